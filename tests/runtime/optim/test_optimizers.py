"""SGD steps as torch.optim.SGD and Lion as its paper says, under any options; their states and refusals."""

import copy
from collections.abc import Callable
from typing import Any

import lion
import pytest
import torch
from one_chunk import OneChunk, assert_same_params, make_model, make_pair, set_gradients
from torch import nn

from chunkc.errors import ChunkcError
from chunkc.runtime.optim.optimizers import SGD, AdamW, Lion
from chunkc.runtime.update.rules import ADAM, LION, SGD_MOMENTUM
from chunkc.runtime.update.rules import SGD as PLAIN_SGD

Options = dict[str, Any]
SGD_OPTIONS: dict[str, Options] = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
LION_OPTIONS: dict[str, Options] = {"default": {}, "decay": {"betas": (0.8, 0.95), "weight_decay": 0.3}}
CASES: list[tuple[type, type, Options]] = [
    *((SGD, torch.optim.SGD, options) for options in SGD_OPTIONS.values()),
    *((Lion, lion.Lion, options) for options in LION_OPTIONS.values()),
]
IDS = [*(f"SGD-{name}" for name in SGD_OPTIONS), *(f"Lion-{name}" for name in LION_OPTIONS)]


def steps(models: list[nn.Sequential], optimizers: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(models, step, skip=("1.weight", "3.bias") if step % 4 == 1 else ())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + 0.1 * step)
            optimizer.step()
            optimizer.zero_grad()


def assert_same_lists(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    for key, state in wanted.items():
        for name, value in state.items():
            torch.testing.assert_close(found[key][name], value, rtol=2e-6, atol=5e-8)


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=IDS)
def test_training_equals_the_reference(ours: type, theirs: type, options: Options) -> None:
    model, runtime, plain = make_pair()
    optimizers = [ours(model.parameters(), **options), theirs(plain.parameters(), **options)]
    steps([model, plain], optimizers, 0, 20)
    runtime.drain()
    assert_same_params(model, plain)
    found = optimizers[0].state_dict()["state"]
    assert_same_lists(found, optimizers[1].state_dict()["state"])
    assert [float(state["step"]) for state in found.values()] == [20, 20, 15, 20, 20, 15]
    assert set(found[0]) == {"step", *runtime.state_spec.names}


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("direction", ["from the reference", "to the reference"])
def test_states_are_exchanged(ours: type, theirs: type, options: Options, direction: str) -> None:
    first_model, second_model, plain = make_model(), make_model(), make_model()
    runtime = OneChunk(second_model if direction == "from the reference" else first_model)
    makes = (theirs, ours) if direction == "from the reference" else (ours, theirs)
    first, reference = makes[0](first_model.parameters(), **options), theirs(plain.parameters(), **options)
    steps([first_model, plain], [first, reference], 0, 5)
    runtime.drain()
    saved = copy.deepcopy(first.state_dict())
    if direction == "from the reference":
        runtime.lists["param32"].zero_()
        for piece, p in zip(runtime.pieces, first_model.parameters(), strict=True):
            runtime.lists["param32"][piece.start : piece.end] = p.detach().flatten()
    else:
        second_model.load_state_dict(first_model.state_dict())
    second = makes[1](second_model.parameters(), **options)
    second.load_state_dict(saved)
    steps([second_model, plain], [second, reference], 5, 10)
    runtime.drain()
    assert_same_params(second_model, plain)


def test_momentum_of_some_groups_gives_all_a_buffer() -> None:
    """Groups without momentum leave their buffer as it is; a group's momentum may change and be 0 in between."""
    model, runtime, plain = make_pair()
    optimizers = [
        make([{"params": m[0].parameters(), "momentum": 0.9}, {"params": m[1:].parameters()}], lr=1e-2)
        for make, m in ((SGD, model), (torch.optim.SGD, plain))
    ]
    assert runtime.state_spec == SGD_MOMENTUM.states
    for momentum in (0.9, 0.5, 0.0, 0.9):
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        steps([model, plain], optimizers, 0, 3)
    runtime.drain()
    assert_same_params(model, plain)


def test_a_group_with_momentum_may_come_later() -> None:
    model, runtime, _ = make_pair()
    optimizer = SGD(model[0].parameters())
    assert runtime.state_spec == PLAIN_SGD.states
    optimizer.add_param_group({"params": list(model[1:].parameters()), "momentum": 0.9})
    assert runtime.state_spec == SGD_MOMENTUM.states


