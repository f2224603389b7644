"""A latch wakes all that wait, also where one of them was interrupted."""

import threading

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
        assert any(raises_at(position, delay_s) for delay_s in (0.002, 0.02, 0.2, 2.0)), "opened before it waited"


def raises_at(position: int, delay_s: float) -> bool:
    """Whether the wait for a latch that opens after ``delay_s`` gets as far as ``position``; another wait ends."""
    latch = Latch()
    other = threading.Thread(target=latch.wait)
    other.start()
    timer = threading.Timer(delay_s, latch.open)
    timer.start()
    has_raised = False
    try:
        with RaisePoint(position, per_instruction=True):
            latch.wait()
    except Raised:
        has_raised = True
    timer.join()
    other.join(10.0)
    assert not other.is_alive()
    return has_raised
