"""Checks of a plan before it is replayed: sizes, budgets, names, labels, declared states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Final

from chunkc.errors import PlanError
from chunkc.ir.actions import Action, Op
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.plan import ROLE_GRAPH, ROLE_LETTER, Key, Phase, Plan, Program, Role, State, name_of
from chunkc.ir.tiers import SLOWER_TIERS, Tier
from chunkc.ir.verify.saved_values import check_moves

_TRAINING: tuple[Role, ...] = ("forward", "backward", "step", "restore", "abandon", "resume")
_BACKWARDS: tuple[Key, ...] = (("backward", "first", False), ("backward", "later", False), ("backward", "last", True))
_DEFERRING: tuple[Key, ...] = (("forward", "later", False), *_BACKWARDS, ("reduce_all", "first", True))
_PHASES: dict[Role, tuple[Phase, Phase]] = {
    "forward": ("cold", "saved"),
    "backward": ("saved", "graded"),
    "step": ("graded", "cold"),
    "restore": ("graded", "cold"),
    "abandon": ("saved", "cold"),
    "resume": ("cold", "saved"),
    "evaluate": ("cold", "cold"),
    "reduce_all": ("unreduced", "graded"),
}
_MOVES = frozenset({Op.FETCH, Op.EVICT, Op.DROP, Op.GATHER, Op.RELEASE, Op.LOAD, Op.STORE})
_ALLOWED: dict[Role, frozenset[Op]] = {
    "forward": _MOVES | {Op.RUN, Op.OFFLOAD, Op.DISCARD},
    "backward": _MOVES
    | {Op.OPEN, Op.RUN, Op.STASH, Op.ADD, Op.REDUCE, Op.NORM, Op.SUM, Op.BEGIN, Op.ALLOCATE, Op.RELOAD},
    "step": _MOVES | {Op.OPEN, Op.DECIDE, Op.UPDATE},
    "restore": _MOVES | {Op.OPEN, Op.DECIDE, Op.RESTORE},
    "abandon": _MOVES,
    "resume": _MOVES,
    "evaluate": (_MOVES - {Op.EVICT, Op.LOAD, Op.STORE}) | {Op.RUN},
    "reduce_all": frozenset({Op.REDUCE, Op.RELEASE, Op.NORM, Op.SUM}),
}

_MAX_RANKS: Final = 2**20
_Twins = tuple[Program, Program, Mapping[Op, Op]]
"""A program, the one whose actions and labels it repeats, and kinds of actions in place of others."""


def check_structure(plan: Plan) -> None:
    """Check everything about ``plan`` that needs no replay.

    Raises:
        PlanError: names the rule, the action where there is one, and the numbers.
    """
    _check_layout(plan.layout)
    _check_mesh(plan)
    _check_segments(plan)
    check_moves(plan)
    _check_memory(plan)
    _check_programs(plan)
    if not plan.is_evaluation:
        _check_gradients(plan)
    twins = list(_twins_of(plan))
    _check_lengths(twins)
    segments = frozenset((s.name, s.graph) for s in plan.segments)
    moved = frozenset(value.target for value in plan.moves)
    lengths = _num_labels(plan)
    for program in plan.programs:
        own = frozenset(label for label, _ in program.labelled())
        for label, action in program.labelled():
            problem = _problem_of(plan.layout, segments, moved, program, action) or _wait_problem(
                label, action, own, lengths
            )
            if problem is not None:
                raise PlanError(f"{program.name} {label} `{action}`: {problem}")
    _check_phases(plan)
    if plan.is_evaluation:
        _check_evaluation(plan.layout, plan.program("evaluate"))
    else:
        _check_twins(plan.layout, twins)
        _check_states(plan)


def _check_mesh(plan: Plan) -> None:
    sizes, layout = dict(plan.mesh), plan.layout
    text = ",".join(f"{name}={size}" for name, size in plan.mesh)
    if len(sizes) < len(plan.mesh) or any(size < 2 for size in sizes.values()) or prod(sizes.values()) > _MAX_RANKS:
        raise PlanError(f"mesh {text}: each dimension once, of two ranks or more, and at most {_MAX_RANKS} in all")
    for names, size in ((("dp_shard", "cp"), layout.world_size), (("dp_replicate",), layout.num_replicas)):
        if sizes and prod(sizes.get(name, 1) for name in names) != size:
            raise PlanError(f"mesh {text} of a layout of {size} ranks along {' and '.join(names)}")


def _check_layout(layout: Layout) -> None:
    if not 0 <= layout.rank < layout.world_size:
        raise PlanError(f"rank {layout.rank} is not one of {layout.world_size}")
    if layout.num_replicas < 1 or (layout.num_replicas > 1 and layout.world_size == 1):
        raise PlanError(
            f"{layout.num_replicas} replicas of {layout.world_size} ranks: replicas exchange gradients in reductions, "
            "which one rank alone has none of"
        )
    indexes = {
        "chunk": [c.index for c in layout.chunks],
        "slot": [s.index for s in layout.slots],
        "group": [g.index for g in layout.groups],
        "placement": [p.param for p in layout.placements],
    }
    for word, indexes_found in indexes.items():
        for position, index in enumerate(indexes_found):
            if index != position:
                raise PlanError(f"the {word} at position {position} has index {index}")
    _check_groups(layout)
    for slot in layout.slots:
        if slot.offset < 0 or slot.nbytes <= 0 or slot.end > layout.arena_nbytes:
            raise PlanError(
                f"slot d{slot.index} (bytes {slot.offset} to {slot.end}) is outside the arena of {layout.arena_nbytes}"
            )
    if len(layout.placements) != len(layout.params):
        raise PlanError(f"{len(layout.placements)} placements for {len(layout.params)} parameters")
    for placement in layout.placements:
        if placement.chunk < 0 or placement.chunk + placement.num_chunks > len(layout.chunks):
            raise PlanError(f"parameter {layout.params[placement.param].name!r} is placed outside the chunks")
    _check_overlap(layout)
    for chunk in layout.chunks:
        if chunk.has_second_home and (chunk.is_resident or not chunk.has_os_below):
            raise PlanError(
                f"c{chunk.index} has a second home, but payload and states are not both at home off the device"
            )


def _check_groups(layout: Layout) -> None:
    size = layout.world_size
    if len(layout.groups) * size != len(layout.chunks):
        raise PlanError(f"{len(layout.groups)} groups of {size} do not cover {len(layout.chunks)} chunks")
    for group in layout.groups:
        if group.num_chunks != size or group.first_chunk != group.index * size:
            raise PlanError(f"group g{group.index} must hold the {size} chunks from c{group.index * size}")


def _check_overlap(layout: Layout) -> None:
    """Refuse two parameters that share elements of a chunk, or reach past its end."""
    ends = [0] * len(layout.chunks)
    for placement in sorted(layout.placements, key=lambda p: (p.chunk, p.offset)):
        info = layout.params[placement.param]
        offset, left = placement.offset, info.numel
        for chunk in placement.chunks:
            taken = min(left, layout.chunks[chunk].numel - offset)
            if left and (offset < ends[chunk] or taken <= 0):
                raise PlanError(f"parameter {info.name!r} does not fit at element {offset} of c{chunk}")
            ends[chunk], offset, left = max(ends[chunk], offset + taken), 0, left - taken
        if left > 0:
            raise PlanError(f"parameter {info.name!r} reaches {left} elements past its {placement.num_chunks} chunks")


def _check_gradients(plan: Plan) -> None:
    """Refuse gradients without states to update, and states without a gradient."""
    layout = plan.layout
    landed = {p for s in plan.segments for p in s.lands}
    twice = landed.intersection(plan.trained_elsewhere)
    if twice:
        raise PlanError(
            f"the gradient of {layout.params[min(twice)].name!r} lands, but is declared to come from elsewhere"
        )
    due = landed.union(plan.trained_elsewhere)
    for placement in layout.placements:
        info = layout.params[placement.param]
        for chunk in placement.chunks:
            kind = layout.chunks[chunk].list
            if (kind is ChunkList.TRAINED) != (placement.param in due) and info.numel:
                raise PlanError(
                    f"parameter {info.name!r} is in c{chunk} of list {kind}, and its gradient "
                    f"{'lands' if placement.param in landed else 'never lands'}"
                )
            if placement.param in due and layout.chunks[chunk].os_home is None:
                raise PlanError(f"c{chunk} is trained but has no optimizer state")
    for item in layout.chunks:
        if (item.list is ChunkList.GRAD) != (item.partner is not None):
            raise PlanError(f"c{item.index}: gradient chunks, and no others, have a partner")
        if item.partner is None:
            continue
        partner = layout.chunks[item.partner]
        if partner.list is not ChunkList.TRAINED or partner.numel > item.numel or partner.dtype != item.dtype:
            raise PlanError(f"c{item.index} cannot hold the gradients of c{item.partner}")
        if layout.owner(item.index) != layout.owner(item.partner):
            raise PlanError(f"c{item.index} and its partner c{item.partner} belong to different ranks")
    if plan.accumulate > 1:
        _check_accumulation(layout)


def _check_accumulation(layout: Layout) -> None:
    """Every trained chunk has a gradient chunk: the next micro-batch reads the parameters again."""
    grad_chunks = layout.grad_chunks()
    for chunk in layout.chunks:
        if chunk.list is ChunkList.TRAINED and chunk.used_numel and chunk.index not in grad_chunks:
            raise PlanError(f"c{chunk.index} has no gradient chunk, but its parameters are read by later micro-batches")


def _check_segments(plan: Plan) -> None:
    if plan.is_evaluation and plan.graph_segments("backward"):
        raise PlanError("an evaluation has no backward graph, but the plan has segments of one")
    for graph in ("forward", "backward"):
        for position, segment in enumerate(s for s in plan.segments if s.graph == graph):
            if segment.index != position:
                raise PlanError(f"segment {segment.name} stands at position {position} of its graph")
            if graph == "forward" and segment.lands:
                raise PlanError(f"segment {segment.name} of the forward graph cannot make gradients")
            for param in (*segment.reads, *segment.lands):
                if not 0 <= param < len(plan.layout.params):
                    raise PlanError(f"segment {segment.name} names parameter {param}, which does not exist")


def _check_memory(plan: Plan) -> None:
    memory, layout = plan.memory, plan.layout
    if memory.arena_nbytes != layout.arena_nbytes:
        raise PlanError(f"memory states an arena of {memory.arena_nbytes} bytes, the layout {layout.arena_nbytes}")
    for tier in SLOWER_TIERS:
        needed, budget = memory.needs[tier], memory.budgets[tier]
        taken = layout.nbytes_in(tier) + (plan.all_copies_nbytes if tier is Tier.HOST else 0)
        if needed != taken:
            raise PlanError(f"memory states {needed} {tier} bytes, homes and copies take {taken}")
        if needed > budget:
            raise PlanError(f"homes and copies take {needed} {tier} bytes, the {tier} budget is {budget}")
    peak = max((s.nonmodel_nbytes for s in plan.segments), default=0)
    if memory.nonmodel_nbytes < peak:
        raise PlanError(f"memory states {memory.nonmodel_nbytes} non-model bytes, a segment takes {peak}")


def _check_programs(plan: Plan) -> None:
    if plan.accumulate < 1:
        raise PlanError(f"an iteration has one micro-batch or more, not {plan.accumulate}")
    keys: list[Key] = [("evaluate", "first", True)] if plan.is_evaluation else [(r, "first", True) for r in _TRAINING]
    keys += [("backward", "later", True)] if plan.accumulate > 1 else []
    keys += _DEFERRING if plan.defers_reduction else ()
    if sorted(p.key for p in plan.programs) != sorted(keys):
        names, found = (", ".join(map(name_of, each)) for each in (keys, [p.key for p in plan.programs]))
        raise PlanError(f"a plan has the programs {names}; found {found}")
    for program in plan.programs:
        is_whole = program.reduces and program.position != "last"
        if len(program.numbers) not in ((0,) if is_whole else (0, len(program.actions))):
            raise PlanError(f"the actions of {program.name} cannot have the labels {program.numbers}")


def _problem_of(
    layout: Layout, segments: Set[tuple[str, str]], moved: Set[str], program: Program, action: Action
) -> str | None:
    landing = Op.ADD if program.begins_step else Op.STASH
    if action.op not in _ALLOWED[program.role] - program.left_out - {landing}:
        return f"{action.op} has no place in program {program.name}"
    runs = action.op is Op.RUN and (action.target, ROLE_GRAPH.get(program.role)) not in segments
    if runs or not (action.target in moved if action.target[:1] == "a" else _target_exists(layout, action)):
        return f"the {program.name} of this plan has no {action.target}"
    if action.source is not None and (action.source, program.role) not in segments:
        return f"the {program.name} of this plan has no {action.source}"
    if action.slot is not None and action.slot >= len(layout.slots):
        return f"there is no slot d{action.slot}; the arena has {len(layout.slots)} slots"
    return None


def _num_labels(plan: Plan) -> dict[str, int]:
    """Numbers of labels, by letter, that all programs have which leave nothing out."""
    lengths: dict[str, int] = {}
    for program in (p for p in plan.programs if not p.numbers):
        letter = ROLE_LETTER[program.role]
        lengths[letter] = min(lengths.get(letter, len(program.actions)), len(program.actions))
    return lengths


def _wait_problem(label: str, action: Action, own: Set[str], lengths: Mapping[str, int]) -> str | None:
    """A problem of the waits of ``action``, whose program has the labels ``own``."""
    for wait in action.waits:
        number = int(wait[1:])
        if wait not in own and number >= lengths.get(wait[0], 0):
            return f"it waits for {wait}, which does not exist"
        if wait[0] == label[0] and number >= int(label[1:]):
            return f"it waits for {wait}, which does not come before it: a deadlock"
    return None


def _target_exists(layout: Layout, action: Action) -> bool:
    if not action.target or action.op is Op.RUN:
        return True
    return action.index < len(layout.groups if action.target[0] == "g" else layout.chunks)


def _twins_of(plan: Plan) -> Iterator[_Twins]:
    for program in plan.programs:
        if program.role == "restore":
            yield program, plan.program("step"), {Op.UPDATE: Op.RESTORE}
        elif program.key == ("backward", "later", True):
            yield program, plan.program("backward"), {Op.OPEN: Op.FETCH, Op.STASH: Op.ADD}
        elif program.position == "last" or not program.reduces:
            is_first = program.role == "forward" or program.begins_step
            yield program, plan.program(program.role, "first" if is_first else "later"), {}


def _kept(twin: Program, program: Program) -> list[tuple[str, Action]]:
    """The actions of ``twin`` that ``program`` repeats."""
    return [(label, action) for label, action in twin.labelled() if action.op not in program.left_out]


def _check_lengths(twins: Sequence[_Twins]) -> None:
    for program, twin, _ in twins:
        num_kept = len(_kept(twin, program))
        if len(program.actions) != num_kept:
            raise PlanError(
                f"{program.name} has {len(program.actions)} actions and {twin.name} {num_kept}"
                f"{' besides what is left out' if program.left_out else ''}; they must match"
            )


def _check_twins(layout: Layout, twins: Sequence[_Twins]) -> None:
    """Check that programs which share labels match under each of these, but for what may differ."""
    for program, twin, swaps in twins:
        for (label, first), (own_label, action) in zip(_kept(twin, program), program.labelled(), strict=True):
            is_remote = first.op is Op.OPEN and layout.owner(first.index) != layout.rank  # opened in both
            op = first.op if is_remote else swaps.get(first.op, first.op)
            if (label, replace(first, op=op, waits=action.waits)) != (own_label, action):
                place = f"{program.name} {own_label} `{action}`"
                raise PlanError(f"{place} does not match `{first}`, {label} of {twin.name}")


def _static(layout: Layout) -> Iterator[str]:
    for chunk in layout.owned():
        if chunk.is_resident:
            yield f"c{chunk.index}"
        if chunk.has_resident_os:
            yield f"os{chunk.index}"


def _check_phases(plan: Plan) -> None:
    for program in plan.programs:
        entry, exit_phase = _PHASES[program.role]
        if program.position == "last" or (program.position == "later" and not program.reduces):
            entry = "unreduced"
        if not program.reduces:
            exit_phase = "unreduced"
        if (program.entry.phase, program.exit.phase) != (entry, exit_phase):
            raise PlanError(
                f"program {program.name} leads from {program.entry.phase} to {program.exit.phase}, not from {entry} to "
                f"{exit_phase}"
            )


def _check_evaluation(layout: Layout, evaluate: Program) -> None:
    if set(evaluate.entry.resident) != set(evaluate.exit.resident):
        raise PlanError(f"{_difference(evaluate.entry, evaluate.exit)} before and after evaluate")
    _check_cold(layout, evaluate.entry)


def _check_states(plan: Plan) -> None:
    """Check that states of one phase are equal; with gradient chunks, ``cold`` and ``graded`` are."""
    alike: tuple[set[Phase], ...] = ({"cold", "graded"},) if plan.accumulate > 1 else ()
    for before, after in product(plan.programs, plan.programs):
        phases = {before.exit.phase, after.entry.phase}
        is_link = len(phases) == 1 or phases in alike
        if is_link and set(before.exit.resident) != set(after.entry.resident):
            raise PlanError(f"{_difference(before.exit, after.entry)} between {before.name} and {after.name}")
    _check_cold(plan.layout, plan.cold)


def _difference(left: State, right: State) -> str:
    changed = sorted(set(left.resident) ^ set(right.resident))
    return "the declared states disagree on " + ", ".join(f"{target} in d{slot}" for target, slot in changed)


def _check_cold(layout: Layout, cold: State) -> None:
    static, resident = set(_static(layout)), [target for target, _ in cold.resident]
    if set(resident) != static or len(resident) != len(static):
        raise PlanError(
            f"in the cold state exactly the static residents ({', '.join(sorted(static)) or 'none'}) stand on the "
            f"device; declared: {', '.join(sorted(resident)) or 'none'}"
        )
    ranges = sorted((slot, target) for target, slot in cold.resident)
    for slot, target in ranges:
        if not 0 <= slot < len(layout.slots):
            raise PlanError(f"{target} stands in slot d{slot}, the arena has {len(layout.slots)}")
        chunk = layout.chunks[int(target.lstrip("cos"))]
        nbytes = chunk.nbytes if target[0] == "c" else layout.os_nbytes_of(chunk)
        if layout.slots[slot].nbytes < nbytes:
            raise PlanError(f"{target} takes {nbytes} bytes, slot d{slot} has {layout.slots[slot].nbytes}")
    by_offset = sorted((layout.slots[slot].offset, layout.slots[slot].end, target) for slot, target in ranges)
    for (_, end, left), (start, _, right) in pairwise(by_offset):
        if start < end:
            raise PlanError(f"static residents {left} and {right} overlap in the arena")
