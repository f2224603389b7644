"""Read a document of JSON into plain data, within bounds of bytes and nesting.

Python's parser accepts more than a format says (repeated keys) and ends deep nesting in a RecursionError. Here every
fault is a `FormatError`, which names the place. `chunkc.files.decoding` decides what the values may be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

MAX_DEPTH: Final = 64
"""Containers inside each other, unless a reader allows more; no document of a fixed format comes near."""
_PIECE_NBYTES: Final = 2**20  # a read of n bytes takes memory for n bytes, however few there are


class FormatError(ValueError):
    """A document that breaks the rules of its format.

    Attributes:
        problem: the rule and what was found.
        place: where in the document, for example ``layout.slots[3].offset``; empty for the document as a whole.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"{place}: {problem}" if place else problem)
        self.problem = problem
        self.place = place

    def within(self, outer: str) -> FormatError:
        """The fault in a document that holds this one at ``outer``: a key, or an index ``[3]``."""
        dot = "." if self.place and not self.place.startswith("[") else ""
        return FormatError(self.problem, f"{outer}{dot}{self.place}")


@contextmanager
def fault_at(place: str) -> Iterator[None]:
    """Move faults of the block to ``place`` in the outer document."""
    try:
        yield
    except FormatError as error:
        raise error.within(place) from None


def read_json(path: str | Path, *, max_nbytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON file of at most ``max_nbytes``, nested at most ``max_depth`` deep.

    Numbers that are not finite come through, since some formats have them.

    Raises:
        OSError: the file cannot be read.
        FormatError: it is larger, no UTF-8, no JSON, nested deeper, or an object has a key twice.
    """
    value = _parsed(_text(path, max_nbytes), max_depth)
    _check_depth(value, max_depth)
    return value


def _text(path: str | Path, max_nbytes: int) -> str:
    with Path(path).open("rb") as file:
        data = bytearray()
        while piece := file.read(_PIECE_NBYTES):
            data += piece
            if len(data) > max_nbytes:
                raise FormatError(f"it is larger than the {max_nbytes} bytes that such a file may have")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"byte {error.start} is no UTF-8 text") from error


def _parsed(text: str, max_depth: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:  # not its cause: the traceback of that is as long as the document is deep
        raise FormatError(f"it is nested more than {max_depth} deep") from None
    except FormatError:
        raise
    except ValueError as error:  # of the syntax, or an integer of more digits than Python reads
        raise FormatError(f"it holds no JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"the key {twice!r:.80} stands twice in one object")
    return entries


def _check_depth(value: Any, max_depth: int) -> None:
    """Level by level, so that no nesting is too deep for the check itself."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for values in children for child in values if isinstance(child, (dict, list))]
        if not level:
            return
    raise FormatError(f"it is nested more than {max_depth} deep")
