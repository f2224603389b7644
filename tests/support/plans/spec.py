"""A plan in a form that tests can write by hand and edit: programs are lists of action texts.

Unless given, ``restore`` is the step with each update turned into a restore. Chunks hold 64 fp32 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chunkc.ir.actions import Action, parse
from chunkc.ir.layout import Chunk, ChunkList, Group, Layout, Placement, Slot
from chunkc.ir.plan import ROLE_LETTER, Memory, MovedValue, Phase, Plan, Program, Role, Segment, StageRecord, State
from chunkc.ir.schedule import ParamInfo, SavedValue
from chunkc.ir.tiers import Tier

CHUNK_NUMEL = 64
PAYLOAD = 256
TRIPLE = 768
Resident = tuple[tuple[str, int], ...]


def trained(index: int, home: Tier = Tier.HOST, os_home: Tier = Tier.HOST) -> Chunk:
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
    moves: tuple[MovedValue, ...] = ()
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
        return {"restore": restore, "resume": self._resume(), **self.programs}

    def _resume(self) -> tuple[str, ...]:
        """What ``abandon`` lets go of comes back: own chunks first, then their groups."""
        abandon = [t.split(" after ")[0] for t in self.programs["abandon"]]
        drops = [t for t in abandon if t.startswith("drop")]
        fetches = [t.replace("drop", "fetch").replace("<-", "->").replace("@compute", "@h2d") for t in drops]
        after = f" after t{len(fetches) - 1}" if fetches else ""
        groups = [t.split()[1] for t in abandon if t.startswith("release")]
        return (*fetches, *(f"gather {g} @comm{after}" for g in groups))

    def build(self) -> Plan:
        layout = self.layout()
        states: dict[Phase, State] = {
            "cold": State("cold", self.cold),
            "saved": State("saved", self.saved),
            "graded": State("graded", self.graded),
        }
        ends: dict[Role, tuple[Phase, Phase]] = {
            "forward": ("cold", "saved"),
            "backward": ("saved", "graded"),
            "step": ("graded", "cold"),
            "restore": ("graded", "cold"),
            "abandon": ("saved", "cold"),
            "resume": ("cold", "saved"),
        }
        texts = self.texts()
        programs = tuple(
            Program(role, states[a], states[b], tuple(parse(t) for t in texts[role])) for role, (a, b) in ends.items()
        )
        peak = max(self.segments, key=lambda s: s.nonmodel_nbytes)
        budget = layout.arena_nbytes + peak.nonmodel_nbytes if self.device_budget is None else self.device_budget
        memory = Memory(
            budget,
            self.host_budget,
            layout.arena_nbytes,
            peak.nonmodel_nbytes,
            peak.name,
            layout.nbytes_in(Tier.HOST) + sum(v.nbytes for v in self.moves),
        )
        stages = (StageRecord("hand", 0.5, "written by hand"),)
        plan = Plan("Toy", "emulated-1m-1m", "0" * 12, layout, self.segments, programs, memory, self.moves, stages)
        values = {v.index: SavedValue(v.target, "", v.nbytes, v.made_by, v.read_by, v.used_until) for v in self.moves}
        return replace(plan, **{"saved": tuple(values.values()), **self.changes})

    # --- edits --------------------------------------------------------------------------------------------------
    def but(self, **fields: Any) -> PlanSpec:
        return replace(self, **fields)

    def _with_program(self, name: str, texts: Sequence[str]) -> PlanSpec:
        return replace(self, programs={**self.programs, name: tuple(texts)})

    def set(self, name: str, position: int, text: str) -> PlanSpec:
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
        letter, by = ROLE_LETTER[name], -1 if text is None else 1
        programs: dict[str, tuple[str, ...]] = {}
        for other, texts in self.programs.items():
            lines = []
            for line in texts:
                action = parse(line)
                waits = tuple(w for w in (shift(w, letter, position, by) for w in action.waits) if w is not None)
                lines.append(str(replace(action, waits=waits)))
            if ROLE_LETTER[other] == letter:
                lines[position : position + (text is None)] = [] if text is None else [text]
            programs[other] = tuple(lines)
        return replace(self, programs=programs)

    def without_wait(self, name: str, position: int, wait: str) -> PlanSpec:
        action = parse(self.texts()[name][position])
        return self.set(name, position, str(replace(action, waits=tuple(w for w in action.waits if w != wait))))

    def action(self, name: str, position: int) -> Action:
        return parse(self.texts()[name][position])
