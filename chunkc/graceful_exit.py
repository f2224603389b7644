"""Ending a run between two steps when the system asks for it by SIGTERM.

    with chunkc.graceful_exit() as stop:
        for batch in batches:
            ...                                     # the step that is under way is finished
            if stop:
                chunkc.save_checkpoint(directory, model, optimizer)
                break

Schedulers and spot instances send SIGTERM. A signal only sets a flag, so it interrupts neither a step nor a save. When
the block ends after one, the process exits with the code that a shell reports for a process ended by that signal, 128 +
its number: 143 for SIGTERM. Handlers that were there before are there again after the block.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from chunkc.errors import ChunkcError

__all__ = ["Stop", "graceful_exit"]


class Stop:
    """Whether a signal has come; true in conditions from then on.

    Attributes:
        signal_number: of the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 without one."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first one.

        A forked child inherits the handler, and has no loop that would look: the signal ends the child, as usual.
        """
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal_number is None:
            self.signal_number = number


@contextmanager
def graceful_exit(*signals: int) -> Iterator[Stop]:
    """Note the ``signals`` (default: SIGTERM) within the block, in the object that the block gives.

    The signals do nothing else. When the block ends after one came, SystemExit is raised with ``128 + signal`` as the
    process's exit code; an exception that leaves the block goes on instead. Checkpoints under way are finished before
    the process is gone.

    Raises:
        ChunkcError: outside of the main thread, where Python takes no signals, and for a signal whose handler Python
            did not set and could not set back.
    """
    wanted = signals or (signal.SIGTERM,)
    if threading.current_thread() is not threading.main_thread():
        raise ChunkcError("graceful_exit works in the main thread only, which is where Python takes signals")
    foreign = [signal.Signals(number).name for number in wanted if signal.getsignal(number) is None]
    if foreign:
        raise ChunkcError(f"{foreign[0]} has a handler that was not set by Python, which could not be set back")
    stop = Stop()
    before = {number: signal.getsignal(number) for number in wanted}
    try:
        for number in wanted:
            signal.signal(number, stop.take)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop:
        raise SystemExit(stop.exit_code)
