"""Refusals of `chunkc.integrations.hf`: Trainers, arguments and models that would train otherwise."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from chunkc.errors import ChunkcError
from chunkc.runtime.model.model import ModelRuntime

_ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
_TRAINER_METHODS = (
    "call_model_init", "create_optimizer", "get_optimizer_cls_and_kwargs", "prediction_step", "_build_accelerator_args",
    "_move_model_to_device", "_wrap_model", "_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_inner_training_loop", "_save",
)  # fmt: skip


def check_arguments(args: TrainingArguments) -> None:
    wrong = {
        "torch_compile": (args.torch_compile, "chunkc compiles the model already; leave it out"),
        "fp16_full_eval": (args.fp16_full_eval, "evaluation is in the compute dtype already; leave it out"),
        "bf16_full_eval": (args.bf16_full_eval, "evaluation is in the compute dtype already; leave it out"),
        "fsdp": (args.fsdp, "a model takes one GPU; leave it out"),
        "deepspeed": (args.deepspeed, "chunkc takes its place; leave it out"),
        "optim": (args.optim not in _ADAMW, f"chunkc has AdamW: use {_ADAMW[0].value!r}"),
        "parallelism_config": (
            args.parallelism_config is not None,
            "ranks divide the model data; leave it out",
        ),
        "n_gpu": (args.n_gpu > 1, "set CUDA_VISIBLE_DEVICES to one GPU"),
    }
    refused = [f"{name}={getattr(args, name)!r}: {advice}" for name, (is_wrong, advice) in wrong.items() if is_wrong]
    if refused:
        raise ChunkcError("ChunkcTrainer cannot honour these arguments. " + ". ".join(refused))


def check_transformers() -> None:
    """Refuse a Trainer that lacks a method overridden here."""
    missing = [name for name in _TRAINER_METHODS if not hasattr(Trainer, name)]
    if missing:
        raise ChunkcError(
            f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}, on which "
            "ChunkcTrainer rests: install transformers 5.23, with which it is tested"
        )


def check_compiled(runtime: ModelRuntime, args: TrainingArguments) -> None:
    """Refuse a compiled model on which Trainer's loop could not run."""
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


def check_dtype(runtime: ModelRuntime, args: TrainingArguments) -> None:
    dtypes = sorted({info.dtype for info in runtime.infos})
    for name, wanted in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(args, name) and wanted not in dtypes:
            raise ChunkcError(
                f"{name}=True, but the model was compiled to compute in {', '.join(dtypes)}: compile it with "
                f"dtype=torch.{wanted}, or leave {name} out"
            )


def wanted_dtype(model: nn.Module, args: TrainingArguments) -> torch.dtype | str:
    """Compute dtype as Trainer chooses it, with fp32 masters in 16 bits; a 16-bit model keeps its dtype."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    is_fp32 = all(p.dtype is torch.float32 for p in model.parameters())
    return torch.float32 if is_fp32 else "auto"
