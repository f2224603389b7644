"""accelerate's loop over compiled models.

    accelerator = ChunkcAccelerator(gradient_accumulation_steps=2)
    model = chunkc.compile(model, hw="v100-240g", accumulate=2)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A compiled model is placed, mixed in precision and divided over ranks by its plan, so ``prepare`` gives it back as it
is: neither moved nor wrapped in DDP. `ChunkcAccelerator.clip_grad_norm_` clips by the plan. All else is accelerate's;
plain models may be prepared beside compiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from chunkc.errors import ChunkcError
from chunkc.integrations.clipping import clip_whole_model, is_compiled
from chunkc.runtime.optim.grad_scaler import GradScaler
from chunkc.runtime.optim.optimizer import ChunkOptimizer

__all__ = ["ChunkcAccelerator"]


class ChunkcAccelerator(Accelerator):
    """``accelerate.Accelerator`` whose compiled models stay as they are; takes the same arguments.

    Raises:
        ChunkcError: by ``prepare``, for a compiled model under ``mixed_precision``, FSDP, DeepSpeed or another way to
            divide it: the plan does that.
    """

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not is_compiled(model):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        if self.mixed_precision not in (None, "no"):
            raise ChunkcError(
                f"mixed_precision={self.mixed_precision!r} would cast a compiled model a second time: leave it out, "
                "and pass dtype= to chunkc.compile"
            )
        if str(self.distributed_type.value) not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ChunkcError(
                f"accelerate is configured for {self.distributed_type.value}, but a compiled model is divided over "
                "ranks by its plan: leave FSDP, DeepSpeed and such out, and start the script by torchrun"
            )
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if not isinstance(optimizer, ChunkOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = PreparedOptimizer(optimizer, None)
        self._optimizers.append(prepared)
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip as accelerate does; where ``parameters`` are all trained ones of a compiled model, by its plan.

        Returns:
            The norm before clipping, float32 [].
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = clip_whole_model(self._models, listed, max_norm, norm_type)
        return super().clip_grad_norm_(listed, max_norm, norm_type) if norm is None else norm


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper, which leaves optimizer states where they are and knows of skipped steps.

    Args:
        optimizer: over a compiled model.
        loss_scaler: of losses that are scaled outside of the plan.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: ChunkOptimizer, loss_scaler: GradScaler | None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._loss_scaler = loss_scaler

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step; losses that were scaled outside are unscaled, and the scale follows."""
        if self._loss_scaler is None:
            super().step(closure)
        elif self.gradient_state.sync_gradients:
            self._loss_scaler.step(self.optimizer)
            self._loss_scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step met an overflow; asks the device only in fp16."""
        decision = self.optimizer.runtime.decision
        return decision is not None and decision.is_skipped()
