"""Training over symbolic memory: what a plan must compute, and its actions as tasks on slots and homes.

It shares nothing with the verifier. Values are interned terms: the result of a segment is a term of the parameters it
read and of the segment before it, an updated triple is a term of the old triple and the gradients, and so on. The
*reference* computes these terms as the mathematics of training prescribes, without any memory. The *execution* computes
them through slots and homes, in the order that a random scheduler chooses among those the streams and waits allow.

Actions take time. Between its start and its finish an action's destinations hold garbage, its sources must not change,
and nobody else may write its destinations; a freed slot holds garbage. So every race shows in some interleaving as a
term that differs from the reference. Slots are sets of byte ranges: writing one tears every slot that overlaps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from chunkc.ir.actions import LANDINGS, Action, Op, Stream
from chunkc.ir.layout import ChunkList, Home
from chunkc.ir.plan import ROLE_LETTER, Plan

PROGRAMS = {
    "F": "forward",
    "B": "backward",
    "C": "accumulate",
    "S": "step",
    "R": "restore",
    "A": "abandon",
    "U": "resume",
}
SEQUENCE = "FBSFBSFBRFBRFBSFAFBSFBRUBRFAUBSUBSFAFBS"
ACCUMULATING = "FBSFBFCSFBFCFCSFBFCRFCSFBFBSFAFCFCSUBFCSFBUCRUCSFAUBUCSFBFASFBS"
"""Where micro-batches add to gradients: ``B`` is the first backward of a step and ``C`` a later one."""
STREAMS = tuple(Stream)

Location = tuple[str, int]
Content = tuple[int, ...]
"""One term per parameter of a chunk; triples, results, norms and the decision are contents of one term."""
Work = Callable[[list[Content]], list[Content]]
Effect = tuple[list[Location], list[Location], Work]
Started = tuple[list[Content], list[list[int]], list[list[int]]]
"""What a running action read, the stamps of what it only reads, and the stamps of what it marked as garbage."""

GARBAGE: Content = (-1,)


class Terms:
    """Equal terms have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def __call__(self, *term: object) -> int:
        return self._numbers.setdefault(term, len(self._numbers))


class Model:
    """What the plan is supposed to compute: parameters of every chunk, and the terms of each kind of work."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.terms = Terms()
        layout = plan.layout
        self.params = {c.index: layout.params_of(c.index if c.partner is None else c.partner) for c in layout.chunks}
        self.trained = [c.index for c in layout.chunks if c.list is ChunkList.TRAINED and self.params[c.index]]
        self.mine = [c for c in self.trained if layout.owner(c) == layout.rank]
        self.landing = {p for s in plan.segments for p in s.lands}
        stashes = [a for a in plan.program("backward").actions if a.op is Op.STASH]
        self.grad_home = {c.partner: c.index for c in layout.chunks if c.partner is not None}
        self.grad_home = {c: g for c, g in self.grad_home.items() if any(a.index == g for a in stashes)}
        self.accumulates = plan.accumulate > 1
        self.reduces_sums = self.accumulates and layout.world_size > 1
        self.zero = self.terms("zero")
        self.scaled = any(a.op is Op.DECIDE for p in plan.programs for a in p.actions)

    def cast(self, chunk: int, triple: int) -> Content:
        """param16 of ``chunk`` whose triple is ``triple``."""
        return tuple(self.terms("cast", triple, p) for p in self.params[chunk])

    def piece(self, held: Content, param: int, chunk: int) -> int:
        """The term of ``param`` in ``held``, what was found where ``chunk`` should stand."""
        params = self.params[chunk]
        return held[params.index(param)] if len(held) == len(params) else -1

    def initial_triple(self, chunk: int) -> int:
        return self.terms("initial", chunk)

    def grad(self, result: int, param: int, chunk: int) -> int:
        return self.terms("grad", result, param, chunk)

    def reduced(self, grads: Content) -> Content:
        return tuple(self.terms("sum", g) for g in grads)


@dataclass
class Expected:
    """The reference's terms: per program instance the results of its segments and param16 of every chunk."""

    results: list[list[int]]
    params: list[dict[int, Content]]
    triples: dict[int, int]
    sent: list[dict[int, Content]]
    landed: list[dict[tuple[int, int], int]]


