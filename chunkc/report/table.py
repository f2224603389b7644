"""The table that ``print(plan)`` shows: what runs, what it reads, what the device holds, what moves.

Segments of equal structure are folded into one line. Layers do not meet chunks in step (a layer may end in the middle
of a chunk), so equality is tried in three strengths and the strongest that fits the screen is taken: operators, shapes
and what is put away; operators and shapes; operators alone. If none fits, unequal neighbours share a line and say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.plan import Plan, Program
from chunkc.ir.tiers import COPIED_TIERS, SLOWER_TIERS, Tier
from chunkc.report.columns import SCREEN_COLUMNS, shorten, wrapped
from chunkc.report.fold import Run, fold, merge
from chunkc.report.moments import Moment, moments
from chunkc.report.units import (
    ESTIMATE_NOTE,
    Unit,
    percent,
    plural,
    printable,
    ranges,
    repeated,
    replicas_of,
    unit_of,
)

MAX_PROGRAM_ROWS = 9
_MAX_CHUNKS_COLUMNS = 16
_BELOW = " " * 6  # before actions that stand below their segments
_HEADINGS = ("segments", "ops", "chunks read", "size", "live", "total")
_LEFT_ALIGNED = (0, 2)
_AHEAD = frozenset(
    {Op.FETCH, Op.LOAD, Op.GATHER, Op.ALLOCATE, Op.RELOAD, Op.RUN}
)  # such an action belongs to the next segment
_ON_ANY_STREAM = frozenset({Op.BEGIN, Op.UPDATE, Op.RESTORE, Op.NORM, Op.DECIDE})
_MEANINGS = {
    "restore": ", in place of step: gradients are given up",
    "evaluate": ", a forward without gradients",
    "abandon": ", in place of backward: a forward that no backward follows",
    "resume": ", before a backward that is not right behind its forward",
    "reduce_all": ", when something comes before the last micro-batch",
}
_OF_POSITION = {"first": "the first micro-batch", "later": "later micro-batches", "last": "the last, reduces all"}
_LEGEND = (
    "[fwd.1-12] x12    12 equal segments: ops of one, chunks and actions of all,",
    "                  largest live and total.  x4 of 3: a part of 3 segments 4 times",
    "[bwd.1-3] mixed   different segments in one line, for space: ops of all of them",
    "ops, chunks read  operators; chunks whose parameters they read, and their size",
    "live, total       activations, gradients under way, workspace; with the arena",
    "c3, os3, g3       chunk; its fp32 parameter and states; group of chunks",
    "fetch, load       to the device.  evict, store: to the host.  drop: home has it",
    "stash             gradients land.  update: step.  restore: parameter from fp32",
)
_LEGEND_OF_RANKS = (
    "gather, release   other ranks' chunks come, go.  reduce: gradients to the owner",
    "norm, sum         squares of gradients: of a chunk, over all ranks, for decide",
)
_LEGEND_OF_MOVES = (
    "offload, discard  a saved value (a3) is copied to the host, and leaves the device",
    "allocate, reload  it has device memory again, and comes back",
)


@dataclass(frozen=True, slots=True)
class _Step:
    """One segment with its actions: what is brought in before it, it, and what is put away behind it."""

    moment: Moment
    actions: tuple[Action, ...]

    @property
    def num_ops(self) -> int:
        return self.moment.segment.end_op - self.moment.segment.first_op


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the table: aligned cells and the actions behind them, or a heading across all columns."""

    cells: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    heading: str = ""


def render(plan: Plan) -> str:
    """The table of ``plan``, as wide as a screen, with sizes in the one unit that its first line names."""
    unit = unit_of(plan)
    rows = [row for program in plan.programs for row in _program(plan, program, unit)]
    legend = _LEGEND + (_LEGEND_OF_RANKS if plan.layout.world_size > 1 else ())
    legend += _LEGEND_OF_MOVES if plan.moves else ()
    parts = (
        (_header(plan, unit), "    "),
        (_aligned(rows), " " * 8),
        (_totals(plan, unit), "  "),
        (legend, " " * 18),
    )
    return "\n\n".join("\n".join(wrapped(printable(line), indent) for line in lines) for lines, indent in parts)


