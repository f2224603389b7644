"""``chunkc plan`` and ``simulate`` of models given as data: the first screen, JSON, and exit codes."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans_for_report import gpt_plan
from tiny_transformers import TINY_GPT

import chunkc.cli.plan
import chunkc.cli.simulate
from chunkc.cli import main
from chunkc.cli.advice import Advice
from chunkc.cli.screen import render_answer
from chunkc.cli.subjects import is_plan_file
from chunkc.errors import BudgetError
from chunkc.hardware import Hardware
from chunkc.report import Plan
from chunkc.report.timeline import simulate
from chunkc.scenarios.captures import Captures
from chunkc.scenarios.scenario import Answer, Scenarios, policies

GIB = 1024**3

KEYS = {"fits", "missing_nbytes", "device_peak_nbytes", "host_nbytes", "step_ms", "tokens_per_s", "bound", "advice"}


@pytest.fixture(scope="module", autouse=True)
def captures_are_shared() -> Iterator[None]:
    """By all commands: each captures the same tiny model otherwise, which is what takes time."""
    captures = Captures()
    with pytest.MonkeyPatch.context() as patched:
        for module in (chunkc.cli.plan, chunkc.cli.simulate):
            patched.setattr(module, "Scenarios", lambda tell: Scenarios(tell, captures))
        yield


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**TINY_GPT.config, "n_layer": 1, "architectures": ["GPT2LMHeadModel"]})
    )
    return "tiny/config.json"


def out_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.long
def test_activations_that_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = {**TINY_GPT.config, "n_layer": 4, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["plan", "config.json", "--hw", "v100-240g", "--no-advice", "--save", "plan.json", "--activations"]
    for choice, recompute in (("offload", "none, activations moved"), ("keep", "none"), ("recompute", "full")):
        assert main([*command, choice]) == 0
        assert f"recompute {recompute}" in out_of(capsys).splitlines()[0]
        plan = Plan.load("plan.json")
        assert bool(plan.moves) == (choice == "offload")
        assert ("reload saved values" in plan.summary()) == (choice == "offload")
        assert ("offload a" in plan.text()) == (choice == "offload")


@pytest.mark.long
def test_the_first_screen_and_the_plan_behind_it(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [tiny, "--hw", "v100-240g", "--batch", "4"]
    assert main(["plan", *command, "--save", "plan.json", "--no-advice"]) == 0
    out, err = capsys.readouterr()
    first = out.splitlines()[0]
    assert first == "tiny, batch 4 x 16, recompute none (auto) on v100-32g-240g: fits"
    plan = Plan.load("plan.json")
    for needed in ("device  ", "host  ", "step  ", "bound by  ", "tokens/s", "TFLOPS"):
        assert needed in out, needed
    assert out.splitlines()[-1] == f"plan {plan.digest()}: chunkc explain plan.json; chunkc simulate plan.json"
    assert "tiny, batch 4 x 16, recompute none: fits" in err
    assert main(["simulate", "plan.json", "--json"]) == 0
    simulated = json.loads(out_of(capsys))
    assert main(["simulate", *command, "--json"]) == 0
    assert json.loads(out_of(capsys)) == simulated
    assert f"{simulated['step_ms']:,.3f} ms" in out


@pytest.mark.long(but="adamw8bit-6")
@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [("adamw", 12), ("adamw8bit", 6), ("sgd", 8), pytest.param("lion", 8, marks=pytest.mark.slow)],
)
def test_states_of_an_optimizer_are_planned_and_simulated(
    tiny: str, optimizer: str, nbytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [tiny, "--hw", "v100-240g", "--optimizer", optimizer]
    assert main(["plan", *command, "--save", "plan.json", "--no-advice"]) == 0
    first = out_of(capsys).splitlines()[0]
    assert (f", {optimizer} (auto) on" in first) == (optimizer != "adamw")
    layout = Plan.load("plan.json").layout
    assert layout.state_spec.nbytes_per_element == nbytes
    numels = [c.numel for c in layout.chunks if c.os_home is not None]
    assert layout.os_nbytes() == sum(map(layout.state_spec.stored_nbytes, numels))
    assert layout.os_nbytes() == nbytes * sum(numels) or layout.state_spec.quantised
    assert main(["simulate", "plan.json", "--json"]) == main(["simulate", *command, "--json"]) == 0
    saved, made = map(json.loads, out_of(capsys).splitlines())
    assert saved == made


def test_advice_stands_between_the_numbers_and_the_plan() -> None:
    hw = Hardware.parse("v100-240g")
    plan = gpt_plan()
    timeline = simulate(plan, hw)
    advice = (Advice("batch 8", "fits: twice as many", True), Advice("batch 16", "not tried: the time is over", None))
    lines = render_answer(Answer(None, plan, timeline=timeline), hw, advice, "a model", "where").splitlines()
    assert lines[0] == "a model on v100-32g-240g: fits"
    assert [line.split(maxsplit=2)[:2] for line in lines if line.startswith("batch")] == [
        ["batch", "8"],
        ["batch", "16"],
    ]
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "where" and lines.index("where") > next(i for i, x in enumerate(lines) if x.startswith("batch"))
    assert len(lines) <= 24


@pytest.mark.parametrize(("moment", "kind"), [("bwd.0", "device"), ("host", "host")])
def test_what_misses_is_in_the_first_line_and_below_zero_in_the_table(moment: str, kind: str) -> None:
    hw = Hardware.parse("8xv100-240g")
    needs = {"device": 20 * GIB, "host": 20 * GIB} | {kind: 40 * GIB}
    error = BudgetError(
        "no", moment=moment, tensors=(), missing_nbytes=8 * GIB,
        min_device_nbytes=needs["device"], min_host_nbytes=needs["host"],
    )  # fmt: skip
    lines = render_answer(Answer(None, shortage=error), hw, (), "a model", "").splitlines()
    assert lines[0] == f"a model on 8xv100-32g-240g: does not fit: 8.00 GiB of {kind} memory missing"
    (row,) = [line for line in lines if line.startswith(kind)]
    needed, there = {"device": (38.875, 31.0), "host": (38.625, 28.625)}[kind]  # less what the system and CUDA keep
    cells = [f"{amount:.2f} GiB" for amount in (needed, there, there - needed)]
    assert re.split(r"\s{2,}", row)[1:4] == cells
    assert "kept (assumed): 1.00 GiB for CUDA and fragments, 1.38 GiB for the system" in lines
    assert "tight" not in row


@pytest.mark.parametrize(("nbytes", "is_tight"), [(97, False), (98, True), (100, True)])
def test_a_plan_that_takes_nearly_all_there_is_is_tight(nbytes: int, is_tight: bool) -> None:
    """Each figure in the unit of its own value: 20 MiB are not 0.02 GiB."""
    hw, plan = Hardware.parse("emulated-20m-1g"), gpt_plan()
    peak = 20 * 1024**2 * nbytes // 100
    memory = replace(plan.memory, nonmodel_nbytes=peak - plan.layout.arena_nbytes)
    answer = Answer(None, Plan.of(replace(plan, memory=memory)))
    assert answer.plan is not None and answer.plan.memory.device_peak_nbytes == peak
    rows = [line for line in render_answer(answer, hw, (), "a model", "").splitlines() if line.startswith("device")]
    assert rows[0].split()[1:5] == [f"{nbytes / 5:.2f}", "MiB", "20.00", "MiB"]
    assert rows[0].endswith("tight") == is_tight


@pytest.mark.long
def test_json_of_a_machine_without_rates(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny, "--hw", "emulated-64m-64m", "--json"]) == 0
    found = json.loads(out_of(capsys))
    assert set(found) >= KEYS
    assert found["fits"] is True and found["device_peak_nbytes"] > 0
    assert (found["step_ms"], found["tokens_per_s"], found["bound"]) == (None, None, None)
    assert found["advice"][0]["change"] == "calibrate" and "chunkc calibrate" in found["advice"][0]["effect"]
    assert main(["simulate", tiny, "--hw", "emulated-64m-64m"]) == 2
    assert "chunkc calibrate" in capsys.readouterr().err


def test_memory_that_misses_is_named_and_is_enough(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", tiny, "--batch", "2", "--activations", "keep", "--no-advice"]
    assert main([*command, "--hw", "emulated-1k-64m"]) == 1
    assert "does not fit" in out_of(capsys).splitlines()[0]
    assert main([*command, "--hw", "emulated-1k-64m", "--json"]) == 1
    found = json.loads(out_of(capsys))
    assert set(found) >= KEYS
    assert found["advice"] == [] and found["bound"] is None
    assert found["missing_nbytes"] == found["min_device_nbytes"] - 1024
    kib = -(-found["min_device_nbytes"] // 1024)
    assert main([*command, "--hw", f"emulated-{kib}k-64m", "--json"]) == 0
    assert json.loads(out_of(capsys))["device_peak_nbytes"] <= kib * 1024
    assert main(["simulate", tiny, "--hw", "emulated-1k-64m", "--activations", "keep"]) == 1


@pytest.mark.slow
def test_advice_is_what_another_call_finds(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", tiny, "--hw", "v100-240g", "--activations", "recompute", "--json"]
    assert main([*command, "--batch", "2"]) == 0
    advice = {found["change"]: found for found in json.loads(out_of(capsys))["advice"]}
    assert main([*command, "--batch", "4", "--no-advice"]) == 0
    other = json.loads(out_of(capsys))
    assert advice["batch 4"]["step_ms"] == other["step_ms"]
    assert advice["batch 4"]["tokens_per_s"] == other["tokens_per_s"]
    (least,) = [found for found in advice.values() if found["min_device_nbytes"] is not None]
    assert least["min_device_nbytes"] <= other["device_peak_nbytes"]


def test_several_ranks_are_told(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", tiny, "--hw", "8xv100-240g", "--world-size", "2", "--no-advice"]) == 0
    heading, _, _ = out_of(capsys).partition("\n\n")
    assert "2 ranks" in heading and "each rank" in " ".join(heading.split())


def test_nodes_that_have_all_of_the_model_data(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [tiny, "--hw", "4x2xv100-240g", "--activations", "keep", "--no-advice", "--json"]
    found, plans = [], []
    for shard in ("all", "node"):
        assert main(["plan", *command, "--shard", shard, "--save", f"{shard}.json"]) == 0
        found.append(json.loads(out_of(capsys)))
        plans.append(Plan.load(f"{shard}.json"))
        assert main(["simulate", f"{shard}.json", "--json"]) == 0
        assert json.loads(out_of(capsys))["step_ms"] == found[-1]["step_ms"]
    over_all, within = found
    assert over_all["world_size"] == within["world_size"] == 8
    tokens = [answer["tokens_per_s"] * answer["step_ms"] for answer in found]
    assert tokens[0] == pytest.approx(tokens[1])
    shapes = [(plan.layout.world_size, plan.layout.num_replicas) for plan in plans]
    assert shapes == [(8, 1), (2, 4)]
    assert "rank 0 of 2 in each of 4 replicas" in str(plans[1])
    assert main(["plan", *command[:-1], "--shard", "node"]) == 0
    assert "8 ranks, sharded within nodes" in out_of(capsys).splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-11b"], "no built-in model 'gpt-11b'"),
        (["t5-10b"], "is not of the form module:function"),
        (["gpt-1b", "--seq", "2048"], "at most 1024 tokens"),
        (["json:loads", "--batch", "2"], "--batch is for built-in models"),
        (["missing/config.json"], "cannot read missing/config.json"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--hw", "v100-240g"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


def test_the_help_lists_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert policies()[0] == "chunkc"
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert re.search(r"--policy {chunkc\b", out_of(capsys))


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"format_version": 2}, True), ([], True), ({"model_type": "gpt2"}, False), (None, True)],
)
def test_plans_are_told_from_configurations(content: Any, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(json.dumps(content))
    assert is_plan_file(str(path)) is expected
    assert not is_plan_file("gpt-10b")


@pytest.mark.long
def test_clipping_makes_updates_wait(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A decision stands before all updates: by default in fp16, by word in bf16; none where none is wanted."""
    for hw, extra, waits in (
        ("v100-240g", [], True),
        ("v100-240g", ["--no-clip"], False),
        ("a100-40g-1024g", [], False),
        ("a100-40g-1024g", ["--clip"], True),
    ):
        assert (
            main(["plan", tiny, "--hw", hw, "--activations", "keep", "--no-advice", "--save", "plan.json", *extra]) == 0
        )
        out_of(capsys)
        assert Plan.load("plan.json").tracks_grad_norm == waits, (hw, extra)
    assert main(["plan", "plan:function", "--clip"]) == 2
    assert "--clip is for built-in models and config.json" in capsys.readouterr().err


