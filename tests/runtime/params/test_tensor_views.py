"""Modules whose parameters are read through views, and what stands again when that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkc.distributed.agreement import Kind, Lines
from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.runtime.params import tensor_views


class Sealed(nn.Linear):
    """A module of a class that cannot have subclasses."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("sealed")


def test_a_class_that_cannot_be_replaced_leaves_all_modules_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it and those behind it."""
    monkeypatch.setattr(tensor_views, "part_of", lambda tensor: tensor)
    model = nn.Sequential(nn.Linear(2, 2), Sealed(2, 2), nn.Linear(2, 2))
    shards: Any = {module.weight: None for module in model}
    params = list(model.parameters())
    with (
        pytest.raises(ChunkcError, match="weight of a Sealed are DTensors"),
        tensor_views.TensorViews(model, shards).installed(Ranks()),
    ):
        pass
    assert [type(module) for module in model] == [nn.Linear, Sealed, nn.Linear]
    assert all(found is param for found, param in zip(model.parameters(), params, strict=True))


class TwoRanks(Ranks):
    """Two ranks of one forward, that note what they agree on and how often they exchange a value."""

    tensor_size = 2

    def __init__(self) -> None:
        self.lines = list[str]()
        self.num_broadcasts = 0

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        assert self.num_broadcasts == 0
        self.lines += lines()
        return [number, number]

    def broadcast_in_job(self, tensor: torch.Tensor) -> None:
        self.num_broadcasts += 1


def test_ranks_agree_on_which_values_they_exchange() -> None:
    """Before they exchange any: one that has a parameter on the meta device would leave the others waiting."""
    ranks, model = TwoRanks(), nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    with tensor_views.TensorViews(model, {}).installed(ranks):
        assert ranks.lines == ["weight has values", "bias has no values"]
        assert ranks.num_broadcasts == 1
