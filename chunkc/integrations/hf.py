"""transformers' Trainer over a compiled model.

    trainer = ChunkcTrainer(model, args, train_dataset=..., eval_dataset=..., hw="v100-240g")
    trainer.train(resume_from_checkpoint=True)

The model is compiled before Trainer sees it: micro-batches by ``gradient_accumulation_steps``, the compute dtype by
``bf16`` and ``fp16``, AdamW by ``optim``. Trainer ends accumulation windows, also early: it sets accelerate's
``sync_gradients`` and calls ``step()``. Clipping is `chunkc.clip_grad_norm_`. accelerate neither moves nor wraps the
model, nor scales losses: the plan has mixed precision and scaling. Metrics, predictions, label smoothing and
``compute_loss_func`` read outputs in fp32. Losses outside of the plan (these two, a subclass's ``compute_loss``) are
scaled by `chunkc.GradScaler` in fp16.

Over several ranks the model stays what it is: accelerate's mark of a prepared model keeps it out of DDP, and gradients
are means over the ranks by the plan, as DDP's are. Reads of the model are collective, so all ranks take part in saving.

``auto_find_batch_size`` tries smaller batches where memory is short. accelerate knows that by the message of an error,
so a `chunkc.BudgetError` of the loop is raised again as ``torch.OutOfMemoryError``.

Checkpoints are Trainer's folders, with a folder ``chunkc`` from `chunkc.save_checkpoint` in place of files of
optimizer, scheduler and scaler. The weights beside it are those of ``save_pretrained``, for other users of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import Trainer, TrainingArguments

from chunkc.api import clip_grad_norm_, compile
from chunkc.checkpoint import load_checkpoint, save_checkpoint
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.device_selection import HardwareLike
from chunkc.errors import BudgetError, ChunkcError
from chunkc.integrations.accelerate import PreparedOptimizer
from chunkc.integrations.clipping import is_compiled
from chunkc.integrations.hf_checks import check_arguments, check_compiled, check_dtype, check_transformers, wanted_dtype
from chunkc.integrations.hf_state import STATE_NAME, check_trainer_state, newest_complete
from chunkc.runtime.optim.grad_scaler import GradScaler
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.runtime.optim.optimizers import AdamW

__all__ = ["ChunkcTrainer"]

STATE_FOLDER = "chunkc"
SCALER_NAME = "scaler.pt"


class ChunkcTrainer(Trainer):
    """``transformers.Trainer`` whose model is compiled by chunkc.

    Takes what Trainer takes, and two keywords. ``model`` may also be compiled: then leave both out. On an emulated
    device pass ``use_cpu=True`` in the arguments where the machine has a GPU.

    Args:
        hw: as for `chunkc.compile`.
        compile_options: further options of it, which win over the arguments.

    Raises:
        ChunkcError: for arguments that cannot be honoured, naming each and what to do; for a compiled model that allows
            fewer micro-batches, computes in another dtype than ``bf16`` or ``fp16`` asks for, or stands where Trainer
            would not put its inputs; for a transformers whose Trainer is built otherwise.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        hw: HardwareLike | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_transformers()
        check_arguments(args)
        if hw is not None or compile_options is not None or not hasattr(self, "_compile_options"):
            self.compile_by(hw, compile_options)
        if model is not None:
            model = self._compiled(model, args)
        super().__init__(model, args, *positional, **named)
        self._take_losses_outside()

    def compile_by(self, hw: HardwareLike | None, compile_options: Mapping[str, Any] | None) -> None:
        """Say how the model is to be compiled, for trainers whose constructors do not pass it on."""
        self._hw = hw
        self._compile_options = dict(compile_options or {})

    def _take_losses_outside(self) -> None:
        """Note whether losses are computed from outputs, which are then in fp32."""
        functions: tuple[Any, Any] = (self.label_smoother, self.compute_loss_func)
        self._has_losses_outside = type(self).compute_loss is not Trainer.compute_loss or functions != (None, None)
        if self.args.bf16 or self.args.fp16:
            self.label_smoother, self.compute_loss_func = (f and _of_fp32_outputs(f) for f in functions)

    @property
    def _managed(self) -> nn.Module:
        if self.model is None:
            raise ChunkcError("ChunkcTrainer has no model yet: pass model= or model_init=")
        return self.model

    def _compiled(self, model: nn.Module, args: TrainingArguments) -> nn.Module:
        was_compiled = is_compiled(model)
        if was_compiled:
            if self._hw is not None or self._compile_options:
                raise ChunkcError(
                    "the model was compiled already, so hw= and compile_options= of ChunkcTrainer would be ignored: "
                    "leave them out, or hand over the model before chunkc.compile"
                )
        else:
            options = dict[str, Any](dtype=wanted_dtype(model, args), accumulate=args.gradient_accumulation_steps)
            model = compile(model, "auto" if self._hw is None else self._hw, **(options | self._compile_options))
        runtime = compiled_of(model).runtime
        check_compiled(runtime, args)
        if was_compiled:
            check_dtype(runtime, args)
        runtime.clipping.wants_norms = True  # Trainer asks for the norm before each step, whether it clips or not
        return model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        return self._compiled(super().call_model_init(trial), self.args)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return arguments | {"mixed_precision": "no", "device_placement": False}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: it is where it should be."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return ``model`` without the hook for gradients through frozen embeddings.

        Compiled checkpoints need none, and the hook would break the forward into two graphs.
        """
        unhook = getattr(model, "disable_input_require_grads", None)
        if unhook is not None:
            unhook()
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # accelerate then leaves it as it is
        return model

    def _inner_training_loop(self, batch_size: int | None = None, *positional: Any, **named: Any) -> Any:
        """Train; with ``auto_find_batch_size`` a batch that no plan fits asks accelerate for a smaller one.

        Raises:
            BudgetError: where a smaller batch would not help: host memory is short, or a batch has one sample.
        """
        try:
            return super()._inner_training_loop(batch_size, *positional, **named)
        except BudgetError as error:
            if not self.args.auto_find_batch_size or error.moment == "host" or batch_size in (None, 1):
                raise
            raise torch.OutOfMemoryError(f"a batch of {batch_size} samples is out of memory. {error}") from error

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return AdamW, {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make Trainer's optimizer, prepared for accelerate; arguments may have changed until now."""
        runtime = compiled_of(self._managed).runtime
        check_arguments(self.args)
        check_compiled(runtime, self.args)
        if self.args.fp16 and self._has_losses_outside and "loss_scale" not in self._compile_options:
            self.accelerator.scaler = self.accelerator.scaler or GradScaler()
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if not isinstance(optimizer, ChunkOptimizer):
            raise ChunkcError(
                f"ChunkcTrainer steps with chunkc's optimizers, not {type(optimizer).__name__}: leave `optim` "
                "at its default, or pass optimizers=(chunkc.AdamW(model.parameters(), ...), None) and a compiled model"
            )
        prepared: torch.optim.Optimizer = PreparedOptimizer(optimizer, self.accelerator.scaler)
        self.optimizer = prepared
        return prepared

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self._clip(float("inf")) if grad_norm is None else grad_norm

    def _clip(self, max_norm: float) -> torch.Tensor:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self._chunk_optimizer)
        return clip_grad_norm_(self._managed, max_norm)

    def prediction_step(self, *positional: Any, **named: Any) -> tuple[Any, Any, Any]:
        loss, predictions, labels = super().prediction_step(*positional, **named)
        if self.args.bf16 or self.args.fp16:
            loss, predictions = convert_to_fp32((loss, predictions))
        return loss, predictions, labels

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> Any:
        """Train as Trainer does, and pass over an unfinished last checkpoint where it is to be found.

        Raises:
            CheckpointError: for a ``trainer_state.json`` that is none.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete(Path(str(self.args.output_dir))) or True
        elif isinstance(resume_from_checkpoint, str) and (Path(resume_from_checkpoint) / STATE_NAME).exists():
            check_trainer_state(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *positional, **named)

    @property
    def _chunk_optimizer(self) -> ChunkOptimizer:
        inner = getattr(self.optimizer, "optimizer", None)
        if not isinstance(inner, ChunkOptimizer):
            raise ChunkcError(
                f"a checkpoint holds states of chunkc's optimizers, but the trainer's optimizer is "
                f"{type(self.optimizer).__name__}: save and load after create_optimizer()"
            )
        return inner

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save on the rank that saves; the others take part in reading the model."""
        if self.args.should_save or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        model: Any = self._managed
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(self.args.output_dir if output_dir is None else output_dir, is_main_process=False)
        else:
            model.state_dict()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / STATE_FOLDER
        save_checkpoint(folder, self._managed, self._chunk_optimizer, self.lr_scheduler, keep=1)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave parameters to `load_checkpoint`, whose masters are more exact than saved weights."""
        if model is not None or not (Path(resume_from_checkpoint) / STATE_FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint) / STATE_FOLDER
        if folder is None or not folder.is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_checkpoint(folder, self._managed, self._chunk_optimizer, self.lr_scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.accelerator.scaler is not None or checkpoint is None:
            super()._load_scaler(checkpoint)
            return
        built_in, path = compiled_of(self._managed).runtime.clipping.loss_scale, Path(checkpoint) / SCALER_NAME
        if built_in is not None and path.is_file():
            built_in.load_state_dict(torch.load(path, weights_only=True))


def _of_fp32_outputs(loss: Any) -> Any:
    return lambda outputs, *positional, **named: loss(convert_to_fp32(outputs), *positional, **named)
