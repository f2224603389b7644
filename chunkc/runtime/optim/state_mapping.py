"""``optimizer.state``: torch's mapping from parameters to states, over states in chunks.

    state[param]["step"]          float32 [], known at once
    state[param]["exp_avg"]       float32, gathered when an operator reads it, as the rule's others and ``master_param``

Nothing is stored here: reads gather the value as it is then, writes in place reach the chunk, views of a gathered value
refuse writes. A copy, deep or pickled, holds plain tensors. Parameters that were never stepped have no entry;
``state[param]`` of one is an empty mapping, which takes a whole state or none. A first step starts from states of zero,
so a state whose step count is 0 is no state, and a count of 0 beside other states is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Set
from functools import partial
from typing import Any, Final, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from chunkc.errors import ChunkcError
from chunkc.runtime.model.optimizer_steps import OptimizerSteps
from chunkc.runtime.optim.state_dict import (
    MASTER_PART,
    check_count,
    check_part,
    check_state,
    check_trained,
    find_runtime,
    parts_of,
    stored_name,
    write_states,
)
from chunkc.runtime.optim.step_counts import StepCounts
from chunkc.runtime.params.managed_tensor import ManagedTensor
from chunkc.runtime.params.shell import Shell

K = TypeVar("K")
V = TypeVar("V")
Snapshot: TypeAlias = dict[str, Tensor]

_STEP: Final = "step"


class _DictLike(MutableMapping[K, V]):
    """A mapping with the methods that dicts have and abstract mappings do not."""

    def copy(self) -> dict[K, V]:
        return dict(self.items())

    __copy__ = copy

    def __or__(self, other: Mapping[K, Any]) -> dict[K, Any]:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) | dict(other)

    def __ror__(self, other: Mapping[K, Any]) -> dict[K, Any]:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(other) | dict(self)

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self


class OptimizerState(_DictLike[nn.Parameter, MutableMapping[str, Tensor]]):
    """The states of one optimizer's parameters, in torch's layout; see the module docstring."""

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        """The state of ``param``, empty while it was never stepped; KeyError for other keys."""
        index = self._find(param)
        if index is None:
            raise KeyError("not a parameter of this optimizer, which has states of its parameters only")
        return ParamState(self._counts, index)

    def __setitem__(self, param: nn.Parameter, value: Mapping[str, Any]) -> None:
        """Replace the whole state of ``param``; an empty one begins anew. ChunkcError changes nothing."""
        self.update({param: value})

    def __delitem__(self, param: nn.Parameter) -> None:
        if param not in self:
            raise KeyError("this parameter was never stepped and has no state")
        self[param].clear()

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([self._counts.params[index] for index in self._counts.current()])

    def __len__(self) -> int:
        return len(self._counts.current())

    def __contains__(self, param: object) -> bool:
        index = self._find(param)
        return index is not None and index in self._counts.current()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(states of {len(self)} parameters)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ({param: state.snapshot() for param, state in self._states()},)

    def get(self, param: nn.Parameter, default: Any = None) -> Any:
        """The state of ``param``; ``default`` where it was never stepped."""
        return self[param] if param in self else default

    def setdefault(self, param: nn.Parameter, default: Any = None) -> ParamState:
        """The state of ``param``, which is ``default`` from now on where it was never stepped."""
        if param not in self:
            self[param] = {} if default is None else default
        return self[param]

    def update(self, *others: Any, **parts: Any) -> None:
        """Replace whole states; ChunkcError, as assigning one, leaves all of them as they were."""
        _replace(self._counts, self._by_index(dict(*others, **parts)))

    def pop(self, param: nn.Parameter, *default: Any) -> Any:
        """Forget the state of ``param`` and return it in plain tensors."""
        if param not in self and default:
            return default[0]
        found = self[param].snapshot()
        del self[param]
        return found

    def popitem(self) -> tuple[nn.Parameter, Snapshot]:
        params = list(self)
        if not params:
            raise KeyError("no parameter was ever stepped")
        return params[-1], self.pop(params[-1])

    def clear(self) -> None:
        """Begin anew: every parameter's next step is its first and starts from states of zero."""
        self._counts.forget(self._counts.current())

    def replace(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take over ``states`` and no others; ChunkcError, as assigning one, leaves all as they were."""
        if isinstance(states, OptimizerState) and states._counts is self._counts:
            return
        found = self._by_index(states)
        left = set(self._counts.current()).difference(found)
        _replace(self._counts, {**{index: {} for index in left}, **found})

    def _by_index(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        indexes = {self._find(param): state for param, state in states.items()}
        found = {index: state for index, state in indexes.items() if index is not None}
        if len(found) != len(states):
            raise ChunkcError("optimizer.state holds the states of the optimizer's parameters and nothing else")
        return found

    def _states(self) -> Iterator[tuple[nn.Parameter, ParamState]]:
        return ((param, self[param]) for param in self)

    def _find(self, param: object) -> int | None:
        if not isinstance(param, nn.Parameter):
            return None
        found = find_runtime(param)
        return found[1] if found is not None and self._counts.params.get(found[1]) is param else None


class ParamState(_DictLike[str, Tensor]):
    """The state of one parameter: ``step``, the rule's states, in 16-bit modes ``master_param``."""

    def __init__(self, counts: StepCounts, index: int) -> None:
        self._counts, self._index = counts, index

    def __getitem__(self, name: str) -> Tensor:
        if name not in list(self):
            raise KeyError(name)
        return _tensor_of(self._counts, self._index, name)

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        """Replace one part; ChunkcError when it does not fit, or the rule or the parameter has none."""
        self._write({name: value})

    def __delitem__(self, name: str) -> None:
        if name not in list(self):
            raise KeyError(name)
        raise ChunkcError(
            f"{name!r} of {self._label} cannot be removed by itself; `optimizer.state[param].clear()` forgets the state"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(_names(self._counts) if self._index in self._counts.current() else ())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.snapshot(),)

    def update(self, *others: Any, **parts: Any) -> None:
        """Replace several parts, or all at once where there is no state; ChunkcError changes none."""
        found = dict(*others, **parts)
        if len(self):
            self._write(found)
        else:
            _replace(self._counts, {self._index: found})

    def clear(self) -> None:
        """Forget the state: the parameter's next step is its first and starts from states of zero."""
        self._counts.check_owned([self._index])
        self._counts.forget([self._index])

    def snapshot(self) -> Snapshot:
        """The state in plain tensors, in host memory."""
        return {name: _read_part(self._counts, self._index, name) for name in self}

    @property
    def _label(self) -> str:
        return f"the state of {_runtime(self._counts).parameters.name_of(self._index)!r}"

    def _write(self, parts: Mapping[str, Tensor | float]) -> None:
        """Replace ``parts``, all checked before the first is written."""
        for name in parts:
            self._check_name(name)
        count = check_count(parts[_STEP], self._label) if _STEP in parts else None
        stored = {name: torch.as_tensor(value) for name, value in parts.items() if name != _STEP}
        runtime = _runtime(self._counts)
        for name, value in stored.items():
            check_part(runtime, self._index, name, value, self._counts.params[self._index].shape)
        if stored:
            check_trained(runtime, self._index)
        runtime.transactions.run(partial(_write_parts, self._counts, self._index, stored, count))

    def _check_name(self, name: str) -> None:
        known = _names(self._counts)
        if name not in known:
            raise ChunkcError(
                f"{self._label} has {', '.join(known)} and no {name!r}; keep values of your own elsewhere"
            )
        if not len(self):
            raise ChunkcError(
                f"{self._label} has no {name!r} to replace, because it was never stepped; assign all of it at once: "
                f"optimizer.state[param] = {{{', '.join(f'{n!r}: ...' for n in known)}}}"
            )


class StateTensor(ManagedTensor):
    """One part of a parameter's state; a step count shows and formats as the number that it is."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return super().__repr__() if self.dim() else repr(self.clone())

    def __format__(self, format_spec: str) -> str:
        return repr(self) if self.dim() else format(self.item(), format_spec)


class _StatePart:
    """The store of managed tensors (`chunkc.runtime.params.managed_tensor`) for one part of the states."""

    holds: Final = "states"

    def __init__(self, counts: StepCounts, name: str) -> None:
        self._counts, self._name = counts, name

    def name_of(self, index: int) -> str:
        return f"{self._name} of {_runtime(self._counts).parameters.name_of(index)}"

    def is_entered(self) -> bool:
        return False  # no compiled graph reads states

    def version_of(self, index: int) -> int:
        return self._counts.params[index]._version + self._counts.num_writes[index]  # every step raises the former

    def read_param(self, index: int) -> Tensor:
        if index not in self._counts.current():
            raise ChunkcError(f"{self.name_of(index)} is gone, because the optimizer's state was cleared since")
        found = _read_part(self._counts, index, self._name)
        return found if self._name == _STEP else found.to(self._counts.params[index].device)

    def write_param(self, index: int, value: Tensor) -> None:
        ParamState(self._counts, index)[self._name] = value


def _tensor_of(counts: StepCounts, index: int, name: str) -> StateTensor:
    param = counts.params[index]
    if name == _STEP:
        shell = Shell.empty((), (), torch.float32, torch.device("cpu"))
    else:
        shell = Shell.empty(param.shape, param.stride(), torch.float32, param.device)
    return StateTensor(shell, "state", index, _StatePart(counts, name))


def _read_part(counts: StepCounts, index: int, name: str) -> Tensor:
    if name == _STEP:
        return torch.tensor(float(counts.current()[index]), dtype=torch.float32, device="cpu")
    return _runtime(counts).parameters.read_state(index, (stored_name(name),))[0]


def _write_parts(counts: StepCounts, index: int, parts: Mapping[str, Tensor], count: int | None) -> None:
    """Replace some of the parts that chunks hold, and the step count unless it is None: one transaction."""
    runtime, names = _runtime(counts), counts.rule.states.names
    if parts:
        found = dict(zip(names, runtime.parameters.read_state(index, names), strict=True))
        counts.note_write(index)
        write_states(counts.rule, runtime, {index: {**found, **parts}})
    if count is not None:
        counts.put(index, count)


def _replace(counts: StepCounts, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace whole states by index, all checked before the first is written; empty ones are forgotten."""
    runtime = _runtime(counts)
    checked = {index: _checked(counts, index, state) for index, state in states.items()}
    found = {index: state for index, state in checked.items() if state is not None}
    counts.check_owned(index for index in checked if index not in found)
    runtime.transactions.run(partial(_write_all, counts, found, checked.keys() - found.keys()))


def _write_all(counts: StepCounts, states: Mapping[int, tuple[int, dict[str, Any]]], forgotten: Set[int]) -> None:
    """Write checked states and forget others: one transaction."""
    for index, (count, parts) in states.items():
        write_states(counts.rule, _runtime(counts), {index: parts})
        if count:
            counts.put(index, count)
    counts.forget({*forgotten, *(index for index, (count, _) in states.items() if not count)})


def _checked(counts: StepCounts, index: int, state: Any) -> tuple[int, dict[str, Any]] | None:
    """The step count and the other parts of a state that a user wrote; None where it is empty."""
    runtime = _runtime(counts)
    label = f"the state of {runtime.parameters.name_of(index)!r}"
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise ChunkcError(f"{label} is a mapping with {', '.join(_names(counts))}, found {kind}")
    if not state:
        return None
    count = check_state(counts.rule, runtime, index, counts.params[index], state)
    known = (_STEP, *counts.rule.states.names, MASTER_PART)
    strange = sorted(set(state).difference(known))
    if strange:
        raise ChunkcError(f"{label} has {', '.join(known)} and no {strange}: leave those out")
    return count, {key: value.clone() for key, value in state.items() if key != _STEP}


def _names(counts: StepCounts) -> tuple[str, ...]:
    return (_STEP, *parts_of(counts.rule, _runtime(counts)))


def _runtime(counts: StepCounts) -> OptimizerSteps:
    if counts.runtime is None:
        raise ChunkcError("the optimizer has no parameters, and no states")
    return counts.runtime
