"""Frames through which a module's plain forward is called, for Dynamo to compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

from torch import nn

_numbers: Final = itertools.count()


def call_plain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward with its hooks, without any compiled implementation. Dynamo inlines it."""
    return nn.Module._call_impl(model, *args, **kwargs)  # type: ignore[no-untyped-call]


def fresh_code(function: Any) -> Any:
    """The same function over a code object of its own, with a name of its own.

    Dynamo keeps frames and limits per code object, and notes by file, line and name which inputs change in size.
    """
    code = function.__code__
    function.__code__ = code.replace(co_name=f"{code.co_name}_{next(_numbers)}")
    return function


def plain_call(model: nn.Module) -> Callable[..., Any]:
    """`call_plain` of ``model``, as a function with `fresh_code`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return nn.Module._call_impl(model, *args, **kwargs)  # type: ignore[no-untyped-call]

    framed: Callable[..., Any] = fresh_code(call)
    return framed
