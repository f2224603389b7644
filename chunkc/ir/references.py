"""Check that every index in a plan is in range, and that sizes agree with the plan's lists.

A plan from a file may say that a parameter reaches over 10**9 chunks. So references are checked before the verifier
walks through them, in time and memory that are linear in the size of the plan; every fault has its place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from typing import Final

from chunkc.files import FormatError
from chunkc.ir.layout import Layout, Placement
from chunkc.ir.plan import MAX_MICRO_BATCHES, Plan, Program, State
from chunkc.ir.schedule import DTYPE_NBYTES, ParamInfo
from chunkc.ir.state_spec import MASTER, STATE_NBYTES, StateSpec

MAX_RANKS: Final = 2**20
MAX_NUMEL: Final = 2**53
"""Elements of a parameter or a chunk: sums of their bytes stay exact even as floats."""
_MAX_DIMS: Final = 64
_MAX_STATES: Final = 16
_RESIDENT: Final = re.compile(r"(c|os)(0|[1-9][0-9]{0,17})")


def check_references(plan: Plan) -> None:
    """Refuse a plan that names what it does not have; FormatError with the place in the plan's file."""
    layout = plan.layout
    for name, value, most in (
        ("layout.world_size", layout.world_size, MAX_RANKS),
        ("layout.num_replicas", layout.num_replicas, MAX_RANKS),
        ("layout.chunk_numel", layout.chunk_numel, MAX_NUMEL),
        ("accumulate", plan.accumulate, MAX_MICRO_BATCHES),
        ("in_flight", plan.in_flight, MAX_MICRO_BATCHES),
    ):
        if not 1 <= value <= most:
            raise FormatError(f"must be from 1 to {most}, found {value}", name)
    _check_state_spec(layout.state_spec)
    _check_params(layout.params)
    _check_chunks(layout)
    _check_placements(layout)
    _check_segments(plan)
    for position, program in enumerate(plan.programs):
        _check_program(plan, program, f"programs[{position}]")


def _check_state_spec(spec: StateSpec) -> None:
    if len(spec.names) != len(spec.dtypes) or len(spec.names) > _MAX_STATES:
        counts = f"{len(spec.names)} names and {len(spec.dtypes)} dtypes"
        raise FormatError(f"at most {_MAX_STATES} states have one dtype each, found {counts}", "layout.state_spec")
    for position, (name, dtype) in enumerate(zip(spec.names, spec.dtypes, strict=True)):
        if not name.isidentifier() or name in (MASTER, *spec.names[:position]):
            raise FormatError(f"must be a name of its own, found {name!r:.60}", f"layout.state_spec.names[{position}]")
        _check_dtype(dtype, f"layout.state_spec.dtypes[{position}]", STATE_NBYTES)


def _check_dtype(dtype: str, place: str, known: Mapping[str, int] = DTYPE_NBYTES) -> None:
    if dtype not in known:
        raise FormatError(f"must be one of {', '.join(known)}, found {dtype!r:.60}", place)


def _check_params(params: tuple[ParamInfo, ...]) -> None:
    for position, info in enumerate(params):
        place = f"layout.params[{position}]"
        if len(info.shape) > _MAX_DIMS or len(info.shape) != len(info.stride):
            dims = f"{len(info.shape)} dimensions and {len(info.stride)} strides"
            raise FormatError(
                f"a parameter has at most {_MAX_DIMS} dimensions with one stride each, found {dims}", place
            )
        if info.numel > MAX_NUMEL:
            raise FormatError(f"a parameter has at most {MAX_NUMEL} elements, found {info.numel}", f"{place}.shape")


def _check_chunks(layout: Layout) -> None:
    partners: dict[int, int] = {}
    for position, chunk in enumerate(layout.chunks):
        place = f"layout.chunks[{position}]"
        _check_dtype(chunk.dtype, f"{place}.dtype")
        if not 1 <= chunk.numel <= MAX_NUMEL:
            raise FormatError(f"must be from 1 to {MAX_NUMEL}, found {chunk.numel}", f"{place}.numel")
        if chunk.numel % layout.state_spec.block_numel:
            blocks = f"blocks of {layout.state_spec.block_numel} elements"
            raise FormatError(f"states are quantised in {blocks}, found {chunk.numel}", f"{place}.numel")
        if chunk.used_numel > chunk.numel:
            raise FormatError(f"{chunk.used_numel} of {chunk.numel} elements are used", f"{place}.used_numel")
        if chunk.partner is not None:
            _index(chunk.partner, layout.chunks, "chunk", f"{place}.partner")
            other = partners.setdefault(chunk.partner, position)
            if other != position:
                raise FormatError(f"c{other} holds the gradients of c{chunk.partner} already", f"{place}.partner")


