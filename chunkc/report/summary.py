"""Numbers of a plan in tables: model data by kind, chunks, memory beside its budget, bytes moved.

Sizes without padding count elements, as papers do; homes, slots and budgets count whole chunks, as memory does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import Chunk, ChunkList, Layout
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import largest_saved
from chunkc.ir.tiers import COPIED_TIERS, SLOWER_TIERS, Tier
from chunkc.report.columns import table, wrapped
from chunkc.report.frame import LANE_NAMES
from chunkc.report.units import (
    ESTIMATE_NOTE,
    Unit,
    exchanged_by_model,
    percent,
    plural,
    printable,
    ranges,
    repeated,
    replicas_of,
    unit_of,
)


def summarize(plan: Plan) -> str:
    """The tables of ``plan``; sizes are in one unit, which every table names."""
    unit = unit_of(plan)
    layout = plan.layout
    is_one = layout.world_size == 1 and not plan.mesh
    ranks = "" if is_one else f" (rank {layout.rank} of {layout.world_size}{replicas_of(plan)})"
    stored = "stored, padded" if layout.world_size == 1 else f"stored by rank {layout.rank}, padded"
    parts = [
        wrapped(printable(f"{plan.model} on {plan.hw}, plan {plan.digest()}{ranks}, sizes in {unit.name}"), "  "),
        table(("memory", "planned", "budget", "share", "where"), _memory(plan, unit), "lrrrl"),
        table(("model data", "elements", unit.name, stored, "always on device"), _model_data(layout, unit), "lrrrr"),
        table(
            ("chunks", "dtype", "count", "elements each", unit.name, "utilisation", "home", "state"),
            _chunks(layout, unit),
            "llrrrrll",
        ),
        table((f"moved per {repeated(plan)}", "stream", "copies", unit.name), _moved(plan, unit), "llrr"),
        "\n".join(wrapped(note, "  ") for note in _notes(plan, unit)),
    ]
    return "\n\n".join(parts)


def _memory(plan: Plan, unit: Unit) -> Iterator[tuple[str, ...]]:
    memory = plan.memory
    budget, peak = memory.device_budget_nbytes, memory.device_peak_nbytes
    segment = plan.segment(memory.nonmodel_segment)
    workspace = f"{memory.nonmodel_segment}, with {unit.of(segment.workspace_nbytes)} workspace"
    yield "device peak", unit.of(peak), unit.of(budget), percent(peak, budget), f"at {segment.name}"
    yield "of it arena", unit.of(memory.arena_nbytes), "", percent(memory.arena_nbytes, budget), "static, all the time"
    yield "of it non-model", unit.of(memory.nonmodel_nbytes), "", percent(memory.nonmodel_nbytes, budget), workspace
    for tier in SLOWER_TIERS:
        needed, there = memory.needs[tier], memory.budgets[tier]
        what = "homes of chunks and their states"
        what += f"; {unit.of(plan.all_copies_nbytes)} copies of activations" if plan.moves and tier is Tier.HOST else ""
        yield tier, unit.of(needed), unit.of(there), percent(needed, there), what


def _model_data(layout: Layout, unit: Unit) -> Iterator[tuple[str, ...]]:
    """Parameters by dtype, optimizer states by list, gradients; the total as `Layout.model_data_nbytes`."""
    owned = layout.owned()
    for dtype in dict.fromkeys(info.dtype for info in layout.params):
        infos = [info for info in layout.params if info.dtype == dtype]
        payloads = [c for c in owned if c.dtype == dtype and c.list is not ChunkList.GRAD]
        nbytes = sum(info.nbytes for info in infos)
        yield _kind(f"param16 ({dtype})", sum(i.numel for i in infos), nbytes, *_payloads(payloads), unit)
    numels = [layout.params[p.param].numel for p in layout.placements if _trained(layout, p.chunk)]
    numel = sum(numels)
    stored = sum(c.numel for c in owned if c.os_home is not None)
    resident = sum(c.numel for c in owned if c.has_resident_os)
    for entry in layout.state_spec.lists():
        num_entries = sum(-(-count // entry.block_numel) for count in numels)
        sizes = (sum(map(entry.nbytes_of, numels)), entry.nbytes_of(stored), entry.nbytes_of(resident))
        yield _kind(f"{entry.name} ({entry.dtype})", num_entries, *sizes, unit)
    grads = [c for c in owned if c.list is ChunkList.GRAD]
    apart_numel, apart_nbytes = _apart_gradients(layout)
    yield _kind("gradients (overlay param16)", numel - apart_numel, 0, 0, 0, unit)
    yield _kind("gradients (own chunks)", apart_numel, apart_nbytes, *_payloads(grads), unit)
    stored_all, resident_nbytes = layout.payload_nbytes() + layout.os_nbytes(), layout.nbytes_in(Tier.DEVICE)
    yield "total", "", unit.of(layout.model_data_nbytes() + apart_nbytes), unit.of(stored_all), unit.of(resident_nbytes)


def _trained(layout: Layout, chunk: int) -> bool:
    return layout.chunks[chunk].list is ChunkList.TRAINED


def _apart_gradients(layout: Layout) -> tuple[int, int]:
    """Elements and bytes of the gradients that do not overlay their parameter."""
    partners = {c.partner for c in layout.chunks if c.list is ChunkList.GRAD}
    infos = [layout.params[p.param] for p in layout.placements if p.chunk in partners]
    return sum(info.numel for info in infos), sum(info.nbytes for info in infos)


def _payloads(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Bytes stored, and bytes of it that never leave the device."""
    return sum(c.nbytes for c in chunks), sum(c.nbytes for c in chunks if c.is_resident)


