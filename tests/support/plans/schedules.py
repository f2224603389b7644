"""Operator schedules for planner tests: written by hand, drawn at random, and those of well-known model shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from chunkc.errors import BudgetError
from chunkc.hardware.usable_memory import Budget
from chunkc.ir.plan import Plan, Program
from chunkc.ir.schedule import GraphKind, GraphSchedule, Operator, ParamInfo, Schedule
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify
from chunkc.passes import Draft, Planned, PlanOptions, Target, assemble, make_plan

PLENTY = 1 << 50


def param(name: str, *shape: int, dtype: str = "float32") -> ParamInfo:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return ParamInfo(name, (), shape, strides, dtype, True)


def op(
    reads: Sequence[int] = (),
    grads: Sequence[int] = (),
    live: int = 0,
    after: int = 0,
    workspace: int = 0,
    name: str = "op",
) -> Operator:
    return Operator(name, "aten.mm.default", tuple(reads), tuple(grads), 0, 0, live, after, workspace)


def schedule(params: Sequence[ParamInfo], forward: Sequence[Operator], backward: Sequence[Operator]) -> Schedule:
    def graph(kind: GraphKind, operators: Sequence[Operator]) -> GraphSchedule:
        return GraphSchedule(kind, tuple(operators))

    return Schedule(tuple(params), graph("forward", forward), graph("backward", backward))


def chain(num_layers: int, numel: int = 64, live: int = 0) -> Schedule:
    """Layers of one parameter each, read in order by forward and in reverse order by backward, which lands them."""
    layers = range(num_layers)
    params = [param(f"layers.{i}.weight", numel) for i in layers]
    return schedule(params, [op([i], live=live) for i in layers], [op([i], [i], live=live) for i in reversed(layers)])


def layered(sizes: list[list[int]], numel: int = 64, *, named: bool = True) -> Schedule:
    """Layers of one parameter, which save values of ``sizes``; the first of each layer is read by the next one too.

    Bytes alive are those of the saved values alone.
    """
    params = [param(f"layers.{i}.weight", numel) for i in range(len(sizes))]
    spans: list[tuple[int, int, int, int]] = []  # maker, bytes, last forward reader, backward reader
    num_forward = sum(map(len, sizes))
    starts = [sum(map(len, sizes[:i])) for i in range(len(sizes))]
    for layer, values in enumerate(sizes):
        for offset, nbytes in enumerate(values):
            made_by = starts[layer] + offset
            following = starts[layer + 1] if layer + 1 < len(sizes) and offset == 0 else made_by
            spans.append((made_by, nbytes, following, num_forward - 1 - made_by))
    forward, backward = [], []
    for layer, values in enumerate(sizes):
        for offset, nbytes in enumerate(values):
            made_by, _, used_until, read_by = spans[starts[layer] + offset]
            live = sum(n for maker, n, *_ in spans if maker <= made_by)
            name = f"layers.{layer}" if named else ""
            operator = Operator(f"op{made_by}", "aten.mm.default", (layer,), (), 8, 8, live, live, 0, name)
            forward.append(replace(operator, saved_nbytes=nbytes, read_by=(read_by, read_by), used_until=used_until))
    for position in range(num_forward):
        live = sum(n for *_, n, _, reader in [(m, n, u, r) for m, n, u, r in spans] if reader >= position)
        made_by = num_forward - 1 - position
        layer = max(i for i, start in enumerate(starts) if start <= made_by)
        grads = (layer,) if made_by == starts[layer] else ()
        after = live - spans[made_by][1]
        backward.append(Operator(f"b{position}", "aten.mm.default", (layer,), grads, 8, 8, live, after, 0))
    return Schedule(tuple(params), GraphSchedule("forward", tuple(forward)), GraphSchedule("backward", tuple(backward)))


def target(device: int = PLENTY, host: int = PLENTY, world_size: int = 1, rank: int = 0) -> Target:
    return Target("Model", "emulated", {Tier.DEVICE: Budget(device), Tier.HOST: Budget(host)}, world_size, rank)


def budgeted(where: Target, device: int | None = None, host: int | None = None) -> Target:
    """``where`` with other budgets."""
    for tier, nbytes in ((Tier.DEVICE, device), (Tier.HOST, host)):
        where = where if nbytes is None else where.with_budget(tier, nbytes)
    return where


def check(name: str, draft: Draft) -> None:
    if draft.layout is not None:
        assert len(draft.layout.placements) == len(draft.schedule.params), name
    if draft.programs is not None:
        verify(assemble(draft))


def planned(found: Schedule, where: Target, options: PlanOptions = PlanOptions()) -> Planned:  # noqa: B008 - frozen
    """A plan that the verifier accepted."""
    return make_plan(found, where, options, check=check)


def planned_somewhere(found: Schedule, where: Target, options: PlanOptions) -> Planned:
    """As ``planned``; where the budgets do not suffice, with those that the error names."""
    try:
        return planned(found, where, options)
    except BudgetError as error:
        return planned(found, budgeted(where, error.min_device_nbytes, error.min_host_nbytes), options)


def texts(result: Planned, program: str) -> list[str]:
    """The labelled actions of a program."""
    return [f"{label} {action}" for label, action in program_named(result.plan, program).labelled()]


def program_named(plan: Plan, name: str) -> Program:
    return next(program for program in plan.programs if program.name == name)


def without_wait(plan: Plan, program: str, position: int, wait: str) -> Plan:
    """``plan`` with one wait less; in ``step`` also in ``restore``, whose labels must agree."""
    names = {program, "restore"} if program == "step" else {program}
    programs = []
    for found in plan.programs:
        if found.name in names:
            action = found.actions[position]
            less = replace(action, waits=tuple(w for w in action.waits if w != wait))
            found = replace(found, actions=(*found.actions[:position], less, *found.actions[position + 1 :]))
        programs.append(found)
    return replace(plan, programs=tuple(programs))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random iterations: odd sizes, no bytes at all, shared reads, frozen and unused parameters, mixed dtypes."""
    sizes = st.sampled_from([0, 1, 53, 91, 300, 1000, 4096]) | st.integers(1, 2000)
    dtypes = st.sampled_from(["float32", "float32", "bfloat16"])
    params = [param(f"layers.{i}.weight", draw(sizes), dtype=draw(dtypes)) for i in range(draw(st.integers(1, 8)))]
    used = draw(st.lists(st.sampled_from(range(len(params))), unique=True))
    num_backward = draw(st.integers(1, 12))
    grads: list[list[int]] = [[] for _ in range(num_backward)]
    for index in used:
        if draw(st.integers(0, 4)):
            grads[draw(st.integers(0, num_backward - 1))].append(index)
    reads = st.lists(st.sampled_from(used), max_size=3, unique=True) if used else st.just([])
    sizes_of_ops = st.integers(0, 5000)

    def graph(made: Sequence[Sequence[int]]) -> list[Operator]:
        found: list[Operator] = []
        for lands in made:
            live = max(draw(sizes_of_ops), found[-1].live_after_nbytes if found else 0)
            found.append(op(draw(reads), lands, live, draw(st.integers(0, live)), draw(st.integers(0, 500))))
        return found

    return schedule(params, graph([[]] * draw(st.integers(1, 10))), graph(grads))


