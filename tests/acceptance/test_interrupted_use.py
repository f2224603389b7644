"""Rhythms other than forward, backward, step: right, or refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pair import MIXED, Pair, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of


@pytest.fixture(
    scope="module", params=[pytest.param({}, marks=pytest.mark.slow, id="host"), pytest.param(MIXED, id="mixed")]
)
def captured(request: pytest.FixtureRequest) -> Pair:
    """With all optimizer states on the host, and with some on the device and some on their way there."""
    pair = Pair("emulated-730k-16m", wishes=request.param)
    pair.train(0)
    assert (min(pair.kinds().values()) > 0) == bool(request.param), pair.kinds()
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0, "the budget is meant to force moves"
    return pair


@pytest.fixture
def pair(captured: Pair) -> Pair:
    """Both sides after two steps from the beginning."""
    captured.restart()
    captured.train(0)
    captured.train(1)
    return captured


def evaluate(model: nn.Module, _: object) -> float:
    with torch.no_grad():
        return model(*batch(99)).item()


@pytest.mark.long
def test_evaluation_before_the_first_step_and_between_steps() -> None:
    pair = Pair("emulated-730k-16m")
    ours, plain = pair.both(evaluate)
    assert ours == pytest.approx(plain, rel=1e-5)
    pair.train(0)
    ours, plain = pair.both(evaluate)
    assert ours == pytest.approx(plain, rel=1e-5)
    pair.check()


def test_evaluation_between_backward_and_step(pair: Pair) -> None:
    pair.both(lambda model, _: model(*batch(2)).backward())
    ours, plain = pair.both(evaluate)
    assert ours == pytest.approx(plain, rel=1e-5)
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.train(3)
    pair.check()


def test_a_skipped_step_changes_nothing(pair: Pair) -> None:
    pair.both(lambda model, optimizer: (model(*batch(2)).backward(), optimizer.zero_grad()))
    pair.check()
    pair.train(3)
    pair.check()


def test_model_zero_grad_discards_like_the_optimizers(pair: Pair) -> None:
    pair.both(lambda model, _: (model(*batch(2)).backward(), model.zero_grad()))
    pair.train(3)
    pair.check()


def test_gradients_left_over_are_refused_at_the_next_forward(pair: Pair) -> None:
    pair.both(lambda model, _: model(*batch(2)).backward())
    with pytest.raises(chunkc.AccumulationError, match="neither stepped nor zeroed"):
        pair.model(*batch(3))
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.train(4)
    pair.check()


def test_a_gradient_written_after_it_was_zeroed_is_left_over_too(pair: Pair) -> None:
    """An eager operator adds to what ``zero_grad(set_to_none=False)`` left; the next forward would discard the sum."""

    def leave(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(*batch(2)).backward()
        optimizer.zero_grad(set_to_none=False)
        list(model.parameters())[2].sum().backward()

    pair.both(leave)
    with pytest.raises(chunkc.AccumulationError, match="neither stepped nor zeroed"):
        pair.model(*batch(3))
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_two_forwards_then_the_later_backward(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(*batch(2))
        model(*batch(3)).backward()
        optimizer.step()
        optimizer.zero_grad()

    pair.both(step)
    pair.check()


def test_the_earlier_backward_in_place_of_the_later(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first, _ = model(*batch(2)), model(*batch(3))
        first.backward()
        optimizer.step()
        optimizer.zero_grad()

    pair.both(step)
    pair.check()


@pytest.mark.parametrize("length", [8, 6])
def test_both_backwards_one_after_the_other(pair: Pair, length: int) -> None:
    """The first gradients are discarded; the second backward finds the parameters again, of either shape."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first, second = model(*batch(2, length)), model(*batch(3))
        second.backward()
        optimizer.zero_grad()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()

    pair.both(step)
    pair.check()
    pair.train(4)
    pair.check()


def test_a_graph_kept_for_a_second_backward_is_refused_by_torch(pair: Pair) -> None:
    """Compiled backwards may write over what forward saved; the refusal changes nothing."""
    with pytest.raises(RuntimeError, match="donated buffers"):
        pair.model(*batch(2)).backward(retain_graph=True)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.train(3)
    pair.check()


