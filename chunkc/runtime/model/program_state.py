"""Phase of one model between two programs, and what leads from there to where the next program begins.

    phase      who holds what                                                   what may come next
    COLD       payloads at home, static residents in place                      forward, evaluation, step
    SAVED      `executor` has left a forward's last chunks on the device        its backward; else the chunks go
    UNREDUCED  groups are gathered, gradient chunks hold this rank's own sum    a micro-batch; else they are reduced
    BROKEN     an update failed halfway: parameters are of two steps            nothing but `close`
    CLOSED     all memory was given back                                        nothing

Where gradients stand is told by `gradients`: they overlay payloads, or have chunks of their own, in any phase. All
ranks are in the same phase, since they agree on every program.

An exception may end what lies between two phases at any line, also in its own handler. So whoever leaves a phase says
first what is at stake (`changing`) and takes that back when the next one is reached; where that was not taken back,
the next use of the model brings it to the cold state, with the parameters of the last step (`settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, IntEnum
from typing import Any

from chunkc.distributed.agreement import Kind
from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.execution.bound_action import BoundProgram
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.runtime.params.gradients import Gradients
from chunkc.runtime.storage.transaction import Transactions


class ModelPhase(Enum):
    """Phases of a model; see the module docstring."""

    COLD = "cold"
    SAVED = "saved"
    UNREDUCED = "unreduced"
    BROKEN = "broken"
    CLOSED = "closed"


class AtStake(IntEnum):
    """Cost of an exception besides the activations: what stands on the device, or the gradients as well."""

    NOTHING = 0
    DEVICE = 1
    GRADIENTS = 2


class ProgramState:
    """The one place that moves a model from phase to phase.

    Attributes:
        executor: of the latest compiled forward or backward; ``executors``: of every captured graph.
        norm_table: of the plan that ran the latest backward; None where it measures nothing.
        num_expected: micro-batches of the latest step, 0 before the first: a guess at those of the next.
    """

    def __init__(self, device: Device, ranks: Ranks, gradients: Gradients) -> None:
        self.device, self.ranks, self.gradients = device, ranks, gradients
        self.phase = ModelPhase.COLD
        self.executor: Executor | None = None
        self.executors: dict[object, Executor] = {}
        self.transactions = Transactions(device.check_usable, device.follow_caller)
        self.norm_table: GradNormTable | None = None
        self.num_expected = 0
        self._at_stake = AtStake.NOTHING

    @property
    def running(self) -> Executor:
        """`executor`; ChunkcError before the first compiled forward."""
        if self.executor is None:
            raise ChunkcError("the model has not run a compiled forward yet")
        return self.executor

    def enter(self, phase: ModelPhase) -> None:
        """Be in ``phase`` from now on; a broken model stays broken until it is closed, a closed one closed."""
        is_final = self.phase in (ModelPhase.BROKEN, ModelPhase.CLOSED)
        if not is_final or phase is ModelPhase.CLOSED:
            self.phase = phase

    def switch_to(self, executor: Executor) -> None:
        if executor is not self.executor:
            if self.executor is not None:
                self.executor.join()
            self.executor = executor

    def release(self, key: object) -> None:
        """Let go of the executor by ``key``, in whose place another will come, in the cold state."""
        if self.executors[key] is self.executor:
            self.to_cold()
        del self.executors[key]

    def close_executors(self) -> None:
        """Let go of all executors, and of the chunks that they read."""
        for executor in (*self.executors.values(), *filter(None, [self.executor])):
            executor.close()
        self.executors.clear()
        self.executor = None

    def collective(self, place: str) -> AbstractContextManager[None]:
        """Within the block all ranks carry out programs together; see `Ranks.collective_section`."""
        if self.ranks.job_size == 1:
            return nullcontext()
        return self.ranks.collective_section(place, self.device.synchronize)

    @contextmanager
    def changing(self, at_stake: AtStake) -> Iterator[None]:
        """Within the block the model is in no phase; where the block raises, it stays so until `settle`."""
        before, self._at_stake = self._at_stake, max(at_stake, self._at_stake)
        yield
        self._at_stake = before

    def settle(self) -> None:
        """Wait for a transaction that its caller has left, and undo a change that an exception has ended."""
        self.transactions.finish()
        if self._at_stake:
            self.recover()

    def recover(self) -> None:
        """After an exception: the cold state with the last step's parameters; overlaid gradients go."""
        self.device.check_usable()
        is_lost = self._at_stake is AtStake.GRADIENTS or self.phase is ModelPhase.UNREDUCED
        if is_lost or self.gradients.accumulate == 1:
            self.gradients.retract()
        for executor in self.executors.values():
            executor.forget_launched()
        if self.executor is not None:
            self.executor.recover()
        self.enter(ModelPhase.COLD)
        self._at_stake = AtStake.NOTHING

    def guarded(self, run: Callable[[], list[Any]]) -> list[Any]:
        """``run()``; an exception in it brings the model to the cold state."""
        self.device.check_usable()
        try:
            return run()
        except BaseException:
            self.recover()
            raise

    def to_cold(self) -> None:
        """Let go of what forwards and backwards left on the device for those that usually follow."""
        self.reduce_gradients()
        if self.phase is ModelPhase.SAVED:
            with self.changing(AtStake.DEVICE):
                self.running.abandon()
                self.enter(ModelPhase.COLD)

    def resume(self) -> None:
        """Bring back from the cold state what a forward of `executor` leaves for its backward."""
        self.running.resume()
        self.enter(ModelPhase.SAVED)

    def restore_params(self) -> None:
        """Payloads hold parameters again wherever gradients overlay them; `gradients` still tells of those."""
        if self.gradients.overlaid:
            self.running.restore()

    def discard_overlaid(self) -> None:
        """Payloads hold parameters again; where gradients overlay them, all gradients are forgotten."""
        if self.gradients.accumulate == 1:
            self.restore_params()
            self.gradients.forget()

    def lose_gradients(self) -> None:
        """Payloads hold parameters again, which show no gradient of the backward under way."""
        self.to_cold()
        self.restore_params()
        self.gradients.retract()

    def reduce_gradients(self) -> bool:
        """Reduce what micro-batches have left; return whether there was any. RankError when ranks differ."""
        if self.phase is not ModelPhase.UNREDUCED:
            return False
        executor = self.running
        executor.agree(Kind.REDUCE, executor.program("reduce_all"))
        with self.collective("a reduction of gradients"), self.changing(AtStake.GRADIENTS):
            executor.reduce_all()
            self.enter(ModelPhase.COLD)
            self.norm_table = executor.norm_table
            graded = frozenset(executor.graded_params)
            self.gradients.note_landed(graded, None, is_measured=self.norm_table is not None)
        return True

    def forward_program(self, executor: Executor) -> BoundProgram:
        is_later = self._is_unreduced(executor)
        return executor.program("forward", "later" if is_later else "first", not is_later)

    def backward_program(self, executor: Executor, number: int, is_unscaled: Callable[[], bool]) -> BoundProgram:
        """The program of micro-batch ``number`` of a step, from 1; the last is guessed by the step before.

        A guess too low makes every further micro-batch exchange; `reduce_gradients` makes up for one too high.
        """
        is_last = number >= (self.num_expected or self.gradients.accumulate)
        if self._is_unreduced(executor) and is_unscaled():
            return executor.program("backward", "last" if is_last else "later", is_last)
        if self.gradients.accumulated:
            return executor.program("backward", "later")
        return executor.program("backward", "first", is_last or not executor.defers_reduction)

    def _is_unreduced(self, executor: Executor) -> bool:
        """Whether a micro-batch of ``executor`` may add to gradients that those before have left unreduced."""
        is_unreduced = self.phase is ModelPhase.UNREDUCED and bool(self.gradients.accumulated)
        return is_unreduced and executor.defers_reduction
