"""Python values as JSON, with their tensors beside it: schedulers, generators, hyperparameters, what users add.

A pickle can hold anything, and reading one can run anything. Here only values of the types below are written, come back
as what they were, and reading makes nothing else. What is none of them is refused by its place in the value.

    JSON by itself       None, bool, int, float (also inf and nan), str, list, dict with str keys
    ``{"#": kind, ...}``  tuple, other dicts, OrderedDict, Counter, bytes, torch.dtype, torch.Size, tensors, NumPy
                          arrays and scalars; a tensor's elements stand under a key of their own among the tensors
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from chunkc.checkpoint.storage import DTYPE_NAMES
from chunkc.errors import ChunkcError

_KIND: Final = "#"
_AS_THEY_ARE: Final = (bool, int, float, str, type(None))
_ARRAY_DTYPES: Final = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
_SEQUENCES: Final[Mapping[type, str]] = {tuple: "tuple", torch.Size: "size"}
_MAPPINGS: Final[Mapping[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


class Encoder:
    """Encodes values into JSON; see the module docstring.

    Attributes:
        tensors: copies of all tensors met, in host memory, by key.
    """

    def __init__(self, prefix: str) -> None:
        """Keys of tensors begin with ``prefix``."""
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix

    def encode(self, value: Any, path: str) -> Any:
        """``value`` for ``json.dumps``; what changes it later changes nothing.

        Raises:
            ChunkcError: for what cannot be held; ``path`` tells how users call the value.
        """
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is list:
            return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
        if kind is dict and all(type(k) is str and k != _KIND for k in value):
            return {k: self.encode(v, f"{path}[{k!r}]") for k, v in value.items()}
        if kind in _SEQUENCES:
            return {_KIND: _SEQUENCES[kind], "items": [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]}
        if kind in _MAPPINGS:
            pairs = [[self.encode(k, f"{path} key"), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return {_KIND: _MAPPINGS[kind], "items": pairs}
        if kind is bytes:
            return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
        if kind is torch.dtype:
            return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
        return self._encode_array(value, path)

    def _encode_array(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in DTYPE_NAMES:
            return {_KIND: "tensor", "key": self._keep(value)}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in _ARRAY_DTYPES and value.dtype.isnative:
            kind = "scalar" if isinstance(value, np.generic) else "array"
            return {_KIND: kind, "key": self._keep(torch.from_numpy(np.array(value)))}
        kind = f" of {value.dtype}" if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else ""
        raise ChunkcError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}{kind}, which a checkpoint does not hold: "
            "it takes numbers, strings, bytes, lists, tuples, dicts, tensors and NumPy arrays. Convert it, or keep it "
            "elsewhere"
        )

    def _keep(self, value: torch.Tensor) -> str:
        key = f"{self._prefix}.{len(self.tensors)}"
        with torch.inference_mode(False), torch.no_grad():
            self.tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return key


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `Encoder.encode` was given; tensors come in host memory.

    Raises:
        KeyError: for a kind, or a tensor, that does not exist.
    """
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {k: decode(v, tensors) for k, v in value.items()}
    return _DECODERS[value[_KIND]](value, tensors)


Decoder = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor]], Any]


def _sequence(make: Callable[[list[Any]], Any]) -> Decoder:
    return lambda value, tensors: make([decode(v, tensors) for v in value["items"]])


def _mapping(make: Callable[[Any], Any]) -> Decoder:
    return lambda value, tensors: make({decode(k, tensors): decode(v, tensors) for k, v in value["items"]})


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise KeyError(name)
    return found


_DECODERS: Final[Mapping[str, Decoder]] = {
    "tuple": _sequence(tuple),
    "size": _sequence(torch.Size),
    "dict": _mapping(dict),
    "ordered": _mapping(OrderedDict),
    "counter": _mapping(Counter),
    "bytes": lambda value, _: base64.b64decode(value["base64"]),
    "dtype": lambda value, _: _dtype(value["name"]),
    "tensor": lambda value, tensors: tensors[value["key"]],
    "array": lambda value, tensors: tensors[value["key"]].numpy(),
    "scalar": lambda value, tensors: tensors[value["key"]].numpy()[()],
}
