"""Layouts made by hand: parameters one behind the other in chunks of 64 elements."""

import torch

from chunkc.ir.layout import Chunk, ChunkList, Group, Layout, Placement, Slot
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.state_spec import ADAM_STATES
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.storage.parameter_io import ChunkValues

CHUNK_NUMEL = 64


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def layout_of(shapes: list[tuple[int, ...]], dtype: str, *, on_device: bool = False) -> Layout:
    """Parameters one behind the other; tensors larger than a chunk span chunks."""
    infos = tuple(ParamInfo(f"p{i}", (), s, contiguous(s), dtype, True) for i, s in enumerate(shapes))
    places, chunk, offset = [], 0, 0
    for index, info in enumerate(infos):
        if offset + info.numel > CHUNK_NUMEL:
            chunk, offset = chunk + 1, 0
        num_chunks = max(1, -(-info.numel // CHUNK_NUMEL))
        places.append(Placement(index, chunk, offset, num_chunks))
        offset += info.numel
        chunk, offset = (chunk + offset // CHUNK_NUMEL, offset % CHUNK_NUMEL) if num_chunks > 1 else (chunk, offset)
    home = Tier.DEVICE if on_device else Tier.HOST
    chunks = tuple(Chunk(i, ChunkList.TRAINED, dtype, CHUNK_NUMEL, CHUNK_NUMEL, home, home) for i in range(chunk + 1))
    sizes = [c.nbytes for c in chunks] + [c.numel * ADAM_STATES.nbytes_per_element for c in chunks] if on_device else []
    slots = tuple(Slot(i, sum(sizes[:i]), n) for i, n in enumerate(sizes))
    groups = tuple(Group(i, i, 1) for i in range(len(chunks)))
    return Layout(infos, tuple(places), chunks, groups, CHUNK_NUMEL, slots, sum(sizes))


def values_of(layout: Layout) -> ChunkValues:
    device = EmulatedDevice("emulated-1m-1m", 1 << 20, 1 << 20)
    device.reserve(layout.arena_nbytes)
    count = len(layout.chunks)
    static = {f"c{i}": i for i in range(count)} | {f"os{i}": count + i for i in range(count)}
    return ChunkValues(ChunkStore(layout, device), static if layout.slots else {})
