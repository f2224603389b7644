"""SGD with momentum and Lion train as their references do, wherever states stand, and go on from what they saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lion
import pytest
import torch
from equalities import SIXTEEN_BITS, check_semantics, check_sixteen_bits
from models import CASES
from placements import Identities, check_mixed, smallest
from plan_runner import GetRunner
from resumed import Run, check_equal
from torch import nn
from training import (
    LOSS_TOLERANCE,
    SEMANTICS,
    UPDATE_TOLERANCE,
    GetPlain,
    Values,
    assert_close_elements,
    assert_same_gradients,
    largest,
    train_measured,
)

import chunkc
from chunkc import ChunkcError
from chunkc.ir.actions import Stream

SGD = replace(SEMANTICS, optimizer="sgd", lr=0.05)
LION = replace(SEMANTICS, optimizer="lion", lr=1e-4)
RECIPES = {"sgd": SGD, "lion": LION}


@pytest.mark.long
def test_sgd_trains_as_torch(runner_of: GetRunner, plain_of: GetPlain) -> None:
    runner = runner_of("gpt2_small")
    check_semantics(runner, plain_of("gpt2_small", SGD), smallest(runner), SGD)


@pytest.mark.long
def test_lion_trains_as_its_paper(runner_of: GetRunner) -> None:
    """Elements whose direction was near zero in some step may have moved by ``lr`` either way, as in any two runs."""
    runner, case = runner_of("gpt2_small"), CASES["gpt2_small"]
    model = case.build()
    reference = lion.Lion(model.parameters(), **LION.options)
    wanted = train_measured(model, case.batches(), reference, LION)
    found = runner.train(smallest(runner), LION)
    assert runner.stats()["h2d_nbytes"] > 0, "everything fits, nothing is shown"
    sure = {name: reference.is_sure[p] for name, p in model.named_parameters()}
    num_sure, num_all = (sum(int(m.sum()) for m in sure.values()), sum(m.numel() for m in sure.values()))
    assert num_sure > 0.9 * num_all

    def those(values: Values) -> Values:
        return {name: value[sure[name]] for name, value in values.items() if name in sure}

    assert_same_gradients(found.gradients, wanted.gradients)
    allowed = UPDATE_TOLERANCE * wanted.largest_update
    assert_close_elements(those(found.params), those(wanted.params), allowed, "parameters")
    assert_close_elements(found.exp_avg, wanted.exp_avg, UPDATE_TOLERANCE * largest(wanted.exp_avg), "exp_avg")
    for loss, other in zip(found.losses, wanted.losses, strict=True):
        assert abs(loss - other) <= LOSS_TOLERANCE * abs(other)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sgd", pytest.param("lion", marks=pytest.mark.slow)])
def test_bf16_is_as_good_as_plain_bf16(
    name: str, runner_of: GetRunner, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    wish = replace(RECIPES[name], num_steps=SIXTEEN_BITS.num_steps)
    check_sixteen_bits(runner_of("gpt2_small", torch.bfloat16), plain_of, plain_16_of, wish)


@pytest.mark.long(but="sgd-some_resident")
@pytest.mark.parametrize("placement", ["some_resident", "some_streamed", "all_resident"])
@pytest.mark.parametrize("name", RECIPES)
def test_placement_changes_no_bit(name: str, placement: str, runner_of: GetRunner, identities: Identities) -> None:
    runner, recipe = runner_of("gpt2_small", torch.bfloat16), replace(RECIPES[name], num_steps=5)
    check_mixed(runner, placement, identities, recipe)
    layout = runner.plan.layout
    assert layout.state_spec.nbytes_per_element == 8
    trained = sum(info.numel for info in layout.params if info.trainable)
    assert runner.stats()["model_data_nbytes"] == 2 * sum(i.numel for i in layout.params) + 8 * trained
    assert runner.stats()["d2h_nbytes"] == runner.plan.moved_nbytes(Stream.D2H)


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: chunkc.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda params: chunkc.SGD(params, lr=1e-3),
    "lion": lambda params: chunkc.Lion(params, lr=1e-3, weight_decay=0.1),
    "adamw8bit": lambda params: chunkc.AdamW8bit(params, lr=1e-3),
}


def run_of(name: str, **options: Any) -> Run:
    return Run(dtype=torch.bfloat16, make=MAKES[name], **options)


@pytest.mark.long(but="lion")
@pytest.mark.parametrize("name", ["sgd", "lion", "adamw8bit", pytest.param("plain sgd", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    """From a checkpoint into a model that has its chunks and one that has not, and from state dicts."""
    whole, first = run_of(name), run_of(name)
    losses = whole.train(0, 6)
    assert first.train(0, 3) == losses[:3]
    first.save(tmp_path)
    fresh, used, copied = run_of(name, seed=7), run_of(name, seed=8), run_of(name, seed=9)
    used.train(0, 1)
    for run in (fresh, used):
        assert run.load(tmp_path).step == 3
        check_equal(run.bits(), first.bits())
        assert run.train(3, 6) == losses[3:]
        check_equal(run.bits(), whole.bits())
    copied.model.load_state_dict(first.model.state_dict())
    copied.optimizer.load_state_dict(first.optimizer.state_dict())
    check_equal(copied.bits(), first.bits())


@pytest.mark.long(but="sgd-lion")
@pytest.mark.parametrize(("saved", "loading"), [("lion", "sgd"), ("sgd", "lion"), ("plain sgd", "lion")])
def test_a_checkpoint_of_another_rule_is_refused(saved: str, loading: str, tmp_path: Path) -> None:
    first, second = run_of(saved), run_of(loading)
    first.train(0, 1)
    first.save(tmp_path)
    before = second.bits()
    with pytest.raises(chunkc.CheckpointError, match=r"it was saved with chunkc\.\w+, and chunkc\.\w+ was given"):
        second.load(tmp_path)
    check_equal(second.bits(), before)


def reference() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def compiled(**options: Any) -> nn.Module:
    return chunkc.compile(reference(), "emulated-1m-64m", **{"dtype": torch.float32, "backend": "eager", **options})


def backward(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(5, 12)).square().sum().backward()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_checkpoint_without_buffers_leaves_no_old_ones(steps_before: int, tmp_path: Path) -> None:
    """Momentum that is turned on after it begins from nothing, in a model whose room for momentum was used or empty."""
    saved, loading, plain = compiled(), compiled(optimizer="sgd"), reference()
    first, second = chunkc.SGD(saved.parameters(), lr=0.1), chunkc.SGD(loading.parameters(), lr=0.1, momentum=0.9)
    wanted = torch.optim.SGD(plain.parameters(), lr=0.1)
    for model, optimizer, num_steps in ((saved, first, 1), (plain, wanted, 1), (loading, second, steps_before)):
        for _ in range(num_steps):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    chunkc.save_checkpoint(tmp_path, saved, first)
    chunkc.load_checkpoint(tmp_path, loading, second)
    for model, optimizer in ((plain, wanted), (loading, second)):
        optimizer.param_groups[0]["momentum"] = 0.9
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(loading.state_dict()[name], value, rtol=0, atol=1e-6)


def test_an_optimizer_behind_the_first_forward_needs_its_room() -> None:
    model = compiled()
    backward(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ChunkcError, match=r"states of Adam .*chunkc\.Lion keeps .*chunkc\.compile.*optimizer='lion'"):
        chunkc.Lion(model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    chunkc.AdamW(model.parameters()).step()


@pytest.mark.parametrize("optimizer", ["sgd", "lion"])
def test_named_room_serves_an_optimizer_behind_the_first_forward(optimizer: str) -> None:
    model, early = compiled(optimizer=optimizer), compiled()
    make = {"sgd": lambda p: chunkc.SGD(p, lr=0.1, momentum=0.9), "lion": lambda p: chunkc.Lion(p, lr=0.1)}[optimizer]
    of_early = make(early.parameters())
    backward(model)
    late = make(model.parameters())
    backward(early)
    for step in (late, of_early):
        step.step()
    assert chunkc.plan_of(model).digest() == chunkc.plan_of(early).digest()
    pairs = zip(model.state_dict().values(), early.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_optimizer_made_last_is_the_one_planned_for() -> None:
    """States that the one before it had loaded are not taken for its own."""
    model = compiled()
    earlier = chunkc.AdamW(model.parameters(), lr=0.1)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    earlier.load_state_dict({**earlier.state_dict(), "state": {3: state}})
    optimizer = chunkc.Lion(model.parameters(), lr=0.1)
    plain = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    plain.load_state_dict(model.state_dict())
    reference = lion.Lion(plain.parameters(), lr=0.1)
    for one, by in ((model, optimizer), (plain, reference)):
        backward(one)
        by.step()
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    with pytest.raises(ChunkcError, match=r"chunkc\.AdamW keeps"):
        earlier.step()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ChunkcError, match=r"optimizer='adagrad' is none .*: give one of adamw, adam, adamw8bit, sgd"):
        compiled(optimizer="adagrad")


@pytest.mark.parametrize(("optimizer", "nbytes"), [("adamw", 12), ("adam", 12), ("sgd", 8), ("lion", 8)])
def test_plans_count_states(optimizer: str, nbytes: int) -> None:
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    inputs = (torch.zeros(5, 12),)
    plan = chunkc.plan(model, "emulated-1m-64m", example_inputs=inputs, dtype=torch.bfloat16, optimizer=optimizer)
    numel = sum(p.numel() for p in model.parameters())
    assert plan.layout.model_data_nbytes() == (2 + nbytes) * numel
    assert f"{nbytes} bytes per element" in " ".join(plan.summary().split())


def test_micro_batches_add_up() -> None:
    """Two halves of a batch in each step, against the whole in plain PyTorch."""
    plain = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    model = compiled(accumulate=2)
    plain.load_state_dict(model.state_dict())
    ours = chunkc.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(4):
        torch.manual_seed(step)
        batch = torch.randn(8, 12)
        for half in batch.chunk(2):
            (model(half).square().mean() / 2).backward()
        plain(batch).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)


def test_clipped_steps_are_as_long_as_asked() -> None:
    model = compiled()
    optimizer = chunkc.SGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=1e-3)
    backward(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    moved = sum(float((value - before[name]).square().sum()) for name, value in model.state_dict().items()) ** 0.5
    assert moved == pytest.approx(0.1 * 1e-3, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda p: chunkc.SGD(p, lr=0.1, momentum=0.9), lambda p: chunkc.Lion(p, lr=0.1)])
def test_a_step_that_overflows_changes_nothing(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = compiled(dtype=torch.float16)
    optimizer = make(model.parameters())
    states = []
    for factor in (1.0, float("inf"), 1.0):
        (model(torch.ones(5, 12)).float() * factor * 1e-2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        states.append({**model.state_dict(), **{f"{i} {n}": t.clone() for i, s in state.items() for n, t in s.items()}})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert all(not torch.equal(value, states[2][name]) for name, value in states[0].items())
