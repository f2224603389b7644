"""Timed activities: work for one stream over a calibration's regions, in pieces as a plan launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

from chunkc.calibrate.memory import Regions, Scale
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.protocol import Device, Event
from chunkc.runtime.update.cpu_update import Piece
from chunkc.runtime.update.rules import AdamHyper, UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs

Work = Callable[[], None]

HEAD_NUMEL: Final = 64
NUM_HEADS: Final = 8
_MAX_PLACES: Final = 64
_MIN_COPY_NBYTES: Final = 4096
_MAX_COPY_NBYTES: Final = 64 * 2**20
_COLUMN_NUMEL: Final = 64  # chunks in updates have a multiple of this many elements, or blocks of quantised states
# With a learning rate of 0 the parameters, which are the next gradients, stay as they are however often it runs.
_HYPER: Final = AdamHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)


@dataclass(frozen=True, slots=True)
class Activity:
    """Pieces of equal work for one stream; they take turns, so that each finds its data out of the caches."""

    stream: Stream
    label: str
    works: tuple[Work, ...]

    def launch(self, device: Device, index: int) -> Event:
        return device.launch(self.stream, self.label, (), self.works[index % len(self.works)])


def copy_sizes(regions: Regions) -> tuple[int, ...]:
    """Sizes in bytes of the copies to time: by factors of 4 from 4 KiB to 64 MiB, as far as they fit."""
    room = min(
        region.numel()
        for region in (regions.device_arriving, regions.device_leaving, regions.host_leaving, regions.host_arriving)
    )
    largest = min(_MAX_COPY_NBYTES, 1 << (room.bit_length() - 1))
    sizes, nbytes = [], _MIN_COPY_NBYTES
    while nbytes < largest:
        sizes.append(nbytes)
        nbytes *= 4
    return (*sizes, largest)


def copy(regions: Regions, stream: Stream, nbytes: int) -> Activity:
    """Copies of ``nbytes`` from host to device (H2D) or back (D2H)."""
    if stream is Stream.H2D:
        source, target = regions.host_leaving, regions.device_arriving
    else:
        source, target = regions.device_leaving, regions.host_arriving
    sources, targets = _places(source, nbytes), _places(target, nbytes)
    pairs = ((sources[i % len(sources)], targets[i % len(targets)]) for i in range(max(len(sources), len(targets))))
    return Activity(stream, f"copy of {nbytes} bytes", tuple(_copy(source, target) for source, target in pairs))


def device_copy(regions: Regions) -> tuple[Activity, int]:
    """A copy within device memory, and the bytes that it reads and writes."""
    nbytes = regions.device_math.numel() // 2
    source, target = regions.device_math[:nbytes], regions.device_math[nbytes : 2 * nbytes]
    return Activity(Stream.COMPUTE, "copy on the device", (_copy(source, target),)), 2 * nbytes


def matmul_sizes(regions: Regions, scale: Scale) -> tuple[int, ...]:
    """Rows of the square matrices of which three fit in float32."""
    return tuple(rows for rows in scale.matmul_sizes if 3 * rows * rows * 4 <= regions.device_math.numel())


def matmul(regions: Regions, dtype: torch.dtype, num_rows: int) -> Activity:
    numel = num_rows * num_rows
    numbers = regions.device_math[: 3 * numel * dtype.itemsize].view(dtype)
    left, right, product = numbers.view(3, num_rows, num_rows)

    def work() -> None:
        torch.mm(left, right, out=product)

    return Activity(Stream.COMPUTE, f"matmul of {num_rows} rows", (work,))


def attention_tokens(regions: Regions, scale: Scale) -> tuple[int, ...]:
    """Tokens for which query, key and value fit in float32, and the output beside the arena."""
    row_nbytes = NUM_HEADS * HEAD_NUMEL * 4
    room = min(regions.device_math.numel() // 3, regions.outputs_nbytes) // row_nbytes
    return tuple(tokens for tokens in scale.attention_tokens if tokens <= room)


def attention(regions: Regions, dtype: torch.dtype, num_tokens: int) -> Activity:
    """Causal attention over one sequence."""
    shape = (3, 1, NUM_HEADS, num_tokens, HEAD_NUMEL)
    numel = 3 * NUM_HEADS * num_tokens * HEAD_NUMEL
    query, key, value = regions.device_math[: numel * dtype.itemsize].view(dtype).view(shape)

    def work() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return Activity(Stream.COMPUTE, f"attention over {num_tokens} tokens", (work,))


def update(
    device: Device, regions: Regions, scale: Scale, stream: Stream, dtype: torch.dtype, rule: UpdateRule
) -> tuple[Activity, int]:
    """An Adam on chunks in host memory (CPU) or device memory (COMPUTE), and the elements of one chunk."""
    memory = regions.host_update if stream is Stream.CPU else regions.device_math
    column = _COLUMN_NUMEL * rule.states.block_numel
    column_nbytes = rule.states.nbytes_of(column) + column * dtype.itemsize
    numel = column * min(scale.update_numel // column, memory.numel() // (2 * column_nbytes))
    lists = [(getattr(torch, entry.dtype), entry.nbytes_of(numel)) for entry in rule.states.lists()]
    lists.append((dtype, numel * dtype.itemsize))
    inputs = StepInputs({0: _HYPER}, {0: 2}, num_params=1)
    works = []
    for start in _starts(memory.numel(), sum(nbytes for _, nbytes in lists)):
        *states, payload = _views(memory[start:], lists)
        made = device.make_update(stream, rule, payload, states, [Piece(0, 0, numel)])
        works.append(partial(made.update, inputs))
    return Activity(stream, f"update of {numel} parameters", tuple(works)), numel


def _views(memory: torch.Tensor, lists: Iterable[tuple[torch.dtype, int]]) -> Iterator[torch.Tensor]:
    """Lists of the dtypes and bytes given, one behind the other."""
    start = 0
    for dtype, nbytes in lists:
        yield memory[start : start + nbytes].view(dtype)
        start += nbytes


def nothing(stream: Stream) -> Activity:
    return Activity(stream, "nothing", (lambda: None,))


def _copy(source: torch.Tensor, target: torch.Tensor) -> Work:
    def work() -> None:
        target.copy_(source, non_blocking=True)

    return work


def _places(region: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    starts = _starts(region.numel(), nbytes)
    step = -(-len(starts) // _MAX_PLACES)
    return [region[start : start + nbytes] for start in starts[::step]]


def _starts(room_nbytes: int, nbytes: int) -> range:
    return range(0, room_nbytes - nbytes + 1, nbytes)
