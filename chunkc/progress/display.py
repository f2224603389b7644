"""One line on standard error, drawn anew in place, on terminals and in notebooks.

Elsewhere lines are appended where that is asked for. tqdm draws the line: it knows the width of terminals, leaves room
for the script's own bars, and works in notebooks. Its thread is switched off; the line changes when work goes on, and
not in between. Before a record of the logger ``chunkc`` is handled, the line is cleared, so that no line is torn.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from chunkc.errors import ChunkcError

VARIABLE: Final = "CHUNKC_PROGRESS"
PLAIN_INTERVAL_S: Final = 5.0
"""Between two lines of a file, in which nothing can be drawn anew."""

_PREFIX: Final = "chunkc: "
_COLOUR, _PLAIN = "\x1b[36m", "\x1b[0m"


def is_wanted(stream: TextIO | None) -> bool:
    """Whether progress is shown on ``stream``; ChunkcError for a value of CHUNKC_PROGRESS but 0 and 1."""
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise ChunkcError(f"{VARIABLE}={value!r} is not allowed: 0 shows no progress, 1 shows it everywhere")
    if value == "0" or stream is None:
        return False
    return value == "1" or can_redraw(stream)


def can_redraw(stream: TextIO) -> bool:
    """Whether a line of ``stream`` can be written again: that of a terminal or a notebook's cell."""
    if type(stream).__module__.startswith("ipykernel."):
        return True
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # in place of standard error, or closed
        return False


def prefix_for(stream: TextIO) -> str:
    """The words before each line, in colour on terminals unless NO_COLOR is set (no-color.org)."""
    try:
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        is_terminal = False
    return f"{_COLOUR}{_PREFIX}{_PLAIN}" if is_terminal and not os.environ.get("NO_COLOR") else _PREFIX


class Display:
    """The line of one block of work; nothing is drawn or looked up before the first text."""

    def __init__(self) -> None:
        self._writer: _Redrawn | _Appended | None = None
        self._is_decided = False

    def show(self, text: str) -> None:
        """Draw ``text`` in place of the text before."""
        if not self._is_decided:
            self._writer, self._is_decided = _writer_for(sys.stderr), True
        if self._writer is not None:
            self._writer.show(text)

    def make_way(self) -> None:
        """Clear the line, up to the next text."""
        if self._writer is not None:
            self._writer.clear()

    def close(self) -> None:
        """Clear the line for good."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._is_decided = None, False


def _writer_for(stream: TextIO | None) -> _Redrawn | _Appended | None:
    if stream is None or not is_wanted(stream):
        return None
    return _Redrawn(stream) if can_redraw(stream) else _Appended(stream)


class _Appended:
    """Lines of a file: the first, and then one whenever `PLAIN_INTERVAL_S` have passed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._next_s = 0.0

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if self._stream is None or now_s < self._next_s:
            return
        self._next_s = now_s + PLAIN_INTERVAL_S
        try:
            print(_PREFIX + text, file=self._stream, flush=True)
        except (OSError, ValueError):  # a full disk or a closed pipe does not end the work
            self._stream = None

    def clear(self) -> None:
        """Do nothing: what is written stays."""

    close = clear


class _Redrawn(logging.Filter):
    """A line that is written again in place; as a filter of the logger, it lets every record pass."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._prefix, self._text = prefix_for(stream), ""
        self._stream = stream
        no_empty_line_first = 1e-9
        self._line = _line_type()(
            file=stream, leave=False, dynamic_ncols=True, bar_format="{desc}", delay=no_empty_line_first
        )
        self._logger = logging.getLogger("chunkc")
        self._logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        self.clear()
        return True

    def show(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._draw(lambda: self._line.set_description_str(self._prefix + text))

    def clear(self) -> None:
        if self._text:
            self._text = ""
            self._draw(self._line.clear)

    def close(self) -> None:
        self._logger.removeFilter(self)
        self.clear()
        self._draw(self._line.close)

    def _draw(self, draw: Callable[[], object]) -> None:
        with self._lock:
            try:
                draw()
                self._stream.flush()
            except (OSError, ValueError):  # nobody looks any more, which does not end the work
                self._line.disable = True


def _line_type() -> Any:
    """Return tqdm's class without its thread, and without the lock that it shares between processes."""
    from tqdm import tqdm

    line_type: Any = type("Line", (tqdm,), {"monitor_interval": 0})
    line_type.set_lock(threading.RLock())
    return line_type
