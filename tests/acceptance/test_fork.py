"""ACCEPTANCE 20, workers: forked DataLoader workers alive during training do not multiply host memory.

Chunks stand in memory that a fork does not inherit. Without that, every page that an update writes while a worker lives
is copied, and the worker keeps the old one: as much host memory again for every generation of workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small import twins_at

from chunkc import ChunkcError

WIDTH = 1536  # four layers: 9.4 M parameters, 151 MB of model data
NUM_WORKERS = 2

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="shares of memory need /proc")


SCRIPT = """
import os, sys
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader
import chunkc
from chunkc.runtime.devices import host_slab as slab

if sys.argv[1] == "inherited":
    advise = slab._advise
    slab._advise = lambda address, nbytes, advice: None if advice == 10 else advise(address, nbytes, advice)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return os.getpid(), torch.full(({width},), float(index))

def pss_nbytes(pids):
    found = [Path(f"/proc/{{pid}}/smaps_rollup").read_text() for pid in pids]
    lines = [line for text in found for line in text.splitlines() if line.startswith("Pss_Anon:")]
    return sum(int(line.split()[1]) << 10 for line in lines)

def step(rows):
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return chunkc.stats(model)["model_data_nbytes"]

model = nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range(4)))
chunkc.compile(model, "emulated-40m-1g", dtype=torch.float32, backend="eager")
optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
step(torch.ones(2, {width}))
data_nbytes = step(torch.ones(2, {width}))
before = model[0].weight.sum().item()
alone_nbytes = pss_nbytes([os.getpid()])
pids = {{os.getpid()}}
together_nbytes = 0
for made_by, rows in DataLoader(Rows(), batch_size=2, num_workers={num_workers}, persistent_workers=True, timeout=60):
    pids.update(made_by.tolist())
    step(rows)
    together_nbytes = max(together_nbytes, pss_nbytes(pids))
assert len(pids) == 1 + {num_workers}, "the workers were alive and counted"
assert model[0].weight.sum().item() != before, "the updates wrote"
print(data_nbytes, together_nbytes - alone_nbytes)
"""


def growth_nbytes(mode: str) -> tuple[int, int]:
    """Model data, and how much more memory (proportional shares) the processes take with workers than without.

    In a process of its own, whose malloc returns large blocks at once, so that what it keeps for reuse is not counted.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(width=WIDTH, num_workers=NUM_WORKERS), mode],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    data_nbytes, grown_nbytes = map(int, done.stdout.split())
    return data_nbytes, grown_nbytes


@pytest.mark.long
def test_workers_alive_during_training_do_not_multiply_memory() -> None:
    """Steps that rewrite all of 151 MB under two persistent workers."""
    data_nbytes, grown_nbytes = growth_nbytes("apart")
    assert data_nbytes > 100 << 20
    assert grown_nbytes < data_nbytes // 2, f"{grown_nbytes >> 20} MiB more with workers, {data_nbytes >> 20} of data"


@pytest.mark.slow
def test_homes_that_a_fork_inherits_would_be_seen() -> None:
    """The measure of the test above finds what it is there to refuse."""
    data_nbytes, grown_nbytes = growth_nbytes("inherited")
    assert grown_nbytes > data_nbytes // 2


def in_child(run: Callable[[], object]) -> str:
    """What ``run`` returns or raises in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(run())
        except ChunkcError as error:
            text = f"ChunkcError: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child died with status {status}"
    return text


@pytest.mark.parametrize("phase", ["graded", "settled"])
def test_a_forked_child_that_touches_the_model_is_told_so(phase: str) -> None:
    """Its memory is not there and its streams are not: reading raises instead of crashing; the parent goes on."""
    twins = twins_at(phase)
    p = twins.model.second.weight
    for use in (lambda: p.sum(), lambda: p.tolist(), twins.model.state_dict, lambda: twins.model(twins.x)):
        assert in_child(use).startswith("ChunkcError"), "said by name"
    assert "second.weight" in in_child(lambda: p), "its text needs no memory"
    twins.check_training()
