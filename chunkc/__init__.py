"""chunkc: train models several times larger than device memory, by a static plan over chunks of model data."""

from __future__ import annotations

from chunkc import _checkout  # noqa: F401 - first: what follows imports the packages that it loads
from chunkc.api import clip_grad_norm_, compile, full_params, plan, plan_of, stats
from chunkc.checkpoint import load_checkpoint, save_checkpoint
from chunkc.errors import (
    AccumulationError,
    BudgetError,
    CaptureError,
    CheckpointError,
    ChunkcError,
    DeviceMemoryError,
    HardwareError,
    PlanError,
    PlanNotReadyError,
    RankError,
    ShapeLimitError,
)
from chunkc.hardware import Hardware
from chunkc.observe import metrics, record_timeline
from chunkc.report import Plan
from chunkc.report.timeline import simulate
from chunkc.runtime.grad_scaler import GradScaler
from chunkc.runtime.optimizer import Adam, AdamW
from chunkc.signals import graceful_exit
from chunkc.weights.load import load_pretrained
from chunkc.weights.save import save_safetensors

__version__ = "0.1.0"

__all__ = [
    "AccumulationError",
    "Adam",
    "AdamW",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ChunkcError",
    "DeviceMemoryError",
    "GradScaler",
    "Hardware",
    "HardwareError",
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