def _kind(name: str, numel: int, nbytes: int, stored: int, resident: int, unit: Unit) -> tuple[str, ...]:
    return name, f"{numel:,}", unit.of(nbytes), unit.of(stored), unit.of(resident)


def _chunks(layout: Layout, unit: Unit) -> Iterator[tuple[str, ...]]:
    """A row for each kind of chunk, and all of them with PatrickStar's utilisation (section 9.2.2)."""
    held = _held_numel(layout)
    kinds: dict[tuple[str, str, int, str, str], list[Chunk]] = {}
    for chunk in layout.chunks:
        kind = str(chunk.list) if chunk.used_numel else "padding"
        homes = str(chunk.home), str(chunk.os_home or "")
        kinds.setdefault((kind, chunk.dtype, chunk.numel, *homes), []).append(chunk)
    for (kind, dtype, numel, home, os_home), group in kinds.items():
        nbytes = sum(c.nbytes for c in group)
        share = percent(sum(held[c.index] for c in group), numel * len(group))
        yield kind, dtype, f"{len(group):,}", f"{numel:,}", unit.of(nbytes), share, home, os_home
    nbytes = sum(c.nbytes for c in layout.chunks)
    share = percent(layout.utilisation(), 1)
    yield "parameters", "", "", "", "", share, "", ""
    yield "total", "", f"{len(layout.chunks):,}", "", unit.of(nbytes), "", "", ""


def _held_numel(layout: Layout) -> list[int]:
    """Elements of parameters (or gradients) in each chunk, alignment and padding not counted."""
    held = [0] * len(layout.chunks)
    for param in range(len(layout.params)):
        for chunk, part in layout.parts_of(param):
            held[chunk] += part
    for grad in layout.chunks:
        if grad.partner is not None:
            held[grad.index] = held[grad.partner]
    return held


