"""Whatever people type ends in an exit code and a line that says why, never in a traceback."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401 - first imported in a test, its log would keep the stream that capsys closes
from plans_for_report import gpt_plan

from chunkc.cli import main
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware

MODULE = "import torch\ndef build():\n    return torch.nn.Linear(1, 1), ()\n"
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    **{"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 64},
}
DIGITS = "9" * 30


def name(value: list[str] | str) -> str:
    return " ".join(value)[:40] if isinstance(value, list) else ""


# What follows `chunkc plan MODEL`, and what is said.
BAD_OPTIONS = [
    (["--accumulate", "999999999999"], "--accumulate: '999999999999' is not a whole number from 1 to 4,096"),
    (["--accumulate", "0"], "'0' is not a whole number from 1 to 4,096"),
    (["--batch", DIGITS], f"'{DIGITS}' is not a whole number from 1 to 1,048,576"),
    (["--batch", "9" * 5000], "999...' is not a whole number from 1 to 1,048,576"),
    (["--batch", ""], "'' is not a whole number from 1 to 1,048,576"),
    (["--batch", "1e3"], "'1e3' is not a whole number"),
    (["--seq", DIGITS], "is not a whole number from 1 to 16,777,216"),
    (["--world-size", DIGITS], "is not a whole number from 1 to 1,048,576"),
    (["--chunk-size", DIGITS], "is not auto or a whole number of elements from 1 to 1,099,511,627,776"),
    (["--save", ""], "cannot write ''"),
    (["--trace", ""], "cannot write ''"),
    (["--html", ""], "cannot write ''"),
    (["--plot", ""], "does not end in .png"),
    (["--save", "missing/plan.json"], "cannot write 'missing/plan.json'"),
    (["--hw", ""], "unknown GPU ''"),
    (["--hw", "\x1b[2J"], "unknown GPU '\\x1b[2j'"),
    (["--hw", "v100"], "host memory is needed"),
    (["--hw", "binary.json"], "hw profile 'binary.json'"),
    (["--hw", f"v100-{DIGITS}g"], "is no size"),
    (["--hw", "-1xv100"], "expected one argument"),
    (["--batch", "2"], "--batch is for built-in models and config.json"),
]

# A model, or another command, and what is said.
BAD_LINES = [
    (["plan", ""], "is not of the form module:function"),
    (["plan", "binary.json"], "binary.json is no configuration of a model: byte"),
    (["plan", "deep.json"], "deep.json is no configuration of a model: it is nested more than 64 deep"),
    (["plan", "missing.json"], "cannot read missing.json"),
    (["plan", "gpt-10b\x1b[31m"], "no built-in model 'gpt-10b\\x1b[31m'"),
    (["plan", "os:system"], "os:system raised TypeError"),
    (["simulate", ""], "is not of the form module:function"),
    (["simulate", "module_for_lines:build", "--hw", ""], "unknown GPU ''"),
    (["simulate", "plan.json", "--batch", "2"], "--batch is for planning, and plan.json is a plan already"),
    (["simulate", "plan.json", "--world-size", "2"], "--world-size is for planning"),
    (["simulate", "plan.json", "--accumulate", "2"], "--accumulate is for planning"),
    (["simulate", "plan.json", "--shard", "node"], "--shard is for planning"),
    (["simulate", "plan.json", "--optimizer", "lion"], "--optimizer is for planning"),
    (["simulate", "plan.json", "--dtype", "float16"], "--dtype is for planning"),
    (["simulate", "plan.json", "--chunk-size", "7"], "--chunk-size is for planning"),
    (["simulate", "plan.json", "--activations", "recompute"], "--activations is for planning"),
    (["explain", "missing.json"], "cannot read missing.json"),
    (["explain", "."], "cannot read ."),
    (["frontier", "--min-tflops", "abc"], "'abc' is not a positive number"),
    (["frontier", "--min-tflops", "nan"], "'nan' is not a positive number"),
    (["frontier", "--min-tokens-per-s", "1e999"], "'1e999' is not a positive number"),
    (["calibrate", "-o", ""], "does not end in .json"),
    (["env", "more"], "unrecognized arguments: more"),
    ([], "required: command"),
]

BAD_CONFIGS: list[dict[str, Any]] = [
    {"n_embd": -4},
    {"n_embd": "a"},
    {"n_embd": 63.5},
    {"vocab_size": 10**18},
    {"architectures": {"a": 1}},
    {"architectures": "GPT2LMHeadModel"},
    {"activation_function": "nope"},
    {"model_type": ["gpt2"]},
    {"dtype": "floaty"},
    {"id2label": 5},
    {"n_positions": -3},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "deep.json").write_text('{"model_type":' + "[" * 100_000)
    (tmp_path / "module_for_lines.py").write_text(MODULE)
    gpt_plan().save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(line: list[str]) -> int:
    try:
        return main(line)
    except SystemExit as ending:
        assert isinstance(ending.code, int)
        return ending.code


def check(line: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "\x1b" not in err
    assert told in err.splitlines()[-1]


@pytest.mark.parametrize(("options", "told"), BAD_OPTIONS, ids=name)
def test_a_bad_option_is_refused(
    options: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(["plan", "module_for_lines:build", *options], told, capsys)


@pytest.mark.parametrize(("line", "told"), BAD_LINES, ids=name)
def test_a_bad_line_is_refused(line: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(line, told, capsys)


@pytest.mark.parametrize("wrong", BAD_CONFIGS, ids=str)
def test_a_bad_configuration_is_refused(
    wrong: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.json").write_text(json.dumps({**CONFIG, **wrong}))
    assert run(["plan", "bad.json", "--hw", "v100-240g", "--no-advice"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and ("bad" in err.splitlines()[-1])


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_bad_number_of_ranks_in_the_environment_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "many")
    with pytest.raises(HardwareError, match=f"{variable}='many' is no whole number"):
        Hardware.detect()


def test_an_interrupt_ends_with_its_exit_code_and_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planner(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    assert main(["plan", "module_for_lines:build"], planner=planner) == 130
    assert capsys.readouterr().err == "interrupted\n"