def reference(model: Model, sequence: str) -> Expected:
    """Train without any memory: the terms that every execution must compute."""
    plan, terms = model.plan, model.terms
    triples = {c.index: model.initial_triple(c.index) for c in plan.layout.chunks}
    expected = Expected([], [], triples, [], [])
    result, grads = 0, dict[tuple[int, int], int]()
    for instance, letter in enumerate(sequence):
        params = {c: model.cast(c, triples[c]) for c in triples}
        results = []
        if letter == "F":
            result, grads = terms("input", instance), grads if model.accumulates else {}
        if letter == "B" and model.accumulates:
            grads = {}
        before, landed = dict(grads), dict[tuple[int, int], int]()
        for segment in plan.segments:
            if segment.graph != ("backward" if letter == "C" else PROGRAMS[letter]):
                continue
            reads = [
                params[c][model.params[c].index(p)] for p in segment.reads for c in plan.layout.placements[p].chunks
            ]
            result = terms("run", segment.name, result, *reads)
            results.append(result)
            for p in segment.lands:
                for c in plan.layout.placements[p].chunks:
                    new = landed[p, c] = model.grad(result, p, c)
                    held = terms("added", before[p, c], new) if (p, c) in before and letter == "C" else new
                    grads[p, c] = model.reduced((held,))[0] if model.reduces_sums else held
        full = {c: tuple(grads[p, c] for p in model.params[c] if (p, c) in grads) for c in model.trained}
        expected.sent.append(dict(full))
        expected.landed.append(landed)
        if letter == "S":
            if plan.layout.world_size > 1 and not model.reduces_sums:
                full = {c: model.reduced(g) for c, g in full.items()}
            norms = tuple(terms("norm", *full[c]) for c in model.mine)
            found = (terms("total", *norms),) if plan.layout.world_size > 1 else norms
            decision = terms("decide", *found) if model.scaled else 0
            for c in model.trained:
                triples[c] = terms("adam", triples[c], decision, *full[c])
        if letter in "SR" and model.accumulates:
            grads = {}
        expected.results.append(results)
        expected.params.append(params)
    return expected


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
    """The tasks of a whole sequence. Slots of chunks are resolved in program order, as an executor does when it
    issues actions; whatever is not on the device then is read from nowhere, as garbage."""

    def __init__(self, model: Model, sequence: str) -> None:
        self.model, self.sequence = model, sequence
        self.plan, self.layout = model.plan, model.plan.layout
        self.expected = reference(model, sequence)
        self.tasks: list[Task] = []
        self.wrong: list[str] = []
        self.slots: dict[str, int] = dict(self.plan.program("forward").entry.resident)
        latest: dict[str, list[int]] = {}
        barrier: list[int] = []
        self.kept: set[tuple[int, int]] = set()
        self.unreduced: dict[int, set[int]] = {}
        for instance, letter in enumerate(sequence):
            program = self.plan.program(PROGRAMS[letter])
            if letter in "BSR":
                self.kept = set()
            if program.name == "resume":
                barrier = list(range(len(self.tasks)))
            current = latest[ROLE_LETTER[program.role]] = []
            for position, action in enumerate(program.actions):
                waits = [latest[w[0]][int(w[1:])] for w in action.waits if w[0] in latest]
                reads, writes, work = self._lower(action, instance)
                name = f"{instance}:{program.label(position)} {action}"
                stream = STREAMS.index(action.stream)
                current.append(len(self.tasks))
                self.tasks.append(Task(name, stream, waits + barrier, reads, writes, work))
            if program.role == "transition":
                barrier = list(range(len(self.tasks)))
            if program.role == "backward":
                self.kept |= {
                    (p, c) for c in self.model.trained for p in self.model.landing & set(self.model.params[c])
                }

    # --- where things are ---------------------------------------------------------------------------------------
    def _slot(self, target: str) -> Location:
        return ("slot", self.slots.get(target, -1))

    def _payload(self, action: Action, chunk: int) -> Location:
        return ("home", chunk) if action.stream is Stream.CPU else self._slot(f"c{chunk}")

    def _triple(self, action: Action, chunk: int) -> Location:
        return ("os", chunk) if action.stream is Stream.CPU else self._slot(f"os{chunk}")

    def initial(self, memory: Memory) -> None:
        """Homes and static residents before the first program."""
        for chunk in self.layout.chunks:
            triple = self.model.initial_triple(chunk.index)
            content = self.model.cast(chunk.index, triple)
            if self.layout.owner(chunk.index) == self.layout.rank:
                memory.write(("home", chunk.index), content if chunk.home is Home.HOST else GARBAGE)
                memory.write(("os", chunk.index), (triple,) if chunk.os_home is Home.HOST else GARBAGE)
        for target, slot in self.plan.program("forward").entry.resident:
            index = int(target.lstrip("cos"))
            triple = self.model.initial_triple(index)
            memory.write(("slot", slot), (triple,) if target[0] == "o" else self.model.cast(index, triple))

    # --- lowering -----------------------------------------------------------------------------------------------
    def _lower(self, action: Action, instance: int) -> Effect:
        op, here = action.op, ("slot", action.slot or 0)
        if op in (Op.FETCH, Op.LOAD):
            self.slots[action.target] = action.slot or 0
            return [("home" if op is Op.FETCH else "os", action.index)], [here], lambda inputs: inputs
        if op is Op.OPEN:
            self.slots[action.target] = action.slot or 0
            chunk = self.layout.chunks[action.index]
            zeros = chunk.partner is not None and self.layout.owner(chunk.index) != self.layout.rank
            opened = (self.model.zero,) * len(self.model.params[chunk.index]) if zeros else GARBAGE
            return [], [here], lambda inputs: [opened]
        if op in (Op.EVICT, Op.STORE):
            self.slots.pop(action.target, None)
            kind = "home" if op is Op.EVICT else "os"
            return [here], [(kind, action.index), here], lambda inputs: [inputs[0], GARBAGE]
        if op is Op.DROP:
            self.slots.pop(action.target, None)
            return [], [here], lambda inputs: [GARBAGE]
        if op in (Op.GATHER, Op.RELEASE, Op.REDUCE):
            return self._lower_collective(action, instance)
        if op is Op.RUN:
            return self._lower_run(action, instance)
        if op in LANDINGS:
            return self._lower_stash(action)
        if op in (Op.GROW, Op.SHRINK):
            return [], [], lambda inputs: []
        return self._lower_step(action)

    def _chunks(self, action: Action) -> list[int]:
        return list(self.layout.groups[action.index].chunks) if action.target[0] == "g" else [action.index]

    def _lower_collective(self, action: Action, instance: int) -> Effect:
        chunks = self._chunks(action)
        remote = [c for c in chunks if self.layout.owner(c) != self.layout.rank]
        own = self.layout.group_of(chunks[0]).first_chunk + self.layout.rank
        if action.op is Op.RELEASE:
            freed = [("slot", self.slots.pop(f"c{c}", -1)) for c in remote]
            return [], freed, lambda inputs: [GARBAGE] * len(freed)
        if action.op is Op.GATHER:
            for c in remote:
                self.slots[f"c{c}"] = self.slots.get(f"c{own}", -100) - self.layout.rank + self.layout.owner(c)
            now = self.expected.params[instance]
            sends = [self._slot(f"c{own}")] if own in chunks else []

            def gather(inputs: list[Content]) -> list[Content]:
                if inputs and inputs[0] != now[own]:
                    self.wrong.append(f"{instance}: `{action}` sends {inputs[0]} instead of {now[own]}")
                return [now[c] for c in remote]

            return sends, [self._slot(f"c{c}") for c in remote], gather
        places = [self._slot(f"c{c}") for c in chunks]
        if self.model.reduces_sums:
            return (
                places,
                [self._slot(f"c{own}")] if own in chunks else [],
                self._summing(action, chunks, own, instance),
            )
        wanted = self.expected.sent[instance]

        def reduce(inputs: list[Content]) -> list[Content]:
            for c, held in zip(chunks, inputs, strict=True):
                if held != wanted[c]:
                    self.wrong.append(f"{instance}: `{action}` sends {held} of c{c} instead of {wanted[c]}")
            return [self.model.reduced(inputs[chunks.index(own)])] if own in chunks else []

        return places, [self._slot(f"c{own}")] if own in chunks else [], reduce

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
            if own not in chunks:
                return []
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

        def run(inputs: list[Content]) -> list[Content]:
            read = [self.model.piece(held, p, c) for (p, c), held in zip(pieces, inputs[1:], strict=True)]
            first = segment.graph == "forward" and segment.index == 0
            result = terms("run", segment.name, terms("input", instance) if first else inputs[0][0], *read)
            if result != wanted:
                self.wrong.append(f"{instance}: `{action}` computes another result than the reference")
            return [(result,), (result,)]

        return [("activation", 0), *places], [("activation", 0), ("result", self.plan.segments.index(segment))], run

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

        def update(inputs: list[Content]) -> list[Content]:
            decided = inputs[2][0] if model.scaled else 0
            new = terms("adam", inputs[1][0], decided, *inputs[0])
            return [(new,), model.cast(chunk, new)]

        return [grads, triple] + [decision] * model.scaled, [triple, payload], update