def test_dampening_behind_steps_without_momentum_is_refused() -> None:
    model, runtime, _ = make_pair()
    optimizer = SGD([{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[1:].parameters()}])
    steps([model], [optimizer], 0, 1)
    runtime.drain()
    before = [p.clone() for p in model.parameters()]
    optimizer.param_groups[1].update(momentum=0.9, dampening=0.5)
    with pytest.raises(ChunkcError, match=r"dampening=0\.5 in a group that was stepped with momentum=0"):
        steps([model], [optimizer], 1, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


REFUSED: dict[str, tuple[Callable[[nn.Module], object], type[Exception], str]] = {
    "lr": (lambda m: SGD(m.parameters(), lr=-1.0), ValueError, "lr must not be negative"),
    "momentum": (lambda m: SGD(m.parameters(), momentum=-0.1), ValueError, "momentum must not be negative"),
    "nesterov": (lambda m: SGD(m.parameters(), nesterov=True), ValueError, "nesterov takes a momentum above 0"),
    "betas": (lambda m: Lion(m.parameters(), betas=(0.9, 1.0)), ValueError, "betas must lie in"),
    "maximize": (lambda m: SGD([{"params": m.parameters(), "maximize": True}]), ChunkcError, "maximize=True is not"),
    "differentiable": (lambda m: Lion([{"params": m.parameters(), "differentiable": True}]), ChunkcError, "is not"),
    "norm": (lambda m: SGD([{"params": m.parameters(), "max_grad_norm": 1.0}]), ChunkcError, "no option of a group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused(case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make(make_pair()[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Lion(m.parameters()), r"states of Adam \(param32, exp_avg, exp_avg_sq\), and chunkc\.Lion keeps"),
        (lambda m: SGD(m.parameters(), momentum=0.9), r"before the first forward, or name it: .*optimizer='sgd'"),
        (lambda m: SGD(m.parameters()), r"chunkc\.SGD keeps param32:"),
    ],
)
def test_other_states_than_the_layouts_are_refused(make: Callable[[nn.Module], object], message: str) -> None:
    """Also of an optimizer that was made before the layout and is not the one that it was made for."""
    model, runtime, _ = make_pair()
    early = make(model)
    optimizer = AdamW(model.parameters())
    assert runtime.state_spec == ADAM.states
    runtime.layout = object()
    with pytest.raises(ChunkcError, match=message):
        make(model)
    for attempt in (early.step, lambda: early.load_state_dict(early.state_dict())):  # type: ignore[attr-defined]
        with pytest.raises(ChunkcError, match=message):
            attempt()
    steps([model], [optimizer], 0, 1)
    runtime.drain()


@pytest.mark.parametrize("has_layout", [True, False])
def test_room_for_momentum_serves_sgd_without(has_layout: bool) -> None:
    """Room that was named stays, so that momentum may come later."""
    model, runtime, plain = make_pair()
    runtime.state_spec = SGD_MOMENTUM.states
    runtime.layout = object() if has_layout else None
    optimizers = [SGD(model.parameters(), lr=1e-2), torch.optim.SGD(plain.parameters(), lr=1e-2)]
    steps([model, plain], optimizers, 0, 3)
    runtime.drain()
    assert_same_params(model, plain)


@pytest.mark.parametrize(("make", "wrong"), [(Lion, "Lion"), (lambda p: SGD(p, momentum=0.9), "SGD")])
def test_states_of_other_rules_are_refused(make: Callable[[Any], Any], wrong: str) -> None:
    model, _, plain = make_pair()
    set_gradients([plain], 0)
    other = torch.optim.Adagrad(plain.parameters())
    other.step()
    optimizer = make(model.parameters())
    with pytest.raises(ChunkcError, match=rf"is not {wrong}'s: .* missing, found \['step', 'sum'\]"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": other.state_dict()["state"]})


def test_states_with_parts_of_another_rule_are_refused() -> None:
    """Lion's momentum has the name of one of Adam's moments; nothing has changed after the refusal."""
    model, runtime, plain = make_pair()
    reference = torch.optim.AdamW(plain.parameters())
    steps([plain], [reference], 0, 1)
    optimizer = Lion(model.parameters())
    with pytest.raises(ChunkcError, match=r"is not Lion's: it has \['exp_avg_sq'\] too"):
        optimizer.load_state_dict(reference.state_dict())
    assert runtime.state_spec == LION.states and optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_a_refused_load_leaves_the_rule() -> None:
    model, runtime, plain = make_pair()
    reference = torch.optim.SGD(plain.parameters(), momentum=0.9)
    steps([plain], [reference], 0, 1)
    saved = reference.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(1)
    optimizer = SGD(model.parameters())
    with pytest.raises(ChunkcError, match=r"it has \['exp_avg'\] too"):
        optimizer.load_state_dict(saved)
    assert runtime.state_spec == PLAIN_SGD.states


def test_dampening_behind_a_load_without_momentum_is_refused() -> None:
    model, _, _ = make_pair()
    optimizer = SGD(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
    with pytest.raises(ChunkcError, match="stepped with momentum=0"):
        steps([model], [optimizer], 0, 1)


def test_sixteen_bit_states_carry_the_master_parameter() -> None:
    """Also of SGD without momentum, whose only state it is."""
    for make, names in ((SGD, ()), (Lion, ("exp_avg",))):
        model, runtime, _ = make_pair(torch.bfloat16)
        optimizer = make(model.parameters(), lr=1e-2)
        steps([model], [optimizer], 0, 3)
        state = optimizer.state_dict()["state"]
        assert set(state[0]) == {"step", "master_param", *names}
        assert torch.equal(state[0]["master_param"], runtime.view(0, "param32"))
        assert set(optimizer.state[model[0].weight]) == set(state[0])
        loaded_model, loaded, _ = make_pair(torch.bfloat16)
        other = make(loaded_model.parameters(), lr=1e-2)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps([model, loaded_model], [optimizer, other], 3, 5)
        runtime.drain()
        loaded.drain()
        for i in range(len(runtime.params)):
            assert all(torch.equal(runtime.view(i, n), loaded.view(i, n)) for n in ("param32", *names))
