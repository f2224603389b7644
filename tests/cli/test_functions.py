"""A model given as ``module:function``: what that code raises is one line that names the place, never a traceback."""

import sys
from pathlib import Path

import pytest

from chunkc.cli import main
from chunkc.cli.functions import model_and_inputs
from chunkc.errors import ChunkcError

MODULE = """
import sys
from chunkc import ChunkcError
def build():
    return inner()
def inner():
    raise ValueError("two\\nlines")
def leave():
    sys.exit(0)
def refuse():
    raise ChunkcError("a rule of chunkc's")
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"raising_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("os:system", r"os:system raised TypeError: system\(\) missing .* python -c 'import os; os\.system\(\)'"),
        ("sys:exit", r"sys:exit raised SystemExit: "),
        (
            "{module}:build",
            r"{module}:build raised ValueError at .*{module}\.py:7 in inner: two\nlines\. For",
        ),
        ("{module}:leave", r"{module}:leave raised SystemExit at .*{module}\.py:9 in leave: 0"),
        ("{module}:refuse", r"^a rule of chunkc's$"),
        ("..os:path", r"is not of the form module:function"),
        ("a b:c", r"is not of the form module:function"),
        ("os:\udcff", r"is not of the form module:function"),
    ],
)
def test_errors_in_code_of_users_say_where(spec: str, told: str, user_module: str) -> None:
    with pytest.raises(ChunkcError, match=told.format(module=user_module)):
        model_and_inputs(spec.format(module=user_module))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def (", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit at "),
        ("import no_such_dependency_at_all", "No module named 'no_such_dependency_at_all'"),
        ("\n1 / 0", "py:2 in <module>: division by zero. For the whole traceback: python -c 'import "),
    ],
)
def test_errors_while_a_module_is_imported_say_where(source: str, told: str, user_module: str) -> None:
    Path(f"{user_module}_broken.py").write_text(source)
    with pytest.raises(ChunkcError, match=f"^import {user_module}_broken raised ") as caught:
        model_and_inputs(f"{user_module}_broken:build")
    assert told in str(caught.value)


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ChunkcError, match="the current folder, in which modules are, is no more"):
        model_and_inputs("train:build")


def test_torch_logs_no_traceback_of_its_own(
    user_module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Inputs of a wrong shape, which torch's fake tensors report too."""
    source = "import torch\ndef build():\n    return torch.nn.Linear(4, 4), (torch.zeros(2, 5),)\n"
    Path(f"{user_module}_shapes.py").write_text(source)
    assert main(["plan", f"{user_module}_shapes:build", "--hw", "emulated-4m-64m"]) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told and told.startswith("error: ") and told.count("\n") == 1
