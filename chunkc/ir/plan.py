"""The plan: a layout, segments of both graphs, and programs with declared entry and exit states.

The plan decides everything. The verifier, the report and the executor read the same object; it saves to JSON with a
format version and has a digest over everything that decides what happens (not over how long planning took).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from chunkc.files import Decoder, FormatError, save_text, shown
from chunkc.ir.actions import Action, Op, Stream, parse
from chunkc.ir.layout import Layout
from chunkc.ir.schedule import SEGMENT_PREFIX, GraphKind, digest_of
from chunkc.ir.work import Work

FORMAT_VERSION = 6

Role = Literal["forward", "backward", "step", "transition", "evaluate"]
ROLE_LETTER: dict[Role, str] = {"forward": "f", "backward": "b", "step": "s", "transition": "t", "evaluate": "e"}
ROLE_GRAPH: dict[Role, GraphKind] = {"forward": "forward", "backward": "backward", "evaluate": "forward"}
"""The graph whose segments a program of that role runs."""
MAX_MICRO_BATCHES: Final = 4096
"""Of an iteration at most, since simulations and reports list all of its actions one by one."""

DEFERRING_PROGRAMS = ("forward_again", "backward_unreduced", "accumulate_unreduced", "accumulate_last", "reduce_all")
"""Those of micro-batches that exchange nothing before the last one."""
REPEATED_PROGRAMS = ("forward", "backward", "accumulate", "step", "evaluate", *DEFERRING_PROGRAMS)
"""What may be part of an iteration, or of an evaluation; ``Plan.iteration`` says what is, and how often."""
FIRST_BACKWARDS = frozenset({"backward", "backward_unreduced"})
"""The backwards of a first micro-batch, which find no gradients of their step."""
Phase = Literal["cold", "saved", "graded", "unreduced"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of operators that executes without an action in between.

    Attributes:
        graph: which graph it belongs to.
        index: its position in that graph.
        first_op, end_op: its operators are ``operators[first_op:end_op]``.
        reads: indexes of the parameters whose payload it reads.
        lands: indexes of the parameters whose gradients land when it ends (some may have been produced earlier).
        live_nbytes: peak non-model bytes while it runs, gradients that have not landed included.
        workspace_nbytes: allowance for what its kernels allocate inside operators.
        work: what it computes, for a cost model.
    """

    graph: GraphKind
    index: int
    first_op: int
    end_op: int
    reads: tuple[int, ...]
    lands: tuple[int, ...]
    live_nbytes: int
    workspace_nbytes: int
    work: tuple[Work, ...] = ()

    @property
    def name(self) -> str:
        return f"{SEGMENT_PREFIX[self.graph]}.{self.index}"

    @property
    def nonmodel_nbytes(self) -> int:
        """Device bytes beside the arena that it may need."""
        return self.live_nbytes + self.workspace_nbytes


