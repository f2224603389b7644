"""The shapes that one model meets: a table from the signature of a call to an entry.

Dynamo counts its recompile limit per code object, and where it is exceeded, gives up. Each entry has a code object of
its own, which sees few guards fail, so the bound on programs is ours, per model, and no process-wide setting is
touched. Guards decide inside an entry: what a signature does not know of (attributes of the model, contents of
arguments of other kinds) makes a further program there.

A signature holds no object of the user's, only what describes them: also how tensors overlap in memory, since a graph
that changes an input in place is made for inputs that lie so.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from chunkc._torch_compat import capture_errors
from chunkc._torch_compat.core import (
    Finalizer,
    graph_break,
    plain_call,
    storage_address,
    without_guards,
)
from chunkc._torch_compat.release import ReleasableBackend
from chunkc.capture.backend import DataDependentSizeError
from chunkc.compiler.float_inputs import Place, float_call
from chunkc.errors import ChunkcError, ShapeLimitError
from chunkc.progress import stage
from chunkc.runtime.params.managed_tensor import ManagedTensor
from chunkc.runtime.params.shell import Shell

MAX_PROGRAMS = 64
"""Programs that one model may have for training, and as many for evaluation: ``ShapeTable.max_programs``."""

MAX_IDLE = 64
"""Entries without a program of their own that are kept, those used last."""

NUM_YOUNG = 50_000
"""Objects that a capture makes between two collections: 700, as Python has it, takes a tenth of its time."""

_NUM_NAMED = 3
_AUTOCAST_DEVICES = ("cpu", "cuda")
_SCALARS = (bool, int, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = (torch.Tensor, nn.Parameter)

Shape = tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Signature:
    """The facts of a call that tell it apart; ``key`` is equal for calls that may share a program.

    ``frame`` is the key without shapes and strides; ``is_plain``: arguments are tensors, constants, or nests of these.
    ``numbers`` are arguments that are numbers, as text.
    """

    key: Hashable
    shapes: tuple[Shape, ...]
    frame: Hashable
    is_plain: bool
    numbers: tuple[str, ...] = ()

    def continues(self, earlier: Signature) -> bool:
        """Whether this is the call after ``earlier`` in a loop whose inputs grow by one: token after token."""
        if self.frame != earlier.frame or self.shapes == earlier.shapes:
            return False
        return all(_is_next(shape, before) for shape, before in zip(self.shapes, earlier.shapes, strict=True))


def _is_next(shape: Shape, before: Shape) -> bool:
    grown = [now - then for now, then in zip(shape, before, strict=True) if now != then]
    return grown in ([], [1])


class _Reader:
    """Reads one call's arguments into a signature."""

    def __init__(self) -> None:
        self.frame: list[Hashable] = []
        self.sizes: list[Hashable] = []
        self.tensors: list[torch.Tensor] = []
        self.is_plain = True
        self._seen: dict[int, int] = {}
        self._spans: dict[int, list[tuple[int, int, int]]] = {}

    def read(self, value: Any) -> None:
        kind = type(value)
        if kind in _TENSORS and value.layout is torch.strided:
            self._tensor(value)
        elif kind in _SCALARS:
            self.frame.append((kind, value))
        elif kind in (float, complex):
            self.frame.append((kind, repr(value)))  # a NaN equals nothing, and zeros have signs
        elif kind in (dict, OrderedDict):
            self.frame.append((kind, len(value)))
            for key, item in value.items():
                self.read(key)
                self.read(item)
        elif kind in (tuple, list, torch.Size) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            self.frame.append((_name(kind), len(value)))
            for item in value:
                self.read(item)
        else:
            self.is_plain = False
            self.frame.append(_name(kind))

    def _tensor(self, tensor: torch.Tensor) -> None:
        first = self._seen.setdefault(id(tensor), len(self._seen))
        overlaps = self._overlaps(tensor, first)
        self.frame.append(
            (first, overlaps, tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference())
        )
        self.tensors.append(tensor)
        self.sizes.append((tuple(tensor.shape), tensor.stride()))

    def _overlaps(self, tensor: torch.Tensor, number: int) -> tuple[tuple[int, int], ...]:
        """Return the earlier tensors within the bytes of ``tensor``.

        Each comes with the bytes by which ``tensor`` begins behind its start.
        """
        storage, numel = storage_address(tensor), tensor.numel()
        if not storage or not numel:
            return ()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        end = start + (last + 1) * tensor.element_size()
        spans = self._spans.setdefault(storage, [])
        hits = tuple((n, start - begin) for n, begin, until in spans if n != number and start < until and begin < end)
        spans.append((number, start, end))
        return hits


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of ``model(*args, **kwargs)`` as torch's modes are now."""
    reader = _Reader()
    reader.read(args)
    reader.read(kwargs)
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in _AUTOCAST_DEVICES
    )
    modes = (model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)
    frame = (modes, tuple(reader.frame))
    sizes, shapes = tuple(reader.sizes), tuple(tuple(tensor.shape) for tensor in reader.tensors)
    return Signature((frame, sizes), shapes, frame, reader.is_plain, numbers_of(args, kwargs))


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors whose shapes `signature_of` tells, in their order."""
    reader = _Reader()
    reader.read(args)
    reader.read(kwargs)
    return reader.tensors


def numbers_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Arguments that are numbers, as text."""
    named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
    return tuple(f"{name}={value!r}" for name, value in named if type(value) in (int, float))


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """``method`` without holding on to its object."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = reference()
        if bound is None:
            raise ChunkcError("the compiled model was deleted while its forward was captured")
        return bound(*args, **kwargs)

    return call


RunMaker = Callable[[tuple[Place, ...]], Callable[..., Any]]
"""Makes the compiled function of one entry; it takes the values of floats at these places first, if there are any."""


def entry_maker(model: nn.Module, compile_graph: Callable[..., Any], *, breaks: bool = False) -> RunMaker:
    """Return a function that makes entries to ``model``'s forward, each over a code object of its own.

    What was compiled for them goes when that function does. Dynamo keeps the backend until then, and compiled code
    keeps that function alive through it; so ``compile_graph``, a method, is held weakly. A forward that ``breaks`` may
    be several graphs, whose inputs have sizes that the call's do not tell: from the second on they are symbolic.
    """
    releasable = ReleasableBackend(weakly(compile_graph))

    def make_run(places: tuple[Place, ...]) -> Callable[..., Any]:
        call = float_call(model, places) if places else plain_call(model)
        compiled: Callable[..., Any] = torch.compile(
            call,
            backend=releasable,
            fullgraph=not breaks,
            dynamic=None if breaks else False,
            options=without_guards(_is_of_parameter),
        )
        return compiled

    Finalizer(make_run, releasable.release).atexit = False
    return make_run


def _is_of_parameter(source: str, value: Any, kind: str) -> bool:
    """Whether a guard asks what other guards of the same parameter tell already.

    The guard on its tensor also asks for its type, and that on its metadata tells which parameter it is: of which the
    shell, and what flattening gives, stay as they are.
    """
    if isinstance(value, ManagedTensor):
        return kind == "TYPE_MATCH"
    return isinstance(value, Shell) or "__tensor_flatten__" in source


@dataclass(slots=True)
class Entry:
    """One signature's way into torch.compile, and how many programs it has led to."""

    run: Callable[..., Any]
    places: tuple[Place, ...] = ()
    num_programs: int = 0


