"""Values that stand in no file: those that a module's own initialisation gives.

Constructors on the meta device lose what they compute: tables of rotary embeddings, running statistics, a new head.
transformers' ``_init_weights(module)`` and torch's ``reset_parameters()`` write the same values in place. They run on a
*double* of the model: the same classes and attributes, with every tensor on the meta device, except the wanted ones,
which stand in host memory and are marked. A tensor with no mark left was given a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError, first_names

_RESETS = ("reset_parameters", "_reset_parameters")
_ON_INSTANCES = ("_apply", "_compiled_call_impl", "save_pretrained")
"""What compilation puts on a module object, which its double must not have."""


def initial_values(model: nn.Module, wanted: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Host copies of the initial values of ``wanted``, dtypes by name; those without one are left out.

    Modules are initialised in transformers' order (children first): the same seed draws the same numbers.
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
            wanted_here = doubles.wanted_of(module)
            if reset is not None and not all(w.is_given() for w in wanted_here):
                _run(reset, wanted_here, keep=True)
    return {name: w.tensor.detach() for name, w in doubles.wanted.items() if w.is_given()}


def buffer_values(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Host copies of buffers on the meta device; ChunkcError names those that nothing initialises."""
    on_meta = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    with torch.random.fork_rng(devices=()):
        values = initial_values(model, {name: buffer.dtype for name, buffer in on_meta.items()})
    unknown = [f"{name} ({b.dtype}, {tuple(b.shape)})" for name, b in on_meta.items() if name not in values]
    if unknown:
        raise ChunkcError(
            f"buffers {first_names(unknown)} are on the meta device and nothing says what their values are: "
            "their modules have no `reset_parameters` that sets them, and no transformers model initialises them. "
            "Assign real tensors (`module.name = tensor`) before chunkc.compile, for example those of the same "
            "modules built on the CPU with fewer layers, or build the model on the CPU"
        )
    return {buffer: values[name] for name, buffer in on_meta.items()}


def moved_buffers(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Places of the buffers that are not on ``device``, and their values there; shared ones stay shared."""
    places = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    made = buffer_values(model)
    moved = {b: made.get(b, b).to(device) for _, _, b in places if b.device != device}
    return [(module, name, moved[b]) for module, name, b in places if b in moved]


class _Wanted:
    """A tensor in host memory whose elements are marked (NaN, or the lowest signed integer).

    Bools and unsigned integers have no unlikely value: any write counts.
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
        with torch.no_grad():
            self.tensor.fill_(self._mark)
        self._version = self.tensor._version

    def is_given(self) -> bool:
        if self._mark == 0:
            return self.tensor._version > self._version
        marked = self.tensor.isnan() if self._mark != self._mark else self.tensor == self._mark
        return not bool(marked.any())


class _Doubles:
    """Doubles of modules and tensors of one model, tied alike; ``wanted`` tensors by name."""

    def __init__(self, model: nn.Module, wanted: Mapping[str, torch.dtype]) -> None:
        named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        self._modules: dict[nn.Module, nn.Module] = {}
        self._tensors: dict[torch.Tensor, torch.Tensor] = {}
        self._marked: dict[torch.Tensor, _Wanted] = {}
        self.wanted = {name: self._wanted(named[name], dtype) for name, dtype in wanted.items()}

    def of(self, module: nn.Module) -> nn.Module:
        if module not in self._modules:
            double: nn.Module = object.__new__(type(module))
            self._modules[module] = double
            double.__dict__.update({k: v for k, v in module.__dict__.items() if k not in _ON_INSTANCES})
            double.__dict__["_parameters"] = {k: self._tensor(p) for k, p in module._parameters.items()}
            double.__dict__["_buffers"] = {k: self._tensor(b) for k, b in module._buffers.items()}
            double.__dict__["_modules"] = {k: None if m is None else self.of(m) for k, m in module._modules.items()}
        return self._modules[module]

    def wanted_of(self, module: nn.Module) -> list[_Wanted]:
        tensors = (*module._parameters.values(), *module._buffers.values())
        return [self._marked[t] for t in tensors if t is not None and t in self._marked]

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
    initialise = getattr(module, "_init_weights", None)
    if callable(initialise) and len(inspect.signature(initialise).parameters) == 1:
        outer = initialise
    for child in module.children():
        yield from _library_initialisers(child, outer)
    if outer is not None:
        yield module, outer


def _run(initialise: Callable[[], Any], wanted: Sequence[_Wanted], *, keep: bool = False) -> None:
    """Run an initialisation; one that fails since it reads meta tensors leaves the values as they were.

    With ``keep`` values given before stay.
    """
    if not wanted:
        return
    given = [(w.tensor, w.tensor.clone()) for w in wanted if w.is_given()]
    unknown = [w for w in wanted if not w.is_given()]
    try:
        initialise()
    except RuntimeError:
        keep = True
        for value_wanted in unknown:
            value_wanted.forget()
    if keep:
        for tensor, value in given:
            tensor.copy_(value)


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the buffers of rank 0, once: from then on they are each rank's own, as in FSDP."""
    if ranks.job_size == 1:
        return
    for buffer in model.buffers():
        value = buffer.detach().to("cpu", copy=True).contiguous()
        ranks.broadcast_in_job(value)
        with torch.no_grad():
            buffer.copy_(value)
