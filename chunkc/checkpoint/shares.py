"""Ranges of a tensor's elements that one rank has, as boxes that DCP can put together.

Chunks cut a parameter anywhere in memory order; torch.distributed.checkpoint knows boxes (offsets and sizes by
dimension). Every range of a dense tensor is a few boxes: in two dimensions the rest of a row, whole rows, and the
beginning of a row. So checkpoints depend on neither chunks nor strides, and a whole tensor is one box. Boxes of a part,
which a rank has under tensor parallelism, lie in the whole tensor: checkpoints do not depend on the mesh either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from chunkc.runtime.model.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor whose elements follow each other in memory.

    It begins at element ``first`` of the share's range ``part``; ``offsets`` and ``sizes`` place it in the tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: int
    first: int
    within: tuple[Box, int] | None = None
    """A box of blocks, of which this is the one with that number: then its elements do not follow each other."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Equal blocks along ``dim``, of each of which every rank has its part."""

    dim: int
    num: int

    def split(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Sizes with the number of blocks before that of a block."""
        return (*sizes[: self.dim], self.num, sizes[self.dim] // self.num, *sizes[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a tensor of ``shape`` begins; with ``blocks``, in the order of ranks."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    blocks: Blocks | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Ranges ``[first, end)`` of a dense tensor's elements, counted in the order of its memory.

    ``place``: where the tensor lies, if it is a part of another one.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    place: Place | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that boxes lie in."""
        return self.shape if self.place is None else self.place.shape

    @staticmethod
    def whole(shape: Sequence[int], stride: Sequence[int] | None = None) -> Share:
        """All elements; in row-major order unless ``stride`` says otherwise."""
        dense = torch.empty(tuple(shape), device="meta").stride() if stride is None else stride
        return Share(tuple(shape), tuple(dense), ((0, math.prod(shape)),))

    @property
    def numel(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def boxes(self) -> tuple[Box, ...]:
        """The ranges as boxes, in order; that of a whole tensor without elements is a box without elements."""
        if self.place is not None and self.place.blocks is not None:
            return tuple(self._boxes_by_block(self.place, self.place.blocks))
        origin = (0,) * len(self.shape) if self.place is None else self.place.offsets
        if not math.prod(self.shape):
            return tuple(Box(origin, self.shape, i, 0) for i in range(len(self.ranges)))
        order = self._order()
        sizes = [self.shape[dim] for dim in order]
        return tuple(
            Box(_added(origin, _put_back(order, offsets)), _put_back(order, lengths), part, begin - first)
            for part, (first, end) in enumerate(self.ranges)
            for begin, offsets, lengths in _boxes(sizes, first, end)
        )

    def _split(self, place: Place, blocks: Blocks) -> Share:
        """The share with one dimension more, that of blocks, along which its part is in one piece."""
        stride = self.stride[blocks.dim]
        inner = self.shape[blocks.dim] // blocks.num
        strides = (*self.stride[: blocks.dim], inner * stride, stride, *self.stride[blocks.dim + 1 :])
        offset = place.offsets[blocks.dim] // blocks.num
        offsets = (*place.offsets[: blocks.dim], 0, offset, *place.offsets[blocks.dim + 1 :])
        return Share(blocks.split(self.shape), strides, self.ranges, Place(blocks.split(place.shape), offsets))

    def _boxes_by_block(self, place: Place, blocks: Blocks) -> Iterator[Box]:
        dim, size = blocks.dim, place.shape[blocks.dim] // blocks.num
        for box in self._split(place, blocks).boxes():
            sizes = (*box.sizes[:dim], *box.sizes[dim + 1 :])
            for number in range(box.sizes[dim]):
                offset = (box.offsets[dim] + number) * size + box.offsets[dim + 1]
                offsets = (*box.offsets[:dim], offset, *box.offsets[dim + 2 :])
                yield Box(offsets, sizes, box.part, box.first, (box, number))

    def empty(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(end - first, dtype=dtype, device="cpu") for first, end in self.ranges)

    def flats(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Elements of each range, 1-D; copies where the tensor's strides are not the share's."""
        dense = value
        if value.stride() != self.stride:
            dense = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device="cpu").copy_(value)
        flat = dense.as_strided((dense.numel(),), (1,))
        return tuple(flat[first:end] for first, end in self.ranges)

    def view(self, flats: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        """The elements of ``box``, in its shape, where they stand in the ``flats`` of all ranges."""
        if box.within is not None and self.place is not None and self.place.blocks is not None:
            outer, number = box.within
            return self._split(self.place, self.place.blocks).view(flats, outer).select(self.place.blocks.dim, number)
        order = self._order()
        dense = flats[box.part][box.first : box.first + box.numel].view([box.sizes[dim] for dim in order])
        return dense.permute([order.index(dim) for dim in range(len(order))])

    def tensor(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        [flat] = flats
        return flat.as_strided(self.shape, self.stride)

    def _order(self) -> list[int]:
        """The dimensions, from the outermost in memory to the innermost."""
        return sorted(range(len(self.shape)), key=lambda dim: (self.shape[dim] > 1, -self.stride[dim]))


def _boxes(sizes: Sequence[int], first: int, end: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Boxes of the range ``[first, end)`` of a row-major tensor: first element, offsets and sizes."""
    if first == end:
        return
    if not sizes:
        yield first, [], []
        return
    inner = math.prod(sizes[1:])
    head, tail = -(-first // inner), end // inner
    if head > tail:  # within one row
        yield from _in_row(sizes, tail, first, end)
        return
    if first < head * inner:
        yield from _in_row(sizes, head - 1, first, head * inner)
    if head < tail:
        yield head * inner, [head, *(0 for _ in sizes[1:])], [tail - head, *sizes[1:]]
    if tail * inner < end:
        yield from _in_row(sizes, tail, tail * inner, end)


def _in_row(sizes: Sequence[int], row: int, first: int, end: int) -> Iterator[tuple[int, list[int], list[int]]]:
    start = row * math.prod(sizes[1:])
    for begin, offsets, lengths in _boxes(sizes[1:], first - start, end - start):
        yield begin + start, [row, *offsets], [1, *lengths]


def _put_back(order: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[order.index(dim)] for dim in range(len(order)))


def _added(origin: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(first + offset for first, offset in zip(origin, offsets, strict=True))


def share_of(parameters: Parameters, index: int, ranges: tuple[tuple[int, int], ...]) -> Share:
    """``ranges`` of what this rank has of a parameter: the tensor, or its part along ``tp``."""
    info, shard = parameters.infos[index], parameters.shards.get(index)
    blocks = Blocks(shard.divided_dim, shard.num_blocks) if shard is not None and shard.num_blocks > 1 else None
    place = None if shard is None else Place(tuple(shard.shape), shard.offsets, blocks)
    return Share(info.shape, info.stride, ranges, place)
