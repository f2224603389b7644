"""Attention with dropout, planned for a GPU, is the one kernel that it is there; elsewhere what runs."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.schedule import Schedule

HEADS, TOKENS, SIZE = 4, 128, 16


class Attention(nn.Module):
    def __init__(self, dropout: float, *, by_name: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.by_name, self.checkpointed = dropout, by_name, checkpointed

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        heads = self.inner(x).view(batch, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attend: Any = partial(F.scaled_dot_product_attention, query, key, value)
        y = attend(dropout_p=self.dropout) if self.by_name else attend(None, self.dropout)
        return self.outer(y.transpose(1, 2).reshape(batch, TOKENS, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)
        assert isinstance(y, torch.Tensor)
        return y.pow(2).mean()


INPUTS = (torch.ones(2, TOKENS, HEADS * SIZE),)


def schedule_of(model: nn.Module, *, is_for_gpu: bool) -> Schedule:
    return capture_ahead(model, None, INPUTS, "eager", is_for_gpu=is_for_gpu).schedule


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_for_a_gpu_it_is_traced_as_without_dropout(by_name: bool, checkpointed: bool) -> None:
    found = schedule_of(Attention(0.1, by_name=by_name, checkpointed=checkpointed), is_for_gpu=True)
    expected = schedule_of(Attention(0.0, by_name=by_name, checkpointed=checkpointed), is_for_gpu=False)
    assert found.graphs == expected.graphs
    assert checkpointed or any("scaled_dot_product" in operator.target for operator in found.forward.operators)


def test_elsewhere_it_is_traced_as_it_runs() -> None:
    found = schedule_of(Attention(0.1), is_for_gpu=False)
    assert not any("scaled_dot_product" in operator.target for operator in found.forward.operators)


def test_plans_take_it_from_the_machine() -> None:
    def planned(dropout: float, hw: str) -> int:
        plan = chunkc.plan(Attention(dropout), hw, example_inputs=INPUTS, dtype=torch.float32, backend="eager")
        return plan.memory.nonmodel_nbytes

    assert planned(0.1, "a100-64g") == planned(0.0, "a100-64g")
    assert planned(0.1, "emulated-64m-64m") > planned(0.0, "emulated-64m-64m")
