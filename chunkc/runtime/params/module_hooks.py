"""Hooks on the user's modules, beside parameters: real values in state dicts, answers to conversions.

In a copy of a compiled model (``copy.deepcopy``, pickle), which has plain parameters, they do nothing.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from chunkc.errors import ChunkcError
from chunkc.runtime.params.managed_tensor import ManagedTensor


class StateDictHook:
    """A hook that makes a module's managed tensors in a state dict real, in the dtype handed over.

    Tied parameters stay tied within one state dict. ``keep_vars=True`` keeps the parameters themselves.
    """

    def __init__(self) -> None:
        self._seen: weakref.ref[Any] | None = None
        self._values: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        if self._seen is None or self._seen() is not state:
            self._values.clear()
            self._seen = weakref.ref(state) if isinstance(state, OrderedDict) else None  # a dict has no weak references
        for name, held in module._parameters.items():
            value, param = state.get(prefix + name), cast(object, held)
            if isinstance(param, ManagedTensor) and isinstance(value, ManagedTensor) and value is not param:
                state[prefix + name] = self._value(param)

    def _value(self, param: ManagedTensor) -> torch.Tensor:
        key = (param.chunkc_index, param._version)
        known = self._values.get(key)
        value = known() if known is not None else None
        if value is None:
            value = param.chunkc_store.whole(param.chunkc_index, param.exact())
            self._values[key] = weakref.ref(value)
        return value

    def __deepcopy__(self, memo: object) -> StateDictHook:
        return StateDictHook()

    def __reduce__(self) -> tuple[type[StateDictHook], tuple[()]]:
        return StateDictHook, ()


class LoadHook:
    """A hook that takes this rank's parts of what a state dict to be loaded has whole."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, held in module._parameters.items():
            param = cast(object, held)
            if isinstance(param, ManagedTensor) and prefix + name in state:
                state[prefix + name] = param.chunkc_store.part(param.chunkc_index, state[prefix + name])


class Conversion:
    """Stands in for ``Module._apply``, behind ``to``, ``half``, ``cuda`` and their like.

    What would leave every parameter as it is reaches the buffers; anything else is refused before anything has changed.
    (torch itself would swap parameter objects, which compiled code holds on to, or stop halfway.)
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module that was to be converted is gone")
        if not any(isinstance(p, ManagedTensor) for p in module.parameters(recurse)):
            plain: nn.Module = type(module)._apply(module, convert, recurse)  # type: ignore[no-untyped-call]
            return plain
        modules = list(module.modules()) if recurse else [module]
        for part in modules:
            _check(part, convert)
        for part in modules:
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else convert(buffer)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        return Conversion(memo[id(self._module())])

    def __reduce__(self) -> tuple[type[Conversion], tuple[Any]]:
        return Conversion, (self._module(),)


def _check(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, param in module._parameters.items():
        if param is None:
            continue
        with torch.no_grad():
            converted = convert(param)
        if converted is not param:
            raise ChunkcError(
                f"a compiled model keeps its parameters as they are, but this conversion (Module.to, half, cuda, ...) "
                f"would turn {name} of {type(module).__name__} from {param.dtype} on {param.device} into "
                f"{converted.dtype} on {converted.device}. Convert the model before chunkc.compile, or name the "
                "compute dtype there"
            )


def attach(model: nn.Module) -> None:
    """Put them on every module of ``model``."""
    hook, load_hook = StateDictHook(), LoadHook()
    has_parts = any(p.chunkc_store.shards for p in model.parameters() if isinstance(p, ManagedTensor))
    for module in model.modules():
        module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        if has_parts:
            module.register_load_state_dict_pre_hook(load_hook)  # type: ignore[no-untyped-call]
        module.__dict__["_apply"] = Conversion(module)
