"""A transaction happens whole or not at all, in the order of calls, whatever is raised in its caller."""

import gc
import os
import threading
import weakref

import pytest
import torch
from raise_points import Raised, RaisePoint

from chunkc.errors import ChunkcError
from chunkc.runtime.storage.transaction import Transactions


def transactions() -> Transactions:
    return Transactions(lambda: None, lambda work: work)


def test_it_gives_what_the_call_gives_without_gradients() -> None:
    found = transactions()
    assert torch.is_grad_enabled()
    assert found.run(lambda: (threading.current_thread() is threading.main_thread(), torch.is_grad_enabled())) == (
        False,
        False,
    )


def test_it_raises_what_the_call_raises() -> None:
    found = transactions()
    with pytest.raises(ValueError, match="in it"):
        found.run(lambda: int("in it"))
    assert found.run(lambda: 3) == 3


def test_an_inner_one_is_part_of_the_outer_one() -> None:
    found = transactions()

    def outer() -> bool:
        thread = threading.current_thread()
        found.finish()
        return found.run(lambda: threading.current_thread() is thread)

    assert found.run(outer)


def test_an_exception_at_any_instruction_of_the_caller_leaves_it_whole() -> None:
    found, log = transactions(), list[str]()

    def call() -> None:
        log.append("begun")
        for _ in range(20):
            threading.Event().wait(0.00001)
        log.append("ended")

    found.run(call)  # which starts the thread
    counted = RaisePoint(per_instruction=True)
    with counted:
        found.run(call)
    outcomes = set()
    for position in range(counted.num_passed):
        log.clear()
        with pytest.raises(Raised), RaisePoint(position, per_instruction=True):
            found.run(call)
        found.finish()
        assert log in ([], ["begun", "ended"])
        outcomes.add(len(log))
    assert outcomes == {0, 2}
    assert found.run(lambda: 5) == 5


def test_work_that_waits_for_transactions_leaves_their_thread() -> None:
    """As a finalizer that closes the model does where the garbage collector runs in a transaction."""
    found, has_ended = transactions(), threading.Event()

    def close() -> None:
        found._has_left = True  # as after an interrupted caller
        found.finish()
        has_ended.set()

    found.run(lambda: found.call_from_host(close))
    assert has_ended.wait(10.0)
    has_ended.clear()
    found.call_from_host(close)
    assert has_ended.is_set()


def test_nothing_is_kept_and_the_thread_ends_with_its_owner() -> None:
    class Large:
        pass

    found, large = transactions(), Large()
    held = weakref.ref(large)
    found.run(lambda kept=large: None)  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        found.run(lambda kept=large: 1 // 0)  # type: ignore[misc]
    thread = found.run(threading.current_thread)
    del large
    found.finish()
    assert held() is None
    del found
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_is_refused_where_the_thread_is_not() -> None:
    def refuse() -> None:
        if os.getpid() != parent:
            raise ChunkcError("in a child")

    parent, found = os.getpid(), Transactions(refuse, lambda work: work)
    found.run(lambda: None)
    child = os.fork()
    if child == 0:
        try:
            found.run(lambda: None)
        except ChunkcError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
