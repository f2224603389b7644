"""The files that a steady step runs through: few enough to be read before one of them changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from package_imports import FOLDERS, ROOT
from pair import Tower, batch
from torch._dynamo.utils import counters

import chunkc
from chunkc._torch_compat.capture_cache import keeps_captures

MAX_FILES = 20
DEVICES = "chunkc/runtime/devices"


@pytest.fixture
def called() -> Iterator[set[str]]:
    """Files whose functions run on threads that the test starts, and on its own once it sets their profile."""
    files, before = set[str](), sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)
    try:
        yield files
    finally:
        threading.setprofile(None)
        sys.setprofile(before)


@pytest.mark.parametrize("hw", ["emulated-64m-64m", "emulated-120k-64m"])
def test_a_steady_step_runs_through_few_files(hw: str, called: set[str]) -> None:
    """Files of the package, on the thread that trains and on workers, of a resident plan and of one that moves chunks.

    The devices (`DEVICES`) do not count: they stand behind the `Device` protocol, and a GPU has others.
    """
    check_files(files_of_two_steps(hw, called))


@pytest.mark.long
@pytest.mark.skipif(not keeps_captures(), reason="torch before 2.13 keeps no capture of tensor subclasses")
def test_so_does_one_of_graphs_that_an_earlier_run_kept(
    called: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHUNKC_CACHE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found, before = [], counters["aot_autograd"]["autograd_cache_hit"]
    for _ in range(2):
        found.append(files_of_two_steps("emulated-64m-64m", called))
        sys.setprofile(None)
    assert counters["aot_autograd"]["autograd_cache_hit"] == before + 1
    assert found[0] == found[1]


def files_of_two_steps(hw: str, called: set[str]) -> set[str]:
    """The fourth and fifth step of a new model are seen: each waits for the updates of the one before."""
    model = chunkc.compile(Tower(depth=1, width=24), hw, dtype=torch.bfloat16, backend="inductor", chunk_size=1024)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    for seed in range(5):
        if seed == 3:
            called.clear()
            sys.setprofile(threading.getprofile())
        model(*batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    paths = {Path(name) for name in called.copy() if Path(name).is_relative_to(ROOT)}
    return {str(path.relative_to(ROOT)) for path in paths if path.relative_to(ROOT).parts[0] in FOLDERS}


def check_files(files: set[str]) -> None:
    assert "chunkc/runtime/update/cpu_update.py" in files, "workers are seen"
    counted = sorted(file for file in files if not file.startswith(DEVICES))
    assert len(counted) <= MAX_FILES, "\n".join(counted)
