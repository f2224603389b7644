"""Plans broken in budgets, collectives, names, labels and declared states."""

from dataclasses import replace

from mutations_actions import Mutation, segment_at
from plans import distributed, evicting, measured, resident
from spec import CHUNK_NUMEL, PAYLOAD, TRIPLE, PlanSpec, segment, trained

from chunkc.ir.layout import Chunk, ChunkList, Placement
from chunkc.ir.plan import Memory, Program
from chunkc.ir.tiers import Tier


def _memory(spec: PlanSpec, **fields: int) -> PlanSpec:
    memory: Memory = spec.build().memory
    return spec.but(changes={"memory": replace(memory, **fields)})


def _exit(spec: PlanSpec, name: str, resident: tuple[tuple[str, int], ...]) -> PlanSpec:
    programs: tuple[Program, ...] = spec.build().programs
    changed = tuple(replace(p, exit=replace(p.exit, resident=resident)) if p.name == name else p for p in programs)
    return spec.but(changes={"programs": changed})


BUDGETS: list[Mutation] = [
    ("device over budget", lambda: evicting().but(device_budget=1511),
     (r"forward f1 `run fwd\.0", "1512 bytes", "512 arena", "1000 non-model", "1 more than the budget of 1511")),
    ("one segment over budget", lambda: segment_at(evicting(), 4, live_nbytes=5000).but(device_budget=2000),
     (r"backward b3 `run bwd\.1", "5612 bytes", "budget of 2000")),
    ("host over budget", lambda: evicting().but(host_budget=3071), ("3072 host bytes", "host budget is 3071")),
    ("host bytes misstated", lambda: _memory(evicting(), host_nbytes=3000),
     ("memory states 3000 host bytes", "homes and copies take 3072")),
    ("arena misstated", lambda: _memory(evicting(), arena_nbytes=500),
     ("memory states an arena of 500 bytes, the layout 512",)),
    ("non-model bytes misstated", lambda: _memory(evicting(), nonmodel_nbytes=999),
     ("memory states 999 non-model bytes, a segment takes 1000",)),
]  # fmt: skip

COLLECTIVES: list[Mutation] = [
    ("gather missing", lambda: distributed().delete("forward", 1),
     (r"forward f1 `run fwd\.0", "c0 is read but its group g0 is not gathered")),
    ("remote chunk opened where it is read",
     lambda: distributed().set("backward", 7, "open c1 -> d1 @h2d after b6"),
     (r"backward b8 `run bwd\.1", "c0 is read but its group g0 is not gathered")),
    ("replicas of a single rank",
     lambda: evicting().but(changes={"layout": replace(evicting().layout(), num_replicas=2)}),
     ("2 replicas of 1 ranks", "one rank alone")),
    ("reduce missing where nodes have replicas", lambda: distributed()
        .delete("backward", 3)
        .but(changes={"layout": replace(distributed().layout(), num_replicas=2)}),
     (r"backward b3 `release g1", "c3", "not reduced")),
    ("release before the run",
     lambda: distributed().set("forward", 3, "release g0 @compute after f1").move("forward", 3, 2),
     (r"forward f3 `run fwd\.0", "c0 is read but its group g0 is not gathered")),
    ("run that does not wait for the gather", lambda: distributed().set("forward", 2, "run fwd.0 @compute after f0"),
     (r"forward f2 `run fwd\.0", "slot d1", r"f1 `gather g0")),
    ("gather that does not wait for the fetch", lambda: distributed().without_wait("forward", 1, "f0"),
     (r"forward f1 `gather g0", "slot d0", r"f0 `fetch c0")),
    ("remote chunk fetched", lambda: distributed().set("forward", 0, "fetch c1 -> d0 @h2d after s0"),
     (r"forward f0 `fetch c1", "c1 belongs to rank 1, this is rank 0")),
    ("remote chunk updated", lambda: distributed().set("step", 0, "update c1 @cpu after b12"),
     ("step s0 `update c1", "c1 belongs to rank 1")),
    ("reduce missing", lambda: distributed().delete("backward", 3), (r"backward b3 `release g1", "c3", "not reduced")),
    ("reduce before a stash",
     lambda: distributed().set("backward", 3, "reduce g1 @comm after b1").move("backward", 3, 2),
     (r"backward b2 `reduce g1", "1 of 1 gradients have not landed in c3")),
    ("reduced twice", lambda: distributed().insert("backward", 4, "reduce g1 @comm"),
     (r"backward b4 `reduce g1", "gradients of c2 are reduced twice")),
    ("released while it is still reduced", lambda: distributed().without_wait("backward", 4, "b3"),
     (r"backward b4 `release g1", "slot d3", r"b3 `reduce g1")),
    ("evicted before the reduction",
     lambda: distributed().set("backward", 5, "evict c2 <- d2 @d2h after b2").move("backward", 5, 3),
     (r"backward b3 `evict c2", "not reduced")),
    ("gathered group with a gap",
     lambda: distributed().but(slots=((0, PAYLOAD), (1280, PAYLOAD), (512, PAYLOAD), (768, PAYLOAD))),
     (r"forward f1 `gather g0", "c1 stands at byte 1280, not at byte 256")),
    ("group that does not fit before the own slot",
     lambda: distributed(rank=1).set("forward", 0, "fetch c1 -> d0 @h2d after s0"),
     (r"forward f1 `gather g0", "2 slots around slot d0")),
    ("sum before a norm", lambda: measured().without_wait("backward", 15, "b14").move("backward", 15, 14),
     (r"backward b14 `sum", "no norm of c0 precedes it")),
    ("sum without a norm", lambda: measured().delete("backward", 5).set("backward", 5, "evict c2 <- d2 @d2h after b4"),
     (r"backward b14 `sum", "no norm of c2 precedes it")),
    ("norm behind the sum", lambda: measured().insert("backward", 16, "norm c0 @compute"),
     (r"backward b16 `norm c0", "added up already")),
    ("sum that does not wait for a norm", lambda: measured().without_wait("backward", 15, "b14"),
     (r"backward b15 `sum", r"reads norm of c0", r"b14 `norm c0")),
    ("sum twice", lambda: measured().insert("backward", 16, "sum @comm"), (r"backward b16 `sum", "added up twice")),
    ("sum missing", lambda: measured().delete("backward", 15), (r"step s0 `decide", "no sum of the norms")),
    ("decision that does not wait for the sum", lambda: measured().without_wait("step", 0, "b15"),
     (r"step s0 `decide", "reads sums", r"b15 `sum")),
    ("sum in the forward program", lambda: measured().insert("forward", 0, "sum @comm"),
     (r"forward f0 `sum", "no place in program forward")),
    ("sum of a single rank", lambda: evicting().insert("backward", 12, "sum @comm"),
     (r"backward b12 `sum", "single rank")),
    ("collective of a single rank", lambda: evicting().insert("forward", 1, "gather g0 @comm after f0"),
     (r"forward f1 `gather g0", "single rank")),
]  # fmt: skip

