"""Small plans written by hand, and the edits that break them.

A ``PlanSpec`` keeps programs as lists of action texts, so that tests read like plans. ``build`` makes the plan; unless
given, ``restore`` is the step with each update turned into a restore. Chunks hold 64 fp32 elements: 256 bytes of
payload and 768 of optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chunkc.ir.actions import Action, parse
from chunkc.ir.layout import Chunk, ChunkList, Group, Home, Layout, Placement, Slot
from chunkc.ir.plan import ROLE_LETTER, Memory, Phase, Plan, Program, Role, Segment, StageRecord, State
from chunkc.ir.schedule import ParamInfo

CHUNK_NUMEL = 64
PAYLOAD = 256
TRIPLE = 768
Resident = tuple[tuple[str, int], ...]
ROLES: dict[str, Role] = {
    "forward": "forward",
    "backward": "backward",
    "step": "step",
    "restore": "step",
    "abandon": "transition",
}


def trained(index: int, home: Home = Home.HOST, os_home: Home = Home.HOST) -> Chunk:
    return Chunk(index, ChunkList.TRAINED, "float32", CHUNK_NUMEL, CHUNK_NUMEL, home, os_home)


def segment(name: str, reads: tuple[int, ...] = (), lands: tuple[int, ...] = (), nbytes: int = 1000) -> Segment:
    graph, index = name.split(".")
    kind = "forward" if graph == "fwd" else "backward"
    return Segment(kind, int(index), int(index), int(index) + 1, reads, lands, nbytes - 100, 100)  # type: ignore[arg-type]


def shift(wait: str, letter: str, position: int, by: int) -> str | None:
    """The label ``wait`` once an action of the role ``letter`` was removed (by=-1) or inserted (by=1) at position."""
    number = int(wait[1:])
    if wait[0] != letter or number < position:
        return wait
    if by < 0 and number == position:
        return None
    return f"{letter}{number + by}"


@dataclass(frozen=True)
class PlanSpec:
    """Everything a plan is made of, in a form that tests can edit."""

    numels: tuple[int, ...]
    placements: tuple[Placement, ...]
    chunks: tuple[Chunk, ...]
    slots: tuple[tuple[int, int], ...]
    segments: tuple[Segment, ...]
    programs: dict[str, tuple[str, ...]]
    cold: Resident = ()
    saved: Resident = ()
    graded: Resident = ()
    world_size: int = 1
    rank: int = 0
    arena_nbytes: int | None = None
    device_budget: int | None = None
    host_budget: int = 1 << 20
    changes: dict[str, Any] = field(default_factory=dict)

    def layout(self) -> Layout:
        size = self.world_size
        slots = tuple(Slot(i, offset, nbytes) for i, (offset, nbytes) in enumerate(self.slots))
        arena = max((s.end for s in slots), default=0) if self.arena_nbytes is None else self.arena_nbytes
        params = tuple(
            ParamInfo(f"w{i}", (), (numel,), (1,), "float32", trainable=True) for i, numel in enumerate(self.numels)
        )
        groups = tuple(Group(i, i * size, size) for i in range(len(self.chunks) // size))
        return Layout(params, self.placements, self.chunks, groups, CHUNK_NUMEL, slots, arena, size, self.rank)

    def texts(self) -> dict[str, tuple[str, ...]]:
        step = self.programs["step"]
        restore = tuple(t.replace("update", "restore", 1) for t in step)
        return {"restore": restore, **self.programs}

    def build(self) -> Plan:
        layout = self.layout()
        states: dict[Phase, State] = {
            "cold": State("cold", self.cold),
            "saved": State("saved", self.saved),
            "graded": State("graded", self.graded),
        }
        ends: dict[str, tuple[Phase, Phase]] = {
            "forward": ("cold", "saved"),
            "backward": ("saved", "graded"),
            "step": ("graded", "cold"),
            "restore": ("graded", "cold"),
            "abandon": ("saved", "cold"),
        }
        texts = self.texts()
        programs = tuple(
            Program(name, ROLES[name], states[a], states[b], tuple(parse(t) for t in texts[name]))
            for name, (a, b) in ends.items()
        )
        peak = max(self.segments, key=lambda s: s.nonmodel_nbytes)
        budget = layout.arena_nbytes + peak.nonmodel_nbytes if self.device_budget is None else self.device_budget
        memory = Memory(
            budget, self.host_budget, layout.arena_nbytes, peak.nonmodel_nbytes, peak.name, layout.host_nbytes()
        )
        stages = (StageRecord("hand", 0.5, "written by hand"),)
        plan = Plan("Toy", "emulated-1m-1m", "0" * 12, layout, self.segments, programs, memory, stages)
        return replace(plan, **self.changes)

    # --- edits --------------------------------------------------------------------------------------------------
    def but(self, **fields: Any) -> PlanSpec:
        return replace(self, **fields)

    def _with_program(self, name: str, texts: Sequence[str]) -> PlanSpec:
        return replace(self, programs={**self.programs, name: tuple(texts)})

    def set(self, name: str, position: int, text: str) -> PlanSpec:
        """Another action at ``position`` of program ``name``."""
        texts = list(self.texts()[name])
        texts[position] = text
        return self._with_program(name, texts)

    def delete(self, name: str, position: int) -> PlanSpec:
        """Without the action at ``position``; labels behind it move up, waits for it vanish."""
        return self._renumbered(name, position, None)

    def insert(self, name: str, position: int, text: str) -> PlanSpec:
        """With ``text`` before ``position``; labels from there on move down. ``text`` uses the new labels."""
        return self._renumbered(name, position, text)

    def move(self, name: str, start: int, end: int) -> PlanSpec:
        """With the action at ``start`` taken out and put back at ``end``; waits for it are lost."""
        return self.delete(name, start).insert(name, end, self.texts()[name][start])

    def _renumbered(self, name: str, position: int, text: str | None) -> PlanSpec:
        letter, by = ROLE_LETTER[ROLES[name]], -1 if text is None else 1
        programs: dict[str, tuple[str, ...]] = {}
        for other, texts in self.programs.items():
            lines = []
            for line in texts:
                action = parse(line)
                waits = tuple(w for w in (shift(w, letter, position, by) for w in action.waits) if w is not None)
                lines.append(str(replace(action, waits=waits)))
            if ROLES[other] == ROLES[name]:
                lines[position : position + (text is None)] = [] if text is None else [text]
            programs[other] = tuple(lines)
        return replace(self, programs=programs)

    def without_wait(self, name: str, position: int, wait: str) -> PlanSpec:
        action = parse(self.texts()[name][position])
        return self.set(name, position, str(replace(action, waits=tuple(w for w in action.waits if w != wait))))

    def action(self, name: str, position: int) -> Action:
        return parse(self.texts()[name][position])


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


def resident() -> PlanSpec:
    """Two chunks and their triples always on the device: nothing moves."""
    static = (("c0", 0), ("c1", 1), ("os0", 2), ("os1", 3))
    return PlanSpec(
        numels=(64, 64),
        placements=(Placement(0, 0, 0), Placement(1, 1, 0)),
        chunks=(trained(0, Home.DEVICE, Home.DEVICE), trained(1, Home.DEVICE, Home.DEVICE)),
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
    """c0 is updated on the device, its triple streamed through a slot over payload slots; clipping; elastic bytes."""
    return PlanSpec(
        numels=(64, 64),
        placements=(Placement(0, 0, 0), Placement(1, 1, 0)),
        chunks=(trained(0), trained(1)),
        slots=((0, PAYLOAD), (PAYLOAD, PAYLOAD), (PAYLOAD, TRIPLE)),
        segments=(segment("fwd.0", (0, 1)), segment("bwd.0", (0, 1), (0, 1))),
        programs={
            "forward": (
                "fetch c0 -> d0 @h2d after s9",
                "fetch c1 -> d1 @h2d after s8 s5",
                "run fwd.0 @compute after f1",
            ),
            "backward": (
                "run bwd.0 @compute",
                "stash c0 of bwd.0 @compute",
                "stash c1 of bwd.0 @compute",
                "norm c0 @compute",
                "evict c1 <- d1 @d2h after b2",
            ),
            "step": (
                "norm c1 @cpu after b4",
                "load os0 -> d2 @h2d after b4",
                "decide @compute after s0",
                "grow 500 @compute",
                "update c0 @compute after s1",
                "update c1 @cpu after s2",
                "shrink 300 @compute",
                "shrink 200 @compute",
                "store os0 <- d2 @d2h after s4",
                "evict c0 <- d0 @d2h after s4",
            ),
            "abandon": ("drop c0 <- d0 @compute", "drop c1 <- d1 @compute"),
        },
        saved=(("c0", 0), ("c1", 1)),
        graded=(("c0", 0),),
    )


def grad_chunk() -> PlanSpec:
    """The gradient of c0 must not overlay it: it lands in the gradient chunk c1; c0 is read again after that."""
    gradients = Chunk(1, ChunkList.GRAD, "float32", CHUNK_NUMEL, CHUNK_NUMEL, Home.HOST, None, partner=0)
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


def distributed(rank: int = 0, serial: bool = False) -> PlanSpec:
    """Two ranks, two groups: g0 is gathered, released and gathered again; g1 stays gathered into backward."""
    first, second = rank, 2 + rank

    def each(op: str, group: int, stream: str, waits: str = "") -> list[str]:
        targets = [f"c{2 * group}", f"c{2 * group + 1}"] if serial else [f"g{group}"]
        return [f"{op} {t} @{stream}{waits}" for t in targets]

    forward = [f"fetch c{first} -> d{rank} @h2d after s0", *each("gather", 0, "comm", " after f0")]
    forward += [f"run fwd.0 @compute after f{len(forward) - 1}", *each("release", 0, "compute")]
    forward += [f"drop c{first} <- d{rank} @compute"]
    dropped = f"f{len(forward) - 1}"
    forward += [f"fetch c{second} -> d{2 + rank} @h2d after s1"]
    forward += each("gather", 1, "comm", f" after f{len(forward) - 1}")
    forward += [f"run fwd.1 @compute after f{len(forward) - 1}"]
    backward = ["run bwd.0 @compute"]
    backward += ["stash c2 of bwd.0 @compute", "stash c3 of bwd.0 @compute"]
    backward += each("reduce", 1, "comm", " after b2")
    backward += each("release", 1, "compute", f" after b{len(backward) - 1}")
    backward += [f"evict c{second} <- d{2 + rank} @d2h after b{len(backward) - 1}"]
    evicted_second = len(backward) - 1
    backward += [f"fetch c{first} -> d{rank} @h2d after {dropped}"]
    backward += each("gather", 0, "comm", f" after b{len(backward) - 1}")
    backward += [f"run bwd.1 @compute after b{len(backward) - 1}"]
    backward += ["stash c0 of bwd.1 @compute", "stash c1 of bwd.1 @compute"]
    backward += each("reduce", 0, "comm", f" after b{len(backward) - 1}")
    backward += each("release", 0, "compute", f" after b{len(backward) - 1}")
    backward += [f"evict c{first} <- d{rank} @d2h after b{len(backward) - 1}"]
    step = [f"update c{first} @cpu after b{len(backward) - 1}", f"update c{second} @cpu after b{evicted_second}"]
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
            "forward": tuple(forward),
            "backward": tuple(backward),
            "step": tuple(step),
            "abandon": (*each("release", 1, "compute"), f"drop c{second} <- d{2 + rank} @compute"),
        },
        saved=(("c2", 2), ("c3", 3)),
        world_size=2,
        rank=rank,
    )


SPECS: dict[str, PlanSpec] = {
    "evicting": evicting(),
    "resident": resident(),
    "spanning": spanning(),
    "streaming": streaming(),
    "grad_chunk": grad_chunk(),
    "distributed": distributed(),
    "distributed_rank1": distributed(rank=1),
    "serial": distributed(serial=True),
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
