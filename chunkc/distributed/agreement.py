"""Agreement of the ranks on what they do together: its kinds, digests and errors.

Before a program, a read of a parameter or a checkpoint, each rank says what it is about to do: a kind, a digest of it,
and a number. Where these differ every rank raises `RankError`, so that ``if rank == 0: evaluate(model)`` is an error
and no hang. A rank whose call was refused before joins with the kind ``refused``: the others need not wait.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Final

from chunkc.errors import RankError

_SHOWN_RANKS: Final = 4
_SAME_CALLS: Final = "Call forward, backward, step, evaluation, reads of parameters and saves on every rank"
_SAME_INPUTS: Final = (
    "Build the model, its optimizer and its inputs alike on every rank; where lengths differ, pad the batches of a "
    "step to one length"
)
_SAME_GRAPHS: Final = (
    "The loss of every rank must reach the same graphs of a forward that breaks into several: add the outputs of the "
    "other graphs to it, as in loss + 0 * output.sum(), or remove the break (fullgraph=True names it)"
)
_SAME_SEEDS: Final = (
    "The forward draws random numbers (dropout), and ranks along tp would draw others for the same values: seed those "
    "alike, and others apart, before the first forward, as in torch.manual_seed(seed + dp_rank), and draw further "
    "numbers on all ranks along tp or on none"
)
_BACKWARD: Final = "the backward goes on with graph "
_DRAWS: Final = "draws random numbers from state "

Lines = Callable[[], Sequence[str]]
"""What a digest stands for, line by line; asked for only where digests differ."""


class Kind(StrEnum):
    """A kind of operation that the ranks are about to do together; ``does`` says it of one of them."""

    does: str

    def __new__(cls, name: str, does: str) -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.does = name, does
        return kind

    COMPILE = "compile", "compiles a model"
    PLAN = "plan", "makes the first plan"
    LAYOUT = "layout", "lays out chunks"
    FORWARD = "forward", "runs a training forward"
    BACKWARD = "backward", "runs a backward"
    STEP = "step", "steps"
    EVALUATE = "evaluate", "runs a forward without gradients"
    SLICES = "slices", "takes slices of sequences"
    READ = "read", "reads or writes a parameter, gradient or state"
    GRADIENTS = "gradients", "clips or unscales gradients"
    CLIP = "clip", "clips gradients by the norm of all stages"
    REDUCE = "reduce", "reduces the gradients of its micro-batches"
    SAVE = "save", "saves"
    LOAD = "load", "loads"
    REFUSED = "refused", "had its call refused"


KINDS: Final = tuple(Kind)
PRELIMINARY: Final = frozenset({Kind.PLAN, Kind.LAYOUT, Kind.SLICES, Kind.READ, Kind.GRADIENTS, Kind.REDUCE})
"""Agreements that come before the one that a call is about."""


def digest_lines(lines: Sequence[str]) -> int:
    """63 bits of ``lines``, the same in every process."""
    text = "\n".join(lines).encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)


def named(kind: Kind, what: str) -> str:
    return f"{kind} of {what}" if what else str(kind)


def backward_line(position: int, num_graphs: int) -> str:
    return f"{_BACKWARD}{position + 1} of the {num_graphs} graphs of the forward"


def drawing_line(state: int) -> str:
    """``state``: a checksum of the generator's."""
    return f"{_DRAWS}{state:08x} of its generator"


def check_kinds(kinds: Sequence[Kind], rank: int, what: str) -> None:
    """Refuse, with `RankError`, kinds of the ranks that differ; a refused rank raises its own error."""
    if len(set(kinds)) == 1 or kinds[rank] is Kind.REFUSED:
        return
    advice = f"{_SAME_CALLS}. {_SAME_GRAPHS}" if Kind.BACKWARD in kinds else _SAME_CALLS
    raise RankError(
        "all ranks must do the same with a compiled model, in the same order, but "
        + ", ".join(f"rank {other} {kind.does}" for other, kind in enumerate(kinds))
        + f" (this is rank {rank}, in {named(kinds[rank], what)}). {advice}"
    )


def difference_error(kind: Kind, what: str, descriptions: Mapping[int, Sequence[str]]) -> RankError:
    """Return the error with the first line in which the descriptions of the ranks differ, by rank."""
    for of_ranks in zip_longest(*descriptions.values(), fillvalue="(nothing more)"):
        if len(set(of_ranks)) > 1:
            shown = "; ".join(
                f"rank {rank}: {line}" for rank, line in [*zip(descriptions, of_ranks, strict=True)][:_SHOWN_RANKS]
            )
            break
    else:
        of_ranks, shown = (), "their descriptions agree, their numbers do not"
    by_start = {_BACKWARD: _SAME_GRAPHS, _DRAWS: _SAME_SEEDS}
    known = (text for start, text in by_start.items() if any(line.startswith(start) for line in of_ranks))
    advice = next(known, _SAME_INPUTS)
    return RankError(f"the ranks' {named(kind, what)} are not the same; the first difference: {shown}. {advice}")
