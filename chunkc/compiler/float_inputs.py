"""Floats among the arguments of a forward that change from call to call: an annealed weight.

Capture takes the value of a float for a constant, so each value would need a program of its own. From the second value
on, the float is an input of the graph: it is handed over as a tensor, which the captured forward reads back.

    call        model(x, alpha=0.1)     model(x, alpha=0.2)      model(x, alpha=0.3)
    captured    for alpha = 0.1         for any alpha            (runs what is there)

A forward that decides by the value (``if alpha > 0.5``) has a program for each way. Dynamo makes inputs of floats that
are added, subtracted and multiplied; for others (a divisor, the probability of a dropout) each value has a program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkc._torch_compat.core import fresh_code

Place = int | str
"""Of an argument: its position, or its keyword."""

MAX_PROGRAMS_OF_FLOATS = 4
"""Programs of one form of call and its shapes for any values; with more, it is taken to need one for each value."""

_INPUT = "\0a float that is an input"


@dataclass(frozen=True, slots=True)
class FloatCall:
    """One call whose floats at ``places`` are ``values``; ``args`` and ``kwargs`` have a mark there."""

    places: tuple[Place, ...]
    values: tuple[torch.Tensor, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(places: tuple[Place, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FloatCall:
        marked, keywords = list(args), dict(kwargs)
        values = []
        for place in places:
            into: Any = marked if isinstance(place, int) else keywords
            values.append(torch.tensor(into[place], dtype=torch.float64, device="cpu"))
            into[place] = _INPUT
        return FloatCall(places, tuple(values), tuple(marked), keywords)


class FloatInputs:
    """The floats of one model's calls that have changed, by the form of the call."""

    def __init__(self) -> None:
        self._first: dict[Hashable, dict[Place, str]] = {}
        self._changed: dict[Hashable, set[Place]] = {}
        self._refused: set[Hashable] = set()

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Place, ...]:
        """Places of floats that have had more than one value; nothing where that was refused."""
        form = _form(args, kwargs)
        if not form or form in self._refused:
            return ()
        values = {place: repr(args[place] if isinstance(place, int) else kwargs[place]) for place in form}
        first, changed = self._first.setdefault(form, values), self._changed.setdefault(form, set())
        changed.update(place for place, value in values.items() if first[place] != value)
        return tuple(place for place in form if place in changed)

    def refuse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Have each value of the floats in such calls be a constant again."""
        self._refused.add(_form(args, kwargs))

    def is_refused(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return _form(args, kwargs) in self._refused


def _form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Place, ...]:
    """Places of the floats of a call."""
    floats = [i for i, value in enumerate(args) if type(value) is float]
    return (*floats, *(name for name, value in kwargs.items() if type(value) is float))


def float_call(model: nn.Module, places: tuple[Place, ...]) -> Callable[..., Any]:
    """``model``'s plain forward, over code of its own: on floats at ``places``, then its arguments."""

    def call(values: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        given, keywords = list(args), dict(kwargs)  # Dynamo gives back what changes in its inputs
        for place, value in zip(places, values, strict=True):
            if isinstance(place, int):
                given[place] = value.item()
            else:
                keywords[place] = value.item()
        return nn.Module._call_impl(model, *given, **keywords)  # type: ignore[no-untyped-call]

    framed: Callable[..., Any] = fresh_code(call)
    return framed