@dataclass(frozen=True, slots=True)
class State:
    """Where payloads and optimizer states stand between two programs.

    ``resident`` pairs a target (``c3``, ``os3``) with the slot it occupies. ``phase`` says what the payloads of trained
    chunks hold: ``cold`` and ``saved`` param16 (``saved``: activations of a forward wait for backward), ``graded``
    grad16 of the finished backward. Where gradients have chunks of their own, payloads always hold param16.
    ``unreduced``: gradient chunks of all ranks hold what this rank's micro-batches have made, and groups are gathered.
    """

    phase: Phase
    resident: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Actions of one graph, of the step, or of a transition; ``role`` gives the letter of its labels."""

    name: str
    role: Role
    entry: State
    exit: State
    actions: tuple[Action, ...]

    def label(self, position: int) -> str:
        """The label by which other actions wait for the action at ``position``."""
        return f"{ROLE_LETTER[self.role]}{position}"

    def labelled(self) -> Iterator[tuple[str, Action]]:
        for position, action in enumerate(self.actions):
            yield self.label(position), action


@dataclass(frozen=True, slots=True)
class Memory:
    """Byte budgets of one rank and what the plan takes of them.

    ``is_bound``: whether the non-model bytes are those of operators that run one by one, where the segments will be
    compiled by something that fuses operators and takes fewer.
    """

    device_budget_nbytes: int
    host_budget_nbytes: int
    arena_nbytes: int
    nonmodel_nbytes: int
    nonmodel_segment: str
    host_nbytes: int
    is_bound: bool = False

    @property
    def device_peak_nbytes(self) -> int:
        """Static arena plus peak non-model bytes, workspace allowance included."""
        return self.arena_nbytes + self.nonmodel_nbytes


@dataclass(frozen=True, slots=True)
class StageRecord:
    """The record of one pass: its name, milliseconds, and a line for people."""

    name: str
    elapsed_ms: float
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One training iteration, decided.

    Attributes:
        model: class name of the model.
        hw: canonical spelling of the hardware.
        schedule_digest: digest of the operator schedule that it was made from.
        layout: mapping, homes, arena.
        segments: of the forward graph, then of the backward graph.
        programs: ``forward``, ``backward``, ``step``; ``restore`` (role ``step``: param16 from param32 instead of an
            update, action for action); ``abandon`` (role ``transition``: from the forward's exit to cold) and
            ``resume`` (from cold to there, for a backward after something else ran; it also begins with all streams
            joined). A transition ends with all streams joined. With micro-batches (``accumulate`` above 1) ``backward``
            is that of the first of a step and ``accumulate`` that of the others: the same actions, but gradients are
            added to what the gradient chunks hold, where the first opens these empty. Where ranks share groups and all
            chunks have slots of their own, the micro-batches of a step before the last can do without exchanges
            (``defers_reduction``): ``backward_unreduced`` and ``accumulate_unreduced`` reduce and release nothing,
            ``forward_again`` finds its groups gathered, ``accumulate_last`` reduces what all of them have made, and so
            does the transition ``reduce_all`` (it also begins joined) when something else comes before that. They are
            the actions of ``forward``, ``backward`` and ``accumulate`` with ``keep`` in place of those exchanges. A
            plan for evaluation has one program, ``evaluate``, from cold to cold and joined like a transition, over the
            segments of its only graph, a forward graph.
        memory: budgets and peaks.
        stages: provenance, not part of the digest.
        trained_elsewhere: parameters with an optimizer state whose gradients come from other graphs of the model or
            from eager operators; here the step leaves them as they are.
        accumulate: micro-batches (forwards and backwards) of an iteration, whose gradients one step takes; at most.
        num_samples, num_tokens: of one micro-batch on this rank, as in `chunkc.ir.schedule.Schedule`; 0 where unknown.
    """

    model: str
    hw: str
    schedule_digest: str
    layout: Layout
    segments: tuple[Segment, ...]
    programs: tuple[Program, ...]
    memory: Memory
    stages: tuple[StageRecord, ...] = field(default=(), compare=False)
    trained_elsewhere: tuple[int, ...] = ()
    num_samples: int = 0
    num_tokens: int = 0
    accumulate: int = 1

    @property
    def is_evaluation(self) -> bool:
        """Whether this is a forward without gradients, not a training iteration."""
        return any(p.role == "evaluate" for p in self.programs)

    @property
    def measures(self) -> bool:
        """Whether gradients are measured as they land, and updates follow a decision."""
        return any(a.op is Op.DECIDE for p in self.programs for a in p.actions)

    @property
    def defers_reduction(self) -> bool:
        """Whether micro-batches before the last one of a step can do without exchanges between ranks."""
        return any(p.name == "reduce_all" for p in self.programs)

    @property
    def cold(self) -> State:
        """The canonical state: what stands on the device before the first program."""
        return self.program("evaluate" if self.is_evaluation else "forward").entry

    def program(self, name: str) -> Program:
        """The program called ``name``.

        Raises:
            KeyError: when there is none.
        """
        for program in self.programs:
            if program.name == name:
                return program
        raise KeyError(f"the plan has no program {name!r}; it has {', '.join(p.name for p in self.programs)}")

    def iteration(self) -> tuple[Program, ...]:
        """The programs of one iteration, or of one evaluation, in the order in which they run."""
        if self.is_evaluation:
            return (self.program("evaluate"),)
        if self.defers_reduction:
            between = ["backward_unreduced", *("forward_again", "accumulate_unreduced") * (self.accumulate - 2)]
            between += ["forward_again", "accumulate_last"]
        else:
            between = ["backward", *("forward", "accumulate") * (self.accumulate - 1)]
        return tuple(map(self.program, ("forward", *between, "step")))

    def labelled(self) -> Iterator[tuple[Program, str, Action]]:
        """Every action of one iteration, in order, with its program and a label that is its own.

        From the second micro-batch on labels carry its number: ``2:f12``.
        """
        runs: dict[str, int] = {}
        for program in self.iteration():
            letter = ROLE_LETTER[program.role]
            runs[letter] = number = runs.get(letter, 0) + 1
            for label, action in program.labelled():
                yield program, label if number == 1 else f"{number}:{label}", action

    def segment(self, name: str) -> Segment:
        """The segment called ``name``, for example ``bwd.3``."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise KeyError(f"the plan has no segment {name!r}")

    def graph_segments(self, graph: GraphKind) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.graph == graph)

    def moved_nbytes(self, stream: Stream) -> int:
        """Bytes that one iteration (micro-batches and step), or one evaluation, moves over a stream.

        Over ``h2d`` or ``d2h`` what it copies. Over ``comm`` the payload bytes that this rank receives, padding
        included; `Layout.moved_nbytes` says how each action counts.
        """
        return sum(
            self.layout.moved_nbytes(action)
            for program in self.iteration()
            for action in program.actions
            if action.stream is stream
        )

    def digest(self) -> str:
        """Twelve hexadecimal digits over everything but ``stages``."""
        data = self.to_json()
        del data["stages"]
        return digest_of(data)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dump``; actions in their text form."""
        data = asdict(self)
        data["format_version"] = FORMAT_VERSION
        for program, source in zip(data["programs"], self.programs, strict=True):
            program["actions"] = [str(a) for a in source.actions]
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that ``to_json`` described; neither its references nor its safety are checked.

        Raises:
            ValueError: on another format version, and for data that are none of a plan, with the place.
        """
        version = data.get("format_version")
        if version != FORMAT_VERSION or type(version) is not int:
            raise FormatError(
                f"plan format {shown(version)} is not supported; this release reads format {FORMAT_VERSION}: plan the "
                "model again"
            )
        return _DECODER.decode(Plan, {name: value for name, value in data.items() if name != "format_version"})

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all.

        Raises:
            ChunkcError: it cannot be written; what the file held, it holds.
        """
        save_text(path, json.dumps(self.to_json(), indent=1) + "\n")


_DECODER: Final = Decoder({Action: parse})
