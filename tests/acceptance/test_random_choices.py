"""Random graphs with random choices for what they save: kept, computed again or moved, the bits are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import chunkc
from chunkc.compiler import build
from chunkc.passes import PIPELINE, Draft
from chunkc.passes.support.moved_values import movable

WIDTH, ROWS = 8, 16
NUM_EXAMPLES = settings().max_examples if settings().max_examples > 100 else 8
UNARY = ("linear", "tanh", "gelu", "dropout", "norm", "turned", "softmax", "cumsum")
BINARY = ("add", "mul", "cat")
Step = tuple[str, int, int]


class Graph(nn.Module):
    """A value per step, made of one or two earlier ones; the loss is of the last ones."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.linears[0](x)]
        for (kind, first, second), linear in zip(self.steps, self.linears, strict=True):
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(self.value(kind, linear, a, b))
        return sum((v.square().mean() for v in values[-2:]), torch.zeros(()))

    def value(self, kind: str, linear: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        match kind:
            case "linear":
                return linear(a)  # type: ignore[no-any-return]
            case "dropout":
                return nn.functional.dropout(a, 0.3, self.training)
            case "norm":
                return nn.functional.layer_norm(a, (WIDTH,))
            case "turned":
                return a.reshape(WIDTH, ROWS).t().contiguous()
            case "softmax" | "cumsum":
                return getattr(a, kind)(-1)  # type: ignore[no-any-return]
            case "add":
                return a + b
            case "mul":
                return a * b
            case "cat":
                return torch.cat((a[:, ::2], b[:, 1::2]), 1)
        return torch.tanh(a) if kind == "tanh" else nn.functional.gelu(a)


@dataclass(frozen=True, slots=True)
class Moved:
    """Of the values that may move, those at the positions where ``wishes`` are true; a pass before all others."""

    wishes: tuple[bool, ...]
    found: list[int]
    name: str = "wishes"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"wishes"})
    conflicts: frozenset[str] = frozenset({"moves"})

    def __call__(self, draft: Draft) -> Draft:
        values = sorted(v.index for piece in movable(draft.schedule).values() for v in piece)
        chosen = tuple(v for v, is_moved in zip(values, self.wishes, strict=False) if is_moved)
        self.found.append(len(chosen))
        return replace(draft, options=replace(draft.options, fixed_moves=chosen))


def trained(steps: Sequence[Step], **options: Any) -> list[torch.Tensor]:
    """Losses, gradients and parameters of two steps."""
    torch.manual_seed(0)
    model = chunkc.compile(Graph(steps), "emulated-16m-64m", dtype=torch.float32, backend="eager", **options)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    found = list[torch.Tensor]()
    torch.manual_seed(1)
    for step in range(2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


STEPS = st.lists(
    st.tuples(st.sampled_from((*UNARY, *BINARY)), st.integers(0, 30), st.integers(0, 30)), min_size=3, max_size=12
)


@given(
    steps=STEPS,
    wishes=st.lists(st.booleans(), min_size=16, max_size=16),
    budget=st.sampled_from([None, 0.0, 0.25, 0.5, 0.75]),
)
@settings(max_examples=NUM_EXAMPLES)
def test_random_graphs_have_the_same_bits(steps: list[Step], wishes: list[bool], budget: float | None) -> None:
    """``budget``: of what would be kept, the share that is; None keeps all."""
    kept = trained(steps, activations="keep")
    moved = Moved(tuple(wishes), [])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "RECOMPUTE_ALL", budget or 0.0)
        activations = "keep" if budget is None else "recompute"
        found = trained(steps, activations=activations, passes=[moved, *PIPELINE])
    assert moved.found
    assert len(found) == len(kept) and all(map(torch.equal, found, kept))
