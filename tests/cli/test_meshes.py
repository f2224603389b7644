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
from chunkc.cost.timeline import Flops
from chunkc.errors import BudgetError, ChunkcError
from chunkc.hardware import Hardware
from chunkc.report.timeline import simulate
from chunkc.scenarios.scenario import Answer, Scenario, Scenarios

ONE_NODE, NODES = Hardware.parse("4xa100-40g-1024g"), Hardware.parse("2x4xa100-40g-1024g")
TIMELINE = replace(simulate(gpt_plan(), "v100-240g"), flops=Flops(10**12, 10**12, None))
QUICK = ("--no-advice", "--activations", "keep")


def shortage(nbytes: int) -> BudgetError:
    return BudgetError("no", moment="b", tensors=(), missing_nbytes=nbytes, min_device_nbytes=1, min_host_nbytes=1)


@dataclass
class Machine(Scenarios):
    """Answers by mesh: milliseconds of a step, missing bytes as a negative number, or an error."""

    by_mesh: dict[str, int | str] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)

    def answer(self, scenario: Scenario) -> Answer:
        self.asked.append((scenario.mesh, scenario.batch))
        found = self.by_mesh[scenario.mesh]
        if isinstance(found, str):
            raise ChunkcError(found)
        if found < 0:
            return Answer(scenario, shortage=shortage(-found))
        return Answer(scenario, gpt_plan(), timeline=replace(TIMELINE, step_ms=float(found)))


def asked(**by_mesh: int | str) -> tuple[Machine, list[Any]]:
    machine = Machine(by_mesh={name.replace("__", ",").replace("_is_", "="): v for name, v in by_mesh.items()})
    return machine, candidates(Scenario(TINY_GPT, ONE_NODE, batch=3, sequence=16), machine)


@pytest.mark.parametrize(
    ("hw", "world_size", "wanted"),
    [
        (ONE_NODE, None, ["dp_shard=4", "dp_shard=2,tp=2", "tp=4"]),
        (ONE_NODE, 3, ["dp_shard=3", "tp=3"]),
        (
            NODES,
            None,
            [
                "dp_shard=8",
                "dp_replicate=2,dp_shard=4",
                "dp_shard=4,tp=2",
                "dp_replicate=2,dp_shard=2,tp=2",
                "dp_shard=2,tp=4",
            ],
        ),
        (NODES, 6, ["dp_shard=6", "dp_shard=3,tp=2"]),
    ],
)
def test_ranks_along_tp_are_of_one_node_and_replicas_are_nodes(
    hw: Hardware, world_size: int | None, wanted: Sequence[str]
) -> None:
    found = list(meshes(hw, world_size))
    assert [text for text, _ in found] == wanted
    assert all(text.partition("tp=")[2] == (str(size) if size > 1 else "") for text, size in found)


def test_all_candidates_train_on_as_many_sequences_and_the_fastest_is_taken() -> None:
    machine, found = asked(dp_shard_is_4=30, dp_shard_is_2__tp_is_2=20, tp_is_4=40)
    assert machine.asked == [("dp_shard=4", 3), ("dp_shard=2,tp=2", 6), ("tp=4", 12)]
    best = best_of(found)
    assert best is found[1]
    lines = render(found, best).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("<")] == ["dp_shard=2,tp=2"]
    assert lines[-1].endswith("--mesh dp_shard=2,tp=2 --batch 6")


def test_where_none_fits_the_one_that_misses_least_is_the_answer() -> None:
    _, found = asked(dp_shard_is_4=-(5 << 30), dp_shard_is_2__tp_is_2=-(2 << 30), tp_is_4="heads do not divide")
    assert best_of(found) is found[1]
    text = render(found, best_of(found))
    assert "tp=4: heads do not divide" in text and "dp_shard=4: does not fit: 5.00 GiB of device memory" in text
    assert [candidate.to_json()["fits"] for candidate in found] == [False] * 3


def test_a_model_that_no_mesh_can_be_planned_with_is_an_error() -> None:
    with pytest.raises(ChunkcError, match="one"):
        asked(dp_shard_is_4="one", dp_shard_is_2__tp_is_2="two", tp_is_4="three")


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    config = {**TINY_LLAMA.config, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return "config.json"


def test_the_line_that_is_printed_repeats_the_choice(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", llama, "--hw", "2xa100-40g-1024g", *QUICK, "--json"]
    assert main([*command, "--mesh", "auto"]) == 0
    found = json.loads(capsys.readouterr().out)
    tried = {row["mesh"]: row for row in found["meshes"]}
    assert list(tried) == ["dp_shard=2", "tp=2"] and tried["tp=2"]["batch"] == 2
    fastest = min(tried.values(), key=lambda row: row["step_ms"])
    assert found["step_ms"] == fastest["step_ms"] and not torch.distributed.is_initialized()
    for mesh, row in tried.items():
        assert main([*command, "--mesh", mesh, "--batch", str(row["batch"])]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["step_ms"] == row["step_ms"]
        assert (again["digest"] == found["digest"]) == (mesh == fastest["mesh"])


def test_on_one_device_there_is_nothing_to_choose(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--hw", "a100-40g-1024g", "--mesh", "auto", *QUICK, "--json"]) == 0
    assert "meshes" not in json.loads(capsys.readouterr().out)


REFUSED = {
    "function": (["plan", "train:build"], "a function, which parallelises its model itself"),
    "shard": (["plan", "config.json", "--shard", "node"], "and not beside --shard"),
    "simulate": (["simulate", "gpt-0.7b"], "--mesh auto is of `chunkc plan`"),
    "rates": (["plan", "config.json", "--hw", "2xemulated-64m-1g", *QUICK], "no times are known"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_auto_cannot_choose_is_an_error(what: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, part = REFUSED[what]
    assert main([*arguments, *([] if "--hw" in arguments else ["--hw", "2xa100-40g-1024g"]), "--mesh", "auto"]) == 2
    assert part in " ".join(capsys.readouterr().err.split())
