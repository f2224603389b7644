"""Decode plain data into frozen dataclasses by annotations, strictly; errors name the place.

The dataclass is the format: an object has all its fields and no others. Nothing is converted: a bool is no whole
number, a text is no number, an integer is a float only where a float is wanted. Whole numbers are counts, sizes and
indexes: from 0 to 2**63 - 1. Floats are finite. Classes with a text form are decoded by their parsers.

    Decoder().decode(Slot, {"index": 0, "offset": "0", "nbytes": 256})     FormatError: offset: must be a whole ...
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from itertools import repeat
from reprlib import Repr
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from chunkc.files.reading import FormatError

T = TypeVar("T")
Decode = Callable[[Any], Any]

_MAX_INT: Final = 2**63 - 1
_REPR: Final = Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class Decoder:
    """Decodes values of the annotated types that documents consist of.

    Args:
        texts: parsers of classes that stand in a document as text; a ValueError means that they cannot.
    """

    def __init__(self, texts: Mapping[type, Callable[[str], Any]] | None = None) -> None:
        self._texts = texts or {}
        self._decoders: dict[Any, Decode] = {}

    def decode(self, kind: type[T], data: Any) -> T:
        """``data`` as ``kind``: a dataclass, or an annotation of its fields; FormatError with the place."""
        decoded: T = self._decoder(kind)(data)
        return decoded

    def _decoder(self, kind: Any) -> Decode:
        if kind not in self._decoders:
            self._decoders[kind] = self._make(kind)
        return self._decoders[kind]

    def _make(self, kind: Any) -> Decode:
        origin, arguments = get_origin(kind), get_args(kind)
        if kind in self._texts:
            return _of_text(self._texts[kind])
        if kind in _PLAIN:
            return _PLAIN[kind]
        if is_dataclass(kind):
            return self._of_fields(kind)
        if origin is tuple and arguments[-1] is Ellipsis:
            return _of_items(self._decoder(arguments[0]))
        if origin is tuple:
            return _of_places([self._decoder(argument) for argument in arguments])
        if origin in (Mapping, dict) and arguments[0] is str:
            return _of_entries(self._decoder(arguments[1]))
        if origin in (Union, types.UnionType) and len(arguments) == 2 and types.NoneType in arguments:
            inner = self._decoder(next(argument for argument in arguments if argument is not types.NoneType))
            return lambda data: None if data is None else inner(data)
        if origin is Literal:
            return _of_choices({choice: choice for choice in arguments})
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return _of_choices({str(choice): choice for choice in kind})
        raise TypeError(f"documents have no values of type {kind!r}")

    def _of_fields(self, kind: Any) -> Decode:
        hints = get_type_hints(kind)
        decoders = {field.name: self._decoder(hints[field.name]) for field in fields(kind)}

        def decode(data: Any) -> Any:
            if not isinstance(data, dict):
                raise FormatError(f"must be an object, found {shown(data)}")
            if wrong := decoders.keys() ^ data.keys():
                raise FormatError(f"fields missing or unknown: {', '.join(sorted(map(_key, wrong)))}")
            values, name = {}, ""
            try:
                for name, decoder in decoders.items():
                    values[name] = decoder(data[name])
            except FormatError as error:
                raise error.within(name) from None
            try:
                return kind(**values)
            except ValueError as error:
                raise FormatError(str(error)) from error

        return decode


def shown(value: Any) -> str:
    """A value in a message, however large it is."""
    return _REPR.repr(value)


def _key(name: Any) -> str:
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= _REPR.maxstring else shown(name)


def _whole(data: Any) -> int:
    if type(data) is not int or not 0 <= data <= _MAX_INT:
        raise FormatError(f"must be a whole number from 0 to 2**63 - 1, found {shown(data)}")
    return data


def _finite(data: Any) -> float:
    if type(data) not in (int, float) or not abs(data) <= sys.float_info.max:
        raise FormatError(f"must be a finite number, found {shown(data)}")
    return float(data)


def _bool(data: Any) -> bool:
    if type(data) is not bool:
        raise FormatError(f"must be true or false, found {shown(data)}")
    return data


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise FormatError(f"must be a text, found {shown(data)}")
    try:
        data.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"character {error.start} is half of a character, found {shown(data)}") from error
    return data


_PLAIN: Final[Mapping[Any, Decode]] = {int: _whole, float: _finite, bool: _bool, str: _text, Any: lambda data: data}


def _of_text(parse: Callable[[str], Any]) -> Decode:
    def decode(data: Any) -> Any:
        try:
            return parse(_text(data))
        except ValueError as error:
            raise FormatError(str(error)) from error

    return decode


def _of_choices(choices: Mapping[Any, Any]) -> Decode:
    def decode(data: Any) -> Any:
        if not isinstance(data, str) or data not in choices:
            raise FormatError(f"must be one of {', '.join(choices)}, found {shown(data)}")
        return choices[data]

    return decode


def _items(data: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise FormatError(f"must be a list, found {shown(data)}")
    return data


def _of_items(decoder: Decode) -> Decode:
    return lambda data: _decoded(repeat(decoder), _items(data))


def _of_places(decoders: list[Decode]) -> Decode:
    def decode(data: Any) -> tuple[Any, ...]:
        if len(_items(data)) != len(decoders):
            raise FormatError(f"must have {len(decoders)} entries, found {shown(data)}")
        return _decoded(decoders, data)

    return decode


def _decoded(decoders: Iterable[Decode], items: Iterable[Any]) -> tuple[Any, ...]:
    decoded: list[Any] = []
    try:
        for decoder, item in zip(decoders, items, strict=False):
            decoded.append(decoder(item))
    except FormatError as error:
        raise error.within(f"[{len(decoded)}]") from None
    return tuple(decoded)


def _of_entries(decoder: Decode) -> Decode:
    def decode(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise FormatError(f"must be an object, found {shown(data)}")
        decoded, key = {}, ""
        try:
            for key, value in data.items():
                decoded[_text(key)] = decoder(value)
        except FormatError as error:
            raise error.within(_key(key)) from None
        return decoded

    return decode