class ShapeTable:
    """Entries by signature, no more programs than ``max_programs``; those made stay when that is lowered.

    ``num_programs``: calls that made a program (the graphs of one call count once). ``has_fixed``: whether the last
    call has made one for its sizes alone.
    """

    def __init__(self, make_run: RunMaker, max_programs: int = MAX_PROGRAMS, share_of_more: float = 1.0) -> None:
        """``make_run`` makes the compiled function of one entry, over a code object of its own.

        ``share_of_more``: of one program, by which a further program of a known signature counts.
        """
        self.max_programs = max_programs
        self.num_programs = 0
        self._make_run = make_run
        self._share_of_more = share_of_more
        self._counted = 0.0
        self._entries: dict[Hashable, Entry] = {}
        self._idle: OrderedDict[Hashable, Entry] = OrderedDict()
        self._newest: deque[Signature] = deque(maxlen=_NUM_NAMED)
        self._calling: Signature | None = None
        self._num_captured = 0
        self.has_fixed = False

    def __contains__(self, signature: Signature) -> bool:
        """Whether calls with ``signature`` have run here."""
        return signature.key in self._entries or signature.key in self._idle

    def __len__(self) -> int:
        return len(self._entries)

    def call(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], places: tuple[Place, ...] = ()
    ) -> Any:
        """Run the entry of ``signature``, a new one if there is none and there is room (`check_room`).

        ``places`` of floats that are inputs; then ``args`` begin with their values.
        """
        self._calling, self._num_captured, self.has_fixed = signature, 0, False
        entry = self._entries.get(signature.key) or self._idle.get(signature.key)
        sparing: AbstractContextManager[None] = nullcontext()
        if entry is None:
            self.check_room()
            stage("capturing the forward")
            entry, sparing = Entry(self._make_run(places), places), rarer_collections()
        try:
            with sparing:
                outputs = self._run(entry, args, kwargs)
            self._idle[signature.key] = entry
            return outputs
        finally:
            if self._num_captured:
                self._counted += self._share_of_more if entry.num_programs else 1
                entry.num_programs += 1
                self.num_programs += 1
                self._newest.append(signature)
            self._keep(signature.key, entry)

    def _keep(self, key: Hashable, entry: Entry) -> None:
        """Keep entries that have led to programs, and the newest of those that have run by others' programs."""
        if entry.num_programs:
            self._entries[key] = entry
            self._idle.pop(key, None)
        elif key in self._idle:
            self._idle.move_to_end(key)
            if len(self._idle) > MAX_IDLE:
                self._idle.popitem(last=False)

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``entry``; CaptureFailed in place of the ways in which torch fails where data tell sizes."""
        try:
            return self._run_once(entry, args, kwargs)
        except capture_errors.DataDependentGuard as error:
            raise graph_break(str(error)) from error
        except capture_errors.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, (DataDependentSizeError, capture_errors.DataDependentGuard)):
                raise graph_break(str(error.inner_exception)) from error
            raise

    def _run_once(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return entry.run(*args, **kwargs)
        except capture_errors.RecompileLimitHit:  # raised in place of running, for what the signature does not know of
            entry.run = self._make_run(entry.places)
            return entry.run(*args, **kwargs)

    def num_programs_of(self, signature: Signature) -> int:
        """Programs that calls with ``signature`` have led to."""
        entry = self._entries.get(signature.key)
        return 0 if entry is None else entry.num_programs

    def captured(self, *, any_size: bool = False) -> None:
        """The backend has made a program for the call under way, and for its like at any size."""
        self._num_captured += 1
        self.has_fixed |= not any_size

    def clear(self) -> None:
        """Forget all entries and programs."""
        self._entries.clear()
        self._idle.clear()
        self.num_programs, self._counted = 0, 0.0

    def check_room(self) -> None:
        """Raise ShapeLimitError when ``max_programs`` are made: no more programs may be."""
        if self._counted >= self.max_programs:
            newest = "; ".join(map(_shown, self._newest))
            raise ShapeLimitError(
                f"this call, with inputs of shapes {_shown(self._calling)}, needs a program of its own, and "
                f"{self.num_programs} are made, the most that a model may have (the newest for {newest}). Pad inputs "
                "to few lengths, and keep numbers that change from call to call in tensors"
            )


@contextmanager
def rarer_collections() -> Iterator[None]:
    """Within the block, collections of cyclic garbage are rarer.

    Captures make objects by the million, most of which stay, and each full collection looks at all that the imported
    modules hold. A user who collects none, or more rarely, is left alone.
    """
    youngest, *others = gc.get_threshold()
    if not 0 < youngest < NUM_YOUNG:
        yield
        return
    gc.set_threshold(NUM_YOUNG, *others)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *others)


def is_data_dependent(error: capture_errors.CaptureFailed) -> bool:
    """Whether a forward is not one graph since data tell sizes in it."""
    return isinstance(error.__cause__, (capture_errors.DataDependentGuard, capture_errors.BackendCompilerFailed))


def _shown(signature: Signature | None) -> str:
    """The shapes and numbers of a call."""
    shapes, numbers = ((), ()) if signature is None else (signature.shapes, signature.numbers)
    shown = (", ".join(str(list(shape)) for shape in shapes[:4]) or "no tensor") + (", ..." if len(shapes) > 4 else "")
    return f"{shown} and {', '.join(numbers[:4])}" if numbers else shown
