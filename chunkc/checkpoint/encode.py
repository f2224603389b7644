"""Python values (schedulers, generators, hyperparameters, extras) as JSON, tensors beside it.

Reading a pickle can run anything. Here only values of the types below are written, come back as they were, and reading
makes nothing else. Other values are refused by their place.

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

from chunkc.errors import ChunkcError
from chunkc.files import FormatError, shown
from chunkc.weights.files import DTYPE_NAMES

MAX_DEPTH: Final = 64
"""Containers inside each other; each takes at most three of JSON's."""
_MAX_BITS: Final = 2**13
_KIND: Final = "#"
_AS_THEY_ARE: Final = (bool, int, float, str, type(None))
_ARRAY_DTYPES: Final = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
_SEQUENCES: Final[Mapping[type, str]] = {tuple: "tuple", torch.Size: "size"}
_MAPPINGS: Final[Mapping[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


class Encoder:
    """Encodes values into JSON; ``tensors`` holds host copies of all tensors met, by key."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._outer: list[int] = []  # identities of the containers around the value that is encoded

    def encode(self, value: Any, path: str) -> Any:
        """``value`` for ``json.dumps``, independent of later changes.

        Raises:
            ChunkcError: for what cannot be held; ``path`` is how users call the value.
        """
        kind = type(value)
        if kind is int and value.bit_length() > _MAX_BITS:
            raise ChunkcError(f"{path} is a whole number of {value.bit_length()} bits; a checkpoint holds {_MAX_BITS}")
        if kind in _AS_THEY_ARE:
            return value
        if kind is not list and kind not in _SEQUENCES and kind not in _MAPPINGS:
            return self._encode_leaf(value, path)
        if id(value) in self._outer:
            raise ChunkcError(f"{path} contains itself, which a checkpoint does not hold: leave it out")
        if len(self._outer) == MAX_DEPTH:
            raise ChunkcError(f"{path:.200} is nested more than {MAX_DEPTH} deep, which a checkpoint does not hold")
        self._outer.append(id(value))
        try:
            return self._encode_container(value, path)
        finally:
            self._outer.pop()

    def _encode_container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is list:
            return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
        if kind is dict and all(type(k) is str and k != _KIND for k in value):
            return {k: self.encode(v, f"{path}[{k!r}]") for k, v in value.items()}
        if kind in _SEQUENCES:
            return {_KIND: _SEQUENCES[kind], "items": [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]}
        pairs = [[self.encode(k, f"{path} key"), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
        return {_KIND: _MAPPINGS[kind], "items": pairs}

    def _encode_leaf(self, value: Any, path: str) -> Any:
        if type(value) is bytes:
            return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
        if type(value) is torch.dtype:
            return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
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
    """Decode what `Encoder.encode` made, with its tensors in host memory; FormatError with the place."""
    if isinstance(value, list):
        return _items(value, tensors)
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return _entries(value, tensors)
    kind = value[_KIND]
    decoder = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise FormatError(f"must be one of {', '.join(_DECODERS)}, found {shown(kind)}", _KIND)
    try:
        return decoder(value, tensors)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FormatError(f"is no {kind} as a checkpoint holds it ({type(error).__name__}: {error!s:.200})") from error


Decoder = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor]], Any]


def _items(values: Any, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    decoded: list[Any] = []
    if not isinstance(values, list):
        raise FormatError(f"must be a list, found {shown(values)}", "items")
    try:
        for value in values:
            decoded.append(decode(value, tensors))
    except FormatError as error:
        raise error.within(f"[{len(decoded)}]") from None
    return decoded


def _entries(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    decoded, key = {}, ""
    try:
        for key, value in values.items():
            decoded[key] = decode(value, tensors)
    except FormatError as error:
        raise error.within(shown(key)) from None
    return decoded


def _sequence(make: Callable[[list[Any]], Any]) -> Decoder:
    return lambda value, tensors: make(_items(value["items"], tensors))


def _mapping(make: Callable[[Any], Any]) -> Decoder:
    return lambda value, tensors: make({key: item for key, item in _items(value["items"], tensors)})


def _array(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    return tensors[value["key"]].numpy()


_DTYPES: Final = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if type(kind) is torch.dtype}
_DECODERS: Final[Mapping[str, Decoder]] = {
    "tuple": _sequence(tuple),
    "size": _sequence(torch.Size),
    "dict": _mapping(dict),
    "ordered": _mapping(OrderedDict),
    "counter": _mapping(Counter),
    "bytes": lambda value, _: base64.b64decode(value["base64"], validate=True),
    "dtype": lambda value, _: _DTYPES[value["name"]],
    "tensor": lambda value, tensors: tensors[value["key"]],
    "array": _array,
    "scalar": lambda value, tensors: _array(value, tensors)[()],
}
