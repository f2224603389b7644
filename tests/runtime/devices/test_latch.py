"""A latch wakes all that wait, also where one of them was interrupted."""

import threading

import pytest
from raise_points import Raised, RaisePoint

from chunkc.runtime.devices.latch import Latch


def test_all_that_wait_are_woken() -> None:
    latch, woken = Latch(), list[int]()

    def wait(number: int) -> None:
        latch.wait()
        woken.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert not woken
    assert not latch.is_open
    latch.open()
    for thread in threads:
        thread.join(10.0)
    assert sorted(woken) == list(range(8))
    latch.wait()


def test_one_that_is_made_open_keeps_nobody() -> None:
    Latch(is_open=True).wait()


def test_an_exception_in_one_that_waits_keeps_no_other() -> None:
    """At every instruction of the wait."""
    counted = RaisePoint(per_instruction=True)
    latch = Latch()
    threading.Timer(0.1, latch.open).start()
    with counted:
        latch.wait()
    assert counted.num_passed > 10
    for position in range(counted.num_passed):
        latch = Latch()
        other = threading.Thread(target=latch.wait)
        other.start()
        timer = threading.Timer(0.002, latch.open)
        timer.start()
        with pytest.raises(Raised), RaisePoint(position, per_instruction=True):
            latch.wait()
        timer.join()
        other.join(10.0)
        assert not other.is_alive()
