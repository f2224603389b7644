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

import chunkc

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
    model = chunkc.compile(Tower(depth=1, width=24), hw, dtype=torch.bfloat16, backend="inductor", chunk_size=1024)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    for seed in range(5):
        if seed == 3:  # two steps are seen: the second waits for the updates of the first
            called.clear()
            sys.setprofile(threading.getprofile())
        model(*batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    paths = {Path(name) for name in called.copy() if Path(name).is_relative_to(ROOT)}
    files = {str(path.relative_to(ROOT)) for path in paths if path.relative_to(ROOT).parts[0] in FOLDERS}
    assert "chunkc/runtime/update/cpu_update.py" in files, "workers are seen"
    counted = sorted(file for file in files if not file.startswith(DEVICES))
    assert len(counted) <= MAX_FILES, "\n".join(counted)
