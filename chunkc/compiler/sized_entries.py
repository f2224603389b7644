"""The entries of one captured graph, one for each combination of sizes that it is called with.

A graph that was captured for its sizes alone has one entry. Of a symbolic graph, an entry is made at the first call
with its sizes, over a copy of the graph. Where the backend compiles segments, those of new sizes are interpreted, since
compiling takes longer than many steps; those of sizes that come again are compiled:

    sizes    17  12  17  9  12        entries are kept for the newest sizes
    segments  i   i   c  i   c        interpreted, compiled
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from chunkc._torch_compat.core import without_modes
from chunkc.capture.graphs import Captured
from chunkc.capture.symbolic import Sizes
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.shape_cache import MAX_PROGRAMS
from chunkc.errors import ChunkcError

MAX_SIZES = MAX_PROGRAMS
"""Combinations of sizes that one graph keeps plans for; a further one takes the place of that used longest ago."""

MAX_COMPILED_SIZES = MAX_PROGRAMS
"""Combinations of sizes for which the segments of one graph are compiled, and stay so."""

EntryMaker = Callable[[Captured, object, bool], GraphEntry]
"""Makes the entry of a graph at some sizes, of a family.

Its segments are compiled, or else interpreted where the budget allows.
"""


class SizedEntries:
    """Entries by sizes, of one family: an object by which the runtime knows that they are of one graph."""

    def __init__(self, make: EntryMaker, let_go: Callable[[GraphEntry], bool], *, compiles: bool) -> None:
        """``let_go`` forgets an entry, unless it runs now, and returns whether it did.

        ``compiles``: whether segments that are compiled run otherwise than interpreted ones.
        """
        self._make, self._let_go = make, let_go
        self._compiles = compiles
        self._family = object()
        self._captured: Captured | None = None
        self._entries: OrderedDict[Sizes, GraphEntry] = OrderedDict()
        self._compiled: set[Sizes] = set()
        self._replaced: list[GraphEntry] = []

    def start(self, captured: Captured) -> None:
        """Begin with a graph that was captured now; make the entry of one that was captured for its sizes alone."""
        self._captured = captured
        if captured.symbolic is None:
            self._put((), captured, compiles=True)

    def forward(self, args: list[Any]) -> list[Any]:
        """Outputs of the forward graph; empties ``args``."""
        symbolic = self._graph.symbolic
        sizes = self._sizes(args, () if symbolic is None else symbolic.forward_sizes)
        entry = self._entries.get(sizes)
        if entry is None or self._should_compile(sizes):
            entry = self._put_at(sizes, compiles=self._should_compile(sizes))
        self._entries.move_to_end(sizes)
        return entry.forward(args)

    def backward(self, args: list[Any]) -> list[Any]:
        """Outputs of the backward graph, None for those that nobody asks for; empties ``args``."""
        symbolic = self._graph.symbolic
        sizes = self._sizes(args, () if symbolic is None else symbolic.backward_sizes)
        entry = self._entries.get(sizes)
        if entry is None:  # its forward ran so long ago that others have taken its place
            entry = self._put_at(sizes, compiles=sizes in self._compiled)
        return entry.backward(args)

    @staticmethod
    def _sizes(args: Sequence[Any], positions: Sequence[int]) -> Sizes:
        return tuple(args[position] for position in positions)

    def _put_at(self, sizes: Sizes, *, compiles: bool) -> GraphEntry:
        """Keep a new entry for ``sizes``, which were not those of the call that was captured."""
        captured = self._graph
        with without_modes():
            captured = captured if captured.symbolic is None else captured.symbolic.at(sizes)
            return self._put(sizes, captured, compiles=compiles)

    def _should_compile(self, sizes: Sizes) -> bool:
        """Whether ``sizes`` have come before, are interpreted, and are to be compiled; or were compiled once."""
        if self._graph.symbolic is None or not self._compiles:
            return False
        if sizes in self._compiled:
            return sizes not in self._entries
        return sizes in self._entries and len(self._compiled) < MAX_COMPILED_SIZES

    def _put(self, sizes: Sizes, captured: Captured, *, compiles: bool) -> GraphEntry:
        """Keep a new entry for ``sizes``, and let go of those whose place it takes."""
        entry = self._make(captured, self._family, compiles)
        replaced = self._entries.pop(sizes, None)
        leaving = self._replaced if replaced is None else [*self._replaced, replaced]
        self._entries[sizes] = entry
        if compiles:
            self._compiled.add(sizes)
        while len(self._entries) > MAX_SIZES:
            leaving = [*leaving, self._entries.popitem(last=False)[1]]
        self._replaced = [left for left in leaving if not self._let_go(left)]
        return entry

    @property
    def _graph(self) -> Captured:
        if self._captured is None:
            raise ChunkcError("a graph was to run before it was captured")
        return self._captured
