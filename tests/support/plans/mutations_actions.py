"""Plans broken in one action or wait: moves, gradients and the step."""

from collections.abc import Callable
from dataclasses import replace

from plans import evicting, grad_chunk, resident, spanning, streaming
from spec import PAYLOAD, PlanSpec


def segment_at(spec: PlanSpec, position: int, **fields: object) -> PlanSpec:
    segments = list(spec.segments)
    segments[position] = replace(segments[position], **fields)  # type: ignore[arg-type]
    return spec.but(segments=tuple(segments))


Mutation = tuple[str, Callable[[], PlanSpec], tuple[str, ...]]

# name, how to break a right plan, what the message must contain (regular expressions)
MOVES: list[Mutation] = [
    ("missing wait for a fetch", lambda: evicting().without_wait("forward", 1, "f0"),
     (r"forward f1 `run fwd\.0", "slot d0", r"f0 `fetch c0", "before fwd.0")),
    ("fetch without waiting for the update", lambda: evicting().without_wait("forward", 2, "s1"),
     (r"forward f2 `fetch c1", "home of c1", r"s1 `update c1")),
    ("early reuse of a slot", lambda: evicting().without_wait("forward", 5, "f4"),
     (r"forward f5 `fetch c2", "slot d0", r"f4 `drop c0", "before fwd.2")),
    ("slot reused while it is still copied out", lambda: evicting().without_wait("backward", 6, "b2"),
     (r"backward b6 `fetch c0", "slot d0", r"b2 `evict c2")),
    ("evicted before the gradient landed", lambda: evicting().without_wait("backward", 2, "b1"),
     (r"backward b2 `evict c2", "slot d0", r"b1 `stash c2")),
    ("update before the gradient came home", lambda: evicting().without_wait("step", 0, "b11"),
     (r"step s0 `update c0", "home of c0", r"b11 `evict c0")),
    ("slot that is occupied", lambda: evicting().set("forward", 2, "fetch c1 -> d0 @h2d after s1"),
     (r"forward f2 `fetch c1 -> d0", "slot d0", "holds c0")),
    ("slots that share bytes", lambda: evicting().but(slots=((0, PAYLOAD), (128, PAYLOAD)), arena_nbytes=512),
     (r"forward f2 `fetch c1", "slot d1 shares bytes with slot d0", "holds c0")),
    ("eviction from the wrong slot", lambda: evicting().set("backward", 2, "evict c2 <- d1 @d2h after b1"),
     (r"backward b2 `evict c2", "c2 stands in slot d0, not in slot d1")),
    ("slot outside the table", lambda: evicting().set("forward", 2, "fetch c1 -> d7 @h2d after s1"),
     (r"forward f2 `fetch c1", "no slot d7")),
    ("slot that is too small", lambda: evicting().but(slots=((0, PAYLOAD), (PAYLOAD, 128))),
     (r"forward f2 `fetch c1", "256 bytes", "slot d1 has 128")),
    ("slot outside the arena", lambda: evicting().but(arena_nbytes=400, device_budget=9999),
     ("slot d1", "256 to 512", "arena of 400")),
    ("fetched twice", lambda: evicting().insert("forward", 2, "fetch c0 -> d1 @h2d after s0"),
     (r"forward f2 `fetch c0", "already stands in slot d0")),
    ("never fetched", lambda: evicting().delete("forward", 2), (r"forward f2 `run fwd\.1", "c1 is not on the device")),
    ("drop of gradients that are nowhere else", lambda: evicting().set("backward", 2, "drop c2 <- d0 @compute"),
     (r"backward b2 `drop c2", "only newest copy of c2", "gradients of 1")),
    ("drop of updated parameters with a stale home", lambda: streaming().set("step", 5, "drop c0 <- d0 @compute"),
     (r"step s5 `drop c0", "only newest copy of c0")),
    ("eviction missing", lambda: evicting().delete("backward", 5),
     (r"backward b5 `fetch c0|backward, at its end", "c1")),
    ("fetch of a chunk without host home", lambda: resident().insert("forward", 0, "fetch c0 -> d1 @h2d"),
     (r"forward f0 `fetch c0", "no host home")),
    ("evicted twice", lambda: evicting().insert("backward", 3, "evict c2 <- d0 @d2h"),
     (r"backward b3 `evict c2", "c2 is not on the device")),
    ("spanning parameter with a gap",
     lambda: spanning().but(slots=((0, PAYLOAD), (1280, PAYLOAD), (512, PAYLOAD), (1024, PAYLOAD))),
     (r"forward f3 `run fwd\.0", "'w0' spans c0 at byte 0 and c1 at byte 1280")),
    ("half of a spanning parameter", lambda: spanning().delete("forward", 0),
     (r"forward f2 `run fwd\.0", "c0 is not on the device")),
]  # fmt: skip