@st.composite
def requests(draw: st.DrawFn) -> tuple[Schedule, Target, PlanOptions]:
    """A schedule, budgets from hopeless to everything resident, one to four ranks, any option."""
    found = draw(schedules())
    world_size = draw(st.sampled_from([1, 1, 2, 4]))
    where = target(
        draw(st.integers(1, 200_000)),
        draw(st.just(PLENTY) | st.integers(1, 100_000)),
        world_size,
        draw(st.integers(0, world_size - 1)),
    )
    cuts = [
        tuple(sorted(draw(st.sets(st.integers(1, n - 1), max_size=3)))) if n > 1 else ()
        for n in (len(g.operators) for g in found.graphs)
    ]
    chosen: dict[str, Any] = {"chunk_numel": draw(st.sampled_from([None, 64, 256, 700, 5000]))}
    chosen["os_home"] = draw(st.sampled_from(["auto", "auto", "host", "device"]))
    chosen["cuts"] = draw(st.sampled_from([None, (cuts[0], cuts[1])]))
    return found, where, PlanOptions(**chosen)


STATES = [
    *(ADAM_STATES, ADAM_STATES, StateSpec(("exp_avg",), ("float32",)), StateSpec((), ())),
    StateSpec(("exp_avg", "exp_avg_sq"), ("uint8", "uint8")),
]
"""Of optimizers; in fp32 the fourth takes as many bytes as the parameters, and the last is quantised in blocks."""


