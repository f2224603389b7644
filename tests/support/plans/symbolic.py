"""Training over symbolic memory: a plan's actions as tasks on slots and homes; it shares nothing with the verifier.

Values are interned terms, as in `reference`. Actions take time: between an action's start and its finish its
destinations hold garbage and its sources must not change. So every race shows in some interleaving as a term that
differs from the reference. Slots are sets of byte ranges: writing one tears every slot that overlaps it.

Chunks with second homes have two places for each content, which change with every update. What was begun has to be
what the step would compute from what stands at home then, or its update leaves garbage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from reference import PROGRAMS, Content, Model, reference

from chunkc.ir.actions import LANDINGS, Action, Op, Stream
from chunkc.ir.plan import ROLE_LETTER, TRANSITIONS, Plan
from chunkc.ir.tiers import Tier

STREAMS = tuple(Stream)

Location = tuple[str, int]
Work = Callable[[list[Content]], list[Content]]
Effect = tuple[list[Location], list[Location], Work]
Started = tuple[list[Content], list[list[int]], list[list[int]]]
"""What a running action read, the stamps of what it only reads, and the stamps of what it marked as garbage."""

GARBAGE: Content = (-1,)


class Memory:
    """Symbolic memory: every location is a set of cells; slots that share bytes share cells."""

    def __init__(self, plan: Plan) -> None:
        slots = plan.layout.slots
        edges = sorted({edge for s in slots for edge in (s.offset, s.end)})
        self._cells: dict[Location, tuple[Location, ...]] = {
            ("slot", s.index): tuple(("byte", a) for a, b in pairwise(edges) if s.offset <= a and b <= s.end)
            for s in slots
        }
        self._held: dict[Location, tuple[Location, Content]] = {}
        self._stamps: dict[Location, int] = {}
        self._clock = 0

    def _cells_of(self, place: Location) -> tuple[Location, ...]:
        return self._cells.get(place, (place,))

    def stamps(self, place: Location) -> list[int]:
        return [self._stamps.get(cell, 0) for cell in self._cells_of(place)]

    def read(self, place: Location) -> Content:
        """The content of ``place`` if all its cells were last written together through it, else garbage."""
        held = [self._held.get(cell) for cell in self._cells_of(place)]
        first = held[0]
        whole = first is not None and first[0] == place and all(h == first for h in held)
        return first[1] if first is not None and whole and len(set(self.stamps(place))) == 1 else GARBAGE

    def write(self, place: Location, content: Content) -> None:
        self._clock += 1
        for cell in self._cells_of(place):
            self._held[cell] = (place, content)
            self._stamps[cell] = self._clock


@dataclass
class Task:
    """One action of one program instance: what it reads and writes, and how outputs follow from inputs."""

    name: str
    stream: int
    waits: list[int]
    reads: list[Location]
    writes: list[Location]
    work: Work


class Lowered:
    """The tasks of a sequence; slots of chunks are resolved in program order, what is not there is read as garbage."""

    def __init__(self, model: Model, sequence: str) -> None:
        self.model, self.sequence = model, sequence
        self.plan, self.layout = model.plan, model.plan.layout
        self.expected = reference(model, sequence)
        self.tasks: list[Task] = []
        self.wrong: list[str] = []
        self.slots: dict[str, int] = dict(self.plan.program("forward").entry.resident)
        latest: dict[str, dict[str, int]] = {}
        barrier: list[int] = []
        self.kept: set[tuple[int, int]] = set()
        self.unreduced: dict[int, set[int]] = {}
        self.side = {c.index: 0 for c in self.layout.chunks if c.has_second_home}
        self.begun: set[int] = set()
        self.forward = -1
        for instance, letter in enumerate(sequence):
            program = self.plan.program(*PROGRAMS[letter])
            if letter in "BPSR":
                self.kept = set()
            if program.role == "backward":
                program = program if _is_stepped(sequence[instance + 1 :]) else program.without_begins()
                self.begun = set()
            if program.role in ("resume", "reduce_all"):
                barrier = list(range(len(self.tasks)))
            current = latest.setdefault(ROLE_LETTER[program.role], {})
            if program.position == "first":
                current.clear()
            for label, action in program.labelled():
                waits = [latest[w[0]][w] for w in action.waits if w in latest.get(w[0], {})]
                reads, writes, work = self._lower(action, instance)
                name = f"{instance}:{label} {action}"
                stream = STREAMS.index(action.stream)
                current[label] = len(self.tasks)
                self.tasks.append(Task(name, stream, waits + barrier, reads, writes, work))
            if program.role in TRANSITIONS:
                barrier = list(range(len(self.tasks)))
            if program.role == "backward":
                self.kept |= {
                    (p, c) for c in self.model.trained for p in self.model.landing & set(self.model.params[c])
                }

    # --- where things are ---------------------------------------------------------------------------------------
    def _slot(self, target: str) -> Location:
        return ("slot", self.slots.get(target, -1))

    def home(self, kind: str, chunk: int, *, is_second: bool = False) -> Location:
        """Where payload (``home``) or triple (``os``) of ``chunk`` is at home, or its second home."""
        return (f"{kind} {self.side[chunk] ^ is_second}" if chunk in self.side else kind, chunk)

    def _payload(self, action: Action, chunk: int) -> Location:
        return self.home("home", chunk) if action.stream is Stream.CPU else self._slot(f"c{chunk}")

    def _triple(self, action: Action, chunk: int) -> Location:
        return self.home("os", chunk) if action.stream is Stream.CPU else self._slot(f"os{chunk}")

    def initial(self, memory: Memory) -> None:
        """Homes and static residents before the first program."""
        for chunk in self.layout.chunks:
            triple = self.model.initial_triple(chunk.index)
            content = self.model.cast(chunk.index, triple)
            if self.layout.owner(chunk.index) == self.layout.rank:
                side = " 0" if chunk.has_second_home else ""
                memory.write((f"home{side}", chunk.index), content if chunk.home is Tier.HOST else GARBAGE)
                memory.write((f"os{side}", chunk.index), (triple,) if chunk.os_home is Tier.HOST else GARBAGE)
        for target, slot in self.plan.program("forward").entry.resident:
            index = int(target.lstrip("cos"))
            triple = self.model.initial_triple(index)
            memory.write(("slot", slot), (triple,) if target[0] == "o" else self.model.cast(index, triple))

    # --- lowering -----------------------------------------------------------------------------------------------
    def _lower(self, action: Action, instance: int) -> Effect:
        op, here = action.op, ("slot", action.slot or 0)
        if op in (Op.FETCH, Op.LOAD):
            self.slots[action.target] = action.slot or 0
            home = self.home("home" if op is Op.FETCH else "os", action.index)
            return [home], [here], lambda inputs: inputs
        if op is Op.OPEN:
            self.slots[action.target] = action.slot or 0
            zeros = self.layout.owner(action.index) != self.layout.rank
            opened = (self.model.zero,) * len(self.model.params[action.index]) if zeros else GARBAGE
            return [], [here], lambda inputs: [opened]
        if op in (Op.EVICT, Op.STORE):
            self.slots.pop(action.target, None)
            kind = "home" if op is Op.EVICT else "os"
            return [here], [self.home(kind, action.index), here], lambda inputs: [inputs[0], GARBAGE]
        if op is Op.DROP:
            self.slots.pop(action.target, None)
            return [], [here], lambda inputs: [GARBAGE]
        if op in (Op.GATHER, Op.RELEASE, Op.REDUCE):
            return self._lower_collective(action, instance)
        if op is Op.RUN:
            return self._lower_run(action, instance)
        if op in LANDINGS:
            return self._lower_stash(action)
        if op in (Op.OFFLOAD, Op.DISCARD, Op.ALLOCATE, Op.RELOAD):
            value, copy = ("value", action.index), ("copy", action.index)
            if op in (Op.DISCARD, Op.ALLOCATE):
                return [], [value], lambda inputs: [GARBAGE]
            source, target = (value, copy) if op is Op.OFFLOAD else (copy, value)
            return [source], [target], lambda inputs: inputs
        return self._lower_step(action)

    def _lower_collective(self, action: Action, instance: int) -> Effect:
        chunks = list(self.layout.groups[action.index].chunks)
        remote = [c for c in chunks if self.layout.owner(c) != self.layout.rank]
        own = self.layout.group_of(chunks[0]).first_chunk + self.layout.rank
        if action.op is Op.RELEASE:
            freed = [("slot", self.slots.pop(f"c{c}", -1)) for c in remote]
            return [], freed, lambda inputs: [GARBAGE] * len(freed)
        if action.op is Op.GATHER:
            for c in remote:
                self.slots[f"c{c}"] = self.slots.get(f"c{own}", -100) - self.layout.rank + self.layout.owner(c)
            now = self.expected.params[instance]

            def gather(inputs: list[Content]) -> list[Content]:
                if inputs and inputs[0] != now[own]:
                    self.wrong.append(f"{instance}: `{action}` sends {inputs[0]} instead of {now[own]}")
                return [now[c] for c in remote]

            return [self._slot(f"c{own}")], [self._slot(f"c{c}") for c in remote], gather
        places = [self._slot(f"c{c}") for c in chunks]
        if self.model.reduces_sums:
            return places, [self._slot(f"c{own}")], self._summing(action, chunks, own, instance)
        wanted = self.expected.sent[instance]

        def reduce(inputs: list[Content]) -> list[Content]:
            for c, held in zip(chunks, inputs, strict=True):
                due = wanted.get(c, ())  # nothing of padding
                if held != due:
                    self.wrong.append(f"{instance}: `{action}` sends {held} of c{c} instead of {due}")
            return [self.model.reduced(inputs[chunks.index(own)])]

        return places, [self._slot(f"c{own}")], reduce

    def _summing(self, action: Action, chunks: list[int], own: int, instance: int) -> Work:
        """What has landed since the last reduction is added; others are sent that alone, and zeros."""
        landed, new = self.expected.landed[instance], {c: self.unreduced.pop(c, set()) for c in chunks}

        def wanted(c: int) -> Content:
            mapped = self.layout.chunks[c].partner
            return tuple(landed[p, mapped or 0] if p in new[c] else self.model.zero for p in self.model.params[c])

        def reduce(inputs: list[Content]) -> list[Content]:
            for c, held in zip(chunks, inputs, strict=True):
                if c != own and held != wanted(c):
                    self.wrong.append(f"{instance}: `{action}` sends {held} of c{c} instead of {wanted(c)}")
            held, params = inputs[chunks.index(own)], self.model.params[own]
            if len(held) != len(params):
                return [held]
            return [
                tuple(self.model.reduced((t,))[0] if p in new[own] else t for p, t in zip(params, held, strict=True))
            ]

        return reduce

    def _lower_run(self, action: Action, instance: int) -> Effect:
        segment, terms = self.plan.segment(action.target), self.model.terms
        pieces = [(p, c) for p in segment.reads for c in self.layout.placements[p].chunks]
        places = [self._slot(f"c{c}") for _, c in pieces]
        wanted = self.expected.results[instance][segment.index]
        made = [v.index for v in self.plan.moves if v.is_made_in(segment)]
        used = [v.index for v in self.plan.moves if v.is_used_in(segment) and v.index not in made]
        self.forward = instance if segment.graph == "forward" else self.forward
        saved = {index: terms("saved", index, self.forward) for index in (*made, *used)}

        def run(inputs: list[Content]) -> list[Content]:
            values, inputs = inputs[len(inputs) - len(used) :], inputs[: len(inputs) - len(used)]
            for index, value in zip(used, values, strict=True):
                if value != (saved[index],):
                    self.wrong.append(f"{instance}: `{action}` reads another a{index} than was made")
            read = [self.model.piece(held, p, c) for (p, c), held in zip(pieces, inputs[1:], strict=True)]
            first = segment.graph == "forward" and segment.index == 0
            result = terms("run", segment.name, terms("input", instance) if first else inputs[0][0], *read)
            if result != wanted:
                self.wrong.append(f"{instance}: `{action}` computes another result than the reference")
            return [(result,), (result,), *((saved[index],) for index in made)]

        written: list[Location] = [("activation", 0), ("result", self.plan.segments.index(segment))]
        read_places: list[Location] = [("activation", 0), *places, *(("value", index) for index in used)]
        return read_places, written + [("value", index) for index in made], run

    def _lower_stash(self, action: Action) -> Effect:
        segment = self.plan.segment(action.source or "")
        chunk = self.layout.chunks[action.index]
        mapped = action.index if chunk.partner is None else chunk.partner
        params = self.model.params[action.index]
        place = self._slot(action.target)
        kept = {p for p in params if action.op is Op.ADD and (p, mapped) in self.kept}
        self.unreduced.setdefault(action.index, set()).update(set(params) & set(segment.lands))

        def landed(param: int, old: int, result: int) -> int:
            new = self.model.grad(result, param, mapped)
            return self.model.terms("added", old, new) if param in kept and old != self.model.zero else new

        def stash(inputs: list[Content]) -> list[Content]:
            held = inputs[0] if len(inputs[0]) == len(params) else (-1,) * len(params)
            result = inputs[1][0]
            lands = [p in segment.lands for p in params]
            return [
                tuple(landed(p, old, result) if land else old for p, land, old in zip(params, lands, held, strict=True))
            ]

        return [place, ("result", self.plan.segments.index(segment))], [place], stash

    def _lower_step(self, action: Action) -> Effect:
        model, terms = self.model, self.model.terms
        decision: Location = ("decision", 0)
        if action.op in (Op.SUM, Op.DECIDE):
            sums: Location = ("sums", 0)
            norms: list[Location] = [("norm", c) for c in model.mine]
            if action.op is Op.SUM:
                return norms, [sums], lambda inputs: [(terms("total", *(i[0] for i in inputs)),)]
            found = [sums] if self.layout.world_size > 1 else norms
            return found, [decision], lambda inputs: [(terms("decide", *(i[0] for i in inputs)),)]
        chunk = action.index
        grads = self._payload(action, model.grad_home.get(chunk, chunk))
        if action.op is Op.NORM:
            return [grads], [("norm", chunk)], lambda inputs: [(terms("norm", *inputs[0]),)]
        triple, payload = self._triple(action, chunk), self._payload(action, chunk)
        if action.op is Op.RESTORE:
            return [triple], [payload], lambda inputs: [model.cast(chunk, inputs[0][0])]

        if action.op is Op.BEGIN:
            self.begun.add(chunk)
            second = [self.home(kind, chunk, is_second=True) for kind in ("os", "home")]
            return [grads, triple], second, lambda inputs: [(terms("begun", inputs[1][0], *inputs[0]),), GARBAGE]
        written, early = [triple, payload], []
        if chunk in self.side and action.stream is Stream.CPU:
            self.side[chunk] ^= 1
            written = [self.home("os", chunk), self.home("home", chunk)]
            early = [written[0]] if chunk in self.begun else []

        def update(inputs: list[Content]) -> list[Content]:
            decided = inputs[2][0] if model.scaled else 0
            if early and inputs[-1] != (terms("begun", inputs[1][0], *inputs[0]),):
                return [GARBAGE, GARBAGE]
            new = terms("adam", inputs[1][0], decided, *inputs[0])
            return [(new,), model.cast(chunk, new)]

        return [grads, triple] + [decision] * model.scaled + early, written, update


def _is_stepped(sequence: str) -> bool:
    """Whether a step follows before another backward does."""
    following = next((letter for letter in sequence if PROGRAMS[letter][0] in ("backward", "step", "restore")), "")
    return bool(following) and PROGRAMS[following][0] != "backward"
