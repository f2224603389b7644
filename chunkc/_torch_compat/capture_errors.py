"""Exceptions of torch.compile, which is imported when one of them is first named.

That takes longer than importing torch. So name them as attributes of this module, in an ``except`` clause for one.
Seen on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
    from torch._dynamo.exc import FailOnRecompileLimitHit as RecompileLimitHit
    from torch._dynamo.exc import TorchDynamoException as CaptureFailed
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependentGuard
else:
    _PLACES: Final = {
        "BackendCompilerFailed": ("torch._dynamo.exc", "BackendCompilerFailed"),
        "CaptureFailed": ("torch._dynamo.exc", "TorchDynamoException"),
        "DataDependentGuard": ("torch.fx.experimental.symbolic_shapes", "GuardOnDataDependentSymNode"),
        "RecompileLimitHit": ("torch._dynamo.exc", "FailOnRecompileLimitHit"),
    }

    def __getattr__(name: str) -> type[Exception]:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _PLACES[name]
        return getattr(import_module(module), attribute)


__all__ = ["BackendCompilerFailed", "CaptureFailed", "DataDependentGuard", "RecompileLimitHit"]
