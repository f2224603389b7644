"""Calls that are alike but for sizes: captured for one size at first, then for any size.

    length     17     12     9       21     12     30
    captured   at 17  at 12  for any  -      -      -

From the third size on, calls of one form share an entry, whose graph takes the sizes that have changed as inputs. Some
models allow no such graph, and some graphs serve few sizes, since Python code reads them as numbers: then every further
size has an entry of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from chunkc.compiler.shape_cache import MAX_PROGRAMS, Shape, Signature

NUM_ALONE = 2
"""Sizes of one form that are captured alone before one graph is made for any: many programs have no more."""

MAX_SHARED_PROGRAMS = 6
"""Programs of a shared entry: with as many, sizes are taken to need one each. Dynamo keeps 8 for one function."""

MAX_FORMS = MAX_PROGRAMS
"""Forms of calls that are remembered, those used last."""


@dataclass(slots=True)
class _Form:
    """Calls that are alike but for sizes.

    Attributes:
        first: shapes of the first call.
        alone: keys of the first calls, of which each has an entry of its own; `NUM_ALONE` at most.
        changed: which sizes have changed, by tensor and dimension.
        is_refused: whether each size is captured alone.
        served: keys of calls at which the shared entry has made a program.
    """

    first: tuple[Shape, ...]
    alone: set[Hashable] = field(default_factory=set)
    changed: set[tuple[int, int]] = field(default_factory=set)
    is_refused: bool = False
    served: set[Hashable] = field(default_factory=set)

    def add(self, shapes: tuple[Shape, ...]) -> None:
        """Note which sizes of a call differ from those of the first."""
        pairs = enumerate(zip(shapes, self.first, strict=True))
        self.changed |= {(t, d) for t, (now, first) in pairs for d, size in enumerate(now) if size != first[d]}


class ChangingSizes:
    """The forms of one model's calls."""

    def __init__(self) -> None:
        self._forms: OrderedDict[Hashable, _Form] = OrderedDict()

    def note_alone(self, signature: Signature) -> None:
        """A call has been captured as one graph for its sizes."""
        form = self._forms.setdefault(signature.frame, _Form(signature.shapes))
        form.add(signature.shapes)
        if len(form.alone) < NUM_ALONE:
            form.alone.add(signature.key)
        self._forms.move_to_end(signature.frame)
        if len(self._forms) > MAX_FORMS:
            self._forms.popitem(last=False)

    def note_served(self, signature: Signature) -> None:
        """The shared entry has made a program for this call."""
        self._forms[signature.frame].served.add(signature.key)

    def refuse(self, signature: Signature) -> None:
        """Capture every further size of such calls alone."""
        self._forms[signature.frame].is_refused = True

    def shared(self, signature: Signature) -> Signature | None:
        """The signature of the entry that calls of this form share; None for calls that have one of their own."""
        form = self._forms.get(signature.frame)
        if form is None or len(form.alone) < NUM_ALONE or signature.key in form.alone:
            return None
        self._forms.move_to_end(signature.frame)
        form.add(signature.shapes)
        if not form.changed or (form.is_refused and signature.key not in form.served):
            return None
        return replace(signature, key=("any size", signature.frame))

    def changed(self, signature: Signature) -> set[tuple[int, int]]:
        """The sizes that have changed among calls of this form, by tensor and dimension."""
        return self._forms[signature.frame].changed

    def is_special(self, signature: Signature) -> bool:
        """Whether a size that has changed is 0 or 1 in this call, which torch always captures alone."""
        return any(signature.shapes[t][d] in (0, 1) for t, d in self._forms[signature.frame].changed)
