"""Notice parameters that something other than chunkc's optimizers updates, operator by operator.

What gives it away is that somebody reads a waiting gradient and its parameter, then writes the parameter, and the
gradient goes without a step. A load of weights reads neither, and a manual change leaves the gradient to a step. So an
update is known for sure at the next forward, or at once where no optimizer of chunkc's could follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

logger = logging.getLogger("chunkc")


class ForeignUpdates:
    """Reads and writes of parameters since their gradients landed; ``num_steps`` counts foreign updates.

    ``has_read``: whether anything was read since gradients were stepped or began anew; else there was no update.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.has_read = False
        self._is_told = False
        self._read: set[int] = set()
        self._graded: set[int] = set()
        self._updated: set[int] = set()

    def read(self, index: int) -> None:
        self.has_read = True
        self._read.add(index)

    def read_gradient(self, index: int) -> None:
        self.has_read = True
        self._graded.add(index)

    def written(self, index: int) -> bool:
        """The parameter was written while its gradient waited; whether by what read both."""
        is_update = index in self._read and index in self._graded
        if is_update:
            self._updated.add(index)
        return is_update

    def end_gradients(self, discarded: Collection[int], names: Callable[[Sequence[int]], str]) -> bool:
        """Gradients were stepped or begin anew; whether something else has stepped ``discarded`` ones."""
        updated = sorted(self._updated.intersection(discarded))
        self.has_read = False
        self._read.clear()
        self._graded.clear()
        self._updated.clear()
        if updated:
            self.num_steps += 1
            self.tell(names(updated))
        return bool(updated)

    def tell(self, names: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        logger.warning(
            "an optimizer that is not chunkc's updates %s: it runs operator by operator and keeps states of its own, "
            "outside of the plan and its budget. Write chunkc.AdamW, Adam, SGD or Lion in its place; with "
            "transformers, and with libraries over its Trainer, chunkc.integrations.hf.ChunkcTrainer (said once per "
            "model)",
            names,
        )
