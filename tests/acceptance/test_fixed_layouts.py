"""What a layout has no room for is refused before anything changes, and what the refusal advises works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small import HW, OPTIONS, TOLERANCE, Twins
from torch import nn

import chunkc
from chunkc import ChunkcError


class Branching(nn.Module):
    """A trunk and a side branch that some forwards take; ``breaks`` after the trunk where asked for."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.trunk, self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.takes_side, self.touches_side, self.breaks = False, False, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        if self.breaks:
            torch._dynamo.graph_break()
        if self.takes_side:
            hidden = hidden + self.side(hidden)
        loss = (self.head(hidden) ** 2).mean()
        return loss + 0 * sum(p.sum() for p in self.side.parameters()) if self.touches_side else loss


def twins_of(plain: nn.Module, accumulate: int = 1) -> Twins:
    """Twins that have not run."""
    model = chunkc.compile(copy.deepcopy(plain), HW, dtype=torch.float32, backend="eager", accumulate=accumulate)
    ours, theirs = chunkc.AdamW(model.parameters(), **OPTIONS), torch.optim.AdamW(plain.parameters(), **OPTIONS)
    return Twins(model, plain, ours, theirs, torch.randn(4, 8))


def take_side(model: nn.Module) -> None:
    model.takes_side = True


def unfreeze(model: nn.Module) -> None:
    model.trunk.requires_grad_(True)


Change = Callable[[nn.Module], None]


@pytest.mark.parametrize(
    ("change", "breaks", "match"),
    [
        (take_side, False, r"'side\.weight', 'side\.bias' were used nowhere.*state_dict"),
        (unfreeze, False, r"'trunk\.weight', 'trunk\.bias' were frozen.*state_dict"),
        (unfreeze, True, r"'trunk\.weight', 'trunk\.bias' were frozen.*state_dict"),
    ],
)
def test_what_the_first_forward_did_not_train_is_refused_later(change: Change, breaks: bool, match: str) -> None:
    """Then training goes on as it was, and states loaded into a model compiled anew train on with the change."""
    torch.manual_seed(3)
    plain = Branching(breaks)
    if change is unfreeze:
        plain.trunk.requires_grad_(False)
    twins = twins_of(plain)
    twins.check_training()
    before = copy.deepcopy(twins.model.__dict__["takes_side"])
    change(twins.model)
    with pytest.raises(ChunkcError, match=match) as caught:
        twins.model(twins.x)
    assert not isinstance(caught.value, chunkc.PlanError)
    twins.model.takes_side = before
    twins.model.trunk.requires_grad_(plain.trunk.weight.requires_grad)
    twins.check_training()

    states = copy.deepcopy(twins.model.state_dict()), copy.deepcopy(twins.optimizer.state_dict())
    anew = Branching(breaks)
    anew.load_state_dict(states[0])
    change(anew), change(twins.plain)
    model = chunkc.compile(anew, HW, dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(states[1])
    Twins(model, twins.plain, optimizer, twins.plain_optimizer, twins.x).check_training()


def test_the_first_forward_may_train_what_later_ones_leave_out() -> None:
    """The other advice: touch a branch at first, freeze later; both then train, or rest, as the plain model's."""
    torch.manual_seed(3)
    twins = twins_of(Branching())
    for model, _ in twins.sides():
        model.touches_side = True
    twins.check_training()
    for model, _ in twins.sides():
        model.touches_side, model.takes_side = False, True
    twins.check_training()
    for model, _ in twins.sides():
        model.takes_side = False
        model.trunk.requires_grad_(False)
    twins.check_training()
    for model, _ in twins.sides():
        model.trunk.requires_grad_(True)
    twins.check_training()


def test_parts_called_before_the_first_forward() -> None:
    """Their values are true, a step by their gradients alone is refused, and a forward then adds its own."""
    torch.manual_seed(3)
    twins = twins_of(Branching())
    outputs = [torch.tanh(model.trunk(twins.x)) for model, _ in twins.sides()]
    torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=0)
    for output in outputs:
        output.square().sum().backward()
    twins.check_gradients()
    for _ in range(2):
        with pytest.raises(ChunkcError, match=r"trunk\.weight, trunk\.bias.*no plan to step by"):
            twins.optimizer.step()
        twins.check_gradients()
        assert not len(twins.optimizer.state)
    twins.backward()
    twins.check_gradients()
    twins.check_training()
    assert all(int(state["step"]) == 3 for state in twins.optimizer.state.values())


class Changing(nn.Module):
    """Changes its first input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x + y).square().mean()


Inputs = tuple[torch.Tensor, torch.Tensor]
ARRANGED: dict[str, Callable[[torch.Tensor], Inputs]] = {
    "separate": lambda base: (base[:4].clone(), base[4:].clone()),
    "rows": lambda base: (base[:4], base[4:]),
    "columns": lambda base: (base.view(4, 16)[:, :8], base.view(4, 16)[:, 8:]),
    "one tensor": lambda base: (base,) * 2,
    "shared rows": lambda base: (base[:4], base[2:6]),
    "two views": lambda base: (base[:4], base[:4]),
}


@pytest.mark.parametrize("first", ["separate", "rows", "shared rows"])
def test_an_input_that_changes_while_another_shares_its_memory(first: str) -> None:
    """Exact where they do not overlap, refused where they do, in whatever order calls of the same shapes come."""
    torch.manual_seed(3)
    twins = twins_of(Changing())
    for arranged in (first, *ARRANGED):
        base = torch.randn(8, 8)
        copied = base.clone()
        found, wanted = ARRANGED[arranged](base), ARRANGED[arranged](copied)
        if arranged in ("shared rows", "two views"):
            with pytest.raises(chunkc.CaptureError, match=r"shares memory.*\(4, 8\), \(4, 8\).*clone"):
                twins.model(*found)
            assert torch.equal(base, copied)
            continue
        losses = twins.model(*found), twins.plain(*wanted)
        torch.testing.assert_close(*losses, atol=TOLERANCE, rtol=0)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
        for loss in losses:
            loss.backward()
        twins.check_gradients()
        twins.step()
    twins.check_params()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_empty_batch_trains_as_the_plain_model_does(accumulate: int) -> None:
    """At first and later, by sums, whose gradients are zeros."""

    class Summing(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.head(torch.tanh(self.trunk(x))) ** 2).sum()

    torch.manual_seed(3)
    twins = twins_of(Summing(), accumulate)
    for number in (0, 4, 0):
        twins.x = torch.randn(number, 8)
        for _ in range(accumulate):
            twins.backward()
        twins.check_gradients()
        twins.step()
        twins.check_params()
    with torch.no_grad():
        assert [twins.model(torch.randn(0, 8)).item() for _ in range(3)] == [0.0] * 3
