"""Lines of stages: which of a process's models count as stages, and which can be clipped together."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from chunkc.distributed import stages
from chunkc.distributed.agreement import Kind, Lines
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError, RankError
from chunkc.runtime.model.grad_clipping import GradClipping, clip_together


def line_over(store: Any, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> stages.StageLine:
    monkeypatch.setattr(stages, "new_group", lambda *_: None)
    return stages.StageLine(RankMesh.of_data(1, 1), 0, number, "gloo", torch.device("cpu"), store, timedelta(seconds=1))


def test_a_stage_counts_from_when_its_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that fails counts nothing."""
    store = HashStore()
    failed, line = line_over(store, monkeypatch), line_over(store, monkeypatch)
    line.count()
    assert line.num_models == 1 and stages.common_line([line]) is line
    assert line.stage == stages.StagePlace(1, 1, 1)
    failed.leave()
    assert line.num_models == 1
    line.leave()
    assert line.num_models == 0


def clipping_of(ranks: Ranks, calls: list[str], name: str) -> GradClipping:
    """One without gradients whose own work is noted in ``calls``."""
    values: Any = SimpleNamespace(parameters=None, gradients=None)
    state: Any = SimpleNamespace(device=None, ranks=ranks)
    clipping: Any = GradClipping(values, state)
    clipping.present = lambda: calls.append(f"{name} has gradients") or frozenset()
    clipping.norm = lambda *_: calls.append(f"{name} is measured") or (frozenset(), torch.zeros(()))
    clipping.over_stages = lambda line, norm, _: calls.append(f"line {line.number}") or norm
    return clipping


class Job(Ranks):
    """The ranks of all stages, which note on what they agree, or whose call is refused by another."""

    def __init__(self, calls: list[str], *, refuses: bool = False) -> None:
        self.calls, self.refuses = calls, refuses

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        self.calls.append(f"{kind}: {', '.join(lines())}")
        if self.refuses:
            raise RankError("other stages clip by another norm")
        return [number]


def stages_of(calls: list[str], monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> list[GradClipping]:
    """Two stages of this process, numbered 1 and 2."""
    store, found = HashStore(), list[GradClipping]()
    for number, name in enumerate(("first", "second"), 1):
        ranks = Ranks()
        ranks.line, ranks.all_stages = line_over(store, monkeypatch, number), Job(calls, refuses=refuses)
        ranks.line.count()
        found.append(clipping_of(ranks, calls, name))
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stages_agree_once_before_norms(order: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the first of the models, in whatever order this rank names them: others may name them otherwise."""
    calls = list[str]()
    found = stages_of(calls, monkeypatch)
    clip_together([found[place] for place in order], 1, 2)
    agreed = ["first has gradients", "second has gradients", "clip: clipping to 1.0 by the 2.0-norm"]
    assert calls == [*agreed, "first is measured", "second is measured", "line 1"]


def test_stages_that_do_not_agree_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    with pytest.raises(RankError, match="by another norm"):
        clip_together(stages_of(calls, monkeypatch, refuses=True), 1.0, 2.0)
    assert calls[2:] == ["clip: clipping to 1.0 by the 2.0-norm"]


def test_a_model_given_twice_is_not_clipped() -> None:
    clipping = clipping_of(Ranks(), [], "first")
    with pytest.raises(ChunkcError, match="given twice"):
        clip_together([clipping, clipping], 1.0, 2.0)
