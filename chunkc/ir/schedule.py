"""The operator schedule: one training iteration as the compiler sees it, before any decision is taken.

Capture turns the two FX graphs of a model into lists of operators in execution order. The schedule holds no tensors and
no graph nodes, so that passes can be tested on schedules written by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

GraphKind = Literal["forward", "backward"]
SEGMENT_PREFIX: dict[GraphKind, str] = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter; tied parameters are one parameter with several names.

    Attributes:
        name: its first name in ``named_parameters()`` order.
        aliases: its other names.
        shape: in elements.
        stride: in elements; dense and non-overlapping.
        dtype: the compute dtype that the graphs read (a key of ``DTYPE_NBYTES``).
        trainable: whether it had ``requires_grad`` at capture.
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
        name: the FX node's name.
        target: the operator, for example ``aten.mm.default``.
        reads: indexes of the parameters whose payload it reads.
        grads: indexes of the parameters whose gradient is final once it has run.
        flops: floating-point operations of matrix products, convolutions and (unmasked) attention; others count none.
        nbytes: bytes that it moves to and from device memory, as the compiler of segments runs it: alone or fused.
        live_nbytes: non-model bytes alive while it runs: inputs, outputs and whatever later operators still need, but
            no final gradients of earlier operators.
        live_after_nbytes: the same once it has run and its dead inputs are gone, without its own final gradients.
        workspace_nbytes: allowance for what its kernel allocates while it runs.
        layer: path of the module that it belongs to, for people.
        dtype: of its first floating-point operand, by torch's name; empty where there is none.
        num_kernels: kernels that it launches: none for a view, and where operators are fused one for all.
        tangents_nbytes: of live gradients that autograd handed to backward; part of ``live_nbytes``.
        source: the user's line that called it (``model.py:31``); empty where unknown.
        saved_nbytes: of its results that backward reads.
        read_by: positions of the backward operators that read them.
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
    source: str = ""
    saved_nbytes: int = 0
    read_by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that the forward makes and backward reads.

    Attributes:
        name: of the forward operator that makes it.
        source: the user's line that called the operator (``model.py:31``); empty where unknown.
        nbytes: of its storages.
        made_by: position of that operator in the forward graph.
        read_by: positions of the backward operators that read it.
    """

    name: str
    source: str
    nbytes: int
    made_by: int
    read_by: tuple[int, ...]


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

    ``params`` are all parameters of the model in ``named_parameters()`` order, those that no graph uses included.
    ``held_nbytes`` are non-model bytes that the user holds across the iteration (inputs and outputs). ``also_trained``
    are parameters whose gradients come from elsewhere: another graph of the model, or eager operators.
    ``num_samples`` is the size of the first dimension of the largest input, ``num_tokens`` the elements of the largest
    integer input with two dimensions or more (for example ``input_ids``); 0 where there is none.
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
        """Whether there is nothing to train: a forward without gradients."""
        return not self.backward.operators

    @property
    def graphs(self) -> tuple[GraphSchedule, GraphSchedule]:
        return (self.forward, self.backward)

    def used_params(self) -> frozenset[int]:
        """Indexes of the parameters that some graph reads or produces a gradient for."""
        return frozenset(p for graph in self.graphs for op in graph.operators for p in (*op.reads, *op.grads))

    def trained_params(self) -> frozenset[int]:
        """Indexes of the parameters for which backward produces a gradient."""
        return frozenset(p for op in self.backward.operators for p in op.grads)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dump``."""
        return asdict(self)

    def saved_values(self) -> tuple[SavedValue, ...]:
        """All values that the forward makes and backward reads."""
        operators = enumerate(self.forward.operators)
        return tuple(
            SavedValue(op.name, op.source, op.saved_nbytes, i, op.read_by) for i, op in operators if op.read_by
        )

    def digest(self) -> str:
        """Twelve hexadecimal digits over all that planning depends on, equal on every machine."""
        data = self.to_json()
        for operator in (*data["forward"]["operators"], *data["backward"]["operators"]):
            for name in ("source", "saved_nbytes", "read_by"):
                del operator[name]
        return digest_of(data)


def largest_saved(
    values: Sequence[SavedValue], graph: GraphKind, first_op: int, end_op: int, limit: int = 3
) -> list[tuple[str, int, int]]:
    """Lines of the user whose saved values take most while a segment runs: ``(source, count, bytes)``.

    The segment has the operators ``first_op:end_op`` of ``graph``. A value of unknown source goes by its own name.
    """
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


def digest_of(data: Any) -> str:
    """First twelve hexadecimal digits of the SHA-256 of canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
