"""ChunkcTrainer beside transformers' Trainer: the same fine-tuning, and a resumed run equal to the bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt2, llama
from torch import nn
from training import LOSS_TOLERANCE, UPDATE_TOLERANCE, assert_close_elements

import chunkc

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


def scaled_by(loss_scale: float) -> dict[str, Any]:
    return {"backend": "eager", "loss_scale": loss_scale}


def seeded(make: Any = llama, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(**options)


class LargestUpdate(transformers.TrainerCallback):  # type: ignore[misc]
    """The largest change of any element in one step of a plain model."""

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


def test_trains_and_evaluates_as_trainer_does(tmp_path: Path) -> None:
    """Acceptance (b) over two epochs with accumulation, a shorter last window, clipping that bites, and a schedule."""
    model = seeded()
    measured = LargestUpdate(plain_model := copy.deepcopy(model))
    plain = transformers.Trainer(
        plain_model, arguments(tmp_path / "plain"), train_dataset=TRAIN, eval_dataset=EVAL, callbacks=[measured]
    )
    plain.train()
    ours = compiled(model, arguments(tmp_path / "ours"))
    ours.train()
    assert ours.state.global_step == plain.state.global_step == NUM_STEPS
    for key in ("loss", "eval_loss"):
        assert len(logged(plain, key)) == (NUM_STEPS if key == "loss" else 2)
        assert logged(ours, key) == pytest.approx(logged(plain, key), rel=LOSS_TOLERANCE)
    assert logged(ours, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)
    assert min(logged(plain, "grad_norm")) > 0.5, "clipping changes nothing, so nothing is shown"
    assert logged(ours, "learning_rate") == logged(plain, "learning_rate")
    assert_close_elements(values(model), values(plain_model), UPDATE_TOLERANCE * measured.largest, "parameters")
    stats = chunkc.stats(model)
    assert stats["h2d_nbytes"] > 0 and stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


def test_accelerate_neither_moves_nor_wraps_the_model(tmp_path: Path) -> None:
    model = seeded()
    kind, forward = type(model), type(model).forward
    trainer = compiled(model, arguments(tmp_path, bf16=True, max_steps=2, eval_strategy="no"))
    trainer.train()
    assert trainer.model is trainer.model_wrapped is model is trainer.accelerator.unwrap_model(model)
    assert type(model) is kind and model.forward.__func__ is forward and not trainer.accelerator.native_amp
    assert trainer.accelerator.scaler is None and trainer.accelerator.device_placement is False
    assert all(hasattr(p, "_chunkc_index") for p in model.parameters())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_16_bits_the_plan_computes_and_masters_learn(dtype: str, tmp_path: Path) -> None:
    """Losses stay within 2 % of the run in fp32, where fp16 has a scale that does not overflow."""
    exact = compiled(seeded(), arguments(tmp_path / "fp32"))
    exact.train()
    model = seeded()
    trainer = compiled(model, arguments(tmp_path / dtype, **{dtype: True}), compile_options=scaled_by(128.0))
    trainer.train()
    wanted = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert {p.dtype for p in chunkc.plan_of(model).layout.params} == {wanted}
    assert {p.dtype for p in model.state_dict().values()} == {torch.float32}
    assert logged(trainer, "loss") == pytest.approx(logged(exact, "loss"), rel=0.02)
    assert logged(trainer, "eval_loss") == pytest.approx(logged(exact, "eval_loss"), rel=0.02)


def test_the_schedule_waits_for_steps_that_overflow(tmp_path: Path) -> None:
    """As Trainer's does: nothing has changed, the learning rate neither."""
    before = values(model := seeded())
    args = arguments(tmp_path, fp16=True, max_steps=3, eval_strategy="no", warmup_steps=0)
    trainer = compiled(model, args, compile_options=scaled_by(2.0**100))
    trainer.train()
    assert logged(trainer, "learning_rate") == [args.learning_rate] * 3
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def saving(directory: Path, **changed: Any) -> Any:
    return arguments(directory, save_strategy="steps", save_steps=3, **changed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(dtype: str, tmp_path: Path) -> None:
    """From the middle of an epoch, with dropout; a later checkpoint that was not finished is passed over."""
    changed = {dtype: True} if dtype != "fp32" else {}
    whole = compiled(model := seeded(gpt2, dropout=0.1), saving(tmp_path / "whole", **changed))
    whole.train()
    half = compiled(seeded(gpt2, dropout=0.1), saving(tmp_path / "half", max_steps=NUM_STEPS, **changed))
    half.add_callback(StopAfter(4))
    half.train()
    torn = tmp_path / "half" / "checkpoint-5"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half of it")
    torch.manual_seed(99)
    resumed = compiled(again := gpt2(dropout=0.1), saving(tmp_path / "half", **changed))
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert logged(resumed, "eval_loss") == logged(whole, "eval_loss")
    wanted = values(model)
    assert all(torch.equal(v, wanted[n]) for n, v in values(again).items())
    assert json.loads((tmp_path / "half" / "checkpoint-6" / "trainer_state.json").read_text())["global_step"] == 6


class StopAfter(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends training after some steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._num_steps


def test_a_saved_checkpoint_loads_in_plain_transformers(tmp_path: Path) -> None:
    trainer = compiled(model := seeded(), saving(tmp_path, max_steps=3, eval_strategy="no"))
    trainer.train()
    folder = tmp_path / "checkpoint-3"
    assert {p.name for p in folder.iterdir()} >= {"model.safetensors", "chunkc", "trainer_state.json"}
    assert not (folder / "optimizer.pt").exists()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in values(model).items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"torch_compile": True}, "torch_compile=True: chunkc compiles"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        ({"optim": "sgd"}, "optim=.*chunkc has AdamW"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = seeded()
    with pytest.raises(chunkc.ChunkcError, match=message):
        compiled(model, arguments(tmp_path, **changed))
    assert not any(hasattr(p, "_chunkc_index") for p in model.parameters())


def test_a_model_compiled_otherwise_is_refused_by_what_differs(tmp_path: Path) -> None:
    model = chunkc.compile(seeded(), HW, dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.ChunkcError, match="compiled already"):
        compiled(model, arguments(tmp_path))
    with pytest.raises(chunkc.ChunkcError, match="compile it with accumulate=2"):
        compiled(model, arguments(tmp_path), hw=None, compile_options=None)
    trainer = compiled(
        model,
        arguments(tmp_path, gradient_accumulation_steps=1, max_steps=1, eval_strategy="no"),
        hw=None,
        compile_options=None,
        optimizers=(torch.optim.SGD(model.parameters()), None),
    )
    with pytest.raises(chunkc.ChunkcError, match=r"chunkc\.AdamW or chunkc\.Adam, not SGD"):
        trainer.train()
