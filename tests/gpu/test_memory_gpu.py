"""Cases 8, 11 and 12 on a GPU: what is measured stays within what is planned, and that within what was named."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machines import Machine
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
MIB, GIB = 1 << 20, 1 << 30
MAX_UNUSED = 0.10  # of the budget
LOADED_NBYTES = 128 * MIB  # of kernels, which CUDA loads when they are first called, after its context was measured
CAPPED_NBYTES = 3 * GIB // 2  # context and all
NUM_STEPS = 3
OPTIONS = {"lr": 1e-3, "eps": 1e-4}


def llama(hidden: int = 256, layers: int = 6, heads: int = 4) -> LlamaForCausalLM:
    """5.3 million parameters by default; the same values every time."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, vocab_size=1024, max_position_embeddings=256,
        )  # fmt: skip
        return LlamaForCausalLM(config)


def sized(machine: Machine) -> LlamaForCausalLM:
    """`llama`, and on a stand-in, which computes a GPU's kernels on the host, a smaller one."""
    return llama() if machine.kind == "cuda" else llama(hidden=64, layers=2, heads=2)


def ids(machine: Machine, seed: int = 0, batch: int = 4, length: int = 128) -> torch.Tensor:
    found: torch.Tensor = machine.put(
        torch.randint(0, 1024, (batch, length), generator=torch.Generator().manual_seed(seed))
    )
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def compiled(machine: Machine, nbytes: int, dtype: torch.dtype, backend: str) -> nn.Module:
    return chunkc.compile(sized(machine), machine.named(nbytes, 2 * GIB), dtype=dtype, backend=backend)


@pytest.mark.parametrize("placement", ["smallest", "resident"])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float32, "eager"),
        (torch.bfloat16, "eager"),
        pytest.param(torch.bfloat16, "inductor", marks=pytest.mark.slow),
    ],
)
def test_measured_within_planned_within_budget(
    dtype: torch.dtype, backend: str, placement: str, machine: Machine, note: Note
) -> None:
    """At every step, at the least budget that works and with everything resident; and close, by torch's allocator."""
    with pytest.raises(chunkc.BudgetError) as caught:
        compiled(machine, machine.overhead_nbytes + 1, dtype, backend)(input_ids=ids(machine), labels=ids(machine))
    least = caught.value.min_device_nbytes
    model = compiled(machine, least if placement == "smallest" else machine.overhead_nbytes + GIB, dtype, backend)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-4)
    for number in range(NUM_STEPS):
        step(model, optimizer, ids(machine))
        gc.collect()
        found = chunkc.stats(model)
        assert found["planned_peak_nbytes"] <= found["budget_nbytes"]
        if number and machine.kind == "cuda":
            assert found["measured_peak_nbytes"] <= found["planned_peak_nbytes"]
    note(f"{placement} {dtype} {backend}", {k: found[k] for k in sorted(found) if "peak" in k or "budget" in k})
    assert (found["h2d_nbytes"] == 0) == (placement == "resident")
    assert found["host_nbytes"] == chunkc.plan_of(model).layout.host_nbytes()
    if machine.kind == "cuda":
        assert found["planned_peak_nbytes"] - found["measured_peak_nbytes"] <= MAX_UNUSED * found["planned_peak_nbytes"]


CHILD = """
import json, sys
sys.path[:0] = {paths!r}
import torch, chunkc
from test_memory_gpu import ids, llama, step
from machines import EMULATED
is_cuda = {kind!r} == "cuda"
if is_cuda:
    from cuda_machine import Cuda
machine = Cuda() if is_cuda else EMULATED
if is_cuda:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, ({named_nbytes} - machine.context_nbytes) / total))
model = chunkc.compile(llama(*{shape!r}), {hw!r}, dtype=torch.bfloat16, backend={backend!r})
optimizer = chunkc.AdamW(model.parameters(), lr=1e-4)
losses = [step(model, optimizer, ids(machine, seed)) for seed in range(4)]
found = {{"losses": losses, **chunkc.stats(model)}}
if is_cuda:
    free, total = torch.cuda.mem_get_info()
    found |= {{"used_nbytes": total - free, "reserved_nbytes": torch.cuda.max_memory_reserved()}}
print(json.dumps(found))
"""