GRADIENTS: list[Mutation] = [
    ("read after overlay", lambda: segment_at(evicting(), 6, reads=(1,)),
     (r"backward b9 `run bwd\.3", "reads 'w1' in c0, overlaid by its gradient")),
    ("gradients fetched for an update at home leave a stale copy", lambda: evicting()
        .insert("step", 0, "fetch c2 -> d0 @h2d after b11")
        .set("step", 3, "update c2 @cpu after s0 b2")
        .insert("step", 4, "evict c2 <- d0 @d2h after s3"),
     (r"step s4 `evict c2", "device copy of c2 is stale")),
    ("lost gradient", lambda: evicting().delete("backward", 8),
     (r"backward b7 `run bwd\.2", "gradient of 'w1' in c0 is lost")),
    ("lost half of a spanning gradient",
     lambda: spanning().set("backward", 6, "evict c0 <- d0 @d2h after b5").delete("backward", 4),
     (r"backward b3 `run bwd\.1", "gradient of 'w0' in c0 is lost")),
    ("double stash", lambda: evicting().insert("backward", 2, "stash c2 of bwd.0 @compute"),
     (r"backward b2 `stash c2 of bwd\.0", "gradient of 'w3' in c2 is stashed twice")),
    ("stash of another segment", lambda: evicting().set("backward", 4, "stash c1 of bwd.0 @compute"),
     (r"backward b4 `stash c1 of bwd\.0", "no gradient of bwd.0 lands in c1")),
    ("stash of a segment that has not run",
     lambda: evicting().insert("backward", 7, "stash c0 of bwd.3 @compute after b6").delete("backward", 11),
     (r"backward b7 `stash c0 of bwd\.3", "right after it")),
    ("gradient that lands in two segments", lambda: segment_at(evicting(), 6, lands=(0, 1)),
     (r"backward b10 `stash c0", "gradient of 'w1' in c0 is stashed twice")),
    ("gradient chunk updated without its gradient", lambda: grad_chunk().delete("backward", 3).but(graded=(("c1", 1),)),
     (r"step s0 `update c0", "host copy of c1 is stale")),
    ("gradient chunk reused before the update read it",
     lambda: grad_chunk().without_wait("backward", 0, "s0").without_wait("forward", 0, "s0"),
     ("`fetch c[01]", "`update c0")),
    ("overlay where it is illegal", lambda: grad_chunk().set("backward", 2, "stash c0 of bwd.0 @compute"),
     (r"backward b4 `run bwd\.1", "'w0'", "c0")),
]  # fmt: skip

STEP: list[Mutation] = [
    ("double update", lambda: evicting().insert("step", 1, "update c0 @cpu after b11"),
     (r"step s1 `update c0", "c0 is updated or restored twice")),
    ("missing update", lambda: evicting().delete("step", 1), ("step, at its end|forward", "c1")),
    ("update where the triple is not", lambda: evicting().set("step", 0, "update c0 @compute after b11"),
     (r"step s0 `update c0", "c0 is not on the device")),
    ("load missing", lambda: streaming().delete("step", 0).delete("step", 3),
     (r"step s1 `update c0", "os0 is not on the device")),
    ("store missing", lambda: streaming().delete("step", 4), ("step, at its end", "os0 in d2")),
    ("triple loaded over a payload", lambda: streaming().insert("step", 0, "fetch c1 -> d1 @h2d after b5"),
     (r"step s1 `load os0", "slot d2 shares bytes with slot d1", "holds c1")),
    ("triple loaded before the payload under it has gone home", lambda: streaming().without_wait("step", 0, "b5"),
     (r"step s0 `load os0", "slot d2", r"b5 `evict c1")),
    ("payload fetched before the triple over it has gone home",
     lambda: streaming().set("step", 4, "evict c0 <- d0 @d2h after s2")
         .set("step", 5, "store os0 <- d2 @d2h after s2")
         .set("forward", 0, "fetch c0 -> d0 @h2d after s4")
         .set("forward", 1, "fetch c1 -> d1 @h2d after s3"),
     (r"forward f1 `fetch c1", "slot d1", r"s5 `store os0")),
    ("triple stored before its update", lambda: streaming().without_wait("step", 4, "s2"),
     (r"step s4 `store os0", "slot d2", r"s2 `update c0")),
    ("updated before the triple arrived", lambda: streaming().without_wait("step", 2, "s0"),
     (r"step s2 `update c0", "slot d2", r"s0 `load os0")),
    ("norm missing",
     lambda: streaming().delete("backward", 4)
         .set("backward", 4, "evict c1 <- d1 @d2h after b3")
         .set("step", 0, "load os0 -> d2 @h2d after b4")
         .set("step", 1, "decide @compute after b4"),
     (r"step s1 `decide", "no norm of c1")),
    ("norm twice", lambda: streaming().insert("backward", 5, "norm c1 @compute"),
     (r"backward b5 `norm c1", "c1 enters the norm twice")),
    ("eviction that does not wait for the norm", lambda: streaming().set("backward", 5, "evict c1 <- d1 @d2h after b2"),
     (r"backward b5 `evict c1", "slot d1", r"b4 `norm c1")),
    ("update that does not wait for the decision", lambda: streaming().without_wait("step", 3, "s1"),
     (r"step s3 `update c1", "decision", r"s1 `decide")),
    ("decision missing", lambda: streaming().delete("step", 1), (r"step s1 `update c0", "must follow decide")),
    ("restore misaligned",
     lambda: evicting().set("restore", 1, "restore c2 @cpu after b5").set("restore", 2, "restore c1 @cpu after b2"),
     (r"restore s1 `restore c2", "does not match `update c1")),
    ("restore of another length",
     lambda: evicting().but(programs={**evicting().programs, "restore": ("restore c0 @cpu after b11",)}),
     ("restore has 1 actions and step 3",)),
    ("restore that does not wait for the gradient's copy", lambda: evicting().without_wait("restore", 0, "b11"),
     (r"restore s0 `restore c0", "home of c0", r"b11 `evict c0")),
    ("update in the forward program", lambda: evicting().insert("forward", 0, "update c0 @cpu"),
     (r"forward f0 `update c0", "no place in program forward")),
]  # fmt: skip
