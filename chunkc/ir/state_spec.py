"""Optimizer states of a trained element: the fp32 master parameter and what a rule keeps beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from chunkc.ir.schedule import DTYPE_NBYTES

MASTER: Final = "param32"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Names (those of state dicts) and dtypes of states beside the master, in their order in a chunk."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]

    def lists(self) -> Iterator[tuple[str, str]]:
        """Name and dtype of every list of a chunk, the master first."""
        yield MASTER, "float32"
        yield from zip(self.names, self.dtypes, strict=True)

    @property
    def nbytes_per_element(self) -> int:
        return sum(DTYPE_NBYTES[dtype] for _, dtype in self.lists())

    def __str__(self) -> str:
        return ", ".join(name for name, _ in self.lists())


ADAM_STATES: Final = StateSpec(("exp_avg", "exp_avg_sq"), ("float32", "float32"))
"""Those of AdamW and Adam, for which models are planned where nothing else is said."""
