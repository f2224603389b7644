"""A tiny fine-tuning under transformers' Trainer and under ChunkcTrainer, for the tests of both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama
from torch import nn

pytest.importorskip("accelerate", reason="runs where accelerate is installed, as `make test` does")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("chunkc.integrations.hf")

HW = "emulated-320k-16m"
NUM_SAMPLES, NUM_STEPS = 14, 8  # seven micro-batches an epoch: windows of two, two, two and one


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random tokens; every sample is its own labels."""

    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, 97, (num_samples, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


SEARCHING: dict[str, Any] = {
    "auto_find_batch_size": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 3,
    "eval_strategy": "no",
}  # fmt: skip
"""Arguments of a run that begins with batches for which there is no plan."""
TRAIN, EVAL = Tokens(NUM_SAMPLES, 0), Tokens(4, 1)


def arguments(directory: Path, **changed: Any) -> Any:
    options = {
        "output_dir": str(directory), "num_train_epochs": 2, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2, "adam_epsilon": 1e-4,
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**(options | changed))


def compiled(model: nn.Module, args: Any, **named: Any) -> Any:
    options = {"hw": HW, "compile_options": {"backend": "eager"}} | named
    return hf.ChunkcTrainer(model, args, train_dataset=TRAIN, eval_dataset=EVAL, **options)


def plain(model: nn.Module, args: Any, **named: Any) -> Any:
    return transformers.Trainer(model, args, train_dataset=TRAIN, eval_dataset=EVAL, **named)


def scaled_by(loss_scale: float) -> dict[str, Any]:
    return {"backend": "eager", "loss_scale": loss_scale}


def seeded(make: Any = llama, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(**options)


class LargestUpdate(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, model: nn.Module) -> None:
        self.largest, self._model = 0.0, model
        self._before = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = [p.detach().clone() for p in self._model.parameters()]
        moved = max(float((a - b).abs().max()) for a, b in zip(now, self._before, strict=True))
        self.largest, self._before = max(self.largest, moved), now


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.detach().clone() for n, v in model.state_dict().items()}


def saving(directory: Path, **changed: Any) -> Any:
    return arguments(directory, save_strategy="steps", save_steps=3, **changed)


class StopAfter(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._num_steps
