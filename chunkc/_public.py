"""Every name that the package offers; importing this module imports torch."""

from __future__ import annotations

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
from chunkc.graceful_exit import graceful_exit
from chunkc.hardware import Hardware
from chunkc.observability import metrics, record_timeline
from chunkc.report import Plan
from chunkc.report.timeline import simulate
from chunkc.runtime.optim.grad_scaler import GradScaler
from chunkc.runtime.optim.optimizers import SGD, Adam, AdamW, Lion
from chunkc.weights.load import load_pretrained
from chunkc.weights.save import save_safetensors

__all__ = [
    "SGD",
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
