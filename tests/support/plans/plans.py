"""Small plans written by hand, one for each way in which memory can be managed, and one of any length."""

from dataclasses import replace

from spec import CHUNK_NUMEL, PAYLOAD, TRIPLE, PlanSpec, segment, trained

from chunkc.ir.layout import Chunk, ChunkList, Placement
from chunkc.ir.plan import MovedValue
from chunkc.ir.tiers import Tier


def evicting() -> PlanSpec:
    """Three chunks through two slots, triples on the host; c0 holds two parameters that are overlaid one by one."""
    return PlanSpec(
        numels=(32, 32, 64, 64),
        placements=(Placement(0, 0, 0), Placement(1, 0, 32), Placement(2, 1, 0), Placement(3, 2, 0)),
        chunks=(trained(0), trained(1), trained(2)),
        slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD)),
        segments=(
            segment("fwd.0", (0, 1)),
            segment("fwd.1", (2,)),
            segment("fwd.2", (3,)),
            segment("bwd.0", (3,), (3,)),
            segment("bwd.1", (2,), (2,)),
            segment("bwd.2", (0, 1), (1,)),
            segment("bwd.3", (0,), (0,)),
        ),
        programs={
            "forward": (
                "fetch c0 -> d0 @h2d after s0",
                "run fwd.0 @compute after f0",
                "fetch c1 -> d1 @h2d after s1",
                "run fwd.1 @compute after f2",
                "drop c0 <- d0 @compute",
                "fetch c2 -> d0 @h2d after f4 s2",
                "run fwd.2 @compute after f5",
            ),
            "backward": (
                "run bwd.0 @compute",
                "stash c2 of bwd.0 @compute",
                "evict c2 <- d0 @d2h after b1",
                "run bwd.1 @compute",
                "stash c1 of bwd.1 @compute",
                "evict c1 <- d1 @d2h after b4",
                "fetch c0 -> d0 @h2d after b2",
                "run bwd.2 @compute after b6",
                "stash c0 of bwd.2 @compute",
                "run bwd.3 @compute",
                "stash c0 of bwd.3 @compute",
                "evict c0 <- d0 @d2h after b10",
            ),
            "step": ("update c0 @cpu after b11", "update c1 @cpu after b5", "update c2 @cpu after b2"),
            "abandon": ("drop c1 <- d1 @compute", "drop c2 <- d0 @compute"),
        },
        saved=(("c1", 1), ("c2", 0)),
    )


def moving() -> PlanSpec:
    """As ``evicting``; what fwd.0 makes and fwd.1 reads leaves the device for fwd.2 and bwd.0, and bwd.2 reads it."""
    spec = (
        evicting()
        .insert("forward", 4, "offload a0 @d2h after f3")
        .insert("forward", 5, "discard a0 @compute after f4")
        .insert("backward", 3, "allocate a0 @compute")
        .insert("backward", 8, "reload a0 @h2d after b3")
        .set("backward", 9, "run bwd.2 @compute after b7 b8")
    )
    segments = tuple(replace(s, away_nbytes=300 if s.name in ("fwd.2", "bwd.0") else 0) for s in spec.segments)
    return spec.but(segments=segments, moves=(MovedValue(0, 300, 0, 1, (2, 3)),))


def begun() -> PlanSpec:
    """As ``evicting``; c1 and c2 have second homes, into which their updates begin in backward."""
    spec = evicting().insert("backward", 3, "begin c2 @cpu after b2").insert("backward", 7, "begin c1 @cpu after b6")
    return spec.but(chunks=tuple(replace(c, has_second_home=c.index > 0) for c in spec.chunks))


def resident() -> PlanSpec:
    static = (("c0", 0), ("c1", 1), ("os0", 2), ("os1", 3))
    return PlanSpec(
        numels=(64, 64),
        placements=(Placement(0, 0, 0), Placement(1, 1, 0)),
        chunks=(trained(0, Tier.DEVICE, Tier.DEVICE), trained(1, Tier.DEVICE, Tier.DEVICE)),
        slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD), (512, TRIPLE), (1280, TRIPLE)),
        segments=(segment("fwd.0", (0, 1)), segment("bwd.0", (1,), (1, 0))),
        programs={
            "forward": ("run fwd.0 @compute",),
            "backward": ("run bwd.0 @compute", "stash c1 of bwd.0 @compute", "stash c0 of bwd.0 @compute"),
            "step": ("update c0 @compute", "update c1 @compute"),
            "abandon": (),
        },
        cold=static,
        saved=static,
        graded=static,
    )


