"""The host update of a chunk with a second home, computed in the step or before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chunkc.runtime.update.begun import BegunStep
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs


class SecondHomeUpdate:
    """The update of one chunk from its home into its second home; implements `Update`."""

    def __init__(self, inner: ChunkUpdate) -> None:
        self._inner = inner
        self._begun: BegunStep | None = None

    def begin(self, begun: BegunStep) -> None:
        """Compute what the step that is expected will ask for, unless that was dropped."""
        self._begun = None
        if not begun.is_dropped:
            seen = begun.expected_decision()
            self._inner.update(StepInputs(begun.hypers, begun.steps, begun.num_params, seen=seen))
            self._begun = begun

    def update(self, inputs: StepInputs) -> None:
        """Leave the second home as it was begun if that is this step; else update."""
        begun, self._begun, expected = self._begun, None, inputs.begun
        is_committed = expected is not None and expected.commits(inputs.seen)
        if not is_committed or begun is not expected:
            self._inner.update(inputs)

    def restore(self) -> None:
        """Write param16 at home from param32."""
        self._inner.restore()


def host_update(
    rule: UpdateRule,
    payload: Tensor,
    states: Sequence[Tensor],
    pieces: Sequence[Piece],
    gradient: Tensor | None,
    target: tuple[Tensor, Sequence[Tensor]] | None,
) -> ChunkUpdate | SecondHomeUpdate:
    """The update of a chunk in host memory; arguments as of `Device.make_update`."""
    update = ChunkUpdate(rule, payload, states, pieces, gradient=gradient, target=target)
    return update if target is None else SecondHomeUpdate(update)
