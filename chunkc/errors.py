"""The errors that users meet: ``except chunkc.ChunkcError`` catches all of them and nothing else.

Every message states the rule, what was found (numbers, parameter names) and what to do. Errors are raised before
anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

_MAX_NAMED: Final = 5


class ChunkcError(RuntimeError):
    """Base of all errors that chunkc raises on purpose."""


class HardwareError(ChunkcError, ValueError):
    """An ``hw`` string, profile or device that cannot be used."""


class CaptureError(ChunkcError):
    """The forward cannot be captured as one static graph pair, or breaks a rule of managed parameters."""


class AccumulationError(ChunkcError):
    """Gradients that were neither stepped nor zeroed met more backwards than were declared to add up."""


class PlanNotReadyError(ChunkcError):
    """The plan was asked for before the first training forward made it."""


class ShapeLimitError(ChunkcError):
    """Training met more input shapes than a model may have programs."""


class PlanError(ChunkcError):
    """The verifier refused a plan: the message names the action, the chunk, the moment and the numbers."""


class DeviceMemoryError(ChunkcError):
    """The device ran out of memory while a plan ran, at the action that the message names."""


class RankError(ChunkcError):
    """The ranks of a job do different things with a model, or one of them has ended."""


class CheckpointError(ChunkcError):
    """A checkpoint that cannot be written, or one that is missing, damaged or of another model.

    Attributes:
        path: of the checkpoint.
        damaged: names of its files that are missing or not what was written.
        previous: the newest complete checkpoint saved before it, if there is one.
    """

    def __init__(
        self, message: str, *, path: Path, damaged: tuple[str, ...] = (), previous: Path | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.damaged = damaged
        self.previous = previous

    def __reduce__(self) -> tuple[object, ...]:
        return partial(CheckpointError, path=self.path, damaged=self.damaged, previous=self.previous), self.args


class BudgetError(ChunkcError):
    """A model cannot be trained within the memory of the hardware.

    Attributes:
        moment: where the device memory is exceeded, for example ``"bwd.3"``; ``"host"`` for the host budget.
        tensors: names of the parameters that must be resident at that moment.
        missing_nbytes: bytes that are missing there.
        min_device_nbytes: the smallest device memory with which the same call works.
        min_host_nbytes: the smallest host memory with which the same call works.
    """

    def __init__(
        self,
        message: str,
        *,
        moment: str,
        tensors: tuple[str, ...],
        missing_nbytes: int,
        min_device_nbytes: int,
        min_host_nbytes: int,
    ) -> None:
        super().__init__(message)
        self.moment = moment
        self.tensors = tensors
        self.missing_nbytes = missing_nbytes
        self.min_device_nbytes = min_device_nbytes
        self.min_host_nbytes = min_host_nbytes

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle with the numbers, which `BaseException` would leave out of the call."""
        names = ("moment", "tensors", "missing_nbytes", "min_device_nbytes", "min_host_nbytes")
        return partial(type(self), str(self), **{name: getattr(self, name) for name in names}), ()


def first_names(names: Sequence[str]) -> str:
    """The first names for a message, and how many more there are; ``none`` without any."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(names[:_MAX_NAMED]) or "none") + more