def spanning() -> PlanSpec:
    """w0 reaches over c0 and into c1; c2 holds a frozen parameter."""
    return PlanSpec(
        numels=(96, 32, 64),
        placements=(Placement(0, 0, 0, 2), Placement(1, 1, 32), Placement(2, 2, 0)),
        chunks=(trained(0), trained(1), Chunk(2, ChunkList.FROZEN, "float32", CHUNK_NUMEL, CHUNK_NUMEL)),
        slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD), (512, PAYLOAD), (1024, PAYLOAD)),
        segments=(
            segment("fwd.0", (0, 2)),
            segment("fwd.1", (1,)),
            segment("bwd.0", (1,), (1,)),
            segment("bwd.1", (2,), (0,)),
        ),
        programs={
            "forward": (
                "fetch c0 -> d0 @h2d after s0",
                "fetch c1 -> d1 @h2d after s1",
                "fetch c2 -> d2 @h2d after b7",
                "run fwd.0 @compute after f1 f2",
                "run fwd.1 @compute",
                "drop c2 <- d2 @compute",
            ),
            "backward": (
                "fetch c2 -> d3 @h2d after b7",
                "run bwd.0 @compute",
                "stash c1 of bwd.0 @compute",
                "run bwd.1 @compute after b0",
                "stash c0 of bwd.1 @compute",
                "stash c1 of bwd.1 @compute",
                "evict c0 <- d0 @d2h after b4",
                "drop c2 <- d3 @compute",
                "evict c1 <- d1 @d2h after b5",
            ),
            "step": ("update c0 @cpu after b6", "update c1 @cpu after b8"),
            "abandon": ("drop c0 <- d0 @compute", "drop c1 <- d1 @compute"),
        },
        saved=(("c0", 0), ("c1", 1)),
    ).set("backward", 0, "fetch c2 -> d3 @h2d after f3")


def streaming() -> PlanSpec:
    """c0 is updated on the device, its triple streamed through a slot over payload slots; clipping."""
    return PlanSpec(
        numels=(64, 64),
        placements=(Placement(0, 0, 0), Placement(1, 1, 0)),
        chunks=(trained(0), trained(1)),
        slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD), (PAYLOAD, TRIPLE)),
        segments=(segment("fwd.0", (0, 1)), segment("bwd.0", (0, 1), (0, 1))),
        programs={
            "forward": (
                "fetch c0 -> d0 @h2d after s5",
                "fetch c1 -> d1 @h2d after s4 s3",
                "run fwd.0 @compute after f1",
            ),
            "backward": (
                "run bwd.0 @compute",
                "stash c0 of bwd.0 @compute",
                "stash c1 of bwd.0 @compute",
                "norm c0 @compute",
                "norm c1 @compute",
                "evict c1 <- d1 @d2h after b4",
            ),
            "step": (
                "load os0 -> d2 @h2d after b5",
                "decide @compute after b5",
                "update c0 @compute after s0",
                "update c1 @cpu after s1",
                "store os0 <- d2 @d2h after s2",
                "evict c0 <- d0 @d2h after s2",
            ),
            "abandon": ("drop c0 <- d0 @compute", "drop c1 <- d1 @compute"),
        },
        saved=(("c0", 0), ("c1", 1)),
        graded=(("c0", 0),),
    )


def grad_chunk() -> PlanSpec:
    """The gradient of c0 must not overlay it: it lands in the gradient chunk c1; c0 is read again after that."""
    gradients = Chunk(1, ChunkList.GRAD, "float32", CHUNK_NUMEL, CHUNK_NUMEL, Tier.HOST, None, partner=0)
    return PlanSpec(
        numels=(64,),
        placements=(Placement(0, 0, 0),),
        chunks=(trained(0), gradients),
        slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD)),
        segments=(segment("fwd.0", (0,)), segment("bwd.0", (0,), (0,)), segment("bwd.1", (0,))),
        programs={
            "forward": ("fetch c0 -> d0 @h2d after s0", "run fwd.0 @compute after f0"),
            "backward": (
                "fetch c1 -> d1 @h2d after b3 s0",
                "run bwd.0 @compute after b0",
                "stash c1 of bwd.0 @compute",
                "evict c1 <- d1 @d2h after b2",
                "run bwd.1 @compute",
                "drop c0 <- d0 @compute",
            ),
            "step": ("update c0 @cpu after b3 b5",),
            "abandon": ("drop c0 <- d0 @compute",),
        },
        saved=(("c0", 0),),
    ).set("backward", 0, "fetch c1 -> d1 @h2d after s0")