def _header(plan: Plan, unit: Unit) -> Iterator[str]:
    memory, layout = plan.memory, plan.layout
    is_one = layout.world_size == 1 and not plan.mesh
    ranks = "" if is_one else f", rank {layout.rank} of {layout.world_size}{replicas_of(plan)}"
    yield f"plan {plan.digest()}: {plan.model} on {plan.hw}{ranks}, sizes in {unit.name}"
    peak, budget = memory.device_peak_nbytes, memory.device_budget_nbytes
    yield f"  device  planned peak {unit.of(peak)} of budget {unit.of(budget)} ({percent(peak, budget)}):"
    yield (
        f"          arena {unit.of(memory.arena_nbytes)} + live {unit.of(memory.nonmodel_nbytes)} "
        f"at {memory.nonmodel_segment}"
    )
    for tier in SLOWER_TIERS:
        needed, there = memory.needs[tier], memory.budgets[tier]
        yield f"  {tier:6}  {unit.of(needed)} of budget {unit.of(there)} ({percent(needed, there)})"
    if memory.is_estimate:
        yield f"  {ESTIMATE_NOTE}"
    yield f"  model   {unit.of(layout.model_data_nbytes())} of parameters and optimizer states:"
    yield (
        f"          {plural(len(layout.params), 'parameter')} in {plural(len(layout.chunks), 'chunk')} "
        f"of {layout.chunk_numel:,} elements"
    )


def _aligned(rows: Sequence[_Row]) -> Iterator[str]:
    """Columns as wide as their widest cell, with actions behind them, or below where there is no room."""
    cells = [_HEADINGS, *(row.cells for row in rows if row.cells)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]

    def line(values: tuple[str, ...]) -> str:
        padded = (
            v.ljust(w) if i in _LEFT_ALIGNED else v.rjust(w)
            for i, (v, w) in enumerate(zip(values, widths, strict=True))
        )
        return "  " + "  ".join(padded) + "  "

    yield line(_HEADINGS) + "actions"
    for row in rows:
        if row.heading:
            yield row.heading
            continue
        start = line(row.cells) if row.cells else "  "
        shown, fits = _brief(row.actions, SCREEN_COLUMNS - len(start))
        if row.cells and not fits:
            yield start.rstrip()
            start = _BELOW
        yield (start + shown).rstrip()


def _program(plan: Plan, program: Program, unit: Unit) -> Iterator[_Row]:
    """A heading, then a row for each run of equal segments, or one for a program without segments.

    A program that repeats another one with less has no row.
    """
    meaning = _MEANINGS.get(program.role, "")
    if program.name != program.role:
        of, without = _OF_POSITION[program.position], "" if program.reduces else ", without exchanges"
        meaning = f", {program.role} of {of}{without}"
    yield _Row(heading=f"{program.name} ({plural(len(program.actions), 'action')}){meaning}")
    steps = _steps(plan, program)
    if program.numbers:
        return  # the actions of a program above it
    if not steps:
        yield _Row(actions=program.actions)
        return
    for run in merge(_fitting_runs(plan, steps), MAX_PROGRAM_ROWS):
        yield _row(plan, steps, run, unit)


def _steps(plan: Plan, program: Program) -> list[_Step]:
    steps: list[_Step] = []
    first = 0
    for moment in moments(plan, program):
        end = moment.position + 1
        while end < len(program.actions) and program.actions[end].op not in _AHEAD:
            end += 1
        steps.append(_Step(moment, program.actions[first:end]))
        first = end
    if steps:  # what the program still brings in behind its last segment
        steps[-1] = _Step(steps[-1].moment, steps[-1].actions + program.actions[first:])
    return steps


def _fitting_runs(plan: Plan, steps: Sequence[_Step]) -> tuple[Run, ...]:
    """Folded by the strongest equality whose lines fit; by the weakest when none does."""
    for strength in (2, 1):
        runs = fold([_structure(plan, step, strength) for step in steps])
        if len(runs) <= MAX_PROGRAM_ROWS:
            return runs
    return fold([step.num_ops for step in steps])


