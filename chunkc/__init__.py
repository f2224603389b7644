"""chunkc trains models several times larger than device memory, by a static plan over chunks.

The package's names are imported when the first of them is asked for (PEP 562): torch takes seconds to import, so the
command can be interrupted meanwhile (`chunkc.__main__`), and a submodule imports no more than it needs.
"""

# ruff: noqa: F405 - the names stand in `chunkc._public`

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

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

    def __getattr__(name: str) -> object:
        if name in __all__:
            public = import_module("chunkc._public")
            globals().update({known: getattr(public, known) for known in __all__})
            return globals()[name]
        if not name.startswith("__") and find_spec(f"chunkc.{name}") is not None:
            return import_module(f"chunkc.{name}")
        raise AttributeError(f"module 'chunkc' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