@pytest.mark.long
def test_several_micro_batches_a_step(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As many tokens as micro-batches, one step; gradients take host memory. Only chunkc plans them."""
    command = [tiny, "--hw", "v100-240g", "--batch", "2", "--activations", "keep", "--no-advice", "--json"]
    found = []
    for extra in ([], ["--accumulate", "4", "--save", "plan.json"]):
        assert main(["plan", *command, *extra]) == 0
        found.append(json.loads(out_of(capsys)))
    one, four = found
    assert four["tokens_per_s"] * four["step_ms"] == pytest.approx(4 * one["tokens_per_s"] * one["step_ms"])
    assert one["step_ms"] < four["step_ms"] < 4.5 * one["step_ms"]
    plan = Plan.load("plan.json")
    assert plan.accumulate == 4 and plan.layout.grad_chunks()
    assert main(["explain", "plan.json", "--full"]) == 0
    text = out_of(capsys)
    assert "program accumulate (role backward)" in text and re.search(r"add c\d+ of bwd", text)
    assert main(["plan", tiny, "--hw", "2xv100-240g", "--accumulate", "2", "--activations", "keep", "--no-advice"]) == 0
    assert out_of(capsys)
    with pytest.raises(SystemExit):
        main(["compare", tiny, "--accumulate", "2"])
