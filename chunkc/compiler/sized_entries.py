"""The entries of one captured graph, one for each combination of sizes that it is called with.

A graph that was captured for its sizes alone has one entry. Of a symbolic graph, an entry is made at the first call
with its sizes, over a copy of the graph. Its segments are interpreted, since compiling takes longer than many steps;
those of sizes that come again are compiled:

    sizes    17  12  17  9  12        entries are kept for the newest sizes
    segments  i   i   c  i   c        interpreted, compiled
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from chunkc.capture.graphs import Captured
from chunkc.capture.symbolic import Sizes
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.shape_cache import MAX_PROGRAMS
from chunkc.errors import ChunkcError

MAX_SIZES = MAX_PROGRAMS
"""Combinations of sizes that one graph keeps plans for; a further one takes the place of that used longest ago."""

MAX_COMPILED_SIZES = MAX_PROGRAMS
"""Combinations of sizes for which the segments of one graph are compiled, and stay so."""


class SizedEntries:
    """Entries by sizes.

    Attributes:
        family: one object for all of them, by which the runtime knows that they are of one graph.
    """

    def __init__(self) -> None:
        self.family = object()
        self._captured: Captured | None = None
        self._entries: OrderedDict[Sizes, GraphEntry] = OrderedDict()
        self._compiled: set[Sizes] = set()
        self._replaced: list[GraphEntry] = []

    def capture(self, captured: Captured) -> Sizes:
        """Note what was captured; return the sizes of the call under way."""
        self._captured = captured
        return () if captured.symbolic is None else captured.symbolic.sizes()

    def captured_at(self, sizes: Sizes) -> Captured:
        captured = self._graph
        return captured if captured.symbolic is None else captured.symbolic.at(sizes)

    def forward_sizes(self, args: Sequence[Any]) -> Sizes:
        """The sizes among the inputs of the forward graph."""
        symbolic = self._graph.symbolic
        return () if symbolic is None else tuple(args[position] for position in symbolic.forward_sizes)

    def backward_sizes(self, args: Sequence[Any]) -> Sizes:
        """The sizes among the inputs of the backward graph."""
        symbolic = self._graph.symbolic
        return () if symbolic is None else tuple(args[position] for position in symbolic.backward_sizes)

    def get(self, sizes: Sizes) -> GraphEntry | None:
        return self._entries.get(sizes)

    def is_compiled(self, sizes: Sizes) -> bool:
        """Whether segments are compiled for ``sizes``, or would be if they came again."""
        if self._graph.symbolic is None or sizes in self._compiled:
            return True
        return sizes in self._entries and len(self._compiled) < MAX_COMPILED_SIZES

    def should_compile(self, sizes: Sizes) -> bool:
        """Whether ``sizes`` come again, whose segments are interpreted and may be compiled."""
        return self._graph.symbolic is not None and sizes not in self._compiled and self.is_compiled(sizes)

    def put(self, sizes: Sizes, entry: GraphEntry, *, is_compiled: bool) -> list[GraphEntry]:
        """Keep ``entry`` for ``sizes``; return entries that have left, now and before, to be let go of."""
        replaced = self._entries.pop(sizes, None)
        self._replaced += [] if replaced is None else [replaced]
        self._entries[sizes] = entry
        if is_compiled:
            self._compiled.add(sizes)
        while len(self._entries) > MAX_SIZES:
            self._replaced.append(self._entries.popitem(last=False)[1])
        left_now, self._replaced = self._replaced, []
        return left_now

    def keep(self, entry: GraphEntry) -> None:
        """Return ``entry``, which has left, again by the next `put`: it runs now."""
        self._replaced.append(entry)

    def use(self, sizes: Sizes) -> None:
        """Note that the entry of ``sizes`` is the one used last."""
        self._entries.move_to_end(sizes)

    @property
    def _graph(self) -> Captured:
        if self._captured is None:
            raise ChunkcError("a graph was to run before it was captured")
        return self._captured
