"""Moved values in real graphs: what the plan says of them is what the graphs have, also where layers run again."""

from dataclasses import replace

import pytest
import torch
from schedules import target
from torch import nn

from chunkc.capture.graphs import Captured
from chunkc.compiler.memory.footprint import NO_STORAGE, Footprint
from chunkc.compiler.memory.moved_values import names_of_moved, with_staying
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.errors import PlanError
from chunkc.ir.plan import MovedValue, Plan
from chunkc.ir.verify import verify
from chunkc.passes import PlanOptions, make_plan


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


@pytest.fixture(scope="module")
def captured() -> Captured:
    """All layers are computed again in backward."""
    model = nn.Sequential(*(Layer() for _ in range(6)))
    return capture_ahead(model, None, (torch.randn(128, 32),), "eager", lambda _: (0.0, ""))


def moving(captured: Captured) -> Plan:
    return make_plan(captured.schedule, target(), PlanOptions(moved_share=1.0)).plan


def test_a_plan_that_forgets_who_computes_again_from_a_value_is_refused(captured: Captured) -> None:
    """Else the value would be brought back behind the operator that computes its layer again."""
    plan = moving(captured)
    assert names_of_moved(captured, plan).keys() == {value.index for value in plan.moves}
    operators = captured.backward.bundles
    forward = {node.target for bundle in captured.forward.bundles for node in bundle.nodes}
    again = [v for v in plan.moves if any(n.target in forward for n in operators[v.read_by[0]].nodes)]
    assert again, "no layer is computed again from a value that moves"
    for value in (again[0], again[-1]):
        for wrong in wrongs(value):
            moves = tuple(wrong if v is value else v for v in plan.moves)
            with pytest.raises(PlanError, match=r"the plan moves .*, and the graph has"):
                names_of_moved(captured, replace(plan, moves=moves))


def wrongs(value: MovedValue) -> list[MovedValue]:
    """As if it were read later, used by fewer, smaller, or another's."""
    first, last = value.read_by
    return [
        replace(value, read_by=(first + 1, max(first + 1, last))),
        replace(value, read_by=(first, last + 1)),
        replace(value, used_until=value.used_until + 1),
        replace(value, nbytes=value.nbytes - 4),
        replace(value, made_by=value.made_by + 1),
    ]


def test_a_plan_whose_reload_comes_behind_what_computes_again_is_refused(captured: Captured) -> None:
    plan = moving(captured)
    backward = plan.program("backward")
    value = plan.moves[0]
    position = next(i for i, a in enumerate(backward.actions) if str(a).startswith(f"reload {value.target} "))
    later = [a for i, a in enumerate(backward.actions) if i != position]
    programs = tuple(replace(backward, actions=tuple(later)) if p is backward else p for p in plan.programs)
    verify(plan)
    with pytest.raises(PlanError):
        verify(replace(plan, programs=programs))


def test_a_value_that_stays_is_never_chosen(captured: Captured) -> None:
    plan = moving(captured)
    makers = {value.made_by for value in plan.moves[::2]}
    schedule = with_staying(captured.schedule, makers)
    found = make_plan(schedule, target(), PlanOptions(moved_share=1.0)).plan
    assert found.moves and makers.isdisjoint(value.made_by for value in found.moves)
    assert with_staying(captured.schedule, ()) is captured.schedule


@pytest.mark.parametrize(
    ("outputs", "nbytes", "is_apart"),
    [
        ((2, 3), 100, True),
        ((2, 2), 100, False),
        ((2, 3), 96, False),
        ((0, 3), 100, False),
        ((NO_STORAGE, 3), 100, False),
    ],
)
def test_a_value_is_apart_in_storages_of_its_own(outputs: tuple[int, ...], nbytes: int, is_apart: bool) -> None:
    """Of two results the first is the value: it shares no buffer, is of its size, and is no input."""
    footprint = Footprint(2, (100, 50), (), outputs, is_exact=True)
    assert footprint.has_apart({0}, nbytes) == is_apart
