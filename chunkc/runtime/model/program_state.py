"""Where one model stands between two programs, and what leads from there to where the next one begins.

Programs meet in the cold state: payloads at home, static residents in place. A forward leaves its last chunks on the
device for the backward that usually follows; when something else comes first they go (``abandon``), and come back
(``resume``) when the backward is called after all. Micro-batches that exchange nothing leave gathered chunks and
gradients of this rank alone, for the next one; whatever else comes first has them reduced (``reduce_all``).

An exception may end what lies between two states at any line, also in its own handler. So whoever leaves a state says
first what is at stake (``changing``) and takes that back when the next one is reached; where that was not taken back,
the next use of the model brings it to the cold state, with the parameters of the last step (``settle``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from chunkc.distributed.agreement import Kind
from chunkc.errors import ChunkcError
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.model.grad_clipping import ScaledGradients


class AtStake(IntEnum):
    """Cost of an exception besides the activations: what stands on the device, or the gradients as well."""

    NOTHING = 0
    DEVICE = 1
    GRADIENTS = 2


class Transitions(ScaledGradients):
    """See the module docstring.

    ``_saved``: a forward of ``_executor`` has left its chunks. ``_unreduced``: groups are gathered, and gradient chunks
    hold what this rank's micro-batches have made; ``_executor`` has programs for that. Never both, and the same on all
    ranks, which agree on every program. ``_num_expected``: micro-batches of the latest step, 0 before the first one; by
    it the last one of the next step is guessed. ``_at_stake``: what stood at stake when the change under way, or one
    that an exception has ended, began.
    """

    executors: dict[object, Executor]
    _executor: Executor | None = None
    _saved = False
    _unreduced = False
    _num_expected = 0
    _at_stake = AtStake.NOTHING

    @property
    def executor(self) -> Executor | None:
        """The executor of the latest compiled forward or backward."""
        return self._executor

    def _running(self) -> Executor:
        if self._executor is None:
            raise ChunkcError("the model has not run a compiled forward yet")
        return self._executor

    def begin_with(self, executor: Executor) -> None:
        """The model stands in the cold state, from which the programs of ``executor`` start."""
        self._switch_to(executor)

    def _switch_to(self, executor: Executor) -> None:
        if executor is not self._executor:
            if self._executor is not None:
                self._executor.join()
            self._executor = executor

    @contextmanager
    def changing(self, at_stake: AtStake) -> Iterator[None]:
        """Within the block the model is in no state; where the block raises, it stays so until `settle`."""
        before, self._at_stake = self._at_stake, max(at_stake, self._at_stake)
        yield
        self._at_stake = before

    def settle(self) -> None:
        """Wait for a transaction that its caller has left, and undo a change that an exception has ended."""
        super().settle()
        if self._at_stake:
            self.recover()

    def recover(self) -> None:
        """After an exception in a change: the cold state, with the parameters of the last step.

        Gradients overlay what is written anew where one backward is declared for a step, and are gone then.
        """
        self.device.check_usable()
        if self._at_stake is AtStake.GRADIENTS or self._unreduced or self.accumulate == 1:
            self.gradients.take_back()
        for executor in self.executors.values():
            executor.forget_launched()
        if self._executor is not None:
            self._executor.recover()
        self._saved = self._unreduced = self._consumed = False
        self._at_stake = AtStake.NOTHING

    def to_cold(self) -> None:
        """Let go of what forwards and backwards left on the device for those that usually follow."""
        self.reduce_gradients()
        if self._saved:
            with self.changing(AtStake.DEVICE):
                self._running().abandon()
                self._saved = False

    def _uncover(self) -> None:
        """Payloads hold parameters again; where gradients overlay them, those are discarded."""
        if self.accumulate == 1:
            self._restore_landed()
            self.gradients.forget()

    def _lose_gradients(self) -> None:
        """Payloads hold parameters again, which show no gradient of the backward under way."""
        self.to_cold()
        self._restore_landed()
        self.gradients.take_back()

    def _restore_landed(self) -> None:
        if self._overlaid():
            self._running().restore()
        self._consumed = False

    def _guarded(self, run: Callable[[], list[Any]]) -> list[Any]:
        self.device.check_usable()
        try:
            return run()
        except BaseException:
            self.recover()
            raise

    def reduce_gradients(self) -> bool:
        """Reduce what micro-batches have left to the last one of their step.

        From here on gradients are those of all ranks.

        Raises:
            RankError: when other ranks would reduce other groups.
        """
        if not self._unreduced:
            return False
        executor = self._running()
        executor.agree(Kind.REDUCE, "reduce_all")
        with (
            self.ranks.collective_section("a reduction of gradients", self.device.synchronize),
            self.changing(AtStake.GRADIENTS),
        ):
            executor.reduce_all()
            self._unreduced = False
            self._note_landed(executor.norm_table, frozenset(executor.graded_params), None)
        return True

    def _forward_program(self, executor: Executor) -> str:
        """The program of a forward that comes now."""
        goes_on = self._unreduced and executor.plan.defers_reduction and bool(self._accumulated())
        return "forward_again" if goes_on else "forward"

    def _backward_program(self, executor: Executor, number: int) -> str:
        """The program of a backward that comes now, as micro-batch ``number`` of its step, from 1.

        Which is the last one nobody says, but a step mostly takes as many as the one before it. Behind a guess that was
        too low every micro-batch exchanges; one that was too high is made up for by ``reduce_gradients``.
        """
        adds, defers = bool(self._accumulated()), executor.plan.defers_reduction
        is_last = number >= (self._num_expected or self.accumulate)
        if self._unreduced and adds and defers and self._is_unscaled():
            return "accumulate_last" if is_last else "accumulate_unreduced"
        if adds:
            return "accumulate"
        return "backward_unreduced" if defers and not is_last else "backward"

    def _enter_backward(self, executor: Executor, program: str) -> None:
        """Bring the chunks to where the backward program begins, with param16 in all that it needs."""
        if executor.plan.program(program).entry.phase == "unreduced":
            self._switch_to(executor)
            return
        overlaid = sorted(self._overlaid() & executor.used_params)
        if self._saved and self._executor is executor and not overlaid:
            return
        self.to_cold()
        self._switch_to(executor)
        self.join()
        self._move_apart(overlaid)
        executor.resume()
        self._saved = True
