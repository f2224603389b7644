"""A function around each operator of segments that run operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from chunkc.compiler import segment_compiler

Around = Callable[[str], AbstractContextManager[object]]
"""Gives a context in which the operator of that name runs."""


class _Hooked(TorchDispatchMode):
    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._around(str(func)):
            return func(*args, **(kwargs or {}))


@contextmanager
def hooked_operators(around: Around) -> Iterator[None]:
    """Within the block segments are made that run each operator in ``around`` of its name, while inputs are alive."""
    boxed_code = segment_compiler.boxed_code

    def hooked(module: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
        code = boxed_code(module)

        def run(args: list[Any]) -> Sequence[Any]:
            with _Hooked(around):
                outputs: Sequence[Any] = code(args)
                return outputs

        return run

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(segment_compiler, "boxed_code", hooked)
        yield
