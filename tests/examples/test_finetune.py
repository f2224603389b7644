"""The fine-tuning example: killed and resumed it ends as if it had never stopped; its export is a plain model."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import chunkc

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--layers=2", "--hidden=64", "--batch=2", "--seq=16", "--backend=eager", "--hw=emulated-700k-64m", "--seed=3"]
STEPS = ["--steps=8", "--save-every=2"]
HAS_PEFT = importlib.util.find_spec("peft") is not None


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLES))
        import finetune

        yield finetune


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, str(EXAMPLES / "finetune.py"), *TINY, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def checkpoints(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoints/0*/manifest.json"))


def await_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    end_s = time.monotonic() + 240
    while not checkpoints(out):
        if process.poll() is not None or time.monotonic() > end_s:
            process.kill()
            raise AssertionError(f"no checkpoint was saved: {process.communicate()}")
        time.sleep(0.01)


def told(capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    return losses_in(capsys.readouterr().out)


def losses_in(out: str) -> tuple[float, float]:
    found = re.fullmatch(r"eval_loss=(.*)\nfinal_loss=(.*)\n", out)
    assert found, out
    return float(found[1]), float(found[2])


def held_out(example: ModuleType) -> list[torch.Tensor]:
    text = example.standard_library()
    text = text[-int(len(text) * example.EVALUATION_SHARE) :]
    return list(islice(example.batches(text, 2, 16, 3), example.NUM_EVALUATION_BATCHES))


@pytest.fixture(scope="module")
def uninterrupted(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float]]:
    out = tmp_path_factory.mktemp("whole")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert example.main([*TINY, *STEPS, f"--out={out}", "--resume"]) == 0
    return out, losses_in(printed.getvalue())


@pytest.mark.long
def test_a_killed_run_that_is_resumed_ends_as_one_that_was_not(
    example: ModuleType,
    uninterrupted: tuple[Path, tuple[float, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses are equal to the bit, and the export has the same logits in plain transformers."""
    steps, (out, whole) = STEPS, uninterrupted
    process = start(*steps, f"--out={tmp_path / 'killed'}")
    await_checkpoint(process, tmp_path / "killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "killed" / "model").exists()
    assert example.main([*TINY, *steps, f"--out={tmp_path / 'killed'}", "--resume"]) == 0
    resumed = told(capsys)
    assert resumed == whole
    assert example.main([*TINY, *steps, f"--out={tmp_path / 'killed'}", "--resume"]) == 0
    assert told(capsys) == pytest.approx(whole, rel=1e-6), "as if it had been killed while it was exported"
    folders = (out, tmp_path / "killed")
    models = [AutoModelForCausalLM.from_pretrained(folder / "model").eval() for folder in folders]
    inputs = held_out(example)
    with torch.no_grad():
        logits, others = ([model(input_ids=batch).logits for batch in inputs] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(logits, others, strict=True))
    assert example.evaluate(models[1], inputs) == pytest.approx(resumed[0], rel=1e-5)


@pytest.mark.slow
def test_sigterm_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    process = start("--steps=100000", "--save-every=3", f"--out={tmp_path}")
    await_checkpoint(process, tmp_path)
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "step/s" in errors or "s/step" in errors
    assert checkpoints(tmp_path) and not (tmp_path / "model").exists()


def test_an_export_is_a_pretrained_model_for_the_next_run(
    example: ModuleType,
    uninterrupted: tuple[Path, tuple[float, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, (eval_loss, _) = uninterrupted
    assert example.main([*TINY, "--steps=0", f"--model={first / 'model'}", f"--out={tmp_path}"]) == 0
    assert told(capsys)[0] == pytest.approx(eval_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PEFT, reason="runs where peft is installed, as `make soak` does")
def test_adapters_are_trained_and_exported_alone_also_after_a_resume(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle; the export over the same base has the same loss in plain PEFT."""
    import peft

    command = [*TINY, "--steps=6", "--lora"]
    assert example.main([*command, f"--out={tmp_path / 'whole'}"]) == 0
    whole = told(capsys)

    class Ended(example.Run):  # type: ignore[name-defined,misc]
        def show(self, progress: Any) -> None:
            if progress.n == 3:
                signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(example, "Run", Ended)
        example.main([*command, f"--out={tmp_path / 'ended'}"])
    assert ended.value.code == 128 + signal.SIGTERM and not capsys.readouterr().out
    assert example.main([*command, f"--out={tmp_path / 'ended'}", "--resume"]) == 0
    assert told(capsys) == whole
    exported = tmp_path / "ended" / "model"
    assert {p.name for p in exported.glob("*.safetensors")} == {"adapter_model.safetensors"}
    torch.manual_seed(3)
    model = peft.PeftModel.from_pretrained(example.build(2, 64, 16), exported)
    assert example.evaluate(model, held_out(example)) == pytest.approx(whole[0], rel=1e-5)


@pytest.mark.long
def test_the_defaults_fit_their_device(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = example.parse([])
    assert args.hw == "emulated-96m-4g"
    with pytest.raises(SystemExit):
        example.parse(["--save-every=0"])
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.long)
    options = {"dtype": getattr(torch, args.dtype), "backend": "eager", "accumulate": args.accumulate}
    options["loss_scale"] = 1.0  # so that the plan has norms, as one that clips
    inputs = {"input_ids": tokens, "labels": tokens}
    plan = chunkc.plan(example.build(args.layers, args.hidden, args.seq), args.hw, example_inputs=inputs, **options)
    assert plan.tracks_grad_norm
    assert plan.memory.device_peak_nbytes <= plan.memory.device_budget_nbytes < plan.layout.model_data_nbytes()
