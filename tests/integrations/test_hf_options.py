"""Trainer's other options under ChunkcTrainer: each does what it does there, or is checked beside it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama
from torch import nn
from trainers import (
    NUM_STEPS,
    StopAfter,
    arguments,
    compiled,
    logged,
    plain,
    saving,
    seeded,
    values,
)
from training import LOSS_TOLERANCE

import chunkc
from chunkc.compiler.compiled_model import compiled_of

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="runs where peft is installed, as `make test` does"
)


def adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(seeded(), config)
    return model


def means(prediction: Any) -> dict[str, float]:
    assert prediction.predictions.dtype == "float32"
    return {"mean": float(prediction.predictions.mean())}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_metrics_and_label_smoothing_read_outputs_in_fp32(dtype: str, tmp_path: Path) -> None:
    """As they do under autocast; a smoothed loss of 16-bit outputs is off by more than is allowed here."""
    changed = {dtype: True, "label_smoothing_factor": 0.1, "max_steps": 2, "eval_steps": 2}
    exact = plain(seeded(), arguments(tmp_path / "plain", **(changed | {dtype: False})), compute_metrics=means)
    ours = compiled(seeded(), arguments(tmp_path / "ours", **changed), compute_metrics=means)
    exact.train()
    ours.train()
    for key in ("loss", "eval_loss"):
        assert logged(ours, key) == pytest.approx(logged(exact, key), rel=2e-4)
    assert logged(ours, "grad_norm") == pytest.approx(logged(exact, "grad_norm"), rel=5e-3)
    assert logged(ours, "eval_mean") == pytest.approx(logged(exact, "eval_mean"), abs=1e-4)


def small_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch * 1e-5


@pytest.mark.long
def test_in_fp16_a_loss_computed_outside_is_scaled(tmp_path: Path) -> None:
    """Its gradients reach the plan in fp16; the scale is Trainer's to save, and goes on from there."""
    changed = {"max_grad_norm": 0.0, "eval_strategy": "no", "learning_rate": 1e-3, "adam_epsilon": 1e-8}
    exact = plain(seeded(), arguments(tmp_path / "plain", max_steps=3, **changed), compute_loss_func=small_loss)
    exact.train()
    args = saving(tmp_path / "ours", fp16=True, max_steps=3, **changed)
    ours = compiled(seeded(), args, compute_loss_func=small_loss)
    ours.train()
    assert logged(ours, "grad_norm") == pytest.approx(logged(exact, "grad_norm"), rel=5e-3)
    scaler = ours.accelerator.scaler
    assert isinstance(scaler, chunkc.GradScaler)
    saved = torch.load(tmp_path / "ours" / "checkpoint-3" / "scaler.pt", weights_only=True)
    assert saved == scaler.state_dict() and saved["_growth_tracker"] == 3


def test_built_in_scaling_goes_on_from_a_trainers_scaler(tmp_path: Path) -> None:
    trainer = compiled(seeded(), arguments(tmp_path, fp16=True))
    state = torch.amp.GradScaler("cpu", init_scale=512.0).state_dict() | {"_growth_tracker": 7}
    torch.save(state, tmp_path / "scaler.pt")
    trainer._load_scaler(str(tmp_path))
    assert compiled_of(trainer.model).runtime.clipping.loss_scale.state_dict() == state


@pytest.mark.slow
def test_hyperparameters_are_those_when_training_begins(tmp_path: Path) -> None:
    """As a search changes them between two trainings of models that ``model_init`` makes."""
    found = []
    for make in (plain, compiled):
        args = arguments(tmp_path, max_steps=2, eval_strategy="no", warmup_steps=0)
        trainer = make(None, args, model_init=lambda: llama())
        trainer.train()
        trainer.args.learning_rate, trainer.args.adam_beta1 = 1e-3, 0.5
        trainer.train()
        group = trainer.optimizer.param_groups[0]
        found.append((logged(trainer, "loss"), logged(trainer, "learning_rate"), group["betas"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=LOSS_TOLERANCE)
    assert found[1][1:] == found[0][1:]


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end_and_old_checkpoints_go(tmp_path: Path) -> None:
    """A checkpoint that is written into the place of another takes no more than one."""
    changed = {
        "save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True,
        "save_total_limit": 1, "learning_rate": 0.3, "max_steps": 4,
    }  # fmt: skip
    trainers = []
    for name, make in (("plain", plain), ("ours", compiled)):
        trainer = make(seeded(), arguments(tmp_path / name, **changed))
        trainer.train()
        trainers.append(trainer)
    exact, ours = trainers
    assert [p.name for p in (tmp_path / "ours").iterdir()] == ["checkpoint-2"], "later steps are worse"
    assert ours.state.best_metric == pytest.approx(exact.state.best_metric, rel=LOSS_TOLERANCE)
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, rel=LOSS_TOLERANCE)
    for _ in range(2):
        ours._save_optimizer_and_scheduler(str(tmp_path / "again"))
    assert len(list((tmp_path / "again" / "chunkc").glob("0*"))) == 1


@pytest.mark.slow
def test_a_run_of_trainer_goes_on_under_chunkc(tmp_path: Path) -> None:
    """Its checkpoint has optimizer.pt and scheduler.pt; losses to the end are those that Trainer goes on to."""
    first = plain(seeded(), saving(tmp_path, max_steps=NUM_STEPS))
    first.add_callback(StopAfter(4))
    first.train()
    checkpoint = str(tmp_path / "checkpoint-3")
    exact, ours = (make(llama(), arguments(tmp_path / "on")) for make in (plain, compiled))
    for trainer in (exact, ours):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert len(logged(ours, "loss")) == NUM_STEPS
    assert logged(ours, "loss") == pytest.approx(logged(exact, "loss"), rel=LOSS_TOLERANCE)


@needs_peft
@pytest.mark.slow
def test_adapters_train_save_and_resume_under_trainer(tmp_path: Path) -> None:
    """Beside Trainer's run; adapters alone are in the saved weights, and a resumed run is equal to the bit."""
    exact = plain(adapted(), arguments(tmp_path / "plain"))
    exact.train()
    whole = compiled(adapted(), saving(tmp_path / "whole"))
    whole.train()
    for key in ("loss", "eval_loss"):
        assert logged(whole, key) == pytest.approx(logged(exact, key), rel=LOSS_TOLERANCE)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert {p.name for p in checkpoint.glob("*.safetensors")} == {"adapter_model.safetensors"}
    resumed = compiled(adapted(), saving(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert logged(resumed, "loss") == logged(whole, "loss")
    wanted = values(whole.model)
    assert all(torch.equal(value, wanted[name]) for name, value in values(resumed.model).items())


@needs_peft
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_adapters_with_checkpointed_activations_stay_one_graph(dtype: str, tmp_path: Path) -> None:
    changed = {"max_steps": 2, "eval_strategy": "no", "gradient_checkpointing": True}
    exact = plain(adapted(), arguments(tmp_path / "plain", **changed))
    exact.train()
    ours = compiled(adapted(), arguments(tmp_path / "ours", **changed, **({"fp16": True} if dtype == "fp16" else {})))
    ours.train()
    assert logged(ours, "loss") == pytest.approx(logged(exact, "loss"), rel=LOSS_TOLERANCE if dtype == "fp32" else 2e-3)
    assert logged(ours, "grad_norm") == pytest.approx(logged(exact, "grad_norm"), rel=1e-4 if dtype == "fp32" else 2e-2)
    assert "of 2" not in chunkc.plan_of(ours.model).model
