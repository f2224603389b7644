"""Every name that the package offers, as type checkers see them; `chunkc` imports each when used."""

from __future__ import annotations

from chunkc.api import clip_grad_norm_ as clip_grad_norm_
from chunkc.api import compile as compile
from chunkc.api import full_params as full_params
from chunkc.api import plan as plan
from chunkc.api import plan_of as plan_of
from chunkc.api import stats as stats
from chunkc.checkpoint import load_checkpoint as load_checkpoint
from chunkc.checkpoint import save_checkpoint as save_checkpoint
from chunkc.errors import AccumulationError as AccumulationError
from chunkc.errors import BudgetError as BudgetError
from chunkc.errors import CaptureError as CaptureError
from chunkc.errors import CheckpointError as CheckpointError
from chunkc.errors import ChunkcError as ChunkcError
from chunkc.errors import DeviceMemoryError as DeviceMemoryError
from chunkc.errors import HardwareError as HardwareError
from chunkc.errors import PlanError as PlanError
from chunkc.errors import PlanNotReadyError as PlanNotReadyError
from chunkc.errors import RankError as RankError
from chunkc.errors import ShapeLimitError as ShapeLimitError
from chunkc.exit_signals import graceful_exit as graceful_exit
from chunkc.hardware import Hardware as Hardware
from chunkc.observability import metrics as metrics
from chunkc.observability import record_timeline as record_timeline
from chunkc.report import Plan as Plan
from chunkc.report.timeline import simulate as simulate
from chunkc.runtime.optim.grad_scaler import GradScaler as GradScaler
from chunkc.runtime.optim.optimizers import SGD as SGD
from chunkc.runtime.optim.optimizers import Adam as Adam
from chunkc.runtime.optim.optimizers import AdamW as AdamW
from chunkc.runtime.optim.optimizers import AdamW8bit as AdamW8bit
from chunkc.runtime.optim.optimizers import Lion as Lion
from chunkc.weights.load import load_pretrained as load_pretrained
from chunkc.weights.save import save_safetensors as save_safetensors
