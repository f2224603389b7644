"""chunkc: train models several times larger than device memory, by a static plan over chunks of model data."""

from __future__ import annotations

from chunkc.api import clip_grad_norm_, compile, full_params, plan, plan_of, stats
from chunkc.errors import (
    AccumulationError,
    BudgetError,
    CaptureError,
    ChunkcError,
    DeviceMemoryError,
    HardwareError,
    PlanError,
    PlanNotReadyError,
    ShapeLimitError,
)
from chunkc.hardware import Hardware
from chunkc.observe import metrics, record_timeline
from chunkc.report import Plan
from chunkc.report.timeline import simulate
from chunkc.runtime.grad_scaler import GradScaler
from chunkc.runtime.optimizer import Adam, AdamW

__version__ = "0.1.0"

__all__ = [
    "AccumulationError",
    "Adam",
    "AdamW",
    "BudgetError",
    "CaptureError",
    "ChunkcError",
    "DeviceMemoryError",
    "GradScaler",
    "Hardware",
    "HardwareError",
    "Plan",
    "PlanError",
    "PlanNotReadyError",
    "ShapeLimitError",
    "clip_grad_norm_",
    "compile",
    "full_params",
    "metrics",
    "plan",
    "plan_of",
    "record_timeline",
    "simulate",
    "stats",
]
