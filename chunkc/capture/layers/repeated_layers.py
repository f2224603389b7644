"""The list of layers of a module that are alike, as a model can be captured with few of.

Layers are alike where they have the same classes, tensors of the same kinds, and the same attributes; a number may be
the layer's place in the list. What an attribute points to must be the very same object. The first layer may differ: it
is in every capture. A forward may still treat a layer by its number alone, so what follows from few layers is compared
with the parameters of all, and `chunkc.compile` plans by the whole model in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (int, str, float, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)

Fact = tuple[str, object]
"""Of a layer: where in it, and what; numbers as they are."""


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """The attribute ``name`` of ``parent``: a list of ``num_layers`` modules that are alike."""

    parent: nn.Module
    name: str
    num_layers: int

    @staticmethod
    def of(model: nn.Module, least: int) -> RepeatedLayers | None:
        """The only list of ``least`` layers or more in ``model``; None unless they are alike."""
        found = list(_lists(model, least))
        if len(found) != 1:
            return None
        parent, name, listed = found[0]
        layers = list(listed.children())
        shared = {id(t) for t in _tensors(model, listed)}
        own = [id(t) for layer in layers for t in _tensors(layer)]
        if len(set(own)) < len(own) or not shared.isdisjoint(own):
            return None
        return RepeatedLayers(parent, name, len(layers)) if _are_alike(layers[1:]) else None

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Let the model have the first ``num_layers`` layers alone in the block."""
        whole = self.parent._modules[self.name]
        if whole is None:
            raise ValueError(f"{self.name} is gone")
        short: nn.Module = object.__new__(type(whole))
        short.__dict__.update(whole.__dict__)
        short.__dict__["_modules"] = dict(list(whole._modules.items())[:num_layers])
        self.parent._modules[self.name] = short
        try:
            yield
        finally:
            self.parent._modules[self.name] = whole


def _lists(module: nn.Module, least: int) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Lists of ``least`` modules or more of one class, but for those within others."""
    for name, child in module._modules.items():
        if child is None:
            continue
        is_list = isinstance(child, nn.ModuleList | nn.Sequential) and len(child) >= least
        if is_list and len({type(layer) for layer in list(child.children())[1:]}) == 1:
            yield module, name, child
        else:
            yield from _lists(child, least)


def _tensors(module: nn.Module, without: nn.Module | None = None) -> Iterator[torch.Tensor]:
    """Parameters and buffers of ``module``, each module once, but for those of the modules in ``without``."""
    left_out = set() if without is None else set(without.modules())
    for part in module.modules():
        if part not in left_out:
            yield from (t for table in (part._parameters, part._buffers) for t in table.values() if t is not None)


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    facts = [list(_facts(layer, "")) for layer in layers]
    if len({tuple(path for path, _ in of_layer) for of_layer in facts}) != 1:
        return False
    return all(_is_one_rule([value for _, value in column]) for column in zip(*facts, strict=True))


def _is_one_rule(values: Sequence[object]) -> bool:
    """Whether values are all the same, or numbers that count the layers."""
    first = values[0]
    if all(type(value) is type(first) and value == first for value in values):
        return True
    numbers = [value for value in values if type(value) is int]
    return len(numbers) == len(values) and [n - i for i, n in enumerate(numbers)] == [numbers[0]] * len(numbers)


def _facts(module: nn.Module, path: str) -> Iterator[Fact]:
    yield path, type(module)
    for name, param in module._parameters.items():
        yield f"{path}.{name}", None if param is None else _kind(param)
    for name, buffer in module._buffers.items():
        yield f"{path}.{name}", None if buffer is None else _kind(buffer)
    for name, value in vars(module).items():
        if name not in _TABLES:
            yield from _facts_of_value(value, f"{path}.{name}")
    for name, child in module._modules.items():
        if child is None:
            yield f"{path}.{name}", None
        else:
            yield from _facts(child, f"{path}.{name}")


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor))


def _facts_of_value(value: object, path: str) -> Iterator[Fact]:
    if isinstance(value, torch.Tensor):
        yield path, _kind(value)
    elif isinstance(value, list | tuple | set):
        items: Sequence[Any] = list(value)
        yield path, (type(value), len(items))
        for number, item in enumerate(items):
            yield from _facts_of_value(item, f"{path}[{number}]")
    elif isinstance(value, Mapping):
        yield path, (type(value), len(value))
        for number, item in enumerate(value.values()):
            yield from _facts_of_value(item, f"{path}[{number}]")
    elif isinstance(value, _PLAIN):
        yield path, value
    else:
        yield path, id(value)
