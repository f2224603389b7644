"""Everything a plan holds, readable as a program: what ``plan.text()`` returns.

In a program each action stands on a line of its own behind its label, in the form that `chunkc.ir.actions.parse` reads
back; all other lines of a program start with ``#``. Before each ``run`` stands its moment: what is resident, and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from chunkc.ir.layout import Chunk, Layout, Placement
from chunkc.ir.plan import Plan, Program, State
from chunkc.ir.tiers import SLOWER_TIERS
from chunkc.report.columns import wrapped
from chunkc.report.moments import Moment, moments
from chunkc.report.units import ESTIMATE_NOTE, Unit, plural, printable, ranges, replicas_of, unit_of


def full_text(plan: Plan) -> str:
    """The whole plan as text, with sizes in the one unit that its first line names."""
    unit = unit_of(plan)
    sections = [_header(plan, unit), _stages(plan), _layout(plan.layout, unit), _slots(plan.layout, unit)]
    sections += [_program(plan, program, unit) for program in plan.programs]
    return "\n\n".join("\n".join(map(_fitted, section)) for section in sections) + "\n"


def _fitted(line: str) -> str:
    """``line`` within a screen's columns: it goes on further to the right, a comment as a comment."""
    indent = " " * (len(line) - len(line.lstrip()))
    return wrapped(printable(line), "  #     " if line.startswith("  #") else f"{indent}    ")


def _header(plan: Plan, unit: Unit) -> Iterator[str]:
    memory, layout = plan.memory, plan.layout
    yield f"plan {plan.digest()}: {plan.model} on {plan.hw}, sizes in {unit.name}"
    ranks = f"rank {layout.rank} of world size {layout.world_size}{replicas_of(plan)}"
    yield f"  schedule {plan.schedule_digest}, {ranks}"
    yield (
        f"  device: planned peak {unit.of(memory.device_peak_nbytes)} of budget "
        f"{unit.of(memory.device_budget_nbytes)} = arena {unit.of(memory.arena_nbytes)} + non-model "
        f"{unit.of(memory.nonmodel_nbytes)} at {memory.nonmodel_segment}"
    )
    for tier in SLOWER_TIERS:
        yield f"  {tier}: {unit.of(memory.needs[tier])} of budget {unit.of(memory.budgets[tier])}"
    if memory.is_estimate:
        yield f"  {ESTIMATE_NOTE}"


def _stages(plan: Plan) -> Iterator[str]:
    total_ms = sum(stage.elapsed_ms for stage in plan.stages)
    yield f"made in {total_ms:,.1f} ms by these passes" if plan.stages else "made by hand: no pass is recorded"
    width = max((len(stage.name) for stage in plan.stages), default=0)
    for stage in plan.stages:
        yield f"  {stage.name:<{width}} {stage.elapsed_ms:>10,.1f} ms  {stage.note}".rstrip()


def _layout(layout: Layout, unit: Unit) -> Iterator[str]:
    yield (
        f"layout: {plural(len(layout.params), 'parameter')} in {plural(len(layout.chunks), 'chunk')}; parameters stand "
        f"below their chunk with offset (elements), name and shape"
    )
    for chunk in layout.chunks:
        yield _chunk(layout, chunk, unit)
        for param in layout.params_of(chunk.index):
            yield "    " + _parameter(layout, layout.placements[param], chunk.index)


def _chunk(layout: Layout, chunk: Chunk, unit: Unit) -> str:
    parts = [
        f"  c{chunk.index}: {chunk.list}",
        chunk.dtype,
        f"{chunk.used_numel:,} of {chunk.numel:,} elements used",
        unit.named(chunk.nbytes),
        f"home {chunk.home}",
    ]
    if chunk.os_home is not None:
        parts.append(f"os{chunk.index} {unit.named(layout.os_nbytes_of(chunk))} home {chunk.os_home}")
    if chunk.partner is not None:
        parts.append(f"gradients of c{chunk.partner}")
    if layout.world_size > 1:
        parts.append(f"group g{layout.group_of(chunk.index).index} owned by rank {layout.owner(chunk.index)}")
    return ", ".join(parts)


def _parameter(layout: Layout, placement: Placement, chunk: int) -> str:
    info = layout.params[placement.param]
    offset = f"{placement.offset:>12,}" if chunk == placement.chunk else f"{'continued':>12}"
    text = f"{offset}  {info.name}  {list(info.shape)}"
    if info.aliases:
        text += f", also {', '.join(info.aliases)}"
    if placement.num_chunks > 1 and chunk == placement.chunk:
        text += f", spans c{placement.chunk}-{placement.chunks[-1]}"
    return text


def _slots(layout: Layout, unit: Unit) -> Iterator[str]:
    yield f"arena: {layout.arena_nbytes:,} bytes in {plural(len(layout.slots), 'slot')}; bytes from .. to below"
    for slot in layout.slots:
        yield f"  d{slot.index}: {slot.offset:,} .. {slot.end:,} ({unit.named(slot.nbytes)})"


def _program(plan: Plan, program: Program, unit: Unit) -> Iterator[str]:
    yield f"program {program.name} (role {program.role}): {plural(len(program.actions), 'action')}"
    yield f"  # entry {_state(program.entry)}"
    upcoming = {moment.position: moment for moment in moments(plan, program)}
    width = len(program.label(max(0, len(program.actions) - 1)))
    for position, (label, action) in enumerate(program.labelled()):
        if position in upcoming:
            yield from _moment(plan, upcoming[position], unit)
        yield f"  {label:<{width}}  {action}"
    yield f"  # exit {_state(program.exit)}"


def _state(state: State) -> str:
    return f"{state.phase}: resident {_resident(state.resident)}"


def _resident(pairs: tuple[tuple[str, int], ...]) -> str:
    """Targets and slots, by slot; where both count up together, as ranges: ``c3-7 in d0-4``."""
    runs: list[list[tuple[str, int, int]]] = []
    for target, slot in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        prefix = target.rstrip("0123456789")
        entry = (prefix, int(target.removeprefix(prefix)), slot)
        if runs and entry == (runs[-1][-1][0], runs[-1][-1][1] + 1, runs[-1][-1][2] + 1):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return ", ".join(_in_slots(run) for run in runs) or "nothing"


def _in_slots(run: list[tuple[str, int, int]]) -> str:
    (prefix, first, slot), (_, last, last_slot) = run[0], run[-1]
    return f"{prefix}{first} in d{slot}" if first == last else f"{prefix}{first}-{last} in d{slot}-{last_slot}"


def _moment(plan: Plan, moment: Moment, unit: Unit) -> Iterator[str]:
    """Lines on what is resident before a segment, and on the bytes while it runs."""
    segment, budget = moment.segment, unit.of(plan.memory.device_budget_nbytes)
    reads = ranges("c", plan.layout.chunks_of(segment.reads)) or "no chunk"
    gathered = f"; gathered {' '.join(moment.gathered)}" if moment.gathered else ""
    yield f"  # moment {segment.name}: resident {_resident(moment.resident)}{gathered}"
    used = f"{unit.named(moment.used_nbytes)} of the arena in use"
    away = f" - away {unit.of(segment.away_nbytes)}" if segment.away_nbytes else ""
    yield f"  #   operators {segment.first_op}..{segment.end_op - 1} read {reads}; {used}"
    yield (
        f"  #   {unit.of(moment.total_nbytes)} of {budget} {unit.name} = arena {unit.of(plan.layout.arena_nbytes)}"
        f" + live {unit.of(segment.live_nbytes)}{away} + workspace {unit.of(segment.workspace_nbytes)}"
    )