@st.composite
def mixed(draw: st.DrawFn) -> tuple[Schedule, Target, PlanOptions]:
    """Any request, with any number of resident triples and second homes, and any share of streamed ones."""
    found, where, options = draw(requests())
    home = draw(st.sampled_from(["auto", "host", "host", "host"]))
    num = draw(st.integers(0, 12))
    share = draw(st.sampled_from([0.0, 0.4, 1.0]) | st.floats(0, 1))
    keeps = draw(st.booleans())
    wishes: dict[str, Any] = {"num_resident_states": num, "keeps_payloads": keeps, "streamed_share": share}
    wishes["num_second_homes"] = draw(st.sampled_from([0, 2, 100]))
    wishes["state_spec"] = draw(st.sampled_from(STATES))
    return found, where, replace(options, os_home=home, **wishes)


@st.composite
def accumulating(draw: st.DrawFn) -> tuple[Schedule, Target, PlanOptions]:
    """Any request, with several micro-batches and optimizer states anywhere."""
    found, where, options = draw(requests())
    home = draw(st.sampled_from(["auto", "host", "host"]))
    num = draw(st.integers(0, 12))
    share = draw(st.sampled_from([0.0, 0.4, 1.0]) | st.floats(0, 1))
    micro_batches = draw(st.integers(2, 5))
    keeps = draw(st.booleans())
    wishes: dict[str, Any] = {"num_resident_states": num, "keeps_payloads": keeps, "streamed_share": share}
    wishes["num_second_homes"] = draw(st.sampled_from([0, 2, 100]))
    wishes["state_spec"] = draw(st.sampled_from(STATES))
    return found, where, replace(options, os_home=home, accumulate=micro_batches, **wishes)


def gpt_like(
    num_layers: int, hidden: int, vocabulary: int = 50257, *, dtype: str = "bfloat16", ops_per_layer: int = 18
) -> Schedule:
    params = [param("wte", vocabulary, hidden, dtype=dtype), param("wpe", 1024, hidden, dtype=dtype)]
    shapes: list[tuple[int, ...]] = [(hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden)]
    shapes += [(hidden,), (hidden,), (hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    forward, layers = [op([0]), op([1])], []
    for layer in range(num_layers):
        first = len(params)
        params += [param(f"h.{layer}.{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        layers.append([(first + i, first + i + 1) for i in range(0, 12, 2)])
    params += [param("ln_f.weight", hidden, dtype=dtype), param("ln_f.bias", hidden, dtype=dtype)]
    final = (len(params) - 2, len(params) - 1)
    idle = [op()] * (ops_per_layer // 18)
    for pairs in layers:
        for pair in pairs:
            forward += [op(pair), *idle]
    forward += [op(final), op([0])]
    backward = [op([0]), op(final, final)]
    for pairs in reversed(layers):
        for pair in reversed(pairs):
            backward += [op(pair[:1]), op([], pair), *idle]
    return schedule(params, forward, [*backward, op([], [1]), op([], [0])])
