"""The command line: what each command prints where, and its exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_report import gpt_plan
from terminal import terminal

import chunkc
from chunkc.cli import main
from chunkc.errors import BudgetError, HardwareError
from chunkc.hardware import format_size
from chunkc.ir import plan as ir
from chunkc.ir.verify import verify
from chunkc.progress import stage
from chunkc.report import Plan, full_text, render, summarize

MODULE = """
import logging
from torch import nn
model = nn.Linear(1, 1)
def build():
    print("building")
    logging.getLogger("chunkc").info("a log line")
    return model, {"input_ids": 1}
def positional():
    return model, (1, 2)
def wrong():
    return model
def unmodelled():
    return "the model", (1, 2)
number = 3
"""


class Planner:
    """Stands in for `chunkc.api.plan`: remembers how it was called and answers with a plan or an error."""

    def __init__(self, answer: ir.Plan | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **options: Any) -> ir.Plan:
        self.calls.append((args, options))
        print("planning")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "saved.json"
    gpt_plan().save(path)
    return str(path)


def shortage() -> BudgetError:
    return BudgetError(
        "512 bytes are missing\nat bwd.0",
        moment="bwd.0",
        tensors=("embed.weight",),
        missing_nbytes=512,
        min_device_nbytes=4096,
        min_host_nbytes=8192,
    )


@pytest.mark.parametrize(("option", "report"), [([], render), (["--full"], full_text), (["--summary"], summarize)])
def test_explain_prints_the_report(
    saved: str, option: list[str], report: Callable[[ir.Plan], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", saved, *option]) == 0
    out, err = capsys.readouterr()
    assert out == report(gpt_plan()) + "\n"
    assert err == ""


@pytest.mark.parametrize("content", [None, "", "[]", '{"format_version": 7}'])
def test_explain_refuses_what_is_no_plan_in_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    assert main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and str(path) in err and err.count("\n") == 1


def test_plan_prints_the_table_and_nothing_else_on_stdout(
    user_module: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(gpt_plan())
    assert main(["plan", f"{user_module}:build", "--hw", "emulated-4m-64m", "--table"], planner=planner) == 0
    out, err = capsys.readouterr()
    assert out == render(gpt_plan()) + "\n"
    assert err.splitlines() == ["building", "planning"]
    assert caplog.messages == ["a log line"]
    expected = {"example_inputs": {"input_ids": 1}, "hw": "emulated-4m-64m", "dtype": "auto", "chunk_size": "auto"}
    assert planner.calls == [((sys.modules[user_module].model,), expected | {"world_size": None})]


def test_plan_passes_its_options_and_saves(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    planner = Planner(gpt_plan())
    options = ["--dtype", "bfloat16", "--chunk-size", "4096", "--world-size", "2", "--save", "out.json", "--full"]
    assert main(["plan", f"{user_module}:positional", *options], planner=planner) == 0
    assert capsys.readouterr().out == full_text(gpt_plan()) + "\n"
    _, called = planner.calls[0]
    expected = {"example_inputs": (1, 2), "hw": "auto", "dtype": torch.bfloat16, "chunk_size": 4096, "world_size": 2}
    assert called == expected
    assert Plan.load("out.json") == gpt_plan()


def test_json_of_a_plan_that_fits(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{user_module}:build", "--json"], planner=Planner(gpt_plan())) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["missing_nbytes"] == 0
    assert found["device_peak_nbytes"] == (5 * 128 + 768) * 1024 + 14 * 65_536 + 2 * 8 * 1000 * 64 + 1024
    assert found["device_budget_nbytes"] == 4 * 1024**2
    assert found["host_nbytes"] == (13 * 7 + 3) * 128 * 1024
    assert found["min_device_nbytes"] is None
    assert found["digest"] == gpt_plan().digest()


def test_json_of_a_model_that_does_not_fit(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{user_module}:build", "--json"], planner=Planner(shortage())) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] is False
    assert (found["missing_nbytes"], found["min_device_nbytes"], found["min_host_nbytes"]) == (512, 4096, 8192)
    assert (found["moment"], found["tensors"]) == ("bwd.0", ["embed.weight"])
    assert {"device_peak_nbytes", "host_nbytes"} <= set(found)
    assert "does not fit: 512 bytes are missing at bwd.0\n" in err


@pytest.mark.parametrize("form", ["--table", "--full"])
def test_a_model_that_does_not_fit_has_no_plan_to_print_or_save(
    form: str, user_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{user_module}:build", form, "--save", "out.json"], planner=Planner(shortage())) == 1
    assert capsys.readouterr().out == ""
    assert not Path("out.json").exists()


def test_errors_of_the_family_are_one_line(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    planner = Planner(HardwareError("no such\nhardware"))
    assert main(["plan", f"{user_module}:build"], planner=planner) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "error: no such hardware"


def test_a_mistake_of_ours_has_its_traceback_and_an_exit_code(
    user_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not Python's own, 1, which says that a model does not fit."""
    assert main(["plan", f"{user_module}:build"], planner=Planner(ZeroDivisionError("by zero"))) == 3
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" in err
    assert err.splitlines()[-2:] == [
        "ZeroDivisionError: by zero",
        "error: this is a mistake in chunkc; please report it with the lines above and what `chunkc env` prints",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{module}", "is not of the form module:function"),
        (":build", "is not of the form module:function"),
        ("{module}:", "is not of the form module:function"),
        ("no_such_module_at_all:build", "no module 'no_such_module_at_all'"),
        ("{module}.inner:build", "no module '{module}"),
        ("{module}:nothing", "has no function 'nothing'"),
        ("{module}:number", "has no function 'number'"),
        ("{module}:wrong", "must return (model, example_inputs)"),
        ("{module}:unmodelled", "with an nn.Module first, found 'the model'"),
    ],
)
def test_a_bad_function_is_refused(
    spec: str, message: str, user_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planner = Planner(gpt_plan())
    assert main(["plan", spec.format(module=user_module)], planner=planner) == 2
    assert message.format(module=user_module) in capsys.readouterr().err
    assert planner.calls == []


@pytest.mark.parametrize("option", [["--chunk-size", "0"], ["--chunk-size", "many"], ["--dtype", "int8"], ["--nope"]])
def test_bad_options_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "module:function", *option])
    assert caught.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_DEBUG", "0")
    assert main(["env"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert found["torch"] == torch.__version__
    assert found["CHUNKC_DEBUG"] == "0"


@pytest.mark.long
def test_python_m_chunkc_and_a_reader_that_leaves(tmp_path: Path) -> None:
    """Like ``python -m chunkc explain plan.json --full | head -1``; the text is larger than a pipe holds."""
    plan = gpt_plan(num_layers=400, device_budget_nbytes=1024**3)
    assert len(full_text(plan)) > 2**17
    plan.save(tmp_path / "large.json")
    root = str(Path(next(iter(chunkc.__path__))).parent)
    command = [sys.executable, "-m", "chunkc", "explain", str(tmp_path / "large.json"), "--full"]
    environ = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"plan ")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


REAL_MODULE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()
def build():
    return Net(), (torch.zeros(4, 256),)
"""


@pytest.mark.long
def test_the_memory_that_a_real_model_is_said_to_need_is_enough(
    user_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{user_module}_net.py").write_text(REAL_MODULE)
    command = ["plan", f"{user_module}_net:build", "--dtype", "float32", "--json"]
    assert main([*command, "--hw", "emulated-64k-64m"]) == 1
    found = json.loads(capsys.readouterr().out)
    least = f"emulated-{format_size(found['min_device_nbytes'])}-{format_size(found['min_host_nbytes'])}"
    assert main([*command, "--hw", least, "--save", "net.json"]) == 0
    fitting = json.loads(capsys.readouterr().out)
    assert fitting["device_peak_nbytes"] <= found["min_device_nbytes"]
    assert fitting["host_nbytes"] <= found["min_host_nbytes"]
    plan = Plan.load("net.json")
    verify(plan)
    assert plan.digest() == fitting["digest"]
    assert sum(info.numel for info in plan.layout.params) == 6 * (256 * 256 + 256)


def test_progress_goes_to_a_terminal_and_not_into_the_result(
    user_module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planner(*_: Any, **__: Any) -> ir.Plan:
        stage("planning")
        return gpt_plan()

    with terminal() as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        assert main(["plan", f"{user_module}:build", "--hw", "emulated-4m-64m", "--table"], planner=planner) == 0
        assert "planning" in screen.end()
        assert screen.screen() == ["building", ""]
    assert capsys.readouterr().out == render(gpt_plan()) + "\n"


def test_an_interrupt_clears_the_line_and_says_so(user_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def planner(*_: Any, **__: Any) -> ir.Plan:
        stage("planning, which takes a while")
        raise KeyboardInterrupt

    with terminal() as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        assert main(["plan", f"{user_module}:build", "--hw", "emulated-4m-64m"], planner=planner) == 130
        assert screen.screen() == ["building", "interrupted", ""]
