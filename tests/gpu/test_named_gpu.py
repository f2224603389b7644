"""Case 11 on a GPU: a machine that is named has the memory that was named; nothing else may run beside these tests."""

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
from llamas import ids, sized, step
from machines import Machine
from torch import nn

import chunkc

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
MIB, GIB = 1 << 20, 1 << 30
LOADED_NBYTES = 128 * MIB  # of kernels, which CUDA loads when they are first called, after its context was measured
CAPPED_NBYTES = 3 * GIB // 2  # context and all
NUM_STEPS = 3


CHILD = """
import json, sys
sys.path[:0] = {paths!r}
import torch, chunkc
from llamas import ids, llama, step
from machines import EMULATED
if {is_cuda}:
    from cuda_machine import Cuda
machine, hw, named_nbytes = Cuda() if {is_cuda} else EMULATED, {hw!r}, {named_nbytes}
if named_nbytes:
    hw = machine.named(named_nbytes, 64 << 30)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((named_nbytes - machine.context_nbytes) / total)
model = chunkc.compile(llama(*{shape!r}), hw, dtype=torch.bfloat16, backend={backend!r})
optimizer = chunkc.AdamW(model.parameters(), lr=1e-4)
losses = [step(model, optimizer, ids(machine, seed)) for seed in range(4)]
found = {{"losses": losses, **chunkc.stats(model)}}
if {is_cuda}:
    free, total = torch.cuda.mem_get_info()
    found |= {{"used_nbytes": total - free, "reserved_nbytes": torch.cuda.max_memory_reserved()}}
print(json.dumps(found))
"""


def child(is_cuda: bool, hw: str, named_nbytes: int, backend: str) -> dict[str, Any]:
    """Numbers of four steps in a process of their own, on ``hw`` or on this GPU with ``named_nbytes``."""
    script = CHILD.format(
        paths=[p for p in sys.path if p], is_cuda=is_cuda, hw=hw, named_nbytes=named_nbytes, backend=backend,
        shape=(2048, 3, 16) if is_cuda else (128, 4, 2),
    )  # fmt: skip
    env = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_process_stays_within_the_gpu_that_was_named(backend: str, machine: Machine, note: Note) -> None:
    """What the driver says is used is the memory named, and kernels loaded later; torch's allocator refuses nothing."""
    on_cuda = machine.kind == "cuda"
    tight, roomy, named_nbytes = "emulated-20m-256m", "emulated-1g-256m", 0
    if on_cuda:  # what this process has on the GPU is others' to the children, and part of the memory named
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        roomy, named_nbytes = "auto", total - free + CAPPED_NBYTES
    found = child(on_cuda, tight, named_nbytes, backend)
    wanted = child(on_cuda, roomy, 0, backend)
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
