"""chunkc trains models several times larger than device memory, by a static plan over chunks.

A name of the package imports the module that it stands in when it is asked for (PEP 562), and no more than that: torch
takes seconds to import, and what compiles takes more. So the command can be interrupted meanwhile (`chunkc.__main__`),
and `chunkc.BudgetError` or `chunkc.Hardware` come without torch's compiler.
"""

# ruff: noqa: F405 - for type checkers the names stand in `chunkc._public`

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from chunkc import _checkout  # noqa: F401 - first: what follows imports the packages that it loads

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AccumulationError",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ChunkcError",
    "DeviceMemoryError",
    "GradScaler",
    "Hardware",
    "HardwareError",
    "Lion",
    "Plan",
    "PlanError",
    "PlanNotReadyError",
    "RankError",
    "ShapeLimitError",
    "clip_grad_norm_",
    "compile",
    "full_params",
    "graceful_exit",
    "load_checkpoint",
    "load_pretrained",
    "metrics",
    "plan",
    "plan_of",
    "record_timeline",
    "save_checkpoint",
    "save_safetensors",
    "simulate",
    "stats",
]

if TYPE_CHECKING:
    from chunkc._public import *  # noqa: F403
else:
    _MODULES: Final = {
        "api": ("clip_grad_norm_", "compile", "full_params", "plan", "plan_of", "stats"),
        "checkpoint": ("load_checkpoint", "save_checkpoint"),
        "errors": tuple(name for name in __all__ if name.endswith("Error")),
        "exit_signals": ("graceful_exit",),
        "hardware": ("Hardware",),
        "observability": ("metrics", "record_timeline"),
        "report": ("Plan",),
        "report.timeline": ("simulate",),
        "runtime.optim.grad_scaler": ("GradScaler",),
        "runtime.optim.optimizers": ("SGD", "Adam", "AdamW", "AdamW8bit", "Lion"),
        "weights.load": ("load_pretrained",),
        "weights.save": ("save_safetensors",),
    }
    _MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name in _MODULE_OF:
            found = getattr(import_module(f"chunkc.{_MODULE_OF[name]}"), name)
            globals()[name] = found
            return found
        if not name.startswith("__") and find_spec(f"chunkc.{name}") is not None:
            return import_module(f"chunkc.{name}")
        raise AttributeError(f"module 'chunkc' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