def test_an_evaluation_between_forward_and_backward(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(*batch(2))
        found = evaluate(model, optimizer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    for _ in range(3):
        ours, plain = pair.both(step)
        assert ours == pytest.approx(plain, rel=1e-5)
    pair.check()


@pytest.mark.parametrize("length", [8, 6])
def test_one_backward_over_two_forwards_is_refused(pair: Pair, length: int) -> None:
    """It would add up two batches; no gradient of either stays."""
    pair.train(2, length)
    with pytest.raises(chunkc.AccumulationError, match="two forwards"):
        (pair.model(*batch(2)) + pair.model(*batch(3, length))).backward()
    assert all(p.grad is None for p in pair.model.parameters())
    pair.check()
    pair.both(lambda model, _: model.zero_grad())
    pair.train(2, length)
    pair.check()


def test_a_refused_backward_leaves_the_gradients_that_the_user_assigned(pair: Pair) -> None:
    assigned = []
    for model in (pair.model, pair.plain):
        model.head.bias.grad = torch.full_like(pair.plain.head.bias, 0.01)
        assigned.append(model.head.bias.grad)
    with pytest.raises(chunkc.AccumulationError, match="two forwards"):
        (pair.model(*batch(2)) + pair.model(*batch(3))).backward()
    assert pair.model.head.bias.grad is assigned[0]
    assert [n for n, p in pair.model.named_parameters() if p.grad is not None] == ["head.bias"]
    pair.both(lambda _, optimizer: optimizer.step())
    pair.check()
    pair.both(lambda model, _: model.zero_grad())
    pair.train(3)
    pair.check()


def test_the_earlier_backward_after_the_later_is_refused(pair: Pair) -> None:
    first, second = pair.model(*batch(2)), pair.model(*batch(3))
    second.backward()
    with pytest.raises(chunkc.AccumulationError):
        first.backward()
    pair.plain(*batch(3)).backward()
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_a_step_between_forward_and_backward_is_caught_by_autograd(pair: Pair) -> None:
    stale = pair.model(*batch(2))
    pair.train(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    pair.train(4)
    pair.check()


def test_backward_over_gradients_already_stepped_is_refused(pair: Pair) -> None:
    pair.both(lambda model, optimizer: (model(*batch(2)).backward(), optimizer.step()))
    with pytest.raises(chunkc.AccumulationError, match="zero_grad"):
        pair.model(*batch(3)).backward()
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.train(4)
    pair.check()


def test_step_called_twice_is_refused(pair: Pair) -> None:
    pair.both(lambda model, optimizer: (model(*batch(2)).backward(), optimizer.step()))
    with pytest.raises(chunkc.ChunkcError, match="already called"):
        pair.optimizer.step()
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.check()


def test_zero_grad_between_forward_and_backward(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        loss = model(*batch(seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for seed in (2, 3, 4):
        pair.both(lambda model, optimizer, seed=seed: step(model, optimizer, seed))
    pair.check()


def test_loading_parameters_between_steps(pair: Pair) -> None:
    saved = pair.model.state_dict()
    pair.train(2)
    pair.both(lambda model, _: model.load_state_dict(saved))
    pair.train(3)
    pair.check()


def test_another_shape_shares_the_chunks(pair: Pair) -> None:
    pair.train(2, length=6)
    pair.train(3, length=8)
    pair.train(4, length=6)
    pair.check()


@pytest.mark.long
def test_a_shape_that_does_not_fit_is_refused_and_the_model_goes_on(pair: Pair) -> None:
    with pytest.raises(chunkc.BudgetError, match="graphs of all its calls"):
        pair.model(*batch(2, length=64))
    pair.train(3)
    pair.check()


@pytest.mark.parametrize("program", ["forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_program_leaves_the_last_step(
    pair: Pair, program: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = compiled_of(pair.model).runtime
    executor, calls = runtime.executor, [0]
    launch = runtime.device.launch

    def failing(stream: Any, label: str, waits: Any, work: Any) -> Any:
        calls[0] += 1
        if calls[0] == len(executor.plan.program(program).actions) // 2:
            raise error("in the middle")
        return launch(stream, label, waits, work)

    loss = pair.model(*batch(2)) if program == "backward" else None
    with monkeypatch.context() as patch:
        patch.setattr(runtime.device, "launch", failing)
        with pytest.raises(error, match="in the middle"):
            pair.model(*batch(2)) if loss is None else loss.backward()
    pair.check()
    pair.train(3)
    pair.train(4)
    pair.check()


@pytest.mark.parametrize("program", ["forward", "backward"])
def test_an_interrupt_right_behind_a_program_leaves_the_last_step(
    pair: Pair, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients lie over parameters by then, and nobody has been told."""

    def failing(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt("behind it")

    loss = pair.model(*batch(2)) if program == "backward" else None
    with monkeypatch.context() as patch:
        patch.setattr(compiled_of(pair.model).runtime.accounting, f"end_{program}", failing)
        with pytest.raises(KeyboardInterrupt, match="behind it"):
            pair.model(*batch(2)) if loss is None else loss.backward()
    assert all(p.grad is None for p in pair.model.parameters())
    pair.check()
    pair.train(3)
    pair.train(4)
    pair.check()


@pytest.mark.long
def test_two_compiled_models_do_not_meet() -> None:
    first, second = Pair("emulated-730k-16m"), Pair("emulated-900k-16m")
    for seed in range(3):
        first.train(seed)
        second.train(seed + 10)
    first.check()
    second.check()


def test_state_dict_under_inference_mode(pair: Pair) -> None:
    with torch.inference_mode():
        state = pair.model.state_dict()
    for name, value in pair.plain.state_dict().items():
        torch.testing.assert_close(state[name].clone(), value, rtol=0, atol=1e-5)
    pair.train(5)
    pair.check()
