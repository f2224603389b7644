"""Loops with micro-batches that do not end as planned: right as plain PyTorch, or refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pair import MIXED, Pair, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

Optimizer = torch.optim.Optimizer


@pytest.fixture(
    scope="module", params=[pytest.param({}, marks=pytest.mark.slow, id="host"), pytest.param(MIXED, id="mixed")]
)
def captured(request: pytest.FixtureRequest) -> Pair:
    """Up to three micro-batches a step, two alive together, at a budget that forces moves."""
    pair = Pair("emulated-730k-16m", wishes=request.param, accumulate=3)
    pair.train(0)
    assert (min(pair.kinds().values()) > 0) == bool(request.param), pair.kinds()
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0
    return pair


@pytest.fixture
def pair(captured: Pair) -> Pair:
    """Both sides as at the beginning, with moments of one step."""
    captured.restart()
    captured.train(0)
    return captured


def add(model: nn.Module, *numbers: int, length: int = 8) -> None:
    for number in numbers:
        model(*batch(number, length)).backward()


def finish(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def check_gradients(pair: Pair) -> None:
    """What ``param.grad`` shows, on both sides."""
    for (name, ours), plain in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
        assert (ours.grad is None) == (plain.grad is None), name
        if ours.grad is not None and plain.grad is not None:
            torch.testing.assert_close(ours.grad.clone(), plain.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.long(but="mixed-3")
@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_window_of_any_length_up_to_the_declared_one(pair: Pair, num: int) -> None:
    for start in (1, 10):
        for number in range(start, start + num):
            pair.both(lambda model, _, number=number: add(model, number))
            check_gradients(pair)
        pair.both(finish)
        pair.check()
    pair.train(20)
    pair.check()


def test_one_backward_more_than_declared_is_refused_before_anything_changes(pair: Pair) -> None:
    pair.both(lambda model, _: add(model, 1, 2, 3))
    loss = pair.model(*batch(4))
    with pytest.raises(chunkc.AccumulationError, match=r"gradients of 3 backwards .*accumulate=3"):
        loss.backward()
    check_gradients(pair)
    pair.both(finish)
    pair.check()
    pair.train(5)
    pair.check()


def test_zero_grad_starts_a_window_anew(pair: Pair) -> None:
    for to_none in (True, False):
        pair.both(lambda model, _: add(model, 1, 2))
        pair.both(lambda _, optimizer, to_none=to_none: optimizer.zero_grad(set_to_none=to_none))
        pair.both(lambda model, _: add(model, 3, 4, 5))
        check_gradients(pair)
        pair.both(finish)
        pair.check()


def test_a_step_without_zero_grad_is_refused_at_the_next_backward(pair: Pair) -> None:
    pair.both(lambda model, optimizer: (add(model, 1), optimizer.step()))
    loss = pair.model(*batch(2))
    with pytest.raises(chunkc.AccumulationError, match="that step\\(\\) has consumed"):
        loss.backward()
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.both(lambda model, optimizer: (add(model, 3, 4), finish(model, optimizer)))
    pair.check()


def evaluate(model: nn.Module, length: int = 8) -> float:
    with torch.no_grad():
        return float(model(*batch(99, length)))


@pytest.mark.long
def test_evaluations_and_forwards_without_backward_between_micro_batches(pair: Pair) -> None:
    """The evaluation runs by its program: parameters are not overlaid."""
    pair.both(lambda model, _: evaluate(model))
    pair.both(lambda model, _: evaluate(model))
    before = compiled_of(pair.model).runtime.accounting.num_evaluations
    pair.both(lambda model, _: add(model, 1))
    ours, plain = pair.both(lambda model, _: evaluate(model))
    assert ours == pytest.approx(plain, rel=1e-5)
    assert compiled_of(pair.model).runtime.accounting.num_evaluations == before + 1
    ours, plain = pair.both(lambda model, _: model(*batch(7)).item())
    assert ours == pytest.approx(plain, rel=1e-5)
    pair.both(lambda model, _: (model.eval(), add(model, 2), model.train()))
    pair.check()
    check_gradients(pair)
    pair.both(finish)
    pair.check()


@pytest.mark.long
def test_several_shapes_in_one_window(pair: Pair) -> None:
    layout = chunkc.plan_of(pair.model).layout
    for lengths in ((8, 6, 8), (6, 5), (5, 8, 6)):
        for number, length in enumerate(lengths):
            pair.both(lambda model, _, n=number, length=length: add(model, n, length=length))
            check_gradients(pair)
            assert chunkc.plan_of(pair.model).layout == layout
        pair.both(finish)
        pair.check()


def test_bytes_moved_are_those_of_all_shapes_of_the_latest_step(pair: Pair) -> None:
    """The plans of both shapes move as much. A shape that ended no window for a while has counted nothing meanwhile."""
    for lengths in ((8, 8, 8), (8, 6, 6), (8, 8, 6), (8, 6, 6), (6, 6, 8)):
        for number, length in enumerate(lengths):
            pair.both(lambda model, _, n=number, length=length: add(model, n, length=length))
        pair.both(finish)
        stats = chunkc.stats(pair.model)
        for stream in ("h2d", "d2h"):
            assert stats[f"{stream}_nbytes"] == stats[f"planned_{stream}_nbytes"] > 0, lengths


@pytest.mark.long
def test_two_forwards_and_their_backwards_in_either_order(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> None:
        first, second = model(*batch(1)), model(*batch(2, 6))
        second.backward()
        first.backward()
        finish(model, optimizer)

    pair.both(step)
    pair.check()


@pytest.mark.long
def test_one_backward_of_two_forwards_counts_as_two(pair: Pair) -> None:
    pair.both(lambda model, _: (model(*batch(1)) + model(*batch(2))).backward())
    check_gradients(pair)
    pair.both(lambda model, _: add(model, 3))
    pair.both(finish)
    pair.check()
    pair.both(lambda model, _: add(model, 4, 5))
    loss = pair.model(*batch(6)) + pair.model(*batch(7))
    with pytest.raises(chunkc.AccumulationError, match="reaches more forwards than are left: all gradients"):
        loss.backward()
    assert all(p.grad is None for p in pair.model.parameters())
    pair.plain_optimizer.zero_grad()
    pair.train(8)
    pair.check()


def test_gradients_taken_away_assigned_and_changed_between_micro_batches(pair: Pair) -> None:
    """None starts anew, a tensor of the user's is added to, and so is what stands there after a change in place."""

    def change(model: nn.Module) -> None:
        params = list(model.parameters())
        params[0].grad = None
        params[1].grad = torch.full(params[1].shape, 0.5)
        params[2].grad.mul_(3.0)
        params[3].grad.zero_()

    pair.both(lambda model, _: (add(model, 1), change(model)))
    pair.both(lambda model, _: add(model, 2))
    check_gradients(pair)
    pair.both(lambda model, _: change(model))
    pair.both(finish)
    pair.check()


