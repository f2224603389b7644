"""Waiting for what another thread is about to do, for as long as a busy machine may take, instead of for a while."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 60.0


def await_that(holds: Callable[[], bool]) -> None:
    """Return once ``holds()``; AssertionError when it does not come to that."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "what was waited for did not come"
        time.sleep(0.001)


@contextmanager
def once(holds: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Beside the block another thread calls ``act`` once ``holds()``, or when patience ends."""

    def wait() -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not holds() and time.monotonic() < until_s:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield
    thread.join()
