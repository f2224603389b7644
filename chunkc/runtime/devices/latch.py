"""Something that happens once, for which threads wait asleep.

Each sleeps on a lock of its own, so that an exception in one waiting thread keeps no other thread asleep.
"""

from __future__ import annotations

import threading


class Latch:
    """Closed until `open` is called."""

    __slots__ = ("_sleepers", "is_open")

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self._sleepers: list[threading.Lock] = []

    def open(self) -> None:
        """Wake all that wait; called once."""
        self.is_open = True
        for sleeper in self._sleepers:  # one that comes too late for this list finds the latch open
            sleeper.release()

    def wait(self) -> None:
        if self.is_open:
            return
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        if not self.is_open:
            sleeper.acquire()
