"""ChunkcTrainer beside transformers' Trainer: the same fine-tuning, and a resumed run equal to the bit."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt2
from pair import Pair, batch
from trainers import (
    EVAL,
    HW,
    NUM_STEPS,
    TRAIN,
    LargestUpdate,
    StopAfter,
    arguments,
    compiled,
    logged,
    saving,
    scaled_by,
    seeded,
    transformers,
    values,
)
from training import LOSS_TOLERANCE, UPDATE_TOLERANCE, assert_close_elements

import chunkc
from chunkc.compiler.compiled_model import compiled_of


@pytest.mark.long
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
    assert chunkc.plan_of(model).tracks_grad_norm, "norms are measured as gradients land"
    stats = chunkc.stats(model)
    assert stats["h2d_nbytes"] > 0 and stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.long
def test_accelerate_neither_moves_nor_wraps_the_model(tmp_path: Path) -> None:
    model = seeded()
    kind, forward = type(model), type(model).forward
    trainer = compiled(model, arguments(tmp_path, bf16=True, max_steps=2, eval_strategy="no"))
    trainer.train()
    assert trainer.model is trainer.model_wrapped is model is trainer.accelerator.unwrap_model(model)
    assert type(model) is kind and model.forward.__func__ is forward and not trainer.accelerator.native_amp
    assert trainer.accelerator.scaler is None and trainer.accelerator.device_placement is False
    assert all(hasattr(p, "chunkc_index") for p in model.parameters())


@pytest.mark.slow
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


@pytest.mark.long
def test_the_schedule_waits_for_steps_that_overflow(tmp_path: Path) -> None:
    before = values(model := seeded())
    args = arguments(tmp_path, fp16=True, max_steps=3, eval_strategy="no", warmup_steps=0)
    trainer = compiled(model, args, compile_options=scaled_by(2.0**100))
    trainer.train()
    assert logged(trainer, "learning_rate") == [args.learning_rate] * 3
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def test_a_skipped_step_is_known_also_where_no_plan_measures_gradients() -> None:
    """The scheduler asks: of a script that scales, and a plan without norms."""
    pair, scaler = Pair(), chunkc.GradScaler()
    scaler.scale(pair.model(*batch(0)) * torch.inf).backward()
    assert not chunkc.plan_of(pair.model).tracks_grad_norm
    scaler.step(pair.optimizer)
    assert compiled_of(pair.model).runtime.steps.decision.is_skipped()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16")), "fp16"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(dtype: str, tmp_path: Path) -> None:
    """From the middle of an epoch, with dropout; a later checkpoint that was not finished is passed over."""
    changed = {"eval_strategy": "no"} | ({dtype: True} if dtype != "fp32" else {})
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
    wanted = values(model)
    assert all(torch.equal(v, wanted[n]) for n, v in values(again).items())
    assert json.loads((tmp_path / "half" / "checkpoint-6" / "trainer_state.json").read_text())["global_step"] == 6


@pytest.mark.long
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
    assert not any(hasattr(p, "chunkc_index") for p in model.parameters())


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
    with pytest.raises(chunkc.ChunkcError, match=r"steps with chunkc's optimizers, not SGD"):
        trainer.train()


def test_a_dtype_asked_for_in_the_arguments_is_that_of_the_model(tmp_path: Path) -> None:
    model = chunkc.compile(seeded(), HW, dtype=torch.float32, backend="eager", accumulate=2)
    with pytest.raises(chunkc.ChunkcError, match=r"bf16=True, but the model was compiled to compute in float32"):
        compiled(model, arguments(tmp_path, bf16=True), hw=None, compile_options=None)


def test_arguments_that_change_later_are_checked_again(tmp_path: Path) -> None:
    trainer = compiled(seeded(), arguments(tmp_path, eval_strategy="no"))
    trainer.args.gradient_accumulation_steps = 4
    with pytest.raises(chunkc.ChunkcError, match="compile it with accumulate=4"):
        trainer.train()


def test_a_trainer_that_is_built_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ChunkcTrainer overrides would otherwise be passed over without a word."""
    monkeypatch.delattr(transformers.Trainer, "_get_grad_norm")
    with pytest.raises(chunkc.ChunkcError, match=r"has no _get_grad_norm"):
        compiled(seeded(), arguments(tmp_path))
