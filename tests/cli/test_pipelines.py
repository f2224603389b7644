"""``chunkc plan --mesh pp=N``: a table of stages, the step that they make, and the plan of one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_transformers import TINY_BERT, TINY_GPT

from chunkc.cli import main
from chunkc.cost.pipeline import StageTimes, pipeline_order, simulate_pipeline
from chunkc.cost.rates import cost_rates
from chunkc.cost.spread import send_ms
from chunkc.hardware import Hardware
from chunkc.report import Plan
from chunkc.report.timeline import simulate

HW = "4xa100-40g-1024g"
QUICK = ("--activations", "keep")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, model, architecture in (("gpt", TINY_GPT, "GPT2LMHeadModel"), ("bert", TINY_BERT, "BertForMaskedLM")):
        config = {**model.config, "architectures": [architecture]}
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *options, *QUICK, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_step_is_that_of_the_plans_of_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage alone gives the plan that the table has; two micro-batches go through both by 1F1B."""
    command = ("gpt.json", "--hw", HW, "--mesh", "pp=2,dp_shard=2", "--accumulate", "2", "--seq", "16")
    found = planned(capsys, *command)
    plans = []
    for number, stage in enumerate(found["stages"], start=1):
        alone = planned(capsys, *command, "--stage", str(number), "--save", f"{number}.plan.json")
        assert alone["digest"] == stage["digest"] and stage["num_layers"] == 1
        assert {
            key: alone[key] for key in ("stage", "num_stages", "in_flight", "buffers_nbytes")
        }.items() <= stage.items()
        assert (stage["stage"], stage["num_stages"]) == (number, 2) and alone["advice"] == []
        plans.append(Plan.load(f"{number}.plan.json"))
    assert [plan.in_flight for plan in plans] == [stage["in_flight"] for stage in found["stages"]] == [2, 1]
    assert all(plan.mesh == (("pp", 2), ("dp_shard", 2)) and plan.accumulate == 2 for plan in plans)
    assert [plan.layout.world_size for plan in plans] == [2, 2]
    times = [StageTimes.of(simulate(plan)) for plan in plans]
    step = simulate_pipeline(times, pipeline_order("1f1b", 2, 2), found["sent_ms"])
    assert (found["step_ms"], found["bubble_share"]) == (step.step_ms, step.bubble_share) and found["sent_ms"] > 0
    # two ranks, each two micro-batches of one sequence
    assert found["samples_per_s"] == pytest.approx(4 / step.step_ms * 1e3)
    assert found["tokens_per_s"] == pytest.approx(4 * 16 / step.step_ms * 1e3)


