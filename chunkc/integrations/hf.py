"""transformers' Trainer over a compiled model: its loop, arguments and callbacks, with chunkc below them.

    trainer = ChunkcTrainer(model, args, train_dataset=..., eval_dataset=..., hw="v100-240g")
    trainer.train(resume_from_checkpoint=True)

The model is compiled before Trainer sees it, from what the arguments say: micro-batches by
``gradient_accumulation_steps``, the compute dtype by ``bf16`` and ``fp16``, AdamW by ``optim`` and its hyperparameters.
Which micro-batch ends a window is Trainer's to say: it sets accelerate's ``sync_gradients`` and calls ``step()``, also
early, at the end of an epoch. Clipping is `chunkc.clip_grad_norm_`. accelerate neither moves the model (chunkc keeps it
within its budget), nor wraps it (mixed precision is in the plan), nor scales losses (so is scaling).

Checkpoints are Trainer's folders. In place of files of optimizer, scheduler and scaler they hold a folder ``chunkc``
from `chunkc.save_checkpoint`, written without a second copy of the states in memory, and checked when it is loaded. The
weights beside it are those of ``save_pretrained``, for whoever wants to use the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from chunkc.api import clip_grad_norm_, compile
from chunkc.checkpoint import load_checkpoint, save_checkpoint
from chunkc.compiled import CompiledModel, compiled_of
from chunkc.devices import HardwareLike
from chunkc.errors import ChunkcError
from chunkc.runtime.model import ModelRuntime
from chunkc.runtime.optimizer import Adam, AdamW

__all__ = ["ChunkcTrainer"]

STATE_FOLDER = "chunkc"
_ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


class ChunkcTrainer(Trainer):
    """``transformers.Trainer`` whose model is compiled by chunkc.

    Takes what Trainer takes, and two keywords:

    Args:
        hw: as for `chunkc.compile`.
        compile_options: further options of it, which win over what the arguments say.

    ``model`` may also have been compiled already: then leave ``hw`` and ``compile_options`` out, its own options count.
    On an emulated device pass ``use_cpu=True`` in the arguments where the machine has a GPU.

    Raises:
        ChunkcError: for arguments that cannot be honoured, naming each and what to do; for a
            compiled model that allows fewer micro-batches, or stands where Trainer would not put its inputs.
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
        _check_arguments(args)
        self._hw = hw
        self._compile_options = dict(compile_options or {})
        if model is not None:
            model = self._compiled(model, args)
        super().__init__(model, args, *positional, **named)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            self.optimizer_cls_and_kwargs = (AdamW, _adamw_options(args))

    @property
    def _managed(self) -> nn.Module:
        """The model, which Trainer's type does not say is there."""
        if self.model is None:
            raise ChunkcError("ChunkcTrainer has no model yet: pass model= or model_init=")
        return self.model

    def _compiled(self, model: nn.Module, args: TrainingArguments) -> nn.Module:
        """``model`` compiled for ``args``, or as it is where it was compiled before."""
        if isinstance(getattr(model, "_compiled_call_impl", None), CompiledModel):
            if self._hw is not None or self._compile_options:
                raise ChunkcError(
                    "the model was compiled already, so hw= and compile_options= of ChunkcTrainer would be ignored: "
                    "leave them out, or hand over the model before chunkc.compile"
                )
        else:
            wanted: dict[str, Any] = {"dtype": _dtype(model, args), "accumulate": args.gradient_accumulation_steps}
            model = compile(model, "auto" if self._hw is None else self._hw, **(wanted | self._compile_options))
        runtime = compiled_of(model).runtime
        if runtime.accumulate < args.gradient_accumulation_steps:
            raise ChunkcError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, but the model was compiled with "
                f"accumulate={runtime.accumulate}: compile it with accumulate={args.gradient_accumulation_steps}"
            )
        if runtime.device.torch_device.type != args.device.type:
            raise ChunkcError(
                f"the model runs on {runtime.device.torch_device} ({runtime.device.name}), but Trainer would move its "
                f"inputs to {args.device}: pass use_cpu={runtime.device.torch_device.type == 'cpu'} in the arguments"
            )
        return model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As Trainer's, compiled."""
        return self._compiled(super().call_model_init(trial), self.args)

    # What accelerate is told.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return found | {"mixed_precision": "no", "device_placement": False}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: it is where it should be."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As Trainer's; accelerate takes what it gives as its own."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if not isinstance(optimizer, _PreparedOptimizer):
            optimizer = self.optimizer = _PreparedOptimizer(optimizer, compiled_of(self._managed).runtime)
        return optimizer

    # Steps.

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_grad_norm_(self._managed, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return clip_grad_norm_(self._managed, float("inf")) if grad_norm is None else grad_norm

    # Checkpoints.

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> Any:
        """As Trainer's. ``resume_from_checkpoint=True`` passes over a last checkpoint that was not finished."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(Path(str(self.args.output_dir))) or True
        return super().train(resume_from_checkpoint, *positional, **named)

    @property
    def _chunk_optimizer(self) -> Adam | AdamW:
        """The optimizer below what accelerate wraps."""
        inner = getattr(self.optimizer, "optimizer", None)
        if not isinstance(inner, (Adam, AdamW)):
            raise ChunkcError(
                f"a checkpoint holds chunkc.AdamW's or chunkc.Adam's states, but the trainer's optimizer is "
                f"{type(self.optimizer).__name__}: save and load after create_optimizer()"
            )
        return inner

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(Path(output_dir) / STATE_FOLDER, self._managed, self._chunk_optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing where optimizer and scheduler bring the parameters: masters are more exact than saved weights."""
        if model is not None or not (Path(resume_from_checkpoint) / STATE_FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint) / STATE_FOLDER
        if folder is None or not folder.is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_checkpoint(folder, self._managed, self._chunk_optimizer, self.lr_scheduler)


class _PreparedOptimizer(AcceleratedOptimizer):
    """An optimizer as accelerate wraps it, which leaves states where they are and knows of steps that fp16 skipped."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer, runtime: ModelRuntime) -> None:
        if not isinstance(optimizer, (Adam, AdamW)):
            raise ChunkcError(
                f"ChunkcTrainer steps with chunkc.AdamW or chunkc.Adam, not {type(optimizer).__name__}: leave `optim` "
                "at its default, or pass optimizers=(chunkc.AdamW(model.parameters(), ...), None) and a compiled model"
            )
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._runtime = runtime

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step met an overflow, so that the scheduler waits; asks the device only in fp16."""
        outcome = self._runtime.outcome
        return outcome is not None and outcome.is_skipped()


def _check_arguments(args: TrainingArguments) -> None:
    """Refuse what would go past chunkc, or run without it."""
    wrong = {
        "torch_compile": (args.torch_compile, "chunkc compiles the model already; leave it out"),
        "fp16_full_eval": (args.fp16_full_eval, "evaluation is in the compute dtype already; leave it out"),
        "bf16_full_eval": (args.bf16_full_eval, "evaluation is in the compute dtype already; leave it out"),
        "fsdp": (args.fsdp, "a model takes one GPU; leave it out"),
        "deepspeed": (args.deepspeed, "chunkc takes its place; leave it out"),
        "optim": (args.optim not in _ADAMW, f"chunkc has AdamW: use {_ADAMW[0].value!r}"),
        "world_size": (args.world_size > 1, "training on several GPUs is not built yet; start one process"),
        "n_gpu": (args.n_gpu > 1, "set CUDA_VISIBLE_DEVICES to one GPU"),
    }
    found = [f"{name}={getattr(args, name)!r}: {advice}" for name, (is_wrong, advice) in wrong.items() if is_wrong]
    if found:
        raise ChunkcError("ChunkcTrainer cannot honour these arguments. " + ". ".join(found))


def _dtype(model: nn.Module, args: TrainingArguments) -> torch.dtype | str:
    """What to compute in: as Trainer would, with fp32 masters in 16 bits; a 16-bit model keeps its dtype."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    is_fp32 = all(p.dtype is torch.float32 for p in model.parameters())
    return torch.float32 if is_fp32 else "auto"


def _adamw_options(args: TrainingArguments) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _newest_complete(directory: Path) -> str | None:
    """The last of Trainer's checkpoints whose final file, the trainer's state, is whole."""
    folders = {int(m[1]): p for p in directory.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))}
    for step in sorted(folders, reverse=True):
        try:
            json.loads((folders[step] / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(folders[step])
    return None
