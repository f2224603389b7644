"""Values that stand in no file: those that a module's own initialisation gives.

A model built on the meta device runs its constructors without values, so what they compute is lost: the tables of
rotary embeddings, position ids, running statistics, weights of a new head. Libraries have a second way to the same
values, for this case: ``_init_weights(module)`` of transformers' models, which their ``from_pretrained`` calls, and
torch's convention ``reset_parameters()``. Both write in place.

They are called on a *double* of the model: the same classes and attributes, every parameter and buffer on the meta
device (written to without effect and without memory) except those that are wanted, which stand in host memory and are
marked. What has no mark left afterwards was given a value as a whole; the model itself was not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkc.errors import ChunkcError

_RESETS = ("reset_parameters", "_reset_parameters")
_ON_INSTANCES = ("_apply", "_compiled_call_impl", "save_pretrained")
"""What compilation puts on a module object, which its double must not have."""


def initial_values(model: nn.Module, wanted: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Values that initialisation gives to the parameters and buffers named in ``wanted``.

    The values are in host memory. Modules are initialised in transformers' order (children first), so that the same
    seed draws the same numbers.

    Args:
        wanted: dtypes of the values by name in ``model``.

    Returns:
        values of those that have an initialisation; the others are left out.
    """
    if not wanted:
        return {}
    doubles = _Doubles(model, wanted)
    root = doubles.of(model)
    with torch.no_grad():
        for module, initialise in _library_initialisers(root, None):
            _run(partial(initialise, module), [w for m in module.modules() for w in doubles.wanted_of(m)])
        for module in reversed(list(root.modules())):
            reset = next((r for name in _RESETS if callable(r := getattr(module, name, None))), None)
            found = doubles.wanted_of(module)
            if reset is not None and not all(w.is_given() for w in found):
                _run(reset, found, keep=True)
    return {name: w.tensor.detach() for name, w in doubles.wanted.items() if w.is_given()}


def buffer_values(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Values in host memory for all buffers of ``model`` that are on the meta device.

    Random numbers stay unused.

    Raises:
        ChunkcError: naming those whose values cannot be known.
    """
    on_meta = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    with torch.random.fork_rng(devices=()):
        values = initial_values(model, {name: buffer.dtype for name, buffer in on_meta.items()})
    unknown = [f"{name} ({b.dtype}, {tuple(b.shape)})" for name, b in on_meta.items() if name not in values]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ChunkcError(
            f"buffers {', '.join(unknown[:5])}{more} are on the meta device and nothing says what their values are: "
            "their modules have no `reset_parameters` that sets them, and no transformers model initialises them. "
            "Assign real tensors (`module.name = tensor`) before chunkc.compile, for example those of the same "
            "modules built on the CPU with fewer layers, or build the model on the CPU"
        )
    return {buffer: values[name] for name, buffer in on_meta.items()}


class _Wanted:
    """A tensor in host memory whose elements are marked, to tell whether all of it was written.

    NaN marks floating-point numbers and the lowest value marks signed integers. Where every value is a likely one
    (bool, unsigned integers), any write counts as one of the whole.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = 0
        self._mark: float | int = 0
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            self._mark = torch.nan
        elif tensor.dtype is not torch.bool:
            self._mark = torch.iinfo(tensor.dtype).min
        self.forget()

    def forget(self) -> None:
        """Mark all elements."""
        with torch.no_grad():
            self.tensor.fill_(self._mark)
        self._version = self.tensor._version

    def is_given(self) -> bool:
        """Whether no element has its mark any more."""
        if self._mark == 0:
            return self.tensor._version > self._version
        marked = self.tensor.isnan() if self._mark != self._mark else self.tensor == self._mark
        return not bool(marked.any())


class _Doubles:
    """Doubles of modules and tensors of one model; ties between either are kept.

    Attributes:
        wanted: what values are asked for, by name.
    """

    def __init__(self, model: nn.Module, wanted: Mapping[str, torch.dtype]) -> None:
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._modules: dict[nn.Module, nn.Module] = {}
        self._tensors: dict[torch.Tensor, torch.Tensor] = {}
        self._marked: dict[torch.Tensor, _Wanted] = {}
        self.wanted = {name: self._wanted(named[name], dtype) for name, dtype in wanted.items()}

    def of(self, module: nn.Module) -> nn.Module:
        """The double of ``module``."""
        if module not in self._modules:
            double: nn.Module = object.__new__(type(module))
            self._modules[module] = double
            double.__dict__.update({k: v for k, v in module.__dict__.items() if k not in _ON_INSTANCES})
            double.__dict__["_parameters"] = {k: self._tensor(p) for k, p in module._parameters.items()}
            double.__dict__["_buffers"] = {k: self._tensor(b) for k, b in module._buffers.items()}
            double.__dict__["_modules"] = {k: None if m is None else self.of(m) for k, m in module._modules.items()}
        return self._modules[module]

    def wanted_of(self, module: nn.Module) -> list[_Wanted]:
        """Wanted tensors that the double ``module`` itself holds."""
        own = (*module._parameters.values(), *module._buffers.values())
        return [self._marked[t] for t in own if t is not None and t in self._marked]

    def _tensor(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is not None and tensor not in self._tensors:
            self._tensors[tensor] = _like(tensor, tensor.dtype, "meta")
        return None if tensor is None else self._tensors[tensor]

    def _wanted(self, tensor: torch.Tensor, dtype: torch.dtype) -> _Wanted:
        if tensor not in self._tensors:
            self._tensors[tensor] = _like(tensor, dtype, "cpu")
            self._marked[self._tensors[tensor]] = _Wanted(self._tensors[tensor])
        return self._marked[self._tensors[tensor]]


def _like(tensor: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _library_initialisers(
    module: nn.Module, outer: Callable[[nn.Module], Any] | None
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any]]]:
    """Modules, children first, each with the ``_init_weights`` of the nearest model around it."""
    own = getattr(module, "_init_weights", None)
    if callable(own) and len(inspect.signature(own).parameters) == 1:
        outer = own
    for child in module.children():
        yield from _library_initialisers(child, outer)
    if outer is not None:
        yield module, outer


def _run(initialise: Callable[[], Any], wanted: Sequence[_Wanted], *, keep: bool = False) -> None:
    """Run an initialisation.

    An initialisation that reads tensors on the meta device fails, and nothing that it wrote counts then. With ``keep``
    the initialisation has no effect on what has its value already.
    """
    if not wanted:
        return
    given = [(w.tensor, w.tensor.clone()) for w in wanted if w.is_given()]
    others = [w for w in wanted if not w.is_given()]
    try:
        initialise()
    except RuntimeError:
        keep = True
        for unknown in others:
            unknown.forget()
    if keep:
        for tensor, value in given:
            tensor.copy_(value)
