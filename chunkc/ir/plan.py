"""The plan: a layout, segments of both graphs, and programs with declared entry and exit states.

The verifier, the report and the executor read the same object; it saves to JSON with a format version and has a digest
over everything that decides what happens.

    forward, backward, step
    restore                 in place of step: param16 from param32 instead of an update, action for action
    abandon                 transition from the forward's exit to cold
    resume                  transition from cold to there, for a backward after something else ran
    evaluate                the only program of a plan for evaluation, from cold to cold

A program has a role, a position among the micro-batches of a step, and reduces gradients or not. Later ones add to
gradient chunks; in some plans ranks exchange nothing before the last (`Plan.defers_reduction`, `Program.left_out`).

    position    first               later                               last
    reduces     forward, backward   accumulate                          accumulate_last, what all have made
    does not    backward_unreduced  forward_again, accumulate_unreduced
    reduce_all              transition that does the same when something else comes before the last

With k in flight, as in a stage of a pipeline, k forwards come first, then backwards and forwards take turns, and k
backwards end the step (1F1B, Narayanan et al., SC 2021). A transition lies between two forwards or two backwards.

A transition, and ``evaluate``, ends with all streams joined; all but ``abandon`` begin so too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from chunkc.files import Decoder, FormatError, save_text, shown
from chunkc.ir.actions import VALUE_COPIES, Action, Op, Stream, parse
from chunkc.ir.layout import Layout
from chunkc.ir.schedule import SEGMENT_PREFIX, GraphKind, SavedValue, digest_of
from chunkc.ir.tiers import Tier
from chunkc.ir.work import Work

FORMAT_VERSION = 9

Role = Literal["forward", "backward", "step", "restore", "abandon", "resume", "reduce_all", "evaluate"]
ROLE_LETTER: dict[Role, str] = {
    "forward": "f", "backward": "b", "step": "s", "restore": "s",
    "abandon": "t", "resume": "t", "reduce_all": "t", "evaluate": "e",
}  # fmt: skip
"""The letter of labels; programs of one letter take turns, and share what their labels stand for."""
ROLE_GRAPH: dict[Role, GraphKind] = {"forward": "forward", "backward": "backward", "evaluate": "forward"}
"""The graph whose segments a program of that role runs."""
TRANSITIONS: frozenset[Role] = frozenset({"abandon", "resume", "reduce_all"})
Position = Literal["first", "later", "last"]
"""Of a micro-batch in its step; ``last``: behind others that have left gradients unreduced."""
Key = tuple[Role, Position, bool]
"""Role, position, and whether the program reduces gradients."""
_NAMES: dict[Key, str] = {
    ("forward", "later", False): "forward_again",
    ("backward", "later", True): "accumulate",
    ("backward", "first", False): "backward_unreduced",
    ("backward", "later", False): "accumulate_unreduced",
    ("backward", "last", True): "accumulate_last",
}
"""Names for people; other programs are called as their role."""
_EXCHANGES = frozenset({Op.GATHER, Op.REDUCE, Op.RELEASE, Op.NORM, Op.SUM})
_USUAL: Final = {"in_flight": 1, "waiting_nbytes": 0, "mesh": ()}
"""Fields that are not written where they have these values."""
MAX_MICRO_BATCHES: Final = 4096
"""Of an iteration at most, since simulations and reports list all of its actions one by one."""

Phase = Literal["cold", "saved", "graded", "unreduced"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of operators, ``operators[first_op:end_op]`` of its graph, without an action in between.

    ``reads``: parameters whose payload it reads; ``lands``: those whose gradients land when it ends (some may have
    been produced earlier). ``live_nbytes``: peak non-model bytes, gradients that have not landed included.
    ``workspace_nbytes``: allowance for what its kernels allocate inside operators. ``away_nbytes``: of the live ones,
    those of moved values that are away all the while.
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
    away_nbytes: int = 0

    @property
    def name(self) -> str:
        return f"{SEGMENT_PREFIX[self.graph]}.{self.index}"

    @property
    def nonmodel_nbytes(self) -> int:
        return self.live_nbytes - self.away_nbytes + self.workspace_nbytes


@dataclass(frozen=True, slots=True)
class MovedValue:
    """A saved value that leaves the device in forward and is back before backward reads it.

    ``index``: position in `Plan.saved`; ``a5`` is the target of its actions. ``made_by``, ``used_until``: operators of
    forward that make it, and that read it last (``made_by`` where none does). ``read_by``: the first and the last
    operator of backward that read it. Between ``discard`` and ``allocate`` it is *away*.
    """

    index: int
    nbytes: int
    made_by: int
    used_until: int
    read_by: tuple[int, int]

    @property
    def target(self) -> str:
        return f"a{self.index}"

    def is_made_in(self, segment: Segment) -> bool:
        return segment.graph == "forward" and segment.first_op <= self.made_by < segment.end_op

    def is_used_in(self, segment: Segment) -> bool:
        """Whether ``segment`` makes or reads it, or lies between two that do."""
        first, last = (self.made_by, self.used_until) if segment.graph == "forward" else self.read_by
        return first < segment.end_op and segment.first_op <= last


@dataclass(frozen=True, slots=True)
class State:
    """Where payloads and optimizer states stand between two programs.

    ``resident`` pairs a target (``c3``, ``os3``) with the slot it occupies. ``phase`` says what the payloads of trained
    chunks hold: ``cold`` and ``saved`` param16 (``saved``: activations wait for backward), ``graded`` grad16, unless
    gradients have chunks of their own. ``unreduced``: gradient chunks of all ranks hold what this rank has made.
    """

    phase: Phase
    resident: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Actions of one graph, of the step, or of a transition, told apart by `key`.

    ``numbers``: those of the actions' labels where the program leaves some out; empty: 0, 1, 2 and so on.
    """

    role: Role
    entry: State
    exit: State
    actions: tuple[Action, ...]
    position: Position = "first"
    reduces: bool = True
    numbers: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return self.role, self.position, self.reduces

    @property
    def name(self) -> str:
        return name_of(self.key)

    @property
    def begins_step(self) -> bool:
        """Whether this is the backward of a first micro-batch, which finds no gradients of its step."""
        return self.role == "backward" and self.position == "first"

    @property
    def is_repeated(self) -> bool:
        """Whether an iteration, or an evaluation, may have it; `Plan.iteration` says which it has."""
        return self.role not in ("restore", "abandon", "resume")

    @property
    def left_out(self) -> frozenset[Op]:
        """Kinds of actions that others of its role have: exchanges, and openings of what is open."""
        exchanges = frozenset[Op]() if self.reduces else _EXCHANGES
        return exchanges | {Op.OPEN} if self.entry.phase == "unreduced" else exchanges

    def without_begins(self) -> Program:
        """The program as it runs where no update is begun before its step."""
        numbered = zip(self.numbers or range(len(self.actions)), self.actions, strict=True)
        kept = {number: action for number, action in numbered if action.op is not Op.BEGIN}
        if len(kept) == len(self.actions):
            return self
        return replace(self, actions=tuple(kept.values()), numbers=tuple(kept))

    def label(self, position: int) -> str:
        return f"{ROLE_LETTER[self.role]}{self.numbers[position] if self.numbers else position}"

    def labelled(self) -> Iterator[tuple[str, Action]]:
        for position, action in enumerate(self.actions):
            yield self.label(position), action


