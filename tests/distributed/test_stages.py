"""Lines of stages: which of a process's models count as stages, and which can be clipped together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from chunkc.distributed import stages
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import ChunkcError
from chunkc.runtime.model.grad_clipping import GradClipping, clip_together


def line_over(store: Any, monkeypatch: pytest.MonkeyPatch) -> stages.StageLine:
    monkeypatch.setattr(stages, "new_group", lambda *_: None)
    return stages.StageLine(RankMesh.of_data(1, 1), 0, "gloo", torch.device("cpu"), store, timedelta(seconds=1))


def test_a_stage_counts_from_when_its_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that fails counts nothing."""
    store = HashStore()
    failed, line = line_over(store, monkeypatch), line_over(store, monkeypatch)
    line.count()
    assert line.num_models == 1 and stages.common_line([line]) is line
    failed.leave()
    assert line.num_models == 1
    line.leave()
    assert line.num_models == 0


def test_a_model_given_twice_is_not_clipped() -> None:
    clipping = GradClipping.__new__(GradClipping)
    with pytest.raises(ChunkcError, match="given twice"):
        clip_together([clipping, clipping], 1.0, 2.0)
