"""Actions: what a plan is made of. Each has a one-line text form that parses back.

An action names its stream and what it waits for; nothing relies on program order except that one stream carries out its
own actions in program order. An action's *label* is its program's letter and a number, for example ``f12`` for the
thirteenth action of the forward program. Programs of one letter differ by kinds of actions that some leave out; these
skip the labels of what they leave out, so that a label stands for the same work in all of them.

A wait for a label means the latest action launched under that label; where there is none since all streams were joined,
it is satisfied. So labels that a micro-batch leaves out mean actions of those before it: a later one waits for a chunk
that the first one has opened. The verifier counts on labels only from the first micro-batch of a step on.

    fetch c12 -> d3 @h2d after f9 s4        payload host to device
    open c12 -> d3 @h2d after f9 s4         the slot is c12's, with nothing in it yet: it will be written, not copied
    evict c12 <- d3 @d2h after b7           payload device to host, the slot is free afterwards
    drop c12 <- d3 @compute after b7        the slot is free; the home copy is valid
    gather g4 @comm / reduce g4 @comm / release g4 @compute
    run fwd.17 @compute after f11           a compiled segment
    stash c12 of bwd.17 @compute            gradients of the segment land in the chunk
    add c12 of bwd.17 @compute              the same, added to those of earlier micro-batches in a gradient chunk
        norm c12 @compute / sum @comm           sum of squares and finiteness of a chunk; the sum over all ranks
        decide @compute                         clip coefficient, overflow, loss scale
        begin c12 @cpu after b57                the update of a chunk into its second home, before the step is called
        update c12 @cpu / restore c12 @compute  the optimizer on a chunk; only its param16 from param32
    load os7 -> d9 @h2d / store os7 <- d9 @d2h       optimizer states to the device, back home
    offload a5 @d2h after f9                a saved value (the sixth of `Plan.saved`) is copied to host memory
    discard a5 @compute after f12           its device memory goes back to the allocator; the copy is valid
    allocate a5 @compute / reload a5 @h2d after b3   it has device memory again; its elements come back
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """The kind of an action.

    OPEN makes no copy. Where several ranks share groups, an opened gradient chunk begins as zeros: another rank's in
    every residency interval of its group, the own one in the first backward of a step, unless it never leaves the
    device: then that backward stashes over it. A parameter chunk of another rank begins as zeros too, where gradients
    of all its parameters land before anything reads it. REDUCE adds up: the owner holds the sum so far and its part of
    this micro-batch, the others their parts; with replicas the own chunk then becomes its mean over its owners in all
    of them. BEGIN is optional: it changes nothing that another action reads, and an update that finds nothing begun
    computes all by itself.
    """

    FETCH = "fetch"
    OPEN = "open"
    EVICT = "evict"
    DROP = "drop"
    GATHER = "gather"
    RELEASE = "release"
    REDUCE = "reduce"
    RUN = "run"
    STASH = "stash"
    ADD = "add"
    NORM = "norm"
    SUM = "sum"
    DECIDE = "decide"
    BEGIN = "begin"
    UPDATE = "update"
    RESTORE = "restore"
    LOAD = "load"
    STORE = "store"
    OFFLOAD = "offload"
    DISCARD = "discard"
    ALLOCATE = "allocate"
    RELOAD = "reload"


class Stream(StrEnum):
    """The queues of a rank. COMPUTE belongs to the computing device, CPU to host threads."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    COMM = "comm"
    CPU = "cpu"


TO_SLOT = frozenset({Op.FETCH, Op.OPEN, Op.LOAD})
FROM_SLOT = frozenset({Op.EVICT, Op.DROP, Op.STORE})
LANDINGS = frozenset({Op.STASH, Op.ADD})
"""What puts the gradients of a segment into a chunk."""
VALUE_COPIES = frozenset({Op.OFFLOAD, Op.RELOAD})
"""Copies of saved values between device and host memory."""

_ALLOWED_STREAMS: dict[Op, frozenset[Stream]] = {
    Op.FETCH: frozenset({Stream.H2D}),
    Op.OPEN: frozenset({Stream.H2D}),
    Op.LOAD: frozenset({Stream.H2D}),
    Op.EVICT: frozenset({Stream.D2H}),
    Op.STORE: frozenset({Stream.D2H}),
    Op.GATHER: frozenset({Stream.COMM}),
    Op.REDUCE: frozenset({Stream.COMM}),
    Op.SUM: frozenset({Stream.COMM}),
    Op.RELEASE: frozenset({Stream.COMPUTE, Stream.COMM}),
    Op.DROP: frozenset({Stream.COMPUTE, Stream.COMM}),
    Op.NORM: frozenset({Stream.COMPUTE, Stream.COMM}),
    Op.BEGIN: frozenset({Stream.CPU}),
    Op.UPDATE: frozenset({Stream.COMPUTE, Stream.CPU}),
    Op.RESTORE: frozenset({Stream.COMPUTE, Stream.CPU}),
    Op.OFFLOAD: frozenset({Stream.D2H}),
    Op.RELOAD: frozenset({Stream.H2D}),
}
_COMPUTE_ONLY = frozenset({Stream.COMPUTE})