def name_of(key: Key) -> str:
    """The name of a program for people."""
    return _NAMES.get(key, key[0])


@dataclass(frozen=True, slots=True)
class Memory:
    """Byte budgets and what a plan takes of them; ``is_estimate``: no fused segment was compiled yet."""

    device_budget_nbytes: int
    host_budget_nbytes: int
    arena_nbytes: int
    nonmodel_nbytes: int
    nonmodel_segment: str
    host_nbytes: int
    is_estimate: bool = False

    @property
    def device_peak_nbytes(self) -> int:
        """Static arena plus peak non-model bytes, workspace allowance included."""
        return self.arena_nbytes + self.nonmodel_nbytes

    @property
    def budgets(self) -> dict[Tier, int]:
        return {Tier.DEVICE: self.device_budget_nbytes, Tier.HOST: self.host_budget_nbytes}

    @property
    def needs(self) -> dict[Tier, int]:
        """Most bytes that the plan takes of each tier."""
        return {Tier.DEVICE: self.device_peak_nbytes, Tier.HOST: self.host_nbytes}


@dataclass(frozen=True, slots=True)
class StageRecord:
    """The record of one pass: its name, milliseconds, and a line for people."""

    name: str
    elapsed_ms: float
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One training iteration, decided; ``stages`` and ``saved`` are for people, not part of the digest.

    ``segments`` of forward stand before those of backward. ``trained_elsewhere``: parameters with an optimizer state
    whose gradients come from other graphs or eager operators; the step leaves them as they are. ``accumulate``: most
    micro-batches whose gradients one step takes. ``num_samples`` and ``num_tokens`` (0: unknown) are those of one
    micro-batch on this rank, as in `chunkc.ir.schedule.Schedule`. ``moves``: saved values that go to the host and back.
    ``in_flight``: most micro-batches whose forward has begun and whose backward has not ended; each but the one that
    runs holds ``waiting_nbytes`` of the device, which all segments count. ``mesh``: dimensions of the job's ranks with
    their sizes, neighbours along the last; empty: replicas, and in each the ranks of the layout.
    """

    model: str
    hw: str
    schedule_digest: str
    layout: Layout
    segments: tuple[Segment, ...]
    programs: tuple[Program, ...]
    memory: Memory
    moves: tuple[MovedValue, ...] = ()
    stages: tuple[StageRecord, ...] = field(default=(), compare=False)
    trained_elsewhere: tuple[int, ...] = ()
    num_samples: int = 0
    num_tokens: int = 0
    accumulate: int = 1
    in_flight: int = 1
    waiting_nbytes: int = 0
    mesh: tuple[tuple[str, int], ...] = ()
    saved: tuple[SavedValue, ...] = field(default=(), compare=False)

    @property
    def is_evaluation(self) -> bool:
        return any(p.role == "evaluate" for p in self.programs)

    @property
    def tracks_grad_norm(self) -> bool:
        """Whether gradients are measured as they land, and updates follow a decision."""
        return any(a.op is Op.DECIDE for p in self.programs for a in p.actions)

    @property
    def defers_reduction(self) -> bool:
        """Whether micro-batches before the last one of a step can do without exchanges between ranks."""
        return any(p.role == "reduce_all" for p in self.programs)

    @property
    def cold(self) -> State:
        """The canonical state: what stands on the device before the first program."""
        return self.program("evaluate" if self.is_evaluation else "forward").entry

    def program(self, role: Role, position: Position = "first", reduces: bool = True) -> Program:
        """The program of that key; KeyError when there is none."""
        key = (role, position, reduces)
        for program in self.programs:
            if program.key == key:
                return program
        raise KeyError(f"the plan has no program {key}; it has {', '.join(p.name for p in self.programs)}")

    def iteration(self) -> tuple[Program, ...]:
        """The programs of one iteration, or of one evaluation, in the order in which they run.

        Updates are begun in the last backward.
        """
        if self.is_evaluation:
            return (self.program("evaluate"),)
        defers, forward = self.defers_reduction, self.program("forward")
        first = self.program("backward", "first", not defers)
        if self.accumulate == 1:
            return (forward, first, self.program("step"))
        again = self.program("forward", "later", False) if defers else forward
        later = self.program("backward", "later", not defers)
        last = self.program("backward", "last") if defers else later
        backwards = [first.without_begins(), *(later.without_begins() for _ in range(self.accumulate - 2)), last]
        return (*self._interleaved(forward, again, backwards), self.program("step"))

    def _interleaved(self, forward: Program, again: Program, backwards: Sequence[Program]) -> Iterator[Program]:
        """Forwards and ``backwards`` of a step; ``again``: the forward behind the first backward."""
        abandon, resume = self.program("abandon"), self.program("resume")
        yield from (forward, *(abandon, forward) * (self.in_flight - 1))
        num_later = self.accumulate - self.in_flight
        for number, backward in enumerate(backwards):
            if number > num_later and backward.entry.phase != "unreduced":
                yield resume
            yield backward
            if number < num_later:
                yield again

    def labelled(self) -> Iterator[tuple[Program, str, Action]]:
        """Actions of one iteration in order, with program and unique label (``2:f12``: micro-batch 2)."""
        runs: dict[str, int] = {}
        for program in self.iteration():
            letter = ROLE_LETTER[program.role]
            runs[letter] = number = runs.get(letter, 0) + 1
            for label, action in program.labelled():
                yield program, label if number == 1 else f"{number}:{label}", action

    def segment(self, name: str) -> Segment:
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise KeyError(f"the plan has no segment {name!r}")

    def graph_segments(self, graph: GraphKind) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.graph == graph)

    @property
    def copies_nbytes(self) -> int:
        """Host bytes that the copies of moved values take, for one forward that waits for its backward."""
        return sum(value.nbytes for value in self.moves)

    @property
    def all_copies_nbytes(self) -> int:
        """Host bytes that the copies of all micro-batches in flight take."""
        return self.in_flight * self.copies_nbytes

    def nbytes_of(self, actions: Iterable[Action]) -> int:
        """Bytes that ``actions`` move over the host's link or from other ranks."""
        sizes = {value.target: value.nbytes for value in self.moves}
        return sum(
            sizes[action.target] if action.op in VALUE_COPIES else self.layout.moved_nbytes(action)
            for action in actions
        )

    def moved_nbytes(self, *streams: Stream) -> int:
        return self.nbytes_of(
            action for program in self.iteration() for action in program.actions if action.stream in streams
        )

    def digest(self) -> str:
        """Twelve hexadecimal digits over everything but ``stages`` and ``saved``."""
        data = self.to_json()
        del data["stages"], data["saved"]
        return digest_of(data)

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, programs=()))
        data["format_version"] = FORMAT_VERSION
        data = {name: value for name, value in data.items() if _USUAL.get(name, ...) != value}
        data["programs"] = [
            {**asdict(replace(program, actions=())), "actions": [str(action) for action in program.actions]}
            for program in self.programs
        ]
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan that ``to_json`` described, unchecked; ValueError, with the place, for other data."""
        if (version := data.get("format_version")) != FORMAT_VERSION or type(version) is not int:
            raise FormatError(
                f"plan format {shown(version)} is not supported; this release reads format {FORMAT_VERSION}: plan the "
                "model again"
            )
        given = {name: value for name, value in data.items() if name != "format_version"}
        return _DECODER.decode(Plan, {**_USUAL, **given})

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all; ChunkcError leaves what the file held."""
        save_text(path, json.dumps(self.to_json(), indent=1) + "\n")


_DECODER: Final = Decoder({Action: parse})
