"""The grammar of ``hw`` strings: reading into parts, writing the parts back, precise errors.

    [[<nodes>x]<gpus>x]<gpu>[-<gpu_memory>]-<host_memory>          sizes <number>(k|m|g), powers of 1024

Nothing is guessed: a single size that might mean either memory is refused with both spellings.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from typing import Final

from chunkc.errors import HardwareError
from chunkc.hardware.catalogue import gpu_spellings, gpus, machines

GRAMMAR: Final = "[[<nodes>x]<gpus>x]<gpu>[-<gpu_memory>]-<host_memory>, sizes <number>(k|m|g)"
EMULATED: Final = "emulated"

_UNIT_NBYTES: Final = {"g": 1024**3, "m": 1024**2, "k": 1024}
MAX_NBYTES: Final = 1024**6
_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,10})?)([kmg])")
_COUNT: Final = re.compile(r"([0-9]{1,6})x(?=.)")
_ANY_GPU: Final = re.compile(r"sm([1-9][0-9]?)([0-9])")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The parts of an ``hw`` string; `str` gives the canonical spelling, with all sizes explicit."""

    gpu: str
    gpu_memory_nbytes: int
    host_memory_nbytes: int
    num_nodes: int = 1
    gpus_per_node: int = 1

    def __str__(self) -> str:
        counts = (self.num_nodes, self.gpus_per_node) if self.num_nodes > 1 else (self.gpus_per_node,)
        prefix = "" if counts == (1,) else "".join(f"{count}x" for count in counts)
        return f"{prefix}{self.gpu}-{format_size(self.gpu_memory_nbytes)}-{format_size(self.host_memory_nbytes)}"


def parse_spelling(text: str) -> Spelling:
    """Read an ``hw`` string, no alias or ``auto``; a HardwareError says what would be right."""
    head, *sizes = text.strip().lower().split("-")
    counts: list[int] = []
    while (match := _COUNT.match(head)) is not None:
        counts.append(int(match[1]))
        head = head[match.end() :]
    _refuse_counted_alias(text, counts, "-".join([head, *sizes]))
    if len(counts) > 2 or 0 in counts:
        raise _error(text, "before the GPU stands at most <nodes>x<gpus>x, each at least 1")
    num_nodes, gpus_per_node = [1, 1, *counts][-2:]
    gpu = _gpu(text, head)
    return Spelling(gpu, *_memories(text, gpu, sizes), num_nodes, gpus_per_node)


def parse_size(text: str) -> int:
    """Bytes of ``<number>(k|m|g)`` in powers of 1024; a fraction of a byte is dropped.

    >>> parse_size("1.5k")
    1536
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise HardwareError(f"{text!r} is no size: write <number>(k|m|g) in powers of 1024, for example 512m or 1.5g")
    nbytes = int((Decimal(match[1]) * _UNIT_NBYTES[match[2]]).to_integral_value(ROUND_DOWN))
    if not 0 < nbytes <= MAX_NBYTES:
        raise HardwareError(f"{text!r} is {nbytes} bytes: a memory has at least 1 byte and at most {MAX_NBYTES}")
    return nbytes


def format_size(nbytes: int) -> str:
    """The spelling of a size that `parse_size` reads back exactly, in the largest unit without a fraction.

    >>> format_size(64 * 1024**2), format_size(1), format_size(1537)
    ('64m', '0.0009765625k', '1.5009765625k')
    """
    for unit, unit_nbytes in _UNIT_NBYTES.items():
        if nbytes % unit_nbytes == 0:
            return f"{nbytes // unit_nbytes}{unit}"
    return f"{Decimal(nbytes) / 1024:f}k"


def any_gpu_capability(gpu: str) -> tuple[int, int] | None:
    """The compute capability in ``sm<NN>``, or ``None`` for other names.

    >>> any_gpu_capability("sm86"), any_gpu_capability("sm120")
    ((8, 6), (12, 0))
    """
    match = _ANY_GPU.fullmatch(gpu)
    return None if match is None else (int(match[1]), int(match[2]))


def _error(text: str, problem: str) -> HardwareError:
    return HardwareError(f"hw={text!r}: {problem}. Grammar: {GRAMMAR}")


def _refuse_counted_alias(text: str, counts: list[int], alias: str) -> None:
    """``4xsuperpod``: an alias is a whole machine, so say how its nodes are written."""
    if not counts or alias not in machines():
        return
    meant = f"{counts[0]}x{machines()[alias].hw}"
    raise _error(text, f"{alias!r} is a whole machine and takes no count; {counts[0]} such nodes are {meant!r}")


def _gpu(text: str, head: str) -> str:
    if head == EMULATED or any_gpu_capability(head) is not None:
        return head
    if head in gpu_spellings():
        return gpu_spellings()[head]
    close = difflib.get_close_matches(head, [*gpu_spellings(), EMULATED, *machines()], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    known = ", ".join(f"{gpu} ({'/'.join(map(format_size, row.variants))})" for gpu, row in gpus().items())
    problem = (
        f"unknown GPU {head!r}{hint} Known GPUs: {known}, {EMULATED}, and sm<NN> for any other by compute capability. "
        f"Known machines: {', '.join(machines())}, auto"
    )
    raise _error(text, problem)


def _memories(text: str, gpu: str, sizes: list[str]) -> tuple[int, int]:
    if len(sizes) not in (1, 2):
        example = f"{gpu}-64g" if gpu in gpus() else f"{gpu}-64m-2g"
        problem = f"host memory is needed and GPU memory may stand before it, found {len(sizes)} sizes"
        raise _error(text, f"{problem}; for example {example}")
    try:
        nbytes = [parse_size(size) for size in sizes]
    except HardwareError as error:
        raise _error(text, str(error)) from error
    row = gpus().get(gpu)
    if row is None and len(nbytes) == 1:
        raise _error(text, f"{gpu} has no default memory; write both sizes, for example {gpu}-64m-{sizes[0]}")
    if row is None:
        return nbytes[0], nbytes[1]
    if len(nbytes) == 1:
        _refuse_two_readings(text, sizes[0], nbytes[0], row.variants, row.default_nbytes)
        return row.default_nbytes, nbytes[0]
    if nbytes[0] > row.variants[-1]:
        sold = ", ".join(map(format_size, row.variants))
        raise _error(text, f"no {gpu} has {sizes[0]} of memory, it is sold with {sold}")
    return nbytes[0], nbytes[1]


def _refuse_two_readings(text: str, size: str, nbytes: int, variants: tuple[int, ...], default_nbytes: int) -> None:
    """``v100-32g``: is it the card with 32 GiB, or a host with 32 GiB?"""
    if nbytes not in variants:
        return
    machine = text.strip().lower().removesuffix(f"-{size}")
    problem = (
        f"{size} may be the memory of the GPU or of the host. For the GPU write '{machine}-{size}-<host_memory>', for "
        f"example '{machine}-{size}-240g'; for the host write '{machine}-{format_size(default_nbytes)}-{size}'"
    )
    raise _error(text, problem)
