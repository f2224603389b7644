"""Values of a lowered graph by name: what every segment takes, makes and uses last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkc.errors import PlanError


@dataclass(frozen=True, slots=True)
class SegmentValues:
    """Values that enter and leave one segment.

    Attributes:
        inputs: names of the values it takes; a parameter's name is that of its placeholder.
        params: (position in ``inputs``, parameter index) of the inputs that are payloads.
        outputs: names of the values it makes for later segments and for the graph's result.
        dies: positions in ``inputs`` of the values that nothing needs afterwards.
    """

    inputs: tuple[str, ...]
    params: tuple[tuple[int, int], ...]
    outputs: tuple[str, ...]
    dies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphValues:
    """Values of a whole graph.

    Attributes:
        inputs: names of the graph's inputs in call order.
        segments: in execution order.
        result: what the graph returns, one entry per output: the name of a value, or a constant in a 1-tuple.
        last_use: position of the last segment that takes a value, by name.
    """

    inputs: tuple[str, ...]
    segments: tuple[SegmentValues, ...]
    result: tuple[str | tuple[Any, ...], ...]
    last_use: Mapping[str, int]

    def slots(self) -> dict[str, int]:
        """A number for every value: inputs in their order, then the outputs of each segment.

        Raises:
            PlanError: when a name stands for two values.
        """
        names: Sequence[str] = [*self.inputs, *(name for segment in self.segments for name in segment.outputs)]
        slots = {name: number for number, name in enumerate(names)}
        if len(slots) != len(names):
            raise PlanError("a lowered graph gives one name to two values: capture the model again")
        return slots
