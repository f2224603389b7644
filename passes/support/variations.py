"""Variations of a plan's options: those one step away from others, and how two differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from chunkc.passes.support.draft import PlanOptions


def options_around(
    options: PlanOptions, count: int, share: float, most: int, *, may_keep: bool
) -> Iterable[PlanOptions]:
    """Options one step of ``count`` chunks' states, of ``share``, or of both in opposite directions away.

    With ``may_keep``, ``options`` and those of opposite steps also come with ``keeps_payloads`` turned over.
    """
    opposite = [(-count, share), (count, -share)]
    moves = [(options.keeps_payloads, [(count, 0.0), (-count, 0.0), (0, share), (0, -share), *opposite])]
    moves += [(not options.keeps_payloads, [(0, 0.0), *opposite])] if may_keep else []
    for keeps, steps in moves:
        for more_states, more_share in steps:
            num_states, streamed = options.num_resident_states + more_states, options.streamed_share + more_share
            if num_states <= most:
                yield replace(
                    options,
                    num_resident_states=max(0, num_states),
                    keeps_payloads=keeps and num_states > 0,
                    streamed_share=min(max(0.0, streamed), 1.0),
                )


def difference(options: PlanOptions, wished: PlanOptions) -> str:
    """Describe how ``options`` differ from the caller's."""
    parts = []
    if options.chunk_numel != wished.chunk_numel:
        parts.append(f"chunks of {options.chunk_numel} elements")
    if options.num_resident_states != wished.num_resident_states:
        parts.append(f"{options.num_resident_states} optimizer states resident")
    if options.streamed_share != wished.streamed_share:
        parts.append(f"{options.streamed_share:.0%} streamed")
    if options.moved_share != wished.moved_share:
        parts.append(f"{options.moved_share:.0%} of the layers' saved values moved")
    if options.num_exchanges != wished.num_exchanges:
        parts.append(f"about {options.num_exchanges} segments a graph")
    if options.num_second_homes != wished.num_second_homes:
        parts.append(f"{options.num_second_homes} second homes")
    return ", ".join(parts)
