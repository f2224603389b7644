"""The operator schedule: one training iteration as the compiler sees it, before any decision is taken.

Capture turns the two FX graphs of a model into lists of operators in execution order. The schedule holds no tensors and
no graph nodes, so that passes can be tested on schedules written by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Those that a parameter can be trained in; a parameter of another holds packed bits, and is frozen."""


GraphKind = Literal["forward", "backward"]
SEGMENT_PREFIX: dict[GraphKind, str] = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter; tied parameters are one parameter with ``aliases``.

    ``stride``: dense and non-overlapping. ``dtype``: what the graphs read, a key of ``DTYPE_NBYTES``.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trainable: bool

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(f"parameter {self.name!r} has dtype {self.dtype}; supported: {', '.join(DTYPE_NBYTES)}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of a captured graph.

    Attributes:
        reads, grads: parameters whose payload it reads, and whose gradient is final once it has run.
        flops: of matrix products, convolutions and (unmasked) attention; others count none.
        nbytes: that it moves to and from device memory, as the compiler of segments runs it: alone or fused.
        live_nbytes: non-model, while it runs: inputs, outputs, what later operators need; no earlier final gradients.
        live_after_nbytes: the same without its dead inputs and its own final gradients.
        dtype: of its first floating-point operand, by torch's name; empty where there is none.
        num_kernels: none for a view, and where operators are fused one for all.
        tangents_nbytes: of live gradients that autograd handed to backward; part of ``live_nbytes``.
        source: the user's line that called it (``model.py:31``); empty where unknown.
        crossing_nbytes: more bytes alive in front of it if a segment begins there; fused neighbours never make these.
        saved_nbytes, read_by: of its results that backward reads; positions of the first and last operator that does.
        used_until: operator of forward that reads these last; None where somebody else holds their storage too, so that
            they must stay on the device.
    """

    name: str
    target: str
    reads: tuple[int, ...]
    grads: tuple[int, ...]
    flops: int
    nbytes: int
    live_nbytes: int
    live_after_nbytes: int
    workspace_nbytes: int = 0
    layer: str = ""
    dtype: str = ""
    num_kernels: int = 1
    tangents_nbytes: int = 0
    crossing_nbytes: int = 0
    source: str = ""
    saved_nbytes: int = 0
    read_by: tuple[int, ...] = ()
    used_until: int | None = None


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value of ``nbytes`` that forward makes and backward reads; other fields as in `Operator`."""

    name: str
    source: str
    nbytes: int
    made_by: int
    read_by: tuple[int, ...]
    used_until: int | None = None


@dataclass(frozen=True, slots=True)
class GraphSchedule:
    """The operators of one graph in execution order."""

    kind: GraphKind
    operators: tuple[Operator, ...]

    def read_params(self) -> Iterator[int]:
        """Indexes of the parameters read, in order of first use."""
        seen: set[int] = set()
        for op in self.operators:
            for param in op.reads:
                if param not in seen:
                    seen.add(param)
                    yield param


@dataclass(frozen=True, slots=True)
class Schedule:
    """One iteration: parameters, forward graph, and backward graph (no operators in an evaluation).

    ``params``: in ``named_parameters()`` order, unused ones included. ``held_nbytes``: non-model bytes that the user
    holds across the iteration. ``also_trained``: parameters whose gradients come from another graph or eager operators.
    ``num_samples``: first dimension of the largest input; ``num_tokens``: elements of the largest integer input with
    two dimensions or more; 0 where there is none.
    """

    params: tuple[ParamInfo, ...]
    forward: GraphSchedule
    backward: GraphSchedule
    held_nbytes: int = 0
    also_trained: tuple[int, ...] = ()
    num_samples: int = 0
    num_tokens: int = 0

    @property
    def is_evaluation(self) -> bool:
        return not self.backward.operators

    @property
    def graphs(self) -> tuple[GraphSchedule, GraphSchedule]:
        return (self.forward, self.backward)

    def used_params(self) -> frozenset[int]:
        """Indexes of the parameters that some graph reads or produces a gradient for."""
        return frozenset(p for graph in self.graphs for op in graph.operators for p in (*op.reads, *op.grads))

    def trained_params(self) -> frozenset[int]:
        return frozenset(p for op in self.backward.operators for p in op.grads)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def saved_values(self) -> tuple[SavedValue, ...]:
        operators = enumerate(self.forward.operators)
        return tuple(
            SavedValue(op.name, op.source, op.saved_nbytes, i, op.read_by, op.used_until)
            for i, op in operators
            if op.read_by
        )

    def digest(self) -> str:
        """Twelve hexadecimal digits over all that planning depends on, equal on every machine."""
        return digest_of(self, _digested)


def largest_saved(
    values: Sequence[SavedValue], graph: GraphKind, first_op: int, end_op: int, limit: int = 3
) -> list[tuple[str, int, int]]:
    """``(source, count, bytes)`` of the user's lines whose saved values take most while a segment runs."""
    sums: dict[str, tuple[int, int]] = {}
    for value in values:
        is_alive = value.made_by < end_op if graph == "forward" else max(value.read_by) >= first_op
        if is_alive:
            count, nbytes = sums.get(value.source or value.name, (0, 0))
            sums[value.source or value.name] = (count + 1, nbytes + value.nbytes)
    largest = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))[:limit]
    return [(source, count, nbytes) for source, (count, nbytes) in largest if nbytes]


def commonest_dtype(params: tuple[ParamInfo, ...]) -> str:
    """The dtype with most elements (of equals the first in the alphabet), which ``chunk_numel`` counts."""
    numel = dict.fromkeys(sorted(DTYPE_NBYTES), 0)
    for info in params:
        numel[info.dtype] += info.numel
    return max(numel, key=lambda dtype: numel[dtype])


def _digested(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that planning depends on."""
    names = type(value).__dataclass_fields__
    return {name: getattr(value, name) for name in names if name != "source" or not isinstance(value, Operator)}


def digest_of(data: Any, default: Callable[[Any], Any] | None = None) -> str:
    """First twelve hexadecimal digits of the SHA-256 of canonical JSON; ``default``: as of ``json.dumps``."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=default)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