def _moved(plan: Plan, unit: Unit) -> Iterator[tuple[str, ...]]:
    """Copies and exchanges between ranks of one iteration by action; totals are `Plan.moved_nbytes`."""
    actions = [action for _, _, action in plan.labelled()]
    kinds = ((Op.FETCH, "chunks"), (Op.LOAD, "states"), (Op.EVICT, "chunks"), (Op.STORE, "states"))
    for op, noun in kinds:
        copies = [a for a in actions if a.op is op]
        stream = Stream.H2D if op in (Op.FETCH, Op.LOAD) else Stream.D2H
        yield f"{op} {noun}", LANE_NAMES[stream], f"{len(copies):,}", unit.of(_copied(plan, copies))
    for op, stream in ((Op.RELOAD, Stream.H2D), (Op.OFFLOAD, Stream.D2H)) if plan.moves else ():
        copies = [a for a in actions if a.op is op]
        yield f"{op} saved values", LANE_NAMES[stream], f"{len(copies):,}", unit.of(_copied(plan, copies))
    for stream, (source, destination) in COPIED_TIERS.items():
        copies = [a for a in actions if a.stream is stream]
        total = f"{len(copies):,}", unit.of(plan.moved_nbytes(stream))
        yield f"total {source} to {destination}", LANE_NAMES[stream], *total
    num_exchanges, received_nbytes = exchanged_by_model(plan)
    if num_exchanges:
        yield "exchanges of the model", LANE_NAMES[Stream.COMPUTE], f"{num_exchanges:,}", unit.of(received_nbytes)
    if plan.layout.world_size == 1:
        return
    for op, noun in ((Op.GATHER, "groups"), (Op.REDUCE, "groups")):
        exchanges = [a for a in actions if a.op is op]
        yield f"{op} {noun}", LANE_NAMES[Stream.COMM], f"{len(exchanges):,}", unit.of(_copied(plan, exchanges))
    exchanges = [a for a in actions if a.op in (Op.GATHER, Op.REDUCE, Op.SUM)]
    received = unit.of(plan.moved_nbytes(Stream.COMM))
    yield "total from other ranks", LANE_NAMES[Stream.COMM], f"{len(exchanges):,}", received


def _copied(plan: Plan, actions: Sequence[Action]) -> int:
    return plan.nbytes_of(actions)


def _notes(plan: Plan, unit: Unit) -> Iterator[str]:
    owned = plan.layout.owned()
    payloads = [c.index for c in owned if c.is_resident]
    states = [c.index for c in owned if c.has_resident_os]
    names = " ".join(part for part in (ranges("c", payloads), ranges("os", states)) if part)
    counts = f"{plural(len(payloads), 'chunk')}, {plural(len(states), 'state')}"
    yield f"residents (never moved): {counts}{': ' if names else ''}{names}"
    always = {*(f"c{c}" for c in payloads), *(f"os{c}" for c in states)}
    kept = [target for target, _ in plan.cold.resident if target not in always]
    if kept:
        yield f"also on the device when a step begins: {' '.join(kept)}"
    used = unit.named(plan.memory.device_budget_nbytes - plan.memory.device_peak_nbytes)
    yield f"free under the device budget at its peak: {used}"
    seconds = [c.index for c in owned if c.has_second_home]
    if seconds:
        nbytes = sum(plan.layout.second_home_nbytes(tier) for tier in SLOWER_TIERS)
        yield (
            f"second homes (updates begin before step()): {plural(len(seconds), 'chunk')}, {unit.named(nbytes)}: "
            f"{ranges('c', seconds)}"
        )
    peak = plan.segment(plan.memory.nonmodel_segment)
    largest = largest_saved(plan.saved, peak.graph, peak.first_op, peak.end_op)
    if largest:
        listed = ", ".join(
            f"{unit.named(nbytes)} at {line} ({plural(count, 'value')})" for line, count, nbytes in largest
        )
        yield printable(f"largest values saved for backward, at {peak.name}: {listed}")
    if plan.moves:
        saved_nbytes = sum(value.nbytes for value in plan.saved)
        yield (
            f"saved for backward: {unit.named(saved_nbytes - plan.copies_nbytes)} stay on the device, "
            f"{unit.named(plan.copies_nbytes)} ({plural(len(plan.moves), 'value')}) go to the host and come back"
        )
    if plan.in_flight > 1:
        yield (
            f"{plan.in_flight} micro-batches are in flight, each but the one that runs with "
            f"{unit.named(plan.waiting_nbytes)} on the device, of the non-model bytes"
        )
    if plan.memory.is_estimate:
        yield ESTIMATE_NOTE
    yield "utilisation of parameters: without grad chunks and rank padding"
    spec = plan.layout.state_spec
    blocks = f" and {spec.nbytes_per_block} per block of {spec.block_numel}" if spec.quantised else ""
    yield f"param16: parameters in compute dtype. state: {spec}, {spec.nbytes_per_element} bytes per element{blocks}."
