"""``chunkc plan --mesh``: models that ranks compute together, planned by a process that is in no job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import TINY_GPT, TINY_LLAMA

import chunkc
from chunkc._torch_compat.fake_job import fake_job, first_line
from chunkc.cli import main
from chunkc.report import Plan
from chunkc.scenarios.models import parallelise

HW = "8xa100-40g-1024g"
MESH = "dp_shard=4,tp=2"
QUICK = ("--no-advice", "--activations", "keep")
OPT_CONFIG = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4}
FUNCTION = """
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build():
    mesh = torch.distributed.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, (torch.ones(2, 8),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, config, architecture in (
        ("llama", TINY_LLAMA.config, "LlamaForCausalLM"),
        ("opt", OPT_CONFIG, "OPTForCausalLM"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return tmp_path


@pytest.mark.long
def test_a_config_is_divided_and_planned_as_chunkc_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama/config.json", "--hw", HW, "--mesh", MESH, *QUICK, "--save", "plan.json"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = Plan.load("plan.json")
    assert not torch.distributed.is_initialized(), "the fake job ends with the command"
    with fake_job(8):
        model = TINY_LLAMA.build()
        parallelise(model, "llama", first_line(2, "tp"))
        inputs = TINY_LLAMA.inputs(1, 16)
        wanted = chunkc.plan(model, HW, mesh=MESH, example_inputs=inputs, activations="keep")
    assert (plan.layout, plan.segments, plan.programs) == (wanted.layout, wanted.segments, wanted.programs)
    assert plan.mesh == wanted.mesh == (("dp_shard", 4), ("tp", 2))
    assert found["mesh"] == MESH and found["exchanged_nbytes"] > 0 and found["digest"] == plan.digest()
    assert main(["simulate", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] == found["step_ms"]


@pytest.mark.long
def test_the_screen_names_the_mesh_and_the_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama/config.json", "--hw", "2xa100-40g-1024g", "--mesh", "tp=2", *QUICK]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "llama, 2 ranks, mesh tp=2, batch 1 x 16" in out and "on 2xa100-40g-1024g, each rank: fits" in out
    # embedding, two sums for each of two layers and the output; backward: 5 inputs of a layer, and that of the output
    assert "along tp 17 collectives, " in out and " to each rank: " in out


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ranks_take_slices_of_a_sequence(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of two has half of the tokens, and gathers keys and values of the rest in each of two layers."""
    config, architecture, key_width = {
        "llama": (TINY_LLAMA.config, "LlamaForCausalLM", 16),
        "gpt2": (TINY_GPT.config, "GPT2LMHeadModel", 32),
    }[kind]
    (folder / "model.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    found = {}
    for mesh in ("dp_shard=2", "cp=2"):
        command = ["plan", "model.json", "--hw", "2xa100-40g-1024g", "--mesh", mesh, "--seq", "16", *QUICK]
        assert main([*command, "--json", "--save", f"{mesh}.plan"]) == 0
        found[mesh] = json.loads(capsys.readouterr().out)
    whole, half = (Plan.load(f"{mesh}.plan") for mesh in found)
    assert half.mesh == (("cp", 2),) and half.num_tokens == whole.num_tokens // 2 == 8
    num_samples = [each["samples_per_s"] * each["step_ms"] / 1e3 for each in found.values()]
    assert num_samples == pytest.approx([2, 1])
    # of each token of the other rank, for each of two layers, keys and values come in forward; gradients of the own
    # ones in backward; all in bf16
    assert found["cp=2"]["exchanged_nbytes"] == half.num_tokens * 2 * (2 + 2) * key_width * 2


def test_slices_of_a_sequence_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama/config.json", "--hw", "4xa100-40g-1024g", "--mesh", "cp=4", *QUICK]
    assert main([*command, "--seq", "10"]) == 2
    assert "cp=4 divides sequences into equal slices, and they have 10 tokens" in capsys.readouterr().err


def test_a_function_parallelises_its_model_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "parallel_mlp.py").write_text(FUNCTION)
    assert main(["plan", "parallel_mlp:build", "--hw", HW, "--mesh", MESH, *QUICK]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Sequential (parallel_mlp:build), mesh {MESH}" in out and "along tp 1 collectives" in out


ERRORS: dict[str, tuple[list[str], str]] = {
    "no plan": (["opt/config.json", "--mesh", "dp_shard=2,tp=4"], "opt has no parallel plan"),
    "heads": (["llama/config.json", "--mesh", "dp_shard=2,tp=4"], "tp=4 does not divide the 2 of num_key_value_heads"),
    "ranks": (
        ["llama/config.json", "--mesh", "dp_shard=2,tp=2"],
        "and the plan for 8xa100-40g-1024g has 8",
    ),
    "layers": (["llama/config.json", "--mesh", "pp=4,dp_shard=2"], "pp=4: llama has 2 layers, one a stage or more"),
    "kind": (["opt/config.json", "--mesh", "pp=2"], "opt (opt, AutoModelForCausalLM) is not divided into stages"),
    "module": (["no_such:build", "--mesh", "pp=2"], "no_such:build is one model, which is not divided into stages"),
    "saved": (["llama/config.json", "--mesh", "pp=2", "--save", "p.json"], "--save: one plan is meant"),
    "drawn": (["llama/config.json", "--mesh", "pp=2", "--html", "p.html"], "name a stage by --stage 1 to --stage 2"),
    "stage": (["llama/config.json", "--mesh", "pp=2", "--stage", "3"], "mesh pp=2 has 2"),
    "no stages": (
        ["llama/config.json", "--mesh", "tp=2", "--stage", "1"],
        "a mesh with pp, and --mesh tp=2 has 1",
    ),
    "stage alone": (["no_such:build", "--stage", "1"], "and a plan without --mesh has 1"),
    "cp": (["llama/config.json", "--mesh", "pp=2,cp=4"], "has cp beside tp or pp"),
    "fp16": (["llama/config.json", "--mesh", "pp=2", "--dtype", "float16"], "cannot scale gradients of fp16"),
    "nodes": (["llama/config.json", "--mesh", "tp=2", "--shard", "node"], "name the dimensions dp_replicate"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_planned_is_an_error(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, part = ERRORS[what]
    assert main(["plan", *arguments, "--hw", HW, *QUICK]) == 2
    captured: Any = capsys.readouterr()
    assert part in " ".join(captured.err.split()) and captured.out == ""
    assert not torch.distributed.is_initialized()


def test_the_other_commands_do_not_divide_models_into_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "llama/config.json", "--hw", HW, "--mesh", "pp=2", "--activations", "keep"]) == 2
    assert "plan each stage as a model, with world_size=4" in " ".join(capsys.readouterr().err.split())


def test_a_saved_plan_has_its_mesh_already(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text("{}")
    assert main(["simulate", "plan.json", "--mesh", "tp=2"]) == 2
    assert "--mesh is for planning" in capsys.readouterr().err