def _structure(plan: Plan, step: _Step, strength: int) -> Hashable:
    """A key that segments share where one line may stand for both; fetches ahead belong to later ones."""
    segment, params = step.moment.segment, plan.layout.params
    shapes = tuple(tuple((params[p].shape, params[p].dtype) for p in group) for group in (segment.reads, segment.lands))
    put_away = Counter(str(a.op) for a in step.actions if a.op not in _AHEAD)
    return step.num_ops, shapes, tuple(sorted(put_away.items())) if strength == 2 else ()


def _row(plan: Plan, steps: Sequence[_Step], run: Run, unit: Unit) -> _Row:
    part = steps[run.first : run.end]
    chunks = plan.layout.chunks_of({p for s in part for p in s.moment.segment.reads})
    cells = (
        _name(part, run),
        f"{sum(s.num_ops for s in part[: run.period]):,}",
        shorten(ranges("c", chunks), _MAX_CHUNKS_COLUMNS) if chunks else "none",
        unit.of(sum(plan.layout.chunks[c].nbytes for c in chunks)),
        unit.of(max(s.moment.segment.nonmodel_nbytes for s in part)),
        unit.of(max(s.moment.total_nbytes for s in part)),
    )
    return _Row(cells, tuple(a for s in part for a in s.actions if a.op is not Op.RUN))


def _name(part: Sequence[_Step], run: Run) -> str:
    first, last = part[0].moment.segment, part[-1].moment.segment
    if len(part) == 1:
        return first.name
    name = f"[{first.name}-{last.index}]"
    if run.num_repeats == 1:
        return f"{name} mixed"
    return f"{name} x{run.num_repeats}" + (f" of {run.period}" if run.period > 1 else "")


def _brief(actions: Sequence[Action], width: int) -> tuple[str, bool]:
    """Actions by kind with targets, ``fetch c0 c13, drop c13``, and whether they fit ``width`` columns.

    Where targets do not even fit a line of their own, the numbers of actions stand for them, ``fetch x2``.
    """
    kinds: dict[str, list[Action]] = {}
    for action in actions:
        name = f"{action.op} @{action.stream}" if action.op in _ON_ANY_STREAM else str(action.op)
        kinds.setdefault(name, []).append(action)
    text = ", ".join(_targets(name, group) for name, group in kinds.items()) or "none"
    if len(text) > SCREEN_COLUMNS - len(_BELOW):
        text = ", ".join(f"{name} x{len(group)}" for name, group in kinds.items())
    return text, len(text) <= width


def _targets(name: str, actions: Sequence[Action]) -> str:
    numbers: dict[str, list[int]] = {}
    for action in actions:
        if action.target:
            numbers.setdefault(action.target.rstrip("0123456789"), []).append(action.index)
    return " ".join([name, *(ranges(prefix, group) for prefix, group in numbers.items())])


def _totals(plan: Plan, unit: Unit) -> Iterator[str]:
    moved = ", ".join(
        f"{unit.named(plan.moved_nbytes(stream))} {source} to {destination}"
        for stream, (source, destination) in COPIED_TIERS.items()
    )
    if plan.layout.world_size > 1:
        moved += f", {unit.named(plan.moved_nbytes(Stream.COMM))} from other ranks"
    yield f"moved per {repeated(plan)}: {moved}"
    owned, layout = plan.layout.owned(), plan.layout
    num_payloads, num_states = sum(c.is_resident for c in owned), sum(c.has_resident_os for c in owned)
    if not num_payloads and not num_states:
        yield "always on the device: nothing"
        return
    yield (
        f"always on the device: {plural(num_payloads, 'chunk')} ({unit.named(layout.payload_nbytes(Tier.DEVICE))}), "
        f"{plural(num_states, 'optimizer state')} ({unit.named(layout.os_nbytes(Tier.DEVICE))})"
    )
