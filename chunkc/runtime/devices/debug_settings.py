"""Debug settings of a device: ways to carry out the same plan under which a race shows.

They are read from an environment variable, ``CHUNKC_EMULATED`` for the emulated device and ``CHUNKC_CUDA`` for CUDA's,
for example ``poison,delay=2,seed=3``. Results are equal to the bit under all of them, or a plan has a race. One more,
for the emulated device alone, holds simulated times against real ones: ``throttle``.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.errors import ChunkcError


@dataclass(frozen=True, slots=True)
class DebugSettings:
    """How a device helps to find mistakes.

    Attributes:
        poison: fill freed and fresh device memory with NaN.
        max_delay_ms: longest random pause before and after each piece of work on every stream.
        seed: of the pauses; each stream draws its own sequence from it.
        synchronous: carry everything out at its launch, on the calling thread, which gets exceptions at once.
        throttle: no action is faster than the rates of the machine that was named.
    """

    poison: bool = False
    max_delay_ms: float = 0.0
    seed: int = 0
    synchronous: bool = False
    throttle: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_delay_ms < float("inf"):
            raise ChunkcError(f"debug settings: delay is a number of milliseconds from 0, not {self.max_delay_ms}")

    @classmethod
    def from_env(cls, text: str, variable: str = "CHUNKC_EMULATED") -> DebugSettings:
        """Read settings from the words of an environment variable.

        The words are ``poison``, ``delay=MS``, ``seed=N``, ``sync`` and ``throttle``.

        Raises:
            ChunkcError: for another word or a value that is no number.
        """
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
