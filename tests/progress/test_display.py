"""The line on standard error: when it is shown, what a terminal's screen looks like, and that nothing of it stays."""

import io
import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from terminal import terminal

import chunkc.progress.display
from chunkc.errors import ChunkcError
from chunkc.progress import shown, stage
from chunkc.progress.display import PLAIN_INTERVAL_S, is_wanted


class Cell(io.StringIO):
    """A notebook's standard error."""


Cell.__module__ = "ipykernel.iostream"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNKC_PROGRESS", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("value", "of_file", "of_cell", "of_terminal"),
    [("", False, True, True), ("0", False, False, False), ("1", True, True, True)],
)
def test_when_it_is_shown(
    value: str, of_file: bool, of_cell: bool, of_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKC_PROGRESS", value)
    closed = io.StringIO()
    closed.close()
    with terminal() as screen:
        assert is_wanted(screen.stream) is of_terminal
    assert is_wanted(io.StringIO()) is of_file
    assert is_wanted(closed) is of_file
    assert is_wanted(Cell()) is of_cell
    assert not is_wanted(None)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_PROGRESS", "yes")
    with pytest.raises(ChunkcError, match="CHUNKC_PROGRESS='yes' is not allowed"), shown():
        stage("planning")
    with shown():
        pass


def test_a_terminal_shows_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.enumerate()
    with terminal(columns=40) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        with shown():
            stage("capturing the forward")
            stage("compiling 1/134 segments, about 45 s; cached for next time")
            stage("verifying")
            assert [t for t in threading.enumerate() if t not in threads] == [screen._reader]
        screen.stream.write("training\n")
        written = screen.end()
        assert screen.screen() == ["training", ""]
    drawn = [part.replace("\x1b[36m", "").replace("\x1b[0m", "").rstrip() for part in written.split("\r")]
    assert "chunkc: capturing the forward" in drawn
    assert "chunkc: compiling 1/134 segments, about" in drawn  # as wide as the terminal
    assert "chunkc: verifying" in drawn
    assert "\n" not in written.partition("training")[0]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_turned_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for is_set in (False, True):
        if is_set:
            monkeypatch.setenv(name, value)
        with terminal() as screen:
            monkeypatch.setattr(sys, "stderr", screen.stream)
            with shown():
                stage("planning")
            texts.append(screen.end())
    assert "\x1b[36mchunkc: \x1b[0mplanning" in texts[0]
    assert "\x1b" not in texts[1] and "chunkc: planning" in texts[1]


def test_log_lines_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("chunkc")
    filters = list(logger.filters)
    with terminal() as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        handler = logging.StreamHandler(screen.stream)
        logger.addHandler(handler)
        try:
            with shown():
                stage("capturing the forward, which is a long text")
                logger.warning("captured 8 operators")
                stage("planning")
                logger.warning("planned")
        finally:
            logger.removeHandler(handler)
        assert screen.screen() == ["captured 8 operators", "planned", ""]
    assert logger.filters == filters


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_PROGRESS", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown():
        stage("planning")
        stage("left out")
        behind_s = time.monotonic() + PLAIN_INTERVAL_S
        monkeypatch.setattr(chunkc.progress.display, "time", SimpleNamespace(monotonic=lambda: behind_s))
        stage("compiling")
    assert sys.stderr.getvalue() == "chunkc: planning\nchunkc: compiling\n"  # type: ignore[attr-defined]


def test_a_cell_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Cell())
    with shown():
        stage("planning")
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\rchunkc: planning" in written and "\n" not in written


@pytest.mark.parametrize("kind", [io.StringIO, Cell])
def test_a_stream_that_takes_nothing_ends_no_work(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_PROGRESS", "1")

    class Full(kind):  # type: ignore[valid-type,misc]
        def write(self, text: str) -> int:
            raise OSError("no space left on device")

    Full.__module__ = kind.__module__
    monkeypatch.setattr(sys, "stderr", Full())
    with shown():
        stage("planning")
        stage("compiling")
