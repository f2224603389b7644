"""Pass ``offload``: decide which saved values go to host memory until backward, and when.

Their copies take host memory that nothing else gets, and segments start where they go and come; the bytes that are
away are none of the device's. So this comes before all passes that count bytes. The actions are written where those of
chunks are, so that copies share the queues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.ir.tiers import Tier
from chunkc.passes.support.draft import Draft
from chunkc.passes.support.moved_values import choose_moves, cuts_of


@dataclass(frozen=True, slots=True)
class OffloadPass:
    """Decides ``moves``; takes host memory from the target, and adds cuts to the options."""

    name: str = "offload"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"moves"})
    conflicts: frozenset[str] = frozenset({"liveness"})

    def __call__(self, draft: Draft) -> Draft:
        moves = choose_moves(draft.schedule, draft.options)
        if not moves:
            return replace(draft, moves=(), note="nothing is moved")
        nbytes = sum(move.value.nbytes for move in moves)
        copies_nbytes = nbytes * draft.options.in_flight
        wished = draft.options.cuts or ((), ())
        forward, backward = cuts_of(moves, draft.schedule)
        cuts = tuple(sorted({*wished[0], *forward})), tuple(sorted({*wished[1], *backward}))
        saved_nbytes = sum(value.nbytes for value in draft.schedule.saved_values())
        note = f"{len(moves)} values, {nbytes / 2**20:.2f} of {saved_nbytes / 2**20:.2f} MiB saved, are moved"
        target, options = draft.target.less({Tier.HOST: copies_nbytes}), replace(draft.options, cuts=cuts)
        return replace(draft, moves=moves, target=target, options=options, note=note)