def test_a_gradient_that_is_kept_shows_the_sum(pair: Pair) -> None:
    """One tensor, as in autograd; the next window has others, and the one that was kept refuses to be read."""
    pair.both(lambda model, _: add(model, 1))
    ours, plain = (next(model.parameters()).grad for model in (pair.model, pair.plain))
    pair.both(lambda model, _: add(model, 2))
    assert next(pair.model.parameters()).grad is ours
    torch.testing.assert_close(ours.clone(), plain, rtol=1e-4, atol=1e-6)
    pair.both(finish)
    pair.both(lambda model, _: add(model, 3))
    with pytest.raises(chunkc.ChunkcError, match="earlier backward is gone"):
        ours.clone()


def test_writes_and_state_dicts_between_micro_batches(pair: Pair) -> None:
    def write(model: nn.Module, _: Optimizer) -> None:
        with torch.no_grad():
            list(model.parameters())[2].mul_(1.01)

    pair.both(lambda model, _: add(model, 1))
    pair.check()
    pair.both(write)
    pair.both(lambda model, _: add(model, 2))
    check_gradients(pair)
    pair.both(finish)
    pair.check()


def test_an_exception_in_a_forward_keeps_the_window(pair: Pair) -> None:
    pair.both(lambda model, _: add(model, 1))
    executor = compiled_of(pair.model).runtime.executor
    broken = pytest.MonkeyPatch()
    broken.setattr(type(executor), "forward", _raise)
    with pytest.raises(KeyboardInterrupt):
        pair.model(*batch(2))
    broken.undo()
    check_gradients(pair)
    pair.both(lambda model, _: add(model, 2))
    pair.both(finish)
    pair.check()