STRUCTURE: list[Mutation] = [
    ("wait on a later label", lambda: evicting().set("forward", 1, "run fwd.0 @compute after f0 f2"),
     (r"forward f1 `run fwd\.0", "f2", "deadlock")),
    ("wait on itself", lambda: evicting().set("forward", 1, "run fwd.0 @compute after f1"),
     (r"forward f1 `run fwd\.0", "f1", "deadlock")),
    ("wait on a label that does not exist", lambda: evicting().set("forward", 0, "fetch c0 -> d0 @h2d after s3"),
     (r"forward f0 `fetch c0", "s3, which does not exist")),
    ("wait on a role that does not exist", lambda: evicting().set("forward", 0, "fetch c0 -> d0 @h2d after q0"),
     (r"forward f0 `fetch c0", "q0, which does not exist")),
    ("segment that does not exist", lambda: evicting().set("forward", 1, "run fwd.9 @compute after f0"),
     (r"forward f1 `run fwd\.9", "no fwd.9")),
    ("chunk that does not exist", lambda: evicting().set("forward", 0, "fetch c3 -> d0 @h2d after s0"),
     (r"forward f0 `fetch c3", "no c3")),
    ("segment of the other graph", lambda: evicting().set("forward", 1, "run bwd.0 @compute after f0"),
     (r"forward f1 `run bwd\.0", "the forward of this plan has no bwd.0")),
    ("segment skipped", lambda: evicting().delete("forward", 1),
     (r"forward f2 `run fwd\.1", "segment 0 of forward must run first")),
    ("last segment missing", lambda: evicting().delete("forward", 6), ("forward, at its end", "2 of 3 segments ran")),
    ("exit state with too much", lambda: _exit(evicting(), "backward", (("c1", 1),)),
     ("disagree on c1 in d1 between backward and step",)),
    ("exit state that is not reached", lambda: evicting().but(saved=(("c1", 0), ("c2", 1))),
     ("forward, at its end", "c1 in d1, c2 in d0 beyond", "lacks c1 in d0, c2 in d1")),
    ("chunk left behind in the cycle", lambda: evicting().delete("abandon", 0),
     ("abandon, at its end", "c1 in d1 beyond")),
    ("cold state with a chunk that has a home", lambda: evicting().but(cold=(("c0", 0),)),
     ("cold state", "declared: c0")),
    ("static residents that overlap",
     lambda: resident().but(slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD), (500, TRIPLE), (1280, TRIPLE))),
     ("static residents c1 and os0 overlap",)),
    ("trained parameter without a gradient", lambda: segment_at(evicting(), 6, lands=()),
     ("'w0' is in c0 of list trained", "never lands")),
    ("trained chunk without optimizer state",
     lambda: evicting().but(chunks=(trained(0), trained(1), replace(trained(2), os_home=None))),
     ("c2 is trained but has no optimizer state",)),
    ("parameters that overlap in a chunk", lambda: evicting().but(
            placements=(Placement(0, 0, 0), Placement(1, 0, 31), Placement(2, 1, 0), Placement(3, 2, 0))
        ),
     ("'w1' does not fit at element 31 of c0",)),
    ("parameter longer than its chunks", lambda: evicting().but(numels=(32, 32, 65, 64)),
     ("'w2' reaches 1 elements past its 1 chunks",)),
    ("unused chunk fetched",
     lambda: evicting()
        .but(chunks=(*evicting().chunks, Chunk(3, ChunkList.UNUSED, "float32", CHUNK_NUMEL, 0, Tier.HOST)))
        .insert("abandon", 2, "fetch c3 -> d0 @h2d after t1"),
     (r"abandon t2 `fetch c3", "no graph uses")),
    ("a program missing", lambda: evicting().but(changes={"programs": evicting().build().programs[:4]}),
     ("forward, backward, step, restore, abandon, resume; found forward, backward, step, restore",)),
    ("gradient in the forward graph",
     lambda: evicting().but(segments=(segment("fwd.0", (0, 1), (0,)), *evicting().segments[1:])),
     ("fwd.0 of the forward graph cannot make gradients",)),
]  # fmt: skip
