"""Updates by other optimizers than chunkc's are exact, said once, and counted; what only looks like one is not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small import HW, TOLERANCE, Small, Twins, twins_at
from torch import nn

import chunkc

Step = Callable[[nn.Module], Callable[[], object]]


def sgd_by_hand(model: nn.Module) -> Callable[[], object]:
    """What a script without an optimizer does."""

    def step() -> None:
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad

    return step


def copied_back(model: nn.Module) -> Callable[[], object]:
    """What optimizers for 16-bit parameters do: a step in a copy."""

    def step() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.data.copy_(p.data.double().add_(p.grad, alpha=-0.1))

    return step


STEPS: dict[str, Step] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9).step,
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()).step,
    "fused": lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], fused=True).step,
    "foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True).step,
    "by hand": sgd_by_hand,
    "copied back": copied_back,
}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of foreign optimizers."""
    return [r.getMessage() for r in caplog.records if "not chunkc's updates" in r.getMessage()]


@pytest.mark.parametrize(("has_own", "accumulate"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("step", STEPS)
def test_it_is_said_once_and_counted(
    step: str, has_own: bool, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At its first step; where an optimizer of chunkc's might step behind it, at the forward after that."""
    torch.manual_seed(3)
    plain, batch = Small(), torch.randn(4, 8)
    model = chunkc.compile(copy.deepcopy(plain), HW, dtype=torch.float32, backend="eager", accumulate=accumulate)
    if has_own:
        chunkc.AdamW(model.parameters())
    steps = [STEPS[step](one) for one in (model, plain)]
    for number in range(3):
        for _ in range(accumulate):
            model(batch).backward()
            plain(batch).backward()
        for one, net in zip(steps, (model, plain), strict=True):
            one()
            assert len(said(caplog)) == int(number > 0 or not has_own)
            net.zero_grad(set_to_none=bool(number % 2))
    assert chunkc.stats(model)["num_foreign_steps"] == 2
    model(batch)
    (text,) = said(caplog)
    assert "first.weight" in text and "chunkc.AdamW" in text and "ChunkcTrainer" in text
    found = chunkc.metrics(model)
    assert found["num_foreign_steps"] == found["num_steps"] == 3 and found["step_ms"] > 0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), atol=TOLERANCE, rtol=0)


def load(twins: Twins) -> None:
    """After a look at all gradients, weights are loaded and the step is left out."""
    for model, _ in twins.sides():
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        model.zero_grad()


def decay(twins: Twins) -> None:
    """Gradients are read and parameters changed by hand before chunkc's own step."""
    for model, optimizer in twins.sides():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
                p.data.mul_(0.9)
        optimizer.step()
        model.zero_grad()


def average(twins: Twins) -> None:
    """An average of the weights is kept elsewhere, before and after the step."""
    kept = [[p.detach().clone() for p in model.parameters()] for model, _ in twins.sides()]
    for _ in range(2):
        for (model, optimizer), ema in zip(twins.sides(), kept, strict=True):
            for average, p in zip(ema, model.parameters(), strict=True):
                average.mul_(0.9).add_(p.detach(), alpha=0.1)
                assert p.grad is None or p.grad.norm() > 0
            optimizer.step()
            model.zero_grad()
        twins.backward()


def constrain(twins: Twins) -> None:
    """Parameters are clamped after the step."""
    for model, optimizer in twins.sides():
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)
        model.zero_grad()


def discard(twins: Twins) -> None:
    """Gradients and parameters are looked at, and the gradients dropped."""
    for model, _ in twins.sides():
        assert all(p.grad is None or (p.grad * p).sum().isfinite() for p in model.parameters())
        model.zero_grad()


@pytest.mark.parametrize("use", [load, decay, average, constrain, discard])
def test_what_is_no_optimizer_is_not_taken_for_one(
    use: Callable[[Twins], None], caplog: pytest.LogCaptureFixture
) -> None:
    twins = twins_at("graded")
    use(twins)
    twins.check_training()
    assert not said(caplog) and chunkc.stats(twins.model)["num_foreign_steps"] == 0


class Broken(Small):
    """A forward of two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return (self.last(self.second(hidden)) ** 2).mean()


def test_a_broken_forward_without_a_plan_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody plans it before the first step of an optimizer of chunkc's: said after three steps, once."""
    model = chunkc.compile(Broken(), HW, dtype=torch.float32, backend="eager", accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(5):
        for _ in range(2):
            model(torch.randn(4, 8)).backward()
        optimizer.step()
        model.zero_grad()
        counts.append(sum("outside of any plan" in r.getMessage() for r in caplog.records))
    assert counts == [0, 0, 1, 1, 1] and len(said(caplog)) == 1
    with pytest.raises(chunkc.PlanNotReadyError, match=r"breaks into several graphs.*first step\(\) of chunkc"):
        chunkc.stats(model)
    model(torch.randn(4, 8)).backward()
    chunkc.AdamW(model.parameters()).step()
    assert chunkc.stats(model)["num_foreign_steps"] == 5