def child(machine: Machine, hw: str, backend: str, shape: tuple[int, int, int], named_nbytes: int) -> dict[str, Any]:
    """Numbers of four steps in a process of their own, in which nothing else has taken device memory.

    torch's allocator refuses more there than ``named_nbytes`` less what stands outside of it.
    """
    folders = [p for p in sys.path if p] + [os.path.dirname(__file__)]
    script = CHILD.format(
        paths=folders, kind=machine.kind, shape=shape, hw=hw, backend=backend, named_nbytes=named_nbytes
    )
    env = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_process_stays_within_the_gpu_that_was_named(backend: str, machine: Machine, note: Note) -> None:
    """Context, reserved bytes and all: what the driver says is used is the memory named, and kernels loaded later.

    torch's allocator, which is told of the limit, refuses nothing. The model data of the capped run is larger than the
    limit; its losses are those of a run in which everything fits.
    """
    on_cuda = machine.kind == "cuda"
    shape, tight, roomy, named_nbytes = (128, 4, 2), "emulated-20m-256m", "emulated-1g-256m", 20 * MIB
    if on_cuda:  # what this process has on the GPU is others' to the children, and part of the memory named
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        named_mib = (total - free) // MIB + CAPPED_NBYTES // MIB
        shape, tight, roomy, named_nbytes = (1024, 10, 16), f"v100-{named_mib}m-64g", "auto", named_mib * MIB
    found = child(machine, tight, backend, shape, named_nbytes)
    wanted = child(machine, roomy, backend, shape, 1 << 62)
    note(f"capped, {backend}", found)
    assert found["h2d_nbytes"] > 0 == wanted["h2d_nbytes"]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=2e-3)
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=1e-3)
    if on_cuda:
        assert found["model_data_nbytes"] > CAPPED_NBYTES
        assert found["measured_peak_nbytes"] <= found["planned_peak_nbytes"] <= found["budget_nbytes"] < CAPPED_NBYTES
        assert found["used_nbytes"] <= named_nbytes + LOADED_NBYTES


@pytest.mark.parametrize(("hw", "gpu", "gib"), [("v100-240g", "v100", 32), ("a100-40g-1024g", "a100", 40)])
def test_named_machines_run_within_their_memory(
    hw: str, gpu: str, gib: int, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that names the GPU asked for, and a budget of that GPU less what CUDA takes."""
    with caplog.at_level(logging.WARNING, "chunkc"):
        model = chunkc.compile(sized(machine), hw, dtype=torch.bfloat16, backend="eager")
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and gpu in said[0] and hw.split("-")[0] in said[0]
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-4)
    losses = [step(model, optimizer, ids(machine)) for _ in range(NUM_STEPS)]
    assert losses[-1] < losses[0]
    budget = chunkc.stats(model)["budget_nbytes"]
    assert budget == gib * GIB - machine.overhead_nbytes if machine.kind != "emulated" else gib * GIB


def test_a_larger_gpu_than_the_one_here_is_refused(cuda: Machine) -> None:
    with pytest.raises(chunkc.HardwareError, match="b200"):
        chunkc.compile(nn.Linear(8, 8), "b200-180g-64g", dtype=torch.float32)


class Wide(nn.Module):
    """A loss beside a large output."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(64, 64), nn.Linear(64, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(torch.tanh(self.narrow(x))).square().mean()


def test_out_of_memory_names_the_action(cuda: Machine) -> None:
    """Somebody else takes the GPU: the error says which action, and what stood there; training goes on when it ends."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        plain, x = Wide(), cuda.put(torch.randn(2048, 64))
    model = chunkc.compile(copy.deepcopy(plain), cuda.hw(512 * MIB, GIB), dtype=torch.float32, backend="eager")
    plain = plain.to(cuda.torch_device)
    pairs = [
        (model, chunkc.AdamW(model.parameters(), **OPTIONS)),
        (plain, torch.optim.AdamW(plain.parameters(), **OPTIONS)),
    ]

    def train() -> None:
        for trained, optimizer in pairs:
            trained(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    try:
        with pytest.raises(chunkc.DeviceMemoryError, match=r"`run +fwd\.\d+.*\n.*planned peak"):
            model(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    train()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_deleted_model_gives_its_memory_back(machine: Machine) -> None:
    """Two models share a GPU; the second gets what the first leaves, and all of it when that is gone."""
    hw = machine.hw(96 * MIB, GIB)
    first = chunkc.compile(llama(), hw, dtype=torch.float32, backend="eager")
    first(input_ids=ids(machine), labels=ids(machine)).loss.backward()
    second = chunkc.compile(llama(), hw, dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.BudgetError):
        second(input_ids=ids(machine), labels=ids(machine))
    held = torch.cuda.memory_allocated() if machine.kind == "cuda" else 0
    arena_nbytes = chunkc.plan_of(first).layout.arena_nbytes
    del first
    gc.collect()
    if machine.kind == "cuda":
        assert held - torch.cuda.memory_allocated() >= arena_nbytes
    losses = [step(second, chunkc.AdamW(second.parameters(), lr=1e-4), ids(machine))]
    assert chunkc.stats(second)["budget_nbytes"] == 96 * MIB and losses[0] > 0


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Batches made by workers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 1024, (128,), generator=torch.Generator().manual_seed(index))


def test_forked_workers_change_nothing(machine: Machine) -> None:
    """Case 20: a DataLoader with forked workers beside a model whose homes a fork does not inherit."""
    losses = []
    for num_workers in (0, 2):
        model = chunkc.compile(llama(layers=2), machine.hw(32 * MIB, GIB), dtype=torch.float32, backend="eager")
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
        context = "fork" if num_workers else None
        loader = DataLoader(Rows(), batch_size=2, num_workers=num_workers, multiprocessing_context=context)
        losses.append([step(model, optimizer, machine.put(batch)) for _ in range(2) for batch in loader])
        assert chunkc.stats(model)["h2d_nbytes"] > 0
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
