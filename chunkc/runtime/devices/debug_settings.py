"""Debug settings of a device: ways to carry out the same plan under which a race shows.

``CHUNKC_EMULATED`` or ``CHUNKC_CUDA`` names them: ``poison,delay=2,seed=3``. All give results equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from chunkc.errors import ChunkcError

_POISON: Final = 0xFF  # in every byte: NaN in fp32, bf16 and fp16


@dataclass(frozen=True, slots=True)
class DebugSettings:
    """How a device helps to find mistakes.

    ``poison``: fill freed and fresh device memory with NaN. ``max_delay_ms``: longest random pause, drawn from
    ``seed``, before and after each piece of work. ``synchronous``: carry everything out at its launch, on the calling
    thread. ``throttle``: no action is faster than the rates of the machine that was named; for the emulated device.
    """

    poison: bool = False
    max_delay_ms: float = 0.0
    seed: int = 0
    synchronous: bool = False
    throttle: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_delay_ms < float("inf"):
            raise ChunkcError(f"debug settings: delay is a number of milliseconds from 0, not {self.max_delay_ms}")

    def freed(self, memory: torch.Tensor | torch.UntypedStorage) -> None:
        if self.poison:
            if isinstance(memory, torch.UntypedStorage):
                memory = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
            memory.fill_(_POISON)

    @classmethod
    def from_env(cls, text: str, variable: str = "CHUNKC_EMULATED") -> DebugSettings:
        """Read ``poison``, ``delay=MS``, ``seed=N``, ``sync``, ``throttle``; raises `ChunkcError` for others."""
        values: dict[str, str] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            key, separator, value = word.partition("=")
            is_known = key in ("poison", "sync", "throttle", "delay", "seed")
            if not is_known or (separator == "=") != (key in ("delay", "seed")):
                raise ChunkcError(f"{variable} takes poison, sync, throttle, delay=MS and seed=N, not {word!r}")
            values[key] = value
        try:
            return cls(
                poison="poison" in values,
                max_delay_ms=float(values.get("delay", 0)),
                seed=int(values.get("seed", 0)),
                synchronous="sync" in values,
                throttle="throttle" in values,
            )
        except ValueError as error:
            raise ChunkcError(f"{variable}={text!r}: {error}") from error