def distributed(rank: int = 0) -> PlanSpec:
    """Two ranks, two groups: g0 is gathered, released and gathered again; g1 stays gathered into backward."""
    first, second = rank, 2 + rank

    forward = (
        f"fetch c{first} -> d{rank} @h2d after s0",
        "gather g0 @comm after f0",
        "run fwd.0 @compute after f1",
        "release g0 @compute",
        f"drop c{first} <- d{rank} @compute",
        f"fetch c{second} -> d{2 + rank} @h2d after s1",
        "gather g1 @comm after f5",
        "run fwd.1 @compute after f6",
    )
    backward = (
        "run bwd.0 @compute",
        "stash c2 of bwd.0 @compute",
        "stash c3 of bwd.0 @compute",
        "reduce g1 @comm after b2",
        "release g1 @compute after b3",
        f"evict c{second} <- d{2 + rank} @d2h after b4",
        f"fetch c{first} -> d{rank} @h2d after f4",
        "gather g0 @comm after b6",
        "run bwd.1 @compute after b7",
        "stash c0 of bwd.1 @compute",
        "stash c1 of bwd.1 @compute",
        "reduce g0 @comm after b10",
        "release g0 @compute after b11",
        f"evict c{first} <- d{rank} @d2h after b12",
    )
    return PlanSpec(
        numels=(64, 64, 64, 64),
        placements=tuple(Placement(i, i, 0) for i in range(4)),
        chunks=tuple(trained(i) for i in range(4)),
        slots=tuple((i * PAYLOAD, PAYLOAD) for i in range(4)),
        segments=(
            segment("fwd.0", (0, 1)),
            segment("fwd.1", (2, 3)),
            segment("bwd.0", (2, 3), (2, 3)),
            segment("bwd.1", (0, 1), (0, 1)),
        ),
        programs={
            "forward": forward,
            "backward": backward,
            "step": (f"update c{first} @cpu after b13", f"update c{second} @cpu after b5"),
            "abandon": ("release g1 @compute", f"drop c{second} <- d{2 + rank} @compute"),
        },
        saved=(("c2", 2), ("c3", 3)),
        world_size=2,
        rank=rank,
    )


def measured() -> PlanSpec:
    """The same with norms of the reduced gradients, their sum over ranks, and a decision on it."""
    spec = distributed().insert("backward", 13, "norm c0 @compute")
    spec = spec.set("backward", 14, "evict c0 <- d0 @d2h after b13").insert("backward", 5, "norm c2 @compute")
    spec = spec.set("backward", 6, "evict c2 <- d2 @d2h after b5").insert("backward", 15, "sum @comm after b14")
    spec = spec.insert("step", 0, "decide @compute after b15")
    return spec.set("step", 1, "update c0 @cpu after b16 s0").set("step", 2, "update c2 @cpu after b6 s0")


def measured_begun() -> PlanSpec:
    """The same with a second home for c2, whose update begins while backward goes on."""
    spec = measured().insert("backward", 7, "begin c2 @cpu after b6")
    return spec.but(chunks=tuple(replace(c, has_second_home=c.index == 2) for c in spec.chunks))


SPECS: dict[str, PlanSpec] = {
    "evicting": evicting(),
    "begun": begun(),
    "moving": moving(),
    "resident": resident(),
    "spanning": spanning(),
    "streaming": streaming(),
    "grad_chunk": grad_chunk(),
    "distributed": distributed(),
    "distributed_rank1": distributed(rank=1),
    "measured": measured(),
    "measured_begun": measured_begun(),
}


def chain(num_chunks: int, num_slots: int = 4) -> PlanSpec:
    """``num_chunks`` chunks, one segment each, through ``num_slots`` slots in turn: a plan of any length."""
    forward: list[str] = []
    backward: list[str] = []
    step: list[str] = []
    freed: dict[int, str] = {}
    for i in range(num_chunks):
        slot = i % num_slots
        waits = " ".join([f"s{i}", *([freed[slot]] if slot in freed else [])])
        forward += [f"fetch c{i} -> d{slot} @h2d after {waits}", f"run fwd.{i} @compute after f{len(forward)}"]
        forward += [f"drop c{i} <- d{slot} @compute"]
        freed[slot] = f"f{len(forward) - 1}"
    for position, i in enumerate(reversed(range(num_chunks))):
        slot, base = i % num_slots, len(backward)
        backward += [
            f"fetch c{i} -> d{slot} @h2d after {freed[slot]}",
            f"run bwd.{position} @compute after b{base}",
            f"stash c{i} of bwd.{position} @compute",
            f"evict c{i} <- d{slot} @d2h after b{base + 2}",
        ]
        freed[slot] = f"b{base + 3}"
    for i in range(num_chunks):
        step += [f"update c{i} @cpu after b{4 * (num_chunks - 1 - i) + 3}"]
    segments = [segment(f"fwd.{i}", (i,)) for i in range(num_chunks)]
    segments += [segment(f"bwd.{n}", (num_chunks - 1 - n,), (num_chunks - 1 - n,)) for n in range(num_chunks)]
    return PlanSpec(
        numels=(CHUNK_NUMEL,) * num_chunks,
        placements=tuple(Placement(i, i, 0) for i in range(num_chunks)),
        chunks=tuple(trained(i) for i in range(num_chunks)),
        slots=tuple((s * PAYLOAD, PAYLOAD) for s in range(num_slots)),
        segments=tuple(segments),
        programs={"forward": tuple(forward), "backward": tuple(backward), "step": tuple(step), "abandon": ()},
        host_budget=num_chunks * (PAYLOAD + TRIPLE),
    )
