"""A deepened schedule is the capture of the deeper model."""

from dataclasses import replace

import deep
import pytest
import torch


@pytest.mark.slow
def test_six_layers_from_three_and_four_equal_a_capture_of_six() -> None:
    found = deep.schedule_of(6, 64, 2, heads=4, seq=32)
    captured = deep.captured(6, 64, 2, 4, 32, torch.float16)
    assert found.params == captured.params
    for mine, true in zip(found.graphs, captured.graphs, strict=True):
        assert [replace(o, name="") for o in mine.operators] == [replace(o, name="") for o in true.operators]
