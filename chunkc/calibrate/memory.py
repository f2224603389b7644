"""The memory of a calibration: its share of a budget, and where each activity reads and writes.

Device memory is one arena and host memory one home, like a model's. Activities that run together never share bytes::

    arena   | arriving 1/4 | leaving 1/4  | math 1/2   |
    home    | leaving 1/4  | arriving 1/4 | update 1/2 |

An eighth of the device bytes is no arena: operators allocate outputs there. All of it is filled with positive numbers,
finite in every floating dtype: arithmetic on zeros takes other power, hence other clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from chunkc.errors import HardwareError
from chunkc.hardware import Hardware, format_size, free_host_nbytes
from chunkc.hardware.host_memory import HOST_MEMORY
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.protocol import Device

MIN_DEVICE_NBYTES: Final = 2**20
MIN_HOST_NBYTES: Final = 2**21
_MIB: Final = 2**20
_PATTERN_NUMEL: Final = 1000  # no power of two, so that rows of matrices differ
_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class Scale:
    """How large things are for one kind of device. Sizes that do not fit the memory at hand are left out.

    Attributes:
        max_device_nbytes, max_host_nbytes: most that is taken of either memory.
        dtypes: to measure, the one that models compute in last.
        matmul_sizes: rows of square matrices.
        attention_tokens: tokens of one sequence, in heads of 64.
        update_numel: most elements of one chunk in updates.
        together_rows, together_copy_nbytes: of what runs beside others, so long that launching it leaves no gaps.
    """

    max_device_nbytes: int
    max_host_nbytes: int
    dtypes: tuple[torch.dtype, ...]
    matmul_sizes: tuple[int, ...]
    attention_tokens: tuple[int, ...]
    update_numel: int
    together_rows: int
    together_copy_nbytes: int


_SCALES: Final = {
    "cpu": Scale(
        max_device_nbytes=256 * _MIB,
        max_host_nbytes=128 * _MIB,
        dtypes=(torch.float32, torch.bfloat16),
        matmul_sizes=(128, 512, 1024),
        attention_tokens=(64, 512),
        update_numel=2**20,
        together_rows=512,
        together_copy_nbytes=4 * _MIB,
    ),
    "cuda": Scale(
        max_device_nbytes=2048 * _MIB,
        max_host_nbytes=2048 * _MIB,
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        matmul_sizes=(128, 1024, 4096, 8192),
        attention_tokens=(64, 1024, 4096),
        update_numel=16 * 2**20,
        together_rows=8192,
        together_copy_nbytes=64 * _MIB,
    ),
}


def scale_for(device: Device, hw: Hardware) -> Scale:
    """The scale of the kind of device; bfloat16 is left out where `hw` lacks it."""
    scale = _SCALES[device.torch_device.type]
    if hw.compute_dtype is torch.bfloat16:
        return scale
    return replace(scale, dtypes=tuple(dtype for dtype in scale.dtypes if dtype is not torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes that a calibration takes: all on the device, the arena's part of them, and the home's."""

    device_nbytes: int
    arena_nbytes: int
    home_nbytes: int

    @classmethod
    def of(cls, device: Device, scale: Scale) -> Shares:
        """At most what the scale wants, what the budgets leave, and what this machine has.

        Raises:
            HardwareError: that is too little, or the machine has less than the budgets say.
        """
        device_nbytes = min(device.free_device_nbytes(), scale.max_device_nbytes)
        home_nbytes = min(device.free_host_nbytes(), scale.max_host_nbytes)
        if device_nbytes < MIN_DEVICE_NBYTES or home_nbytes < MIN_HOST_NBYTES:
            raise HardwareError(
                f"calibration needs {format_size(MIN_DEVICE_NBYTES)} of device and {format_size(MIN_HOST_NBYTES)} of "
                f"host memory; {device.name} leaves {format_size(device_nbytes)} and {format_size(home_nbytes)}"
            )
        needed = home_nbytes + (device_nbytes if device.torch_device.type == "cpu" else 0)
        if (free := free_host_nbytes()) < needed:
            raise HardwareError(
                f"calibrating {device.name} takes {needed} bytes of host memory, {free} are free: free some, or name "
                f"a machine with less memory, or say by {HOST_MEMORY}=<size> what a machine comes to have"
            )
        return cls(device_nbytes, _aligned(device_nbytes * 7 // 8), _aligned(home_nbytes))


@dataclass(frozen=True, slots=True)
class Regions:
    """Parts of arena and home as uint8, and the bytes that operators may take beside the arena."""

    device_arriving: torch.Tensor
    device_leaving: torch.Tensor
    device_math: torch.Tensor
    host_leaving: torch.Tensor
    host_arriving: torch.Tensor
    host_update: torch.Tensor
    outputs_nbytes: int


@contextmanager
def regions(device: Device, shares: Shares) -> Iterator[Regions]:
    with ExitStack() as stack:
        device.reserve(shares.device_nbytes)
        stack.callback(device.unreserve, shares.device_nbytes)
        arena = device.allocate_arena(shares.arena_nbytes)
        stack.callback(device.free_arena, arena)
        home = device.allocate_home(shares.home_nbytes)
        stack.callback(device.free_home, home)
        device.launch(Stream.COMPUTE, "fill", (), partial(fill, arena)).wait()
        fill(home)
        yield Regions(*_quarters(arena), *_quarters(home), shares.device_nbytes - shares.arena_nbytes)
        device.synchronize()


def fill(memory: torch.Tensor) -> None:
    """Write positive numbers over uint8 ``memory``, finite as bfloat16, float16 and float32."""
    numbers = memory[: memory.numel() // 2 * 2].view(torch.bfloat16)
    pattern = torch.empty(_PATTERN_NUMEL, dtype=torch.float32).uniform_(2**-7, 2**-6).to(numbers)
    whole = numbers.numel() // _PATTERN_NUMEL * _PATTERN_NUMEL
    numbers[:whole].view(-1, _PATTERN_NUMEL).copy_(pattern)
    numbers[whole:].copy_(pattern[: numbers.numel() - whole])


def _quarters(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quarter = _aligned(memory.numel() // 4)
    return memory[:quarter], memory[quarter : 2 * quarter], memory[2 * quarter :]


def _aligned(nbytes: int) -> int:
    return nbytes // _ALIGNMENT * _ALIGNMENT
