"""Notice differentiable operators that read parameters outside of every plan, and say so once.

    model(x)            graphs are planned; operators between graphs, where it breaks, gather what they read
    model.encode(x)     a method other than forward: every operator gathers what it reads

Both are exact, and their gradients reach the step. They are slow, and what they take is in no budget.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from chunkc.errors import first_names
from chunkc.ir.schedule import ParamInfo

logger = logging.getLogger("chunkc")


class OutsideReads:
    """Reads of parameters by operators that autograd records; ``between`` graphs of a call, by index."""

    def __init__(self, infos: Sequence[ParamInfo]) -> None:
        self.between: set[int] = set()
        self._infos = infos
        self._is_told = False
        self._told_share = 0.0

    def read(self, index: int, *, is_entered: bool) -> None:
        """An operator has read a parameter, in a call of the model (``is_entered``) or outside of all."""
        if is_entered:
            self.between.add(index)
        elif not self._is_told:
            self._is_told = True
            logger.warning(
                "an operator outside of model(...) reads %s, and autograd records it: only model(...) is planned, and "
                "what else uses parameters runs operator by operator, outside of the plan and its budget. Where that "
                "is a method other than forward (encode, training_step), let forward do its work, for example by an "
                "argument, or compile the submodule that does it. A penalty on parameters is exact as it is (said once "
                "per model)",
                self._infos[index].name,
            )

    def tell_share(self, name: str) -> None:
        """Say which share of the parameters' bytes is read between graphs, if it has grown by a tenth."""
        if not self.between:
            return
        outside_nbytes = sum(self._infos[i].nbytes for i in self.between)
        share = outside_nbytes / max(1, sum(info.nbytes for info in self._infos))
        if share > self._told_share + 0.1 or not self._told_share:
            self._told_share = share
            logger.warning(
                "%.0f %% of the bytes of the parameters of %s are read by operators between its graphs (%s), which "
                "run one by one, outside of the plan and its budget",
                *(100 * share, name, first_names([self._infos[i].name for i in sorted(self.between)])),
            )