@pytest.mark.long
def test_figures_of_stages_whose_ranks_compute_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages of two ranks, one batch for both, on nodes of two: all that a stage sends goes through the network."""
    hw = "2x2xa100-40g-1024g"
    shape = ("gpt.json", "--hw", hw, "--mesh", "pp=2,tp=2", "--batch", "3", "--seq", "16")
    command = (*shape, "--accumulate", "4", "--clip")
    found, plans = planned(capsys, *command), []
    for number in (1, 2):
        planned(capsys, *command, "--stage", str(number), "--save", f"{number}.plan.json")
        plans.append(Plan.load(f"{number}.plan.json"))
    timelines = [simulate(plan) for plan in plans]
    links: Any = cost_rates(Hardware.parse(hw)).links
    sent_ms, hop_ms, nbytes = found["sent_ms"], links.hop_us / 1e3, 3 * 16 * 32 * 2
    assert sent_ms == send_ms(nbytes, 2, 2, links) == pytest.approx(2 * nbytes / links.node_gb_per_s * 1e-6 + hop_ms)
    times, order = [StageTimes.of(timeline) for timeline in timelines], pipeline_order("1f1b", 2, 4)
    step_ms = simulate_pipeline(times, order, sent_ms, hop_ms).step_ms
    assert found["step_ms"] == step_ms > simulate_pipeline(times, order, sent_ms).step_ms, "updates wait"
    assert found["samples_per_s"] == pytest.approx(3 * 4 / step_ms * 1e3)
    flops = sum(timeline.flops.model for timeline in timelines)
    assert found["model_tflops"] == pytest.approx(flops / 2 / step_ms * 1e-9)
    assert (found["batch"], found["sequence"], found["accumulate"], found["world_size"]) == (3, 16, 4, 4)
    assert all("step_ms" not in stage and "samples_per_s" not in stage for stage in found["stages"])


@pytest.mark.long
def test_the_screen_has_a_row_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """On a device where the buffers of 64 micro-batches, 2 KiB each, are a part that shows."""
    shape = ("bert.json", "--hw", "2xemulated-600k-1g", "--mesh", "pp=2", "--seq", "16", "--dtype", "float32")
    command = (*shape, "--accumulate", "64")
    stages = planned(capsys, *command)["stages"]
    assert main(["plan", *command, *QUICK]) == 0
    screen = capsys.readouterr().out
    out = " ".join(screen.split())
    assert "bert, 2 ranks, mesh pp=2, batch 64 x 1 x 16, recompute none on" in out
    assert "each rank of a stage: fits" in out
    for number, (stage, num_buffers, num_in_flight) in enumerate(zip(stages, (64, 63), (2, 1), strict=True), start=1):
        needed, buffers_nbytes = stage["device_peak_nbytes"], num_buffers * 16 * 32 * 4
        share = f"{100 * (needed + buffers_nbytes) / (600 * 1024):.1f} %"
        row = [str(number), "1", str(num_in_flight), "none", f"{needed / 1024:.2f} KiB", share]
        assert " ".join(row) in out
    assert "buffers at most 128.00 KiB of a device" in out
    assert all(len(line) <= 80 for line in screen.splitlines())


@pytest.mark.long
def test_few_micro_batches_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ((), ("--stage", "1")):
        assert main(["plan", "bert.json", "--hw", HW, "--mesh", "pp=2,tp=2", "--seq", "16", *QUICK, *stage]) == 0
        captured = capsys.readouterr()
        assert "--accumulate 1: fewer micro-batches than the 2 stages" in captured.err
        assert ("of this stage alone" in captured.out) == bool(stage)


@pytest.mark.long
def test_a_stage_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The last one has the logits."""
    command = ("gpt.json", "--hw", "2xemulated-60k-1g", "--mesh", "pp=2", "--seq", "16", "--dtype", "float32")
    found = planned(capsys, *command, code=1)
    fits = [stage["fits"] for stage in found["stages"]]
    assert not all(fits) and not found["fits"] and found["step_ms"] is None
    assert main(["plan", *command, *QUICK]) == 1
    out = capsys.readouterr().out
    assert f"stage {fits.index(False) + 1} does not fit: " in out and "no plan" in out and "; it takes " in out


@pytest.mark.long
def test_buffers_are_taken_from_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 micro-batches of 16 tokens in fp32, 32 wide: 2 KiB each, for the gradients of what stage 1 hands on."""
    command = ("gpt.json", "--mesh", "pp=2", "--seq", "16", "--dtype", "float32", "--accumulate", "64", "--stage", "1")
    least = planned(capsys, *command, "--hw", "2xemulated-1k-1g", code=1)["min_device_nbytes"]
    num_kib = least // 1024
    planned(capsys, *command, "--hw", f"2xemulated-{num_kib - 1}k-1g", code=1)
    planned(capsys, *command, "--hw", f"2xemulated-{num_kib + 1}k-1g", "--save", "plan.json")
    assert Plan.load("plan.json").memory.device_budget_nbytes == (num_kib + 1) * 1024 - 64 * 16 * 32 * 4
    assert main(["plan", *command, "--hw", f"2xemulated-{num_kib + 1}k-1g", *QUICK]) == 0
    assert "buffers: 128.00 KiB of a device" in capsys.readouterr().out
