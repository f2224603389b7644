"""Case 9 on a GPU: a steady step waits for nothing (by torch's detector), allocates nothing, and is the plan."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from machines import Machine
from models import CASES, loss_of
from steady import check_steady_steps, options, smallest_hw

import chunkc

pytestmark = pytest.mark.gpu


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "is_tight", "backend"),
    [
        ("llama", True, "eager"),
        ("llama", False, "eager"),
        ("odd", True, "eager"),
        ("odd", True, "inductor"),
        ("gpt2", True, "eager"),
    ],
)
def test_a_steady_step_is_exactly_the_plan(name: str, is_tight: bool, backend: str, machine: Machine) -> None:
    around = no_synchronisation if machine.kind == "cuda" else nullcontext
    check_steady_steps(machine, name, is_tight=is_tight, backend=backend, around=around)


def test_a_step_that_reads_its_loss_is_found(cuda: Machine) -> None:
    case = CASES["odd"]
    model = chunkc.compile(case.build(), smallest_hw(cuda, "odd"), **options("eager"))
    loss = loss_of(model(**cuda.put(case.batches()[0])))
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        loss.item()


def test_a_steady_step_takes_no_new_memory(cuda: Machine) -> None:
    case = CASES["llama"]
    model = chunkc.compile(case.build(), smallest_hw(cuda, "llama"), **options("eager"))
    optimizer, batch = chunkc.AdamW(model.parameters(), lr=1e-3), cuda.put(case.batches()[0])
    readings = []
    gc.collect()  # what earlier tests left must not go in between
    for _ in range(6):
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        readings.append([stats[k] for k in ("allocated_bytes.all.current", "num_device_alloc", "num_alloc_retries")])
    assert readings[3] == readings[4] == readings[5]
