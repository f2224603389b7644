"""The example: a tiny run from start to end, what its checks catch, and that its defaults are what it promises."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import chunkc

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--layers=2", "--hidden=64", "--batch=2", "--seq=16", "--backend=eager"]
TINY_HW = "emulated-700k-64m"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_gpt

    return train_gpt


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, *arguments]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
def test_a_run_prints_plan_summary_and_comparison_and_succeeds() -> None:
    done = run("--hw", TINY_HW, "--steps=12", "--compare=4", "--target=5.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"LlamaForCausalLM on {TINY_HW}" in done.stdout
    assert "moved per step: " in done.stdout and "model data" in done.stdout
    assert done.stdout.count("\nok ") == 3 and "FAILED" not in done.stdout
    assert "tokens/s, device peak" in done.stderr and "12/12" in done.stderr


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "hw", "device"),
    [
        (False, [], "emulated-96m-4g", "cpu"),
        (True, [], "auto", "cuda"),
        (True, ["--hw=v100-240g"], "v100-240g", "cuda"),
        (True, ["--hw=emulated-96m-4g"], "emulated-96m-4g", "cpu"),
        (False, ["--hw=v100-240g"], "v100-240g", "cpu"),
    ],
)
def test_the_gpu_is_used_where_there_is_one(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    arguments: list[str],
    hw: str,
    device: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    args = example.parse(arguments)
    assert args.hw == hw
    assert example.device_of(args.hw) == torch.device(device)


def stats(budget_nbytes: int) -> dict[str, int]:
    return {"budget_nbytes": budget_nbytes, "model_data_nbytes": 400}


@pytest.mark.parametrize(
    ("losses", "peak_nbytes", "target", "verdict"),
    [
        ([5.0, 4.0, 2.0], 100, 4.0, 0),
        ([5.0, 4.0002, 2.0], 100, 4.0, 1),
        ([5.0, 4.0, 2.0], 101, 4.0, 1),
        ([5.0, 4.0, 2.0], 100, 11 / 3, 1),
        ([5.0, 4.0, float("nan")], 100, 4.0, 1),
        ([float("nan"), 4.0, 2.0], 100, 9.0, 1),
    ],
)
def test_each_check_fails_alone(
    example: ModuleType, losses: list[float], peak_nbytes: int, target: float, verdict: int
) -> None:
    plain = sys.modules["plain"].Reference([5.0, 4.0], None)
    assert example.check(losses, plain, peak_nbytes, stats(100), target) == verdict


@pytest.mark.parametrize(("error", "agrees"), [(0.149, True), (0.151, False)])
def test_16_bits_may_be_one_and_a_half_times_as_far_off_as_plain_16_bits(
    example: ModuleType, error: float, agrees: bool
) -> None:
    plain = sys.modules["plain"]
    reference = plain.Reference([5.0, 4.0], [5.1, 3.9])
    assert plain.agreement([5.0 + error, 4.0 + error], reference)[0] is agrees


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.weight.sum())


def test_plain_16_bit_training_keeps_an_fp32_master(example: ModuleType) -> None:
    """One update is less than half of the distance between 1.0 and the bf16 number below it; eight together are not."""
    model = Slope()
    inputs = [torch.zeros(1, 1, dtype=torch.long)] * 9
    result = sys.modules["plain"].reference(model, inputs, torch.bfloat16, 1e-3, lambda o: LambdaLR(o, lambda step: 1))
    assert result.fp32 == pytest.approx([(1 - 1e-5) ** k - 1e-3 * k for k in range(9)], abs=1e-5)
    assert result.low == torch.tensor(result.fp32).bfloat16().tolist()
    assert result.low[1] == 1.0 > result.low[-1]
    assert model.weight.item() == 1.0


def test_batches_are_pieces_of_the_text_and_repeat_with_the_seed(example: ModuleType) -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first, again, other = (next(example.batches(text, 3, 5, seed)) for seed in (1, 1, 2))
    assert first.shape == (3, 5) and first.dtype is torch.int64
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first - first[:, :1], torch.arange(5).expand(3, 5))
    assert torch.equal(next(example.batches(text[:5], 2, 5, 0)), torch.arange(5).expand(2, 5))


def test_the_text_is_the_library_of_this_interpreter(example: ModuleType) -> None:
    text = bytes(example.standard_library().tolist())
    assert len(text) > 2**21
    assert Path(os.__file__).read_bytes() in text
    assert text == bytes(example.standard_library().tolist())


@pytest.mark.long
def test_the_defaults_train_25_million_parameters_in_a_third_of_their_model_data(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = example.parse([])
    model = example.build(args.layers, args.hidden, args.seq)
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    dtype = getattr(torch, args.dtype)
    plan = chunkc.plan(model, args.hw, example_inputs=inputs, dtype=dtype, backend="eager")
    assert sum(p.numel() for p in model.parameters()) >= 25_000_000
    assert 3 * plan.memory.device_budget_nbytes <= plan.layout.model_data_nbytes()
