"""Transactions: calls that happen whole or not at all, whatever is raised in the calling thread.

A KeyboardInterrupt comes between any two instructions of the main thread; debuggers raise in any thread. So a call that
must not stop halfway runs on a thread of its own:

    caller     put ──▶ wait ─────────────────▶ result      the put is one instruction: before it nothing has happened,
    thread             └─▶ call ─▶ commit ─▶ done          after it the whole call will

An exception in the waiting caller goes on when the call has ended. A second one leaves at once; whoever uses the model
next waits for the call first (`Transactions.finish`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from chunkc._torch_compat.core import Finalizer
from chunkc.runtime.devices.latch import Latch

T = TypeVar("T")


class _Call(Generic[T]):
    """One call on its way to the thread and back."""

    __slots__ = ("_call", "error", "has_ended", "result")

    def __init__(self, call: Callable[[], T] | None) -> None:
        self._call = call
        self.result: list[T] = []
        self.error: BaseException | None = None
        self.has_ended = Latch()

    def carry_out(self) -> None:
        call, self._call = self._call, None
        try:
            if call is not None:
                self.result.append(call())
        except BaseException as error:  # whatever it is: the caller must get the error, and must not wait for ever
            self.error = error
        finally:
            del call  # the waiting caller may be the last to hold what the call used
            self.has_ended.open()


class Transactions:
    """The transactions of one model, one after another; the thread starts with the first."""

    def __init__(
        self,
        check_usable: Callable[[], None],
        follow_caller: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._check_usable, self._follow_caller = check_usable, follow_caller
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_left = False
        Finalizer(self, self._calls.put, None).atexit = False

    def run(self, call: Callable[[], T]) -> T:
        """Carry out ``call`` as a transaction, or as part of the one it is called in; return or raise alike.

        ``call`` runs without gradients, modes and other state of the calling thread, but on its current stream.
        """
        if self.is_inside():
            return call()
        self._check_usable()
        self.finish()
        self._start()
        transaction = _Call(call)
        self._has_left = True
        self._calls.put(self._follow_caller(transaction.carry_out))
        try:
            transaction.has_ended.wait()
        except BaseException as interruption:
            transaction.has_ended.wait()
            if transaction.error is not None:
                interruption.add_note(f"the call that was interrupted had failed: {transaction.error!r}")
            raise
        finally:
            del call
        self._has_left = False
        error, transaction.error = transaction.error, None  # whose traceback holds the transaction
        try:
            if error is not None:
                raise error
            return transaction.result[0]
        finally:
            del error  # whose traceback holds this frame

    def finish(self) -> None:
        """Wait for a call that an interrupted caller has left."""
        if not self._has_left or self.is_inside():
            return
        self._check_usable()
        self._start()
        mark = _Call[None](None)
        self._calls.put(mark.carry_out)
        mark.has_ended.wait()
        self._has_left = False

    def is_inside(self) -> bool:
        return self._thread is threading.current_thread()

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``, which may wait for transactions; in a thread of its own inside a transaction."""
        if self.is_inside():
            threading.Thread(target=work, name="chunkc-host").start()
        else:
            work()

    def close(self) -> None:
        """Let the thread end behind the calls that it has; idempotent."""
        self._calls.put(None)

    def _start(self) -> None:
        """Start the thread; an exception may come between any two lines, and the next call goes on from there."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="chunkc-transaction", daemon=True)
        if self._thread.ident is None:
            self._thread.start()


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    with torch.no_grad():
        while (call := calls.get()) is not None:
            call()
            del call  # an idle thread keeps nothing alive
