"""``optimizer.state`` of a compiled model in every phase: read, written and cleared beside a plain twin's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from small import OPTIONS, PHASES, TOLERANCE, Twins, twins_at

import chunkc


def check_states(twins: Twins) -> None:
    """Equal entries, counts and moments."""
    pairs = list(zip(twins.model.parameters(), twins.plain.parameters(), strict=True))
    for p, q in pairs:
        assert (p in twins.optimizer.state) == (q in twins.plain_optimizer.state)
        found, wanted = twins.optimizer.state.get(p, {}), twins.plain_optimizer.state.get(q, {})
        for name in wanted:
            torch.testing.assert_close(found[name].clone(), wanted[name], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("phase", "accumulate"), [*((phase, 1) for phase in PHASES), ("graded", 2)])
def test_states_are_read_and_written_in_every_phase(
    phase: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments and counts, before and after they are written, and after they are forgotten."""
    monkeypatch.setenv("CHUNKC_EMULATED", "poison,delay=2,seed=5")
    twins = twins_at(phase, accumulate=accumulate)
    check_states(twins)
    for model, optimizer in twins.sides():
        if len(optimizer.state):
            state = optimizer.state[model.second.weight]
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"].add_(0.25)
            state["step"] += 3
            optimizer.state[model.last.bias] = {
                "step": torch.tensor(9.0),
                "exp_avg": torch.full((4,), 0.5),
                "exp_avg_sq": torch.full((4,), 0.25),
            }
            del optimizer.state[model.first.weight]
    check_states(twins)
    twins.check_training()
    check_states(twins)
    for _, optimizer in twins.sides():
        optimizer.state.clear()
    check_states(twins)
    twins.check_training()
    check_states(twins)


@pytest.mark.parametrize("phase", ["graded", "pending", "settled"])
def test_an_edit_that_adam_magnifies_is_as_near_to_float64_as_in_plain_pytorch(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum of 0.97 beside variances of 1e-8 and less moves parameters by hundreds.

    Adam divides by roots of variances, so a rounding of 1e-7 of the quotient becomes 1e-5 and more of the parameter,
    and two float32 results differ by that. Each is within roundings of the same step in float64; a lost or late edit,
    or one in 16 bits, would be 1e-2 of the update or more away.
    """
    monkeypatch.setenv("CHUNKC_EMULATED", "poison,delay=2,seed=5")
    twins = twins_at(phase)
    for _, optimizer in twins.sides():
        for state in optimizer.state.values():
            state["exp_avg"].fill_(0.97)
    if phase != "graded":
        twins.backward()
    exact = copy.deepcopy(twins.plain).double()
    exact_optimizer = torch.optim.AdamW(exact.parameters(), **OPTIONS)
    for p, q in zip(exact.parameters(), twins.plain.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.double()
        exact_optimizer.state[p] = {name: part.double() for name, part in twins.plain_optimizer.state[q].items()}
    before = [p.detach().clone() for p in exact.parameters()]
    twins.step()
    exact_optimizer.step()
    largest = 0.0
    sides = exact.parameters(), twins.model.parameters(), twins.plain.parameters()
    for old, new, p, q in zip(before, *sides, strict=True):
        wanted = new.detach()
        bound = 32 * torch.finfo(torch.float32).eps * torch.maximum((wanted - old).abs(), old.abs())
        for found in (p.detach().clone(), q.detach()):
            assert bool(((found.double() - wanted).abs() <= bound).all())
        largest = max(largest, float((wanted - old).abs().max()))
    assert largest > 100


def replace_by_assignment(twins: Twins, states: dict[str, dict[str, torch.Tensor]]) -> None:
    twins.optimizer.state = {twins.model.get_parameter(name): state for name, state in states.items()}


def replace_by_load(twins: Twins, states: dict[str, dict[str, torch.Tensor]]) -> None:
    state_dict, names = twins.optimizer.state_dict(), [name for name, _ in twins.model.named_parameters()]
    state_dict["param_groups"][0]["lr"] = 0.5
    state_dict["state"] = {names.index(name): state for name, state in states.items()}
    twins.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("replace", [replace_by_assignment, replace_by_load])
@pytest.mark.parametrize(("name", "phase"), [("scale", "staged"), *product(("unused", "scale"), PHASES[1:])])
def test_a_state_of_what_is_not_trained_is_refused_before_others_are_written(
    replace: Callable[[Twins, dict[str, dict[str, torch.Tensor]]], None], name: str, phase: str
) -> None:
    """Plain AdamW takes a state of any parameter. It comes last here, behind good ones of all others.

    Before the first plan nobody knows that no graph uses ``unused``.
    """
    twins = twins_at(phase)
    before = copy.deepcopy(twins.optimizer.state_dict())
    params = dict(twins.model.named_parameters())
    good = [other for other in params if other not in ("unused", "scale")]
    states = {
        other: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.full(params[other].shape, 0.5),
            "exp_avg_sq": torch.ones(params[other].shape),
        }
        for other in (*good, name)
    }
    with pytest.raises(chunkc.ChunkcError, match=f"{name} is not trained"):
        replace(twins, states)
    after = twins.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    check_states(twins)
    twins.check_training()
    check_states(twins)


def test_a_state_that_the_first_plan_has_no_room_for_is_named_until_it_is_deleted() -> None:
    """It was taken before the first forward, when nobody knew that no graph trains its parameter."""
    twins = twins_at("staged")
    unused = twins.model.unused
    twins.optimizer.state[unused] = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.ones(unused.shape),
        "exp_avg_sq": torch.ones(unused.shape),
    }
    twins.backward()
    twins.step()
    with pytest.raises(chunkc.ChunkcError, match="state of unused was loaded before the first forward"):
        twins.optimizer.state_dict()
    del twins.optimizer.state[unused]
    assert len(twins.optimizer.state_dict()["state"]) == len(twins.plain_optimizer.state)
    check_states(twins)


def test_a_state_is_written_between_forward_and_backward() -> None:
    """Views of the state are refused from then on; what forward saved is not."""
    twins = twins_at("settled")
    view = twins.optimizer.state[twins.model.second.weight]["exp_avg"].view(-1)
    for model, optimizer in twins.sides():
        loss = model(twins.x)
        optimizer.state[model.second.weight]["exp_avg"].zero_()
        loss.backward()
    with pytest.raises(chunkc.ChunkcError, match=r"exp_avg of second\.weight.*before the optimizer state changed"):
        view.sum()
    twins.check_gradients()
    twins.step()
    check_states(twins)
    twins.check_training()


def saved(value: Any) -> Any:
    """``value`` through a file of torch's."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": saved,
    "copy": copy.copy,
    "dict": dict,
}


def test_copies_are_dicts_and_deep_ones_hold_plain_tensors() -> None:
    """A deep copy and a pickle are of the states as they are then; a shallow copy shows those of now, as torch's."""
    optimizer = twins_at("settled").optimizer
    before = [{name: part.clone() for name, part in state.items()} for state in optimizer.state.values()]
    for name, copied in COPIES.items():
        whole, one = copied(optimizer.state), copied(next(iter(optimizer.state.values())))
        assert type(whole) is dict and type(one) is dict and len(whole) == 6
        if name not in ("copy", "dict"):
            assert all(type(part) is torch.Tensor for state in (*whole.values(), one) for part in state.values())
            assert all(type(param) is torch.nn.Parameter for param in whole)
        for state, wanted in zip([*whole.values(), one], [*before, before[0]], strict=True):
            assert list(state) == list(wanted)
            assert all(torch.equal(state[part].clone(), wanted[part]) for part in wanted)
