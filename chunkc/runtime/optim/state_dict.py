"""Exchange of optimizer states: a compiled model's protocol towards optimizers, and torch's layout.

In torch's layout a state dict has ``param_groups``, whose ``params`` are ids, and ``state``, which gives the rule's
states (Adam's: ``exp_avg`` and ``exp_avg_sq``) for the id of each parameter that was ever stepped. ``step`` is beside
them, also where torch's optimizer counts none, and ``master_param`` in 16-bit modes. Ids are matched with parameters by
their place in the groups, as torch does. Of a parameter that ranks divide along ``tp`` the states are DTensors; whole
tensors are loaded, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor, nn

from chunkc.errors import ChunkcError
from chunkc.ir.state_spec import MASTER
from chunkc.runtime.model.optimizer_steps import OptimizerSteps
from chunkc.runtime.update.rules import UpdateRule

Groups = Sequence[Mapping[str, Any]]

MASTER_PART: Final = "master_param"
"""``param32`` as state dicts name it."""


def find_runtime(param: Tensor) -> tuple[OptimizerSteps, int] | None:
    """The compiled model that manages ``param`` and the parameter's index, or None for a plain tensor."""
    store = getattr(param, "chunkc_store", None)
    runtime = getattr(store, "runtime", None)  # gradients and parts of states have a store without one
    return None if runtime is None else (runtime.steps, param.chunkc_index)  # type: ignore[attr-defined]


def managed(param: Tensor) -> tuple[OptimizerSteps, int]:
    """``find_runtime`` of a parameter that a compiled model must manage; else ChunkcError."""
    found = find_runtime(param)
    if found is None:
        raise ChunkcError(f"a parameter of shape {tuple(param.shape)} belongs to no compiled model any more")
    return found


def saved_params(state_dict: Mapping[str, Any], groups: Groups) -> Iterator[tuple[Any, nn.Parameter]]:
    """Pairs of an id in ``state_dict`` and the parameter at the same place of ``groups``."""
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return zip(saved, chain.from_iterable(group["params"] for group in groups), strict=False)


def stored_name(part: str) -> str:
    return MASTER if part == MASTER_PART else part


def parts_of(rule: UpdateRule, runtime: OptimizerSteps) -> tuple[str, ...]:
    """The parts of a parameter's state that chunks hold, as state dicts name them."""
    return (*rule.states.names, *([MASTER_PART] if runtime.parameters.is_sixteen_bit else []))


def read_states(
    rule: UpdateRule,
    runtime: OptimizerSteps,
    state_dict: Mapping[str, Any],
    groups: Groups,
    steps: Mapping[int, int],
) -> dict[Any, dict[str, Tensor]]:
    """States of the parameters in ``steps``, under the ids of ``state_dict``."""
    states: dict[Any, dict[str, Tensor]] = {}
    parts = parts_of(rule, runtime)
    for key, param in saved_params(state_dict, groups):
        index = managed(param)[1]
        if index in steps and key not in states:
            found = runtime.parameters.read_state(index, [stored_name(part) for part in parts])
            found = tuple(runtime.parameters.whole(index, value) for value in found)
            states[key] = {"step": torch.tensor(float(steps[index])), **dict(zip(parts, found, strict=True))}
    return states


def check_states(rule: UpdateRule, state_dict: Mapping[str, Any], groups: Groups) -> dict[int, dict[str, Any]]:
    """The states of ``state_dict`` by parameter index, counts as integers; ChunkcError for one that is not
    the rule's, does not fit, or belongs to none that is trained."""
    params = dict(saved_params(state_dict, groups))
    unknown = [key for key in state_dict["state"] if key not in params]
    if unknown:
        raise ChunkcError(
            f"the loaded state dict has states of {unknown[:5]}, for which this optimizer has no parameter"
        )
    states, known = {}, {"step", *rule.states.names, MASTER_PART, *(["momentum_buffer"] if rule.title == "SGD" else [])}
    for key, state in state_dict["state"].items():
        runtime, index = managed(params[key])
        state = {part: runtime.parameters.part(index, value) for part, value in state.items()}
        states[index] = {**state, "step": check_state(rule, runtime, index, params[key], state)}
        unused = [part for part in state if part not in known]
        if unused:
            name = runtime.parameters.name_of(index)
            raise ChunkcError(f"the loaded state of {name!r} is not {rule.title}'s: it has {unused} too")
    return states


