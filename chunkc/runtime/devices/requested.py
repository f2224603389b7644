"""Requested gradients: those of a backward that autograd asks for, on this rank and on any.

Others are withheld (docs/how_it_works.md, "Parameters that the loss does not reach"). Ranks average gradients, so one
that any rank asks for is a gradient of all: the others contribute zeros to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from torch import nn

from chunkc.distributed.agreement import digest_lines
from chunkc.distributed.process_group import Ranks

logger = logging.getLogger("chunkc")

_MAX_NAMED = 5


class RequestedGradients:
    """Requests of gradients by the backwards of one model; ``params`` are all parameters by index."""

    def __init__(self, ranks: Ranks, params: Sequence[nn.Parameter], name_of: Callable[[int], str]) -> None:
        self._ranks, self._params, self._name_of = ranks, params, name_of
        self._has_warned = False

    def of_rank(self, graded: Collection[int], reached: Collection[int]) -> frozenset[int]:
        """Of the parameters ``graded`` those that this rank's loss has ``reached`` and that are not frozen."""
        return frozenset(i for i in graded if i in reached and self._params[i].requires_grad)

    def frozen(self, graded: Collection[int]) -> list[str]:
        """List which of ``graded`` are frozen now, line by line; all ranks must have the list alike."""
        return [f"{self._name_of(i)} is frozen" for i in graded if not self._params[i].requires_grad]

    def number(self, requested: Collection[int]) -> int:
        return digest_lines([str(i) for i in sorted(requested)]) if self._ranks.job_size > 1 else 0

    def of_any(self, requested: frozenset[int], numbers: Sequence[int]) -> frozenset[int]:
        """Return the gradients that some rank asks for; warns once where the ``numbers`` of ranks differ."""
        if len(set(numbers)) == 1:
            return requested
        texts = self._ranks.collect_from_job(",".join(map(str, sorted(requested))).encode())
        of_ranks = [frozenset(int(i) for i in text.split(b",") if i) for text in texts]
        union = frozenset[int]().union(*of_ranks)
        if not self._has_warned:
            self._has_warned = True
            self._warn(sorted(union.difference(frozenset.intersection(*of_ranks))), of_ranks)
        return union

    def _warn(self, partial: Sequence[int], of_ranks: Sequence[frozenset[int]]) -> None:
        first = partial[0]
        have = [str(rank) for rank, requested in enumerate(of_ranks) if first in requested]
        names = ", ".join(map(self._name_of, partial[:_MAX_NAMED]))
        more = f" and {len(partial) - _MAX_NAMED} more" if len(partial) > _MAX_NAMED else ""
        if self._ranks.is_first_of_job:
            logger.warning(
                "the losses of some ranks do not reach %s%s (%s is reached on rank %s of %d): these gradients are "
                "means over all ranks, with zeros of those that do not, and all ranks step them (said once)",
                names,
                more,
                self._name_of(first),
                ", ".join(have),
                len(of_ranks),
            )
