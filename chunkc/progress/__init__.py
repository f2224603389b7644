"""Progress of long work for people: what is being done now, how far it is, about how long it takes.

    capture, planner, compiler     stage("planning"), Counted("compiling", 134, "segments").advance()
                │
    observer of this context       none, a test's, or the line of `shown`
                │
    standard error                 chunkc: compiling 12/134 segments, about 40 s; cached for next time

Whoever works says so by `stage`, `Counted` and `within`, which cost nothing where nobody looks. Whoever is at the top,
a command or the call of a compiled model, opens `shown` around the work. The observer stands in a context variable: it
is that of one call, and goes with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from chunkc.progress.display import Display

__all__ = ["Counted", "Observer", "make_way", "observed_by", "shown", "stage", "within"]

_LEAST_MEASURED_S: Final = 0.5
"""Of the work that is done, before it says how long the rest takes."""


class Observer(Protocol):
    """Interface of what is told of progress."""

    def show(self, text: str) -> None:
        """Take one line on what is being done now, in place of the one before."""

    def make_way(self) -> None:
        """Leave the screen to other output, up to the next line."""


_OBSERVER: Final[ContextVar[Observer | None]] = ContextVar("chunkc_progress_observer", default=None)
_LABELS: Final[ContextVar[tuple[str, ...]]] = ContextVar("chunkc_progress_labels", default=())


def stage(text: str) -> None:
    """Tell the observer what is being done from now on, behind the labels of `within`."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer.show(": ".join((*_LABELS.get(), text)))


@contextmanager
def within(label: str) -> Iterator[None]:
    """Begin all lines of the block with ``label``: what the work is a part of."""
    token = _LABELS.set((*_LABELS.get(), label))
    try:
        yield
    finally:
        _LABELS.reset(token)


class Counted:
    """Pieces of work of like size, whose number is known; the time left follows from those done so far.

    It is shown as ``compiling 12/134 segments, about 40 s; cached for next time``.
    """

    def __init__(self, text: str, total: int, unit: str, note: str = "") -> None:
        """Begin with none of ``total`` pieces done; ``unit`` is their plural, ``note`` ends the line."""
        self._text, self._total, self._unit = text, total, unit
        self._note = f"; {note}" if note else ""
        self._num_done = 0
        self._began_s = time.perf_counter()
        if total:
            self._show()

    def advance(self) -> None:
        """Count one piece as done."""
        self._num_done += 1
        if self._num_done < self._total:
            self._show()

    def _show(self) -> None:
        if _OBSERVER.get() is None:
            return
        elapsed_s, left = time.perf_counter() - self._began_s, ""
        if self._num_done and elapsed_s >= _LEAST_MEASURED_S:
            left = f", about {_rounded(elapsed_s / self._num_done * (self._total - self._num_done))}"
        stage(f"{self._text} {self._num_done}/{self._total} {self._unit}{left}{self._note}")


def _rounded(duration_s: float) -> str:
    """A duration as precise as an estimate is: ``3 s``, ``45 s``, ``12 min``.

    >>> _rounded(0.2), _rounded(43), _rounded(200)
    ('1 s', '45 s', '3 min')
    """
    if duration_s < 10:
        return f"{max(1, round(duration_s))} s"
    return f"{5 * round(duration_s / 5)} s" if duration_s < 90 else f"{round(duration_s / 60)} min"


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let ``observer`` be told of the work of the block."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


@contextmanager
def shown(*, is_first_rank: bool = True) -> Iterator[None]:
    """Show the work of the block on standard error, where somebody looks, unless somebody is told already.

    The line is cleared when the block ends. Of several ranks only the first shows anything.

    Raises:
        ChunkcError: at the first work in the block, for a value of ``CHUNKC_PROGRESS`` that is not allowed.
    """
    if not is_first_rank or _OBSERVER.get() is not None:
        yield
        return
    display = Display()
    try:
        with observed_by(display):
            yield
    finally:
        display.close()


def make_way() -> None:
    """Let other output have the screen, up to the next `stage`."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer.make_way()
