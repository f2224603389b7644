"""A deepened schedule is the capture of the deeper model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import deep

    return sys.modules[deep.__name__]


@pytest.mark.slow
def test_six_layers_from_three_and_four_equal_a_capture_of_six(deep: ModuleType) -> None:
    found = deep.schedule_of(6, 64, 2, heads=4, seq=32)
    captured = deep.captured(6, 64, 2, 4, 32, torch.float16)
    assert found.params == captured.params
    for mine, true in zip(found.graphs, captured.graphs, strict=True):
        assert [replace(o, name="") for o in mine.operators] == [replace(o, name="") for o in true.operators]