def write_states(rule: UpdateRule, runtime: OptimizerSteps, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Hand ``states`` to the model, in float32 on the host."""
    for index, state in states.items():
        names = (*rule.states.names, MASTER_PART)
        parts = {name: state[name].to("cpu", torch.float32) for name in names if name in state}
        master = parts.pop(MASTER_PART, None)
        runtime.parameters.write_state(index, parts, master)


def check_range(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters out of range, by ValueError as torch does."""
    for name in ("lr", "momentum", "eps", "weight_decay"):
        if name in group and not float(group[name]) >= 0.0:
            raise ValueError(f"{name} must not be negative, found {group[name]}")
    if "betas" in group:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ValueError(f"betas must lie in [0, 1), found {group['betas']}")
    if group.get("nesterov") and not (float(group["momentum"]) > 0.0 and float(group["dampening"]) == 0.0):
        raise ValueError("nesterov takes a momentum above 0 and no dampening")


def check_state(rule: UpdateRule, runtime: OptimizerSteps, index: int, param: Tensor, state: Mapping[str, Any]) -> int:
    """Return the step count of a ``state`` of ``param`` under ``rule``: 0 only beside zeros, 1 where the
    rule counts none and none is told; else ChunkcError."""
    name, names = runtime.parameters.name_of(index), rule.states.names
    missing = [key for key in (*(["step"] if rule.counts_steps else []), *names) if key not in state]
    if missing:
        raise ChunkcError(
            f"the loaded state of {name!r} is not {rule.title}'s: {missing} missing, found {sorted(state)}"
        )
    check_trained(runtime, index)
    for key in (*names, MASTER_PART):
        if key in state:
            check_part(runtime, index, key, state[key], param.shape)
    step = state.get("step", 1)
    if _is_zero(step) and not any(bool(state[key].any()) for key in names):
        return 0
    return check_count(step, f"the state of {name!r}")


def check_part(runtime: OptimizerSteps, index: int, part: str, value: object, shape: torch.Size) -> None:
    """Refuse, by ChunkcError, what is no dense tensor of real numbers in memory, of this shape."""
    label = f"{part} of {runtime.parameters.name_of(index)!r}"
    if not isinstance(value, Tensor):
        raise ChunkcError(f"{label} is a tensor, found {type(value).__name__}")
    if value.shape != shape:
        raise ChunkcError(
            f"{label} has shape {tuple(shape)}, and a value of shape {tuple(value.shape)} was to replace it"
        )
    if value.is_meta or value.is_complex() or value.layout is not torch.strided:
        raise ChunkcError(
            f"{label} is a dense tensor of real numbers, found {value.dtype}, {value.layout} on {value.device}"
        )


def check_trained(runtime: OptimizerSteps, index: int) -> None:
    """Refuse, by ChunkcError, a state of a parameter that the compiled model does not train."""
    if not runtime.parameters.is_trained(index):
        raise ChunkcError(
            f"{runtime.parameters.name_of(index)} is not trained by the compiled graph, so it has no optimizer state: "
            "leave its state out"
        )


def check_count(value: Tensor | float, label: str) -> int:
    """``value`` as a step count of what ``label`` names; ChunkcError unless a whole number from 1 on."""
    if _is_zero(value):
        raise ChunkcError(
            f"{label} has moments, and a step count of 0 begins anew from zero moments; leave the whole state out of "
            "what is loaded, or forget it: optimizer.state[param].clear(), or optimizer.state.clear() for all"
        )
    count = _number(value)
    if count is None or not (count >= 1 and count.is_integer()):
        found = repr(value) if count is None else count
        raise ChunkcError(f"the step count in {label} is a whole number from 1 on, found {found}")
    return int(count)


def _is_zero(value: object) -> bool:
    return _number(value) == 0


def _number(value: Any) -> float | None:
    is_single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta
    return float(value) if is_single or isinstance(value, Real) else None
