"""``chunkc plan --mesh auto``: which meshes are tried, which is taken, and that its line repeats the choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_report import gpt_plan
from tiny_transformers import TINY_GPT, TINY_LLAMA

from chunkc.cli import main
from chunkc.cli.meshes import best_of, candidates, meshes, render
from chunkc.cli.workers import Effort
from chunkc.cost.timeline import Flops
from chunkc.errors import BudgetError, ChunkcError, PlanError
from chunkc.hardware import Hardware
from chunkc.passes.rematerialise import KEEP_ALL, BudgetCandidate
from chunkc.passes.search import MAX_ACTIONS
from chunkc.report.timeline import simulate
from chunkc.scenarios.scenario import Answer, Estimate, Scenario, Scenarios

ONE_NODE, NODES = Hardware.parse("4xa100-40g-1024g"), Hardware.parse("2x4xa100-40g-1024g")
TIMELINE = replace(simulate(gpt_plan(), "v100-240g"), flops=Flops(10**12, 10**12, None))
QUICK = ("--no-advice", "--activations", "keep")


def shortage(nbytes: int) -> BudgetError:
    return BudgetError("no", moment="b", tensors=(), missing_nbytes=nbytes, min_device_nbytes=1, min_host_nbytes=1)


@dataclass
class Machine(Scenarios):
    """Answers by mesh: milliseconds of a step, missing bytes as a negative number, or an error."""

    by_mesh: dict[str, int | str] = field(default_factory=dict)
    in_full: dict[str, int | str] = field(default_factory=dict)
    closer: dict[str, int | str] = field(default_factory=dict)
    asked: list[tuple[str, int, Effort]] = field(default_factory=list)

    def estimate(self, scenario: Scenario, *, tries_all: bool = False) -> Estimate | Answer:
        found = self._found(scenario, Effort.SHARES if tries_all else Effort.LOOK)
        if found < 0:
            return Answer(scenario, shortage=shortage(-found))
        best = BudgetCandidate(KEEP_ALL, found * 1.05, 1.0, "", bound="compute", device_nbytes=1 << 30, host_nbytes=7)
        return Estimate(scenario, 1000, best)

    def answer(self, scenario: Scenario, max_actions: int = MAX_ACTIONS) -> Answer:
        found = self._found(scenario, Effort.PLAN)
        if found < 0:
            return Answer(scenario, shortage=shortage(-found))
        step_ms = float(found)
        return Answer(scenario, gpt_plan(), timeline=replace(TIMELINE, step_ms=step_ms))

    def _found(self, scenario: Scenario, effort: Effort) -> int:
        self.asked.append((scenario.mesh, scenario.batch, effort))
        others = {Effort.LOOK: {}, Effort.SHARES: self.closer, Effort.PLAN: self.in_full}[effort]
        found = (self.by_mesh | others)[scenario.mesh]
        if isinstance(found, str):
            raise (PlanError if "verifier" in found else ChunkcError)(found)
        return found


def asked(**by_mesh: int | str) -> tuple[Machine, list[Any]]:
    machine = Machine(by_mesh={name.replace("__", ",").replace("_is_", "="): v for name, v in by_mesh.items()})
    return machine, candidates(Scenario(TINY_GPT, ONE_NODE, batch=3, sequence=16), machine, num_cores=1)


@pytest.mark.parametrize(
    ("hw", "wanted"),
    [
        (ONE_NODE, ["dp_shard=4", "dp_shard=2,tp=2", "tp=4"]),
        (Hardware.parse("3xa100-40g-1024g"), ["dp_shard=3", "tp=3"]),
        (
            NODES,
            [
                "dp_shard=8",
                "dp_replicate=2,dp_shard=4",
                "dp_shard=4,tp=2",
                "dp_replicate=2,dp_shard=2,tp=2",
                "dp_shard=2,tp=4",
            ],
        ),
        (Hardware.parse("4x1xa100-40g-1024g"), ["dp_shard=4"]),
    ],
)
def test_ranks_along_tp_are_of_one_node_and_replicas_are_nodes(hw: Hardware, wanted: Sequence[str]) -> None:
    found = list(meshes(hw))
    assert [text for text, _ in found] == wanted
    assert all(text.partition("tp=")[2] == (str(size) if size > 1 else "") for text, size in found)


def test_all_candidates_train_on_as_many_sequences_and_the_fastest_is_taken() -> None:
    machine, found = asked(dp_shard_is_4=60, dp_shard_is_2__tp_is_2=50, tp_is_4=51)
    looked = [(mesh, batch, Effort.LOOK) for mesh, batch in (("dp_shard=4", 3), ("dp_shard=2,tp=2", 6), ("tp=4", 12))]
    closer = [(mesh, batch, Effort.SHARES) for mesh, batch, _ in looked[1:]]
    assert machine.asked == [*looked, *closer, ("dp_shard=2,tp=2", 6, Effort.PLAN)], "near ones, then nearer ones"
    best = best_of(found)
    assert best is found[1] and best.step_ms == 50.0
    assert [candidate.to_json()["is_screened"] for candidate in found] == [True, False, True]
    assert found[0].to_json()["device_peak_nbytes"] == 1 << 30 and found[0].to_json()["host_nbytes"] == 7
    text = render(found, best)
    assert "~63.000 ms" in text and "15,873" in text and "~ by a short search" in text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("<")] == ["dp_shard=2,tp=2"]
    assert lines[-2:] == [
        "a step has as many sequences with each mesh; the fastest, below, is that of",
        "  --mesh dp_shard=2,tp=2 --batch 6",
    ]


def test_shares_of_layers_decide_between_meshes_that_are_near() -> None:
    by_mesh: dict[str, int | str] = {"dp_shard=4": 500, "dp_shard=2,tp=2": 509, "tp=4": 520}
    machine = Machine(by_mesh=by_mesh, closer={"dp_shard=2,tp=2": 450})
    found = candidates(Scenario(TINY_GPT, ONE_NODE, batch=3, sequence=16), machine, num_cores=1)
    assert [mesh for mesh, _, effort in machine.asked if effort is Effort.PLAN] == ["dp_shard=2,tp=2"]
    assert best_of(found) is found[1] and found[2].estimate is not None
    machine = Machine(by_mesh=by_mesh, closer={"dp_shard=4": 480})
    candidates(Scenario(TINY_GPT, ONE_NODE, batch=3, sequence=16), machine, num_cores=1)
    assert [mesh for mesh, _, effort in machine.asked if effort is Effort.SHARES] == ["dp_shard=4"], "no other is near"


def test_where_none_fits_the_one_that_misses_least_is_the_answer() -> None:
    _, found = asked(dp_shard_is_4=-(5 << 30), dp_shard_is_2__tp_is_2=-(2 << 30), tp_is_4="heads do not divide")
    assert best_of(found) is found[1]
    text = render(found, best_of(found))
    assert "the one that misses least, below, is that of\n  --mesh dp_shard=2,tp=2 --batch 6" in text
    assert "tp=4: heads do not divide" in text and "dp_shard=4: does not fit: 5.00 GiB of device memory" in text
    assert [candidate.to_json()["fits"] for candidate in found] == [False] * 3


def test_where_an_estimate_was_too_good_the_next_one_is_planned_in_full() -> None:
    by_mesh: dict[str, int | str] = {"dp_shard=4": 30, "dp_shard=2,tp=2": 20, "tp=4": 90}
    machine = Machine(by_mesh=by_mesh, in_full={"dp_shard=2,tp=2": -(1 << 30), "dp_shard=4": "no such layer"})
    found = candidates(Scenario(TINY_GPT, ONE_NODE, batch=3, sequence=16), machine, num_cores=1)
    planned = [mesh for mesh, _, effort in machine.asked if effort is Effort.PLAN]
    assert best_of(found) is found[2] and planned == ["dp_shard=2,tp=2", "dp_shard=4", "tp=4"]
    machine.in_full = dict.fromkeys(by_mesh, "no such layer")
    with pytest.raises(ChunkcError, match="no such layer"):
        candidates(Scenario(TINY_GPT, ONE_NODE, batch=3, sequence=16), machine, num_cores=1)


def test_a_model_that_no_mesh_can_be_planned_with_is_an_error() -> None:
    with pytest.raises(ChunkcError, match="one"):
        asked(dp_shard_is_4="one", dp_shard_is_2__tp_is_2="two", tp_is_4="three")


def test_a_mistake_in_a_plan_is_no_candidate_that_does_not_fit() -> None:
    with pytest.raises(PlanError, match="refused by the verifier"):
        asked(dp_shard_is_4=30, dp_shard_is_2__tp_is_2="refused by the verifier", tp_is_4=10)


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    config = {**TINY_LLAMA.config, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return "config.json"


@pytest.mark.long
def test_each_mesh_alone_has_the_plan_of_its_row(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", llama, "--hw", "2xa100-40g-1024g", *QUICK, "--json"]
    assert main([*command, "--mesh", "auto"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["step_ms"] for row in found["meshes"] if row["is_chosen"]] == [found["step_ms"]]
    tried = {row["mesh"]: row for row in found["meshes"]}
    assert list(tried) == ["dp_shard=2", "tp=2"] and tried["tp=2"]["batch"] == 2
    fastest = min(tried.values(), key=lambda row: row["step_ms"])
    assert found["step_ms"] == fastest["step_ms"] and not torch.distributed.is_initialized()
    for mesh, row in tried.items():
        assert main([*command, "--mesh", mesh, "--batch", str(row["batch"])]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["step_ms"] == row["step_ms"]
        assert (again["digest"] == found["digest"]) == (mesh == fastest["mesh"])


@pytest.mark.long
def test_the_options_that_are_printed_repeat_the_choice(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", llama, "--hw", "2xa100-40g-1024g", *QUICK]
    assert main([*command, "--mesh", "auto"]) == 0
    out, err = capsys.readouterr()
    table, _, rest = out.partition("is that of\n  ")
    options, _, answer = rest.partition("\n")
    assert "dp_shard=2" in table and "tp=2" in table and f"chosen: {options}" in err
    assert main([*command, *options.split()]) == 0
    assert capsys.readouterr().out.strip() == answer.strip()


@pytest.mark.long
def test_where_no_mesh_fits_the_shortage_is_told(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Hardware.parse("2xa100-40g-1024g")
    small = replace(tiny, name="small", gpu_memory_nbytes=1 << 20, host_memory_nbytes=1 << 20)
    small.save("small.json")
    assert main(["plan", llama, "--hw", "small.json", "--mesh", "auto", *QUICK, "--table"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "does not fit: " in err and "chosen: --mesh " in err


@pytest.mark.long
def test_on_one_device_there_is_nothing_to_choose(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--hw", "a100-40g-1024g", "--mesh", "auto", *QUICK, "--json"]) == 0
    assert "meshes" not in json.loads(capsys.readouterr().out)


REFUSED = {
    "function": (["plan", "train:build"], "train:build parallelises its model itself"),
    "function, one device": (["plan", "train:build", "--hw", "a100-40g-1024g"], "parallelises its model itself"),
    "shard": (["plan", "config.json", "--shard", "node"], "--shard beside --mesh auto"),
    "ranks": (["plan", "config.json", "--hw", "4xa100-40g-1024g", "--world-size", "2"], "machine of 2 devices"),
    "simulate": (["simulate", "gpt-0.7b"], "--mesh auto is of `chunkc plan`"),
    "rates": (["plan", "config.json", "--hw", "2xemulated-64m-1g", *QUICK], "rates of 2xemulated-64m-1g are not known"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_auto_cannot_choose_is_an_error(what: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, part = REFUSED[what]
    assert main([*arguments, *([] if "--hw" in arguments else ["--hw", "2xa100-40g-1024g"]), "--mesh", "auto"]) == 2
    assert part in " ".join(capsys.readouterr().err.split())
