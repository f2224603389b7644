"""What cannot be written is an error, a reader that leaves is none, and a terminal is given nothing to obey."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

import chunkc
from chunkc.cli import main
from chunkc.cli.output import show, tell
from chunkc.errors import ChunkcError

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@pytest.fixture
def left() -> Iterator[TextIO]:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


@needs_full
@pytest.mark.parametrize("arguments", [["env"], ["--help"], ["plan", "--help"], ["--version"]])
def test_a_result_on_a_full_disk_is_an_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not exit code 1, which says that a model does not fit, nor 120, as Python exits when it cannot flush."""
    with FULL.open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(arguments) == 2
    told = "error: the result cannot be written to standard output: No space left on device\n"
    assert capsys.readouterr().err == told


@pytest.mark.long
@needs_full
def test_a_process_whose_output_is_full_exits_with_the_code_of_an_error() -> None:
    command = [sys.executable, "-m", "chunkc", "--version"]
    environ = {**os.environ, "PYTHONPATH": str(Path(next(iter(chunkc.__path__))).parent)}
    with FULL.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, env=environ, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1


def test_closed_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ChunkcError, match="standard output is closed"):
        show("a result")


def test_a_reader_that_leaves_changes_no_exit_code(left: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", left)
    show("a result")
    assert main(["env"]) == 0


@pytest.mark.parametrize("kind", ["left", "full", "closed"])
def test_progress_that_nobody_takes_stops_nothing(
    kind: str, left: TextIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "full" and not FULL.exists():
        pytest.skip("there is no /dev/full")
    full = FULL.open("w") if kind == "full" else None
    monkeypatch.setattr(sys, "stderr", {"left": left, "full": full, "closed": None}[kind])
    tell("progress")
    tell("more")
    if full is not None:
        full.close()
    assert capsys.readouterr().out == ""


def test_control_characters_and_what_an_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(binary, encoding="ascii"))
    show("first\nsecond \x1b[2J \u202e \udcff é ünï")
    assert binary.getvalue() == b"first\nsecond \\x1b[2J \\u202e \\udcff \\xe9 \\xfcn\\xef\n"