def _check_placements(layout: Layout) -> None:
    if len(layout.placements) != len(layout.params):
        raise FormatError(f"{len(layout.placements)} entries for {len(layout.params)} parameters", "layout.placements")
    spanned = 0
    for position, (placed, info) in enumerate(zip(layout.placements, layout.params, strict=True)):
        place = f"layout.placements[{position}]"
        if not info.numel:
            if placed.num_chunks:
                raise FormatError("a parameter without elements is in no chunk", f"{place}.num_chunks")
            continue
        _index(placed.chunk, layout.chunks, "chunk", f"{place}.chunk")
        left = len(layout.chunks) - placed.chunk
        if not 1 <= placed.num_chunks <= left:
            raise FormatError(f"must be from 1 to {left}, found {placed.num_chunks}", f"{place}.num_chunks")
        spanned += placed.num_chunks
        if spanned > len(layout.params) + len(layout.chunks):
            raise FormatError("parameters up to here reach over more chunks than hold them", f"{place}.num_chunks")
        _check_offset(layout, placed, f"{place}.offset")


def _check_offset(layout: Layout, placed: Placement, place: str) -> None:
    chunk, block_numel = layout.chunks[placed.chunk], layout.state_spec.block_numel
    if placed.offset >= chunk.numel:
        raise FormatError(f"c{chunk.index} has {chunk.numel} elements, found {placed.offset}", place)
    if placed.offset % block_numel:
        raise FormatError(f"states are quantised in blocks of {block_numel} elements, found {placed.offset}", place)


def _check_segments(plan: Plan) -> None:
    params = plan.layout.params
    for position, segment in enumerate(plan.segments):
        place = f"segments[{position}]"
        if segment.first_op > segment.end_op:
            raise FormatError(f"{segment.first_op} operators precede, found {segment.end_op}", f"{place}.end_op")
        _check_params_named(segment.reads, params, f"{place}.reads")
        _check_params_named(segment.lands, params, f"{place}.lands")
    _check_params_named(plan.trained_elsewhere, params, "trained_elsewhere")
    for position, value in enumerate(plan.saved):
        if not value.read_by:
            raise FormatError("backward reads every saved value", f"saved[{position}].read_by")
    for position, moved in enumerate(plan.moves):
        _index(moved.index, plan.saved, "saved value", f"moves[{position}].index")
    named = plan.memory.nonmodel_segment
    if named and named not in {segment.name for segment in plan.segments}:
        raise FormatError(f"the plan has no segment {named!r:.60}", "memory.nonmodel_segment")


def _check_params_named(indexes: tuple[int, ...], params: tuple[ParamInfo, ...], place: str) -> None:
    for position, index in enumerate(indexes):
        _index(index, params, "parameter", f"{place}[{position}]")
    if len(set(indexes)) < len(indexes):
        raise FormatError("a parameter stands in it twice", place)


def _check_program(plan: Plan, program: Program, place: str) -> None:
    _check_state(plan.layout, program.entry, f"{place}.entry.resident")
    _check_state(plan.layout, program.exit, f"{place}.exit.resident")
    for position, action in enumerate(program.actions):
        if action.slot is not None:
            _index(action.slot, plan.layout.slots, "slot", f"{place}.actions[{position}]")


def _check_state(layout: Layout, state: State, place: str) -> None:
    seen = set[str]()
    for position, (target, slot) in enumerate(state.resident):
        here = f"{place}[{position}]"
        match = _RESIDENT.fullmatch(target)
        if match is None:
            raise FormatError(f"must be a chunk (c3) or an optimizer state (os3), found {target!r:.60}", here)
        _index(int(match[2]), layout.chunks, "chunk", here)
        _index(slot, layout.slots, "slot", here)
        if match[1] == "os" and layout.chunks[int(match[2])].os_home is None:
            raise FormatError(f"c{match[2]} has no optimizer state", here)
        if target in seen:
            raise FormatError(f"{target} stands in it twice", here)
        seen.add(target)


def _index(index: int, items: Sized, what: str, place: str) -> None:
    if not 0 <= index < len(items):
        raise FormatError(f"names {what} {index}, and the plan has {len(items)}", place)