def interrupt_backward(pair: Pair, *, is_behind: bool = False) -> None:
    """Before its first action, or behind its last."""
    loss, runtime = pair.model(*batch(2)), compiled_of(pair.model).runtime
    broken = pytest.MonkeyPatch()
    if is_behind:
        broken.setattr(runtime.accounting, "end_backward", _raise)
    else:
        broken.setattr(type(runtime.executor), "backward", _raise)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    broken.undo()


@pytest.mark.parametrize("to_none", [True, False])
def test_an_exception_in_a_backward_brings_no_gradient_back_that_was_zeroed(pair: Pair, to_none: bool) -> None:
    """One of the user's own, to which a window before the zeroing had added."""
    param = next(pair.model.parameters())
    param.grad = torch.full(param.shape, 0.5)
    add(pair.model, 1)
    pair.optimizer.zero_grad(set_to_none=to_none)
    add(pair.model, 3)
    interrupt_backward(pair)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.train(4)
    pair.check()


@pytest.mark.parametrize("is_behind", [False, True])
def test_an_exception_in_a_backward_gives_the_window_up(pair: Pair, is_behind: bool) -> None:
    pair.both(lambda model, _: add(model, 1))
    interrupt_backward(pair, is_behind=is_behind)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.plain_optimizer.zero_grad()
    pair.train(3)
    pair.check()


def _raise(*_: Any) -> Any:
    raise KeyboardInterrupt


class Sometimes(nn.Module):
    """An extra layer that only some forwards use, one that none does, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.extra, self.unused, self.frozen = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 50)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, *, uses_extra: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embed(tokens)))
        hidden = torch.tanh(self.extra(hidden)) if uses_extra else hidden
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def test_parameters_that_only_some_micro_batches_touch() -> None:
    """A window without them leaves them, and their step counts, alone; gradients never mix with older ones."""
    pair = Pair("emulated-112k-16m", Sometimes(), accumulate=3)
    for window in ((True, False), (False,), (False, True, False), (False, False), (True, True), (False, True)):
        for number, uses_extra in enumerate(window):
            pair.both(lambda model, _, n=number, use=uses_extra: model(*batch(n), uses_extra=use).backward())
            check_gradients(pair)
        pair.both(finish)
        pair.check()
    ours, plain = pair.both(lambda _, optimizer: optimizer.state_dict()["state"])
    assert {i: int(s["step"]) for i, s in ours.items()} == {i: int(s["step"]) for i, s in plain.items()}


@pytest.mark.long
def test_several_graphs_accumulate() -> None:
    """A graph break: the first window runs without a plan, later ones by several."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first, self.second = nn.Embedding(50, 24), nn.Linear(24, 24), nn.Linear(24, 50)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(self.embed(tokens)))
            if hidden.sum().item() > 1e9:
                hidden = hidden * 2
            hidden = torch.tanh(self.first(hidden))
            return nn.functional.cross_entropy(self.second(hidden).flatten(0, 1), targets.flatten())

    pair = Pair("emulated-112k-16m", Broken(), accumulate=2, chunk_size="auto")
    for window in ((1, 2), (3, 4), (5,), (6, 7)):
        for number in window:
            pair.both(lambda model, _, number=number: add(model, number))
            check_gradients(pair)
        pair.both(finish)
        pair.check()


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "2"])
def test_a_number_of_micro_batches_that_is_none_is_refused(accumulate: Any) -> None:
    with pytest.raises(chunkc.ChunkcError, match="1 to 4,096"):
        chunkc.compile(nn.Linear(2, 2), accumulate=accumulate)
