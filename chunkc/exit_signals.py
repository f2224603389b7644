"""Ending a run between two steps when the system asks for it by SIGTERM.

    with chunkc.graceful_exit() as stop:
        for batch in batches:
            ...                                     # the step that is under way is finished
            if stop:
                chunkc.save_checkpoint(directory, model, optimizer)
                break

Schedulers and spot instances send SIGTERM. A signal only sets a flag, so it interrupts neither a step nor a save.
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
    """Whether a signal has come, and the number of the first; true in conditions from then on."""

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
        """Note the first signal; in a forked child, which has no loop that would look, end the process."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal_number is None:
            self.signal_number = number


@contextmanager
def graceful_exit(*signals: int) -> Iterator[Stop]:
    """Note the ``signals`` (default: SIGTERM) within the block, in the object that the block gives.

    When the block ends after a signal, SystemExit is raised with the exit code 128 + its number, as shells report it
    (143 for SIGTERM); an exception that leaves the block goes on instead. Checkpoints under way are finished first. The
    handlers from before are there again after the block.

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