_NUMBER = r"(?:0|[1-9][0-9]{0,17})"
"""One spelling for each number, so that equal targets are equal texts."""
_TEXT = re.compile(
    rf"(?P<op>{'|'.join(Op)})"
    rf"(?: (?P<target>(?:c|os|g|a|fwd\.|bwd\.)?{_NUMBER}))?"
    rf"(?: of (?P<source>(?:fwd|bwd)\.{_NUMBER}))?"
    rf"(?: (?P<arrow>->|<-) d(?P<slot>{_NUMBER}))?"
    rf" @(?P<stream>{'|'.join(Stream)})"
    rf"(?: after (?P<waits>[a-z]{_NUMBER}(?: [a-z]{_NUMBER})*))?"
)
_CHUNK, _GROUP, _STATES, _VALUE = rf"c{_NUMBER}", rf"g{_NUMBER}", rf"os{_NUMBER}", rf"a{_NUMBER}"
_TARGETS: dict[Op, str] = {
    Op.FETCH: _CHUNK, Op.OPEN: _CHUNK, Op.EVICT: _CHUNK, Op.DROP: _CHUNK, Op.GATHER: _GROUP,
    Op.RELEASE: _GROUP, Op.REDUCE: _GROUP, Op.RUN: rf"(fwd|bwd)\.{_NUMBER}", Op.STASH: _CHUNK,
    Op.ADD: _CHUNK, Op.NORM: _CHUNK, Op.SUM: r"", Op.DECIDE: r"", Op.BEGIN: _CHUNK, Op.UPDATE: _CHUNK,
    Op.RESTORE: _CHUNK, Op.LOAD: _STATES, Op.STORE: _STATES,
    Op.OFFLOAD: _VALUE, Op.DISCARD: _VALUE, Op.ALLOCATE: _VALUE, Op.RELOAD: _VALUE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a plan.

    ``target``: ``c12`` (chunk), ``os7`` (optimizer states), ``g4`` (group), ``a5`` (saved value), ``fwd.17`` (segment),
    or empty. ``slot``: the arena slot that it fills or frees. ``source``: for ``stash`` and ``add``, the segment whose
    gradients land. ``waits``: labels of the actions that must be complete before it starts.
    """

    op: Op
    target: str
    stream: Stream
    slot: int | None = None
    source: str | None = None
    waits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(_TARGETS[self.op], self.target):
            raise ValueError(f"{self.op} cannot act on {self.target!r}")
        if self.stream not in _ALLOWED_STREAMS.get(self.op, _COMPUTE_ONLY):
            raise ValueError(f"{self.op} {self.target} cannot run on stream {self.stream}")
        if (self.slot is not None) != (self.op in TO_SLOT | FROM_SLOT):
            raise ValueError(f"{self.op} {self.target} takes {'no' if self.slot is not None else 'a'} slot")
        if (self.source is not None) != (self.op in LANDINGS):
            raise ValueError(f"{self.op} {self.target}: stash and add have a source segment, and no others")

    @property
    def index(self) -> int:
        return int(self.target.lstrip("abcdfgosw."))

    def after(self, waits: tuple[str, ...]) -> Action:
        """The same action with ``waits``; not checked again, since no rule is about waits."""
        if waits == self.waits:
            return self
        action = object.__new__(Action)
        for name in ("op", "target", "stream", "slot", "source"):
            object.__setattr__(action, name, getattr(self, name))
        object.__setattr__(action, "waits", waits)
        return action

    def __str__(self) -> str:
        parts = [str(self.op)]
        if self.target:
            parts.append(self.target)
        if self.source is not None:
            parts.append(f"of {self.source}")
        if self.slot is not None:
            parts.append(f"{'->' if self.op in TO_SLOT else '<-'} d{self.slot}")
        parts.append(f"@{self.stream}")
        if self.waits:
            parts.append("after " + " ".join(self.waits))
        return " ".join(parts)


def parse(text: str) -> Action:
    """The action whose text form is ``text``: ``parse(str(action)) == action``; ValueError for others."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an action: {text!r}")
    op = Op(match["op"])
    slot = match["slot"]
    if slot is not None and (match["arrow"] == "->") != (op in TO_SLOT):
        raise ValueError(f"the arrow of {text!r} points the wrong way")
    return Action(
        op=op,
        target=match["target"] or "",
        stream=Stream(match["stream"]),
        slot=None if slot is None else int(slot),
        source=match["source"],
        waits=tuple(match["waits"].split()) if match["waits"] else (),
    )
