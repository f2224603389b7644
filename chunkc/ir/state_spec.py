"""Optimizer states of a trained element: the fp32 master parameter and what a rule keeps beside it.

A state of dtype uint8 is quantised block by block: a code for each element, and for each `BLOCK_NUMEL` elements a
float32 scale in a list of its own, behind all other lists of the chunk. Blocks are counted from the first element of
the parameter, in the order of its memory. In chunks of such states every parameter begins, and every chunk ends, at a
multiple of `BLOCK_NUMEL` elements, so that blocks follow from the parameter alone: neither the size of chunks nor the
number of ranks moves their borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from chunkc.ir.schedule import DTYPE_NBYTES

MASTER: Final = "param32"

CODE_DTYPE: Final = "uint8"
"""Dtype of quantised states."""

STATE_NBYTES: Final[Mapping[str, int]] = MappingProxyType({**DTYPE_NBYTES, CODE_DTYPE: 1})

BLOCK_NUMEL: Final = 256
"""Elements that share a scale."""

_SCALE_NBYTES: Final = 4
_ALIGNMENT_NBYTES: Final = 256


@dataclass(frozen=True, slots=True)
class StateList:
    """One list of a chunk: an entry of ``dtype`` for every ``block_numel`` elements."""

    name: str
    dtype: str
    block_numel: int = 1

    def nbytes_of(self, numel: int) -> int:
        return -(-numel // self.block_numel) * STATE_NBYTES[self.dtype]

    def entries(self, start: int, end: int) -> slice:
        """The entries of elements [start, end), of which ``start`` begins a block."""
        return slice(start // self.block_numel, -(-end // self.block_numel))


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Names (those of state dicts) and dtypes of states beside the master, in their order in a chunk."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]

    def lists(self) -> Iterator[StateList]:
        """The lists of a chunk: the master, the states, and scales of those that are quantised."""
        yield StateList(MASTER, "float32")
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            yield StateList(name, dtype)
        for name in self.quantised:
            yield StateList(f"{name}_scale", "float32", BLOCK_NUMEL)

    @property
    def quantised(self) -> tuple[str, ...]:
        """Names of the states that are codes with a scale for each block."""
        return tuple(n for n, dtype in zip(self.names, self.dtypes, strict=True) if dtype == CODE_DTYPE)

    @property
    def block_numel(self) -> int:
        """Elements of which an update needs all at once: parameters begin and chunks end at multiples of them."""
        return BLOCK_NUMEL if self.quantised else 1

    @property
    def nbytes_per_element(self) -> int:
        """Bytes that every element takes; scales of blocks come on top (`nbytes_of`)."""
        return sum(entry.nbytes_of(1) for entry in self.lists() if entry.block_numel == 1)

    @property
    def nbytes_per_block(self) -> int:
        """Bytes of scales that every block takes."""
        return _SCALE_NBYTES * len(self.quantised)

    def nbytes_of(self, numel: int) -> int:
        """Bytes of ``numel`` elements that begin at a block."""
        return sum(entry.nbytes_of(numel) for entry in self.lists())

    def stored_nbytes(self, numel: int) -> int:
        """Bytes of all lists of a chunk: scales are padded, so that what follows them is aligned."""
        nbytes = self.nbytes_of(numel)
        return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES if self.quantised else nbytes

    def __str__(self) -> str:
        return ", ".join((MASTER, *(f"{n} (8-bit)" if n in self.quantised else n for n in self.names)))


ADAM_STATES: Final = StateSpec(("exp_avg", "exp_avg_sq"), ("float32", "float32"))
"""Those of AdamW and Adam, for which models are planned where nothing else is said."""

ADAM_8BIT_STATES: Final = StateSpec(ADAM_STATES.names, (CODE_DTYPE, CODE_DTYPE))
"""Those of AdamW8bit."""
