"""Choice of optimizer states that stay on the device, and of those that pass through it in the step.

Both are evenly spread in order of update. What fits in the device's margin beside payload slots and
activations never moves (*resident*: PatrickStar, Fang et al. 2021, section 8.2, device-aware operator placement). Of
the others a share is *streamed*: copied to the device in the step, updated there and copied home, while the host
updates the rest (Deep Optimizer States, Maurya et al. 2024, who stream every n-th for a whole n; the share is any
fraction here).

Chunks are chosen by communication group, so that all ranks choose alike and their arenas have one shape.
"""

from __future__ import annotations

from itertools import accumulate

from chunkc.ir.layout import ChunkList, Layout
from chunkc.passes.support.draft import Liveness


def state_order(layout: Layout, liveness: Liveness) -> tuple[int, ...]:
    """This rank's chunk (or padding) of every group with states, in order of first use."""
    size = layout.world_size
    used: dict[int, None] = {}
    for param in liveness.use_order:
        used.update(dict.fromkeys(c // size for c in layout.placements[param].chunks))
    chunk_of = {c.index // size: c.index for c in layout.owned() if c.list is ChunkList.TRAINED}
    return (*(chunk_of[g] for g in used if g in chunk_of), *(c for g, c in chunk_of.items() if g not in used))


def residence_order(layout: Layout, liveness: Liveness) -> tuple[int, ...]:
    """The chunks of `state_order` in the order in which their states become resident as there is room.

    Positions come by their reversed bits (the sequence of van der Corput, 1935): however many are spread evenly over
    the step, and room for one more moves none of the others.
    """
    order = state_order(layout, liveness)
    num_bits = max(1, (len(order) - 1).bit_length())
    return tuple(order[i] for i in sorted(range(len(order)), key=lambda i: f"{i:0{num_bits}b}"[::-1]))


def states_nbytes(layout: Layout, liveness: Liveness) -> tuple[int, ...]:
    """Bytes of the states of the first k chunks of `residence_order`, for k from none to all."""
    chunks = (layout.chunks[c] for c in residence_order(layout, liveness))
    return tuple(accumulate(map(layout.os_nbytes_of, chunks), initial=0))


def spread(count: int, chosen: int) -> tuple[int, ...]:
    """``chosen`` of ``count`` positions, each in the middle of its part."""
    return tuple((2 * i + 1) * count // (2 * chosen) for i in range(chosen))


def streamed_chunks(layout: Layout, liveness: Liveness, share: float) -> tuple[int, ...]:
    """Chunks whose states are streamed, in order of update: ``share`` of those at home on the host."""
    at_home = [c for c in state_order(layout, liveness) if layout.chunks[c].has_os_below]
    return tuple(at_home[i] for i in spread(len(at_home), int(share * len(at_home) + 0.5)))
