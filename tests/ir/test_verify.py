"""The verifier accepts right plans, and refuses broken ones by the name of the action and the chunk."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from chunkc.errors import PlanError
from chunkc.ir.layout import Chunk, ChunkList, Home, Placement
from chunkc.ir.plan import Memory, Plan, Program
from chunkc.ir.verify import replayed_pairs, verify

from .plans import (
    CHUNK_NUMEL,
    PAYLOAD,
    SPECS,
    TRIPLE,
    PlanSpec,
    chain,
    distributed,
    evicting,
    grad_chunk,
    resident,
    segment,
    spanning,
    streaming,
    trained,
)


@pytest.mark.parametrize("name", SPECS)
def test_right_plan_is_accepted(name: str) -> None:
    verify(SPECS[name].build())


def test_plan_read_from_text_is_accepted() -> None:
    plan = evicting().build()
    verify(Plan.from_json(plan.to_json()))


def test_every_legal_pair_of_programs_is_replayed() -> None:
    assert replayed_pairs() == {"FB", "FA", "BS", "BR", "SF", "RF", "AF"}


def test_three_thousand_actions_take_less_than_two_seconds() -> None:
    plan = chain(375).build()
    assert sum(len(plan.program(name).actions) for name in ("forward", "backward", "step")) == 3000
    start = time.process_time()
    verify(plan)
    assert time.process_time() - start < 2.0


def test_work_grows_linearly() -> None:
    """Twenty times the actions must not take two hundred times as long (graph reachability would)."""

    def seconds(num_chunks: int) -> float:
        plan, best = chain(num_chunks).build(), float("inf")
        for _ in range(3):
            start = time.process_time()
            verify(plan)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(400) < 60 * seconds(20)


def _memory(spec: PlanSpec, **fields: int) -> PlanSpec:
    memory: Memory = spec.build().memory
    return spec.but(changes={"memory": replace(memory, **fields)})


def _exit(spec: PlanSpec, name: str, resident: tuple[tuple[str, int], ...]) -> PlanSpec:
    """With another declared exit state of program ``name``."""
    programs: tuple[Program, ...] = spec.build().programs
    changed = tuple(replace(p, exit=replace(p.exit, resident=resident)) if p.name == name else p for p in programs)
    return spec.but(changes={"programs": changed})


def _segment_at(spec: PlanSpec, position: int, **fields: object) -> PlanSpec:
    segments = list(spec.segments)
    segments[position] = replace(segments[position], **fields)  # type: ignore[arg-type]
    return spec.but(segments=tuple(segments))


Mutation = tuple[str, Callable[[], PlanSpec], tuple[str, ...]]

# name, how to break a right plan, what the message must contain (regular expressions)
MOVES: list[Mutation] = [
    (
        "missing wait for a fetch",
        lambda: evicting().without_wait("forward", 1, "f0"),
        (r"forward f1 `run fwd\.0", "slot d0", r"f0 `fetch c0", "before fwd.0"),
    ),
    (
        "fetch without waiting for the update",
        lambda: evicting().without_wait("forward", 2, "s1"),
        (r"forward f2 `fetch c1", "home of c1", r"s1 `update c1"),
    ),
    (
        "early reuse of a slot",
        lambda: evicting().without_wait("forward", 5, "f4"),
        (r"forward f5 `fetch c2", "slot d0", r"f4 `drop c0", "before fwd.2"),
    ),
    (
        "slot reused while it is still copied out",
        lambda: evicting().without_wait("backward", 6, "b2"),
        (r"backward b6 `fetch c0", "slot d0", r"b2 `evict c2"),
    ),
    (
        "evicted before the gradient landed",
        lambda: evicting().without_wait("backward", 2, "b1"),
        (r"backward b2 `evict c2", "slot d0", r"b1 `stash c2"),
    ),
    (
        "update before the gradient came home",
        lambda: evicting().without_wait("step", 0, "b11"),
        (r"step s0 `update c0", "home of c0", r"b11 `evict c0"),
    ),
    (
        "slot that is occupied",
        lambda: evicting().set("forward", 2, "fetch c1 -> d0 @h2d after s1"),
        (r"forward f2 `fetch c1 -> d0", "slot d0", "holds c0"),
    ),
    (
        "slots that share bytes",
        lambda: evicting().but(slots=((0, PAYLOAD), (128, PAYLOAD)), arena_nbytes=512),
        (r"forward f2 `fetch c1", "slot d1 shares bytes with slot d0", "holds c0"),
    ),
    (
        "eviction from the wrong slot",
        lambda: evicting().set("backward", 2, "evict c2 <- d1 @d2h after b1"),
        (r"backward b2 `evict c2", "c2 stands in slot d0, not in slot d1"),
    ),
    (
        "slot outside the table",
        lambda: evicting().set("forward", 2, "fetch c1 -> d7 @h2d after s1"),
        (r"forward f2 `fetch c1", "no slot d7"),
    ),
    (
        "slot that is too small",
        lambda: evicting().but(slots=((0, PAYLOAD), (PAYLOAD, 128))),
        (r"forward f2 `fetch c1", "256 bytes", "slot d1 has 128"),
    ),
    (
        "slot outside the arena",
        lambda: evicting().but(arena_nbytes=400, device_budget=9999),
        ("slot d1", "256 to 512", "arena of 400"),
    ),
    (
        "fetched twice",
        lambda: evicting().insert("forward", 2, "fetch c0 -> d1 @h2d after s0"),
        (r"forward f2 `fetch c0", "already stands in slot d0"),
    ),
    (
        "never fetched",
        lambda: evicting().delete("forward", 2),
        (r"forward f2 `run fwd\.1", "c1 is not on the device"),
    ),
    (
        "drop of gradients that are nowhere else",
        lambda: evicting().set("backward", 2, "drop c2 <- d0 @compute"),
        (r"backward b2 `drop c2", "only newest copy of c2", "gradients of 1"),
    ),
    (
        "drop of updated parameters with a stale home",
        lambda: streaming().set("step", 9, "drop c0 <- d0 @compute"),
        (r"step s9 `drop c0", "only newest copy of c0"),
    ),
    (
        "eviction missing",
        lambda: evicting().delete("backward", 5),
        (r"backward b5 `fetch c0|backward, at its end", "c1"),
    ),
    (
        "fetch of a chunk without host home",
        lambda: resident().insert("forward", 0, "fetch c0 -> d1 @h2d"),
        (r"forward f0 `fetch c0", "no host home"),
    ),
    (
        "evicted twice",
        lambda: evicting().insert("backward", 3, "evict c2 <- d0 @d2h"),
        (r"backward b3 `evict c2", "c2 is not on the device"),
    ),
    (
        "spanning parameter with a gap",
        lambda: (
            spanning()
            .but(slots=((0, PAYLOAD), (1280, PAYLOAD), (512, PAYLOAD), (1024, PAYLOAD)))
        ),
        (r"forward f3 `run fwd\.0", "'w0' spans c0 at byte 0 and c1 at byte 1280"),
    ),
    (
        "half of a spanning parameter",
        lambda: spanning().delete("forward", 0),
        (r"forward f2 `run fwd\.0", "c0 is not on the device"),
    ),
]  # fmt: skip

GRADIENTS: list[Mutation] = [
    (
        "read after overlay",
        lambda: _segment_at(evicting(), 6, reads=(1,)),
        (r"backward b9 `run bwd\.3", "reads 'w1' in c0, overlaid by its gradient"),
    ),
    (
        "gradients fetched for an update at home leave a stale copy",
        lambda: evicting()
        .insert("step", 0, "fetch c2 -> d0 @h2d after b11")
        .set("step", 3, "update c2 @cpu after s0 b2")
        .insert("step", 4, "evict c2 <- d0 @d2h after s3"),
        (r"step s4 `evict c2", "device copy of c2 is stale"),
    ),
    (
        "lost gradient",
        lambda: evicting().delete("backward", 8),
        (r"backward b7 `run bwd\.2", "gradient of 'w1' in c0 is lost"),
    ),
    (
        "lost half of a spanning gradient",
        lambda: spanning().set("backward", 6, "evict c0 <- d0 @d2h after b5").delete("backward", 4),
        (r"backward b3 `run bwd\.1", "gradient of 'w0' in c0 is lost"),
    ),
    (
        "double stash",
        lambda: evicting().insert("backward", 2, "stash c2 of bwd.0 @compute"),
        (r"backward b2 `stash c2 of bwd\.0", "gradient of 'w3' in c2 is stashed twice"),
    ),
    (
        "stash of another segment",
        lambda: evicting().set("backward", 4, "stash c1 of bwd.0 @compute"),
        (r"backward b4 `stash c1 of bwd\.0", "no gradient of bwd.0 lands in c1"),
    ),
    (
        "stash of a segment that has not run",
        lambda: evicting().insert("backward", 7, "stash c0 of bwd.3 @compute after b6").delete("backward", 11),
        (r"backward b7 `stash c0 of bwd\.3", "right after it"),
    ),
    (
        "gradient that lands in two segments",
        lambda: _segment_at(evicting(), 6, lands=(0, 1)),
        (r"backward b10 `stash c0", "gradient of 'w1' in c0 is stashed twice"),
    ),
    (
        "gradient chunk updated without its gradient",
        lambda: grad_chunk().delete("backward", 3).but(graded=(("c1", 1),)),
        (r"step s0 `update c0", "host copy of c1 is stale"),
    ),
    (
        "gradient chunk reused before the update read it",
        lambda: grad_chunk().without_wait("backward", 0, "s0").without_wait("forward", 0, "s0"),
        ("`fetch c[01]", "`update c0"),
    ),
    (
        "overlay where it is illegal",
        lambda: grad_chunk().set("backward", 2, "stash c0 of bwd.0 @compute"),
        (r"backward b4 `run bwd\.1", "'w0'", "c0"),
    ),
]  # fmt: skip

STEP: list[Mutation] = [
    (
        "double update",
        lambda: evicting().insert("step", 1, "update c0 @cpu after b11"),
        (r"step s1 `update c0", "c0 is updated or restored twice"),
    ),
    ("missing update", lambda: evicting().delete("step", 1), ("step, at its end|forward", "c1")),
    (
        "update where the triple is not",
        lambda: evicting().set("step", 0, "update c0 @compute after b11"),
        (r"step s0 `update c0", "c0 is not on the device"),
    ),
    (
        "load missing",
        lambda: streaming().delete("step", 1).delete("step", 7),
        (r"step s3 `update c0", "os0 is not on the device"),
    ),
    ("store missing", lambda: streaming().delete("step", 8), ("step, at its end", "os0 in d2")),
    (
        "triple loaded over a payload",
        lambda: streaming().insert("step", 1, "fetch c1 -> d1 @h2d after b4"),
        (r"step s2 `load os0", "slot d2 shares bytes with slot d1", "holds c1"),
    ),
    (
        "triple stored before its update",
        lambda: streaming().without_wait("step", 8, "s4"),
        (r"step s8 `store os0", "slot d2", r"s4 `update c0"),
    ),
    (
        "updated before the triple arrived",
        lambda: streaming().without_wait("step", 4, "s1"),
        (r"step s4 `update c0", "slot d2", r"s1 `load os0"),
    ),
    ("norm missing", lambda: streaming().delete("step", 0), (r"step s1 `decide", "no norm of c1")),
    (
        "norm twice",
        lambda: streaming().insert("step", 1, "norm c1 @cpu"),
        (r"step s1 `norm c1", "c1 enters the norm twice"),
    ),
    (
        "norm before the gradients are home",
        lambda: streaming().without_wait("step", 0, "b4"),
        (r"step s0 `norm c1", "home of c1", r"b4 `evict c1"),
    ),
    (
        "update that does not wait for the decision",
        lambda: streaming().without_wait("step", 5, "s2"),
        (r"step s5 `update c1", "decision", r"s2 `decide"),
    ),
    ("decision missing", lambda: streaming().delete("step", 2), (r"step s3 `update c0", "must follow decide")),
    (
        "decision that does not wait for a norm",
        lambda: streaming().without_wait("step", 2, "s0"),
        (r"step s2 `decide", "norm of c1", r"s0 `norm c1"),
    ),
    (
        "restore misaligned",
        lambda: evicting().set("restore", 1, "restore c2 @cpu after b5").set("restore", 2, "restore c1 @cpu after b2"),
        (r"restore s1 `restore c2", "does not match `update c1"),
    ),
    (
        "restore of another length",
        lambda: evicting().but(programs={**evicting().programs, "restore": ("restore c0 @cpu after b11",)}),
        ("restore has 1 actions and step 3",),
    ),
    (
        "restore that does not wait for the gradient's copy",
        lambda: evicting().without_wait("restore", 0, "b11"),
        (r"restore s0 `restore c0", "home of c0", r"b11 `evict c0"),
    ),
    (
        "update in the forward program",
        lambda: evicting().insert("forward", 0, "update c0 @cpu"),
        (r"forward f0 `update c0", "no place in program forward"),
    ),
]  # fmt: skip

BUDGETS: list[Mutation] = [
    (
        "device over budget",
        lambda: evicting().but(device_budget=1511),
        (r"forward f1 `run fwd\.0", "1512 bytes", "512 arena", "1000 non-model", "1 more than the budget of 1511"),
    ),
    (
        "one segment over budget",
        lambda: _segment_at(evicting(), 4, live_nbytes=5000).but(device_budget=2000),
        (r"backward b3 `run bwd\.1", "5612 bytes", "budget of 2000"),
    ),
    (
        "elastic bytes over budget",
        lambda: streaming().set("step", 3, "grow 1001 @compute").set("step", 6, "shrink 801 @compute"),
        (r"step s3 `grow 1001", "1001 elastic", "1 more than the budget"),
    ),
    ("elastic bytes kept", lambda: streaming().delete("step", 6), ("step, at its end", "300 elastic bytes")),
    (
        "more returned than taken",
        lambda: streaming().set("step", 7, "shrink 300 @compute"),
        (r"step s7 `shrink 300", "100 more bytes are returned"),
    ),
    ("host over budget", lambda: evicting().but(host_budget=3071), ("3072 host bytes", "host budget is 3071")),
    (
        "host bytes misstated",
        lambda: _memory(evicting(), host_nbytes=3000),
        ("memory states 3000 host bytes", "homes take 3072"),
    ),
    (
        "arena misstated",
        lambda: _memory(evicting(), arena_nbytes=500),
        ("memory states an arena of 500 bytes, the layout 512",),
    ),
    (
        "non-model bytes misstated",
        lambda: _memory(evicting(), nonmodel_nbytes=999),
        ("memory states 999 non-model bytes, a segment takes 1000",),
    ),
]  # fmt: skip

COLLECTIVES: list[Mutation] = [
    (
        "gather missing",
        lambda: distributed().delete("forward", 1),
        (r"forward f1 `run fwd\.0", "c0 is read but its group g0 is not gathered"),
    ),
    (
        "gather of the own chunk missing",
        lambda: distributed(serial=True).delete("forward", 1),
        (r"forward f2 `run fwd\.0", "c0 is read but its group g0 is not gathered"),
    ),
    (
        "release before the run",
        lambda: distributed().set("forward", 3, "release g0 @compute after f1").move("forward", 3, 2),
        (r"forward f3 `run fwd\.0", "c0 is read but its group g0 is not gathered"),
    ),
    (
        "run that does not wait for the gather",
        lambda: distributed().set("forward", 2, "run fwd.0 @compute after f0"),
        (r"forward f2 `run fwd\.0", "slot d1", r"f1 `gather g0"),
    ),
    (
        "gather that does not wait for the fetch",
        lambda: distributed().without_wait("forward", 1, "f0"),
        (r"forward f1 `gather g0", "slot d0", r"f0 `fetch c0"),
    ),
    (
        "remote chunk fetched",
        lambda: distributed().set("forward", 0, "fetch c1 -> d0 @h2d after s0"),
        (r"forward f0 `fetch c1", "c1 belongs to rank 1, this is rank 0"),
    ),
    (
        "remote chunk updated",
        lambda: distributed().set("step", 0, "update c1 @cpu after b12"),
        ("step s0 `update c1", "c1 belongs to rank 1"),
    ),
    (
        "reduce missing",
        lambda: distributed().delete("backward", 3),
        (r"backward b3 `release g1", "c3", "not reduced"),
    ),
    (
        "reduce before a stash",
        lambda: distributed().set("backward", 3, "reduce g1 @comm after b1").move("backward", 3, 2),
        (r"backward b2 `reduce g1", "1 of 1 gradients have not landed in c3"),
    ),
    (
        "reduced twice",
        lambda: distributed().insert("backward", 4, "reduce g1 @comm"),
        (r"backward b4 `reduce g1", "gradients of c2 are reduced twice"),
    ),
    (
        "released while it is still reduced",
        lambda: distributed().without_wait("backward", 4, "b3"),
        (r"backward b4 `release g1", "slot d3", r"b3 `reduce g1"),
    ),
    (
        "evicted before the reduction",
        lambda: distributed().set("backward", 5, "evict c2 <- d2 @d2h after b2").move("backward", 5, 3),
        (r"backward b3 `evict c2", "not reduced"),
    ),
    (
        "gathered group with a gap",
        lambda: distributed().but(slots=((0, PAYLOAD), (1280, PAYLOAD), (512, PAYLOAD), (768, PAYLOAD))),
        (r"forward f1 `gather g0", "c1 stands at byte 1280, not at byte 256"),
    ),
    (
        "group that does not fit before the own slot",
        lambda: distributed(rank=1).set("forward", 0, "fetch c1 -> d0 @h2d after s0"),
        (r"forward f1 `gather g0", "2 slots around slot d0"),
    ),
    (
        "collective of a single rank",
        lambda: evicting().insert("forward", 1, "gather g0 @comm after f0"),
        (r"forward f1 `gather g0", "single rank"),
    ),
]  # fmt: skip

STRUCTURE: list[Mutation] = [
    (
        "wait on a later label",
        lambda: evicting().set("forward", 1, "run fwd.0 @compute after f0 f2"),
        (r"forward f1 `run fwd\.0", "f2", "deadlock"),
    ),
    (
        "wait on itself",
        lambda: evicting().set("forward", 1, "run fwd.0 @compute after f1"),
        (r"forward f1 `run fwd\.0", "f1", "deadlock"),
    ),
    (
        "wait on a label that does not exist",
        lambda: evicting().set("forward", 0, "fetch c0 -> d0 @h2d after s3"),
        (r"forward f0 `fetch c0", "s3, which does not exist"),
    ),
    (
        "wait on a role that does not exist",
        lambda: evicting().set("forward", 0, "fetch c0 -> d0 @h2d after q0"),
        (r"forward f0 `fetch c0", "q0, which does not exist"),
    ),
    (
        "segment that does not exist",
        lambda: evicting().set("forward", 1, "run fwd.9 @compute after f0"),
        (r"forward f1 `run fwd\.9", "no fwd.9"),
    ),
    (
        "chunk that does not exist",
        lambda: evicting().set("forward", 0, "fetch c3 -> d0 @h2d after s0"),
        (r"forward f0 `fetch c3", "no c3"),
    ),
    (
        "segment of the other graph",
        lambda: evicting().set("forward", 1, "run bwd.0 @compute after f0"),
        (r"forward f1 `run bwd\.0", "the forward of this plan has no bwd.0"),
    ),
    (
        "segment skipped",
        lambda: evicting().delete("forward", 1),
        (r"forward f2 `run fwd\.1", "segment 0 of forward must run first"),
    ),
    ("last segment missing", lambda: evicting().delete("forward", 6), ("forward, at its end", "2 of 3 segments ran")),
    (
        "exit state with too much",
        lambda: _exit(evicting(), "backward", (("c1", 1),)),
        ("disagree on c1 in d1 between backward and step",),
    ),
    (
        "exit state that is not reached",
        lambda: evicting().but(saved=(("c1", 0), ("c2", 1))),
        ("forward, at its end", "c1 in d1, c2 in d0 beyond", "lacks c1 in d0, c2 in d1"),
    ),
    (
        "chunk left behind in the cycle",
        lambda: evicting().delete("abandon", 0),
        ("abandon, at its end", "c1 in d1 beyond"),
    ),
    (
        "cold state with a chunk that has a home",
        lambda: evicting().but(cold=(("c0", 0),)),
        ("cold state", "declared: c0"),
    ),
    (
        "static residents that overlap",
        lambda: resident().but(slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD), (500, TRIPLE), (1280, TRIPLE))),
        ("static residents c1 and os0 overlap",),
    ),
    (
        "trained parameter without a gradient",
        lambda: _segment_at(evicting(), 6, lands=()),
        ("'w0' is in c0 of list trained", "never lands"),
    ),
    (
        "trained chunk without optimizer state",
        lambda: evicting().but(chunks=(trained(0), trained(1), replace(trained(2), os_home=None))),
        ("c2 is trained but has no optimizer state",),
    ),
    (
        "parameters that overlap in a chunk",
        lambda: evicting().but(
            placements=(Placement(0, 0, 0), Placement(1, 0, 31), Placement(2, 1, 0), Placement(3, 2, 0))
        ),
        ("'w1' does not fit at element 31 of c0",),
    ),
    (
        "parameter longer than its chunks",
        lambda: evicting().but(numels=(32, 32, 65, 64)),
        ("'w2' reaches 1 elements past its 1 chunks",),
    ),
    (
        "unused chunk fetched",
        lambda: (
            evicting()
            .but(
                chunks=(*evicting().chunks, Chunk(3, ChunkList.UNUSED, "float32", CHUNK_NUMEL, 0, Home.HOST)),
            )
            .insert("abandon", 2, "fetch c3 -> d0 @h2d after t1")
        ),
        (r"abandon t2 `fetch c3", "no graph uses"),
    ),
    (
        "a program missing",
        lambda: evicting().but(changes={"programs": evicting().build().programs[:4]}),
        ("forward, backward, step, restore, abandon; found forward, backward, step, restore",),
    ),
    (
        "gradient in the forward graph",
        lambda: evicting().but(segments=(segment("fwd.0", (0, 1), (0,)), *evicting().segments[1:])),
        ("fwd.0 of the forward graph cannot make gradients",),
    ),
]  # fmt: skip

MUTATIONS = [*MOVES, *GRADIENTS, *STEP, *BUDGETS, *COLLECTIVES, *STRUCTURE]


@pytest.mark.parametrize(("change", "patterns"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_broken_plan_is_refused_by_name(change: Callable[[], PlanSpec], patterns: tuple[str, ...]) -> None:
    plan = change().build()
    with pytest.raises(PlanError) as refusal:
        verify(plan)
    for pattern in patterns:
        assert re.search(pattern, str(refusal.value)), f"{pattern!r} not in {refusal.value}"


def test_refusal_is_one_line_with_action_moment_and_numbers() -> None:
    with pytest.raises(PlanError) as refusal:
        verify(evicting().but(device_budget=1511).build())
    assert str(refusal.value) == (
        "forward f1 `run fwd.0 @compute after f0` (before fwd.0): the device needs 1512 bytes (512 arena, 0 elastic, "
        "1000 non-model), 1 more than the budget of 1511"
    )
