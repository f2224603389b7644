"""What a plan must compute: training without any memory, in interned terms of the kind that `symbolic` has."""

from dataclasses import dataclass

from chunkc.ir.actions import Op
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import ROLE_GRAPH, Key, Plan

PROGRAMS: dict[str, Key] = {
    "F": ("forward", "first", True),
    "G": ("forward", "later", False),
    "B": ("backward", "first", True),
    "C": ("backward", "later", True),
    "P": ("backward", "first", False),
    "Q": ("backward", "later", False),
    "L": ("backward", "last", True),
    "S": ("step", "first", True),
    "R": ("restore", "first", True),
    "A": ("abandon", "first", True),
    "U": ("resume", "first", True),
    "X": ("reduce_all", "first", True),
}
SEQUENCE = "FBSFBSFBRFBRFBSFAFBSFBRUBRFAUBSUBSFAFBS"
ACCUMULATING = "FBSFBFCSFBFCFCSFBFCRFCSFBFBSFAFCFCSUBFCSFBUCRUCSFAUBUCSFBFASFBS"
DEFERRING = (
    "FPGLSFPGQGQGLSFPGLRFBFCSFPGQLFCSFPXSFPXRFPXFCSFPXUCRFPGXSFPGQXFBSFPGGQLUCSFPQXUCSFPLFBSFPLSFPQGLRFAFPGGQQLFPLS"
    "FAUPGLSUPXSFPGLUPLS"
)
"""Of plans whose micro-batches can do without exchanges."""

Content = tuple[int, ...]
"""One term per parameter of a chunk; triples, results, norms and the decision are contents of one term."""


class Terms:
    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def __call__(self, *term: object) -> int:
        return self._numbers.setdefault(term, len(self._numbers))


class Model:
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
        if letter in "FG":
            result, grads = terms("input", instance), grads if model.accumulates else {}
        if letter in "BP" and model.accumulates:
            grads = {}
        before, landed = dict(grads), dict[tuple[int, int], int]()
        for segment in plan.segments:
            if segment.graph != ROLE_GRAPH.get(PROGRAMS[letter][0]):
                continue
            reads = [
                params[c][model.params[c].index(p)] for p in segment.reads for c in plan.layout.placements[p].chunks
            ]
            result = terms("run", segment.name, result, *reads)
            results.append(result)
            for p in segment.lands:
                for c in plan.layout.placements[p].chunks:
                    new = model.grad(result, p, c)
                    held = terms("added", before[p, c], new) if (p, c) in before and letter in "CQL" else new
                    landed[p, c] = held if letter in "PQL" else new
                    grads[p, c] = model.reduced((held,))[0] if model.reduces_sums and letter in "BCL" else held
        if letter == "X":
            landed, grads = grads, {key: model.reduced((held,))[0] for key, held in grads.items()}
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
