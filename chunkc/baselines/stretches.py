"""Operators of a schedule, layer by layer, as papers describe systems.

A *stretch* is a run of operators of one layer, or of none (embeddings, heads): in backward what is computed again and
the gradients of it. Operators without a module, such as sums of gradients, belong to the layer before them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from chunkc.ir.schedule import SEGMENT_PREFIX, GraphKind, Operator, Schedule, commonest_dtype
from chunkc.ir.work import Work, work_of

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of operators; ``fwd.3`` is the fourth of forward.

    ``reads`` and ``grads``: parameters read, each once, and those whose gradient is final in it. ``nonmodel_nbytes``:
    most bytes of activations, workspace and gradients while it runs.
    """

    graph: GraphKind
    name: str
    reads: tuple[int, ...]
    grads: tuple[int, ...]
    work: tuple[Work, ...]
    nonmodel_nbytes: int

    @property
    def params(self) -> tuple[int, ...]:
        """All parameters that it touches, each once."""
        return tuple(dict.fromkeys((*self.reads, *self.grads)))


@dataclass(frozen=True)
class Course:
    """One iteration of a model in stretches: those of forward, then those of backward."""

    schedule: Schedule
    stretches: tuple[Stretch, ...]
    model: str = ""

    @classmethod
    def of(cls, schedule: Schedule, model: str = "") -> Course:
        """The stretches of ``schedule``."""
        stretches = []
        for graph in schedule.graphs:
            for number, (_, operators) in enumerate(runs_of(graph.operators)):
                name = f"{SEGMENT_PREFIX[graph.kind]}.{number}"
                stretches.append(_stretch(schedule, graph.kind, name, operators))
        return cls(schedule, tuple(stretches), model)

    @cached_property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(info.numel for info in self.schedule.params)

    @cached_property
    def trained_numel(self) -> int:
        """Those that an optimizer updates."""
        return sum(self.schedule.params[p].numel for p in self.schedule.trained_params())

    @cached_property
    def nonmodel_nbytes(self) -> int:
        """The peak of all stretches."""
        return max((s.nonmodel_nbytes for s in self.stretches), default=0)

    @cached_property
    def dtype(self) -> str:
        """Of most parameters' payloads."""
        return commonest_dtype(self.schedule.params)

    @property
    def next_fetched_nbytes(self) -> int:
        """Most bytes of a stretch with its own parameters and those that come for the next one."""
        ahead = [*self.stretches[1:], *self.stretches[:1]]
        return max(
            s.nonmodel_nbytes + self.nbytes(s.params) + self.nbytes(following.params)
            for s, following in zip(self.stretches, ahead, strict=True)
        )

    def nbytes(self, params: Sequence[int]) -> int:
        return sum(self.schedule.params[p].nbytes for p in params)

    def numel_of(self, params: Sequence[int]) -> int:
        return sum(self.schedule.params[p].numel for p in params)

    def graph(self, kind: GraphKind) -> tuple[Stretch, ...]:
        return tuple(s for s in self.stretches if s.graph == kind)


def runs_of(operators: Sequence[Operator]) -> list[tuple[str, list[Operator]]]:
    """Operators cut where the layer changes, with the path of each layer; empty where there is none."""
    runs: list[tuple[str, list[Operator]]] = []
    for op in operators:
        match = _LAYER.match(op.layer)
        layer = match[0] if match else ""
        if runs and (not op.layer or layer == runs[-1][0]):
            runs[-1][1].append(op)
        else:
            runs.append((layer, [op]))
    return runs


def _stretch(schedule: Schedule, graph: GraphKind, name: str, operators: Sequence[Operator]) -> Stretch:
    peak = made = 0
    for op in operators:
        peak = max(peak, op.live_nbytes + op.workspace_nbytes + made)
        made += sum(schedule.params[p].nbytes for p in op.grads) if graph == "backward" else 0
    return Stretch(
        graph=graph,
        name=name,
        reads=tuple(dict.fromkeys(p for op in operators for p in op.reads)),
        grads=tuple(dict.fromkeys(p for op in operators for p in op.grads)),
        work=work_of(operators),
        nonmodel_nbytes=peak,
    )
