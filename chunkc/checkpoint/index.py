"""The index of a checkpoint: dtype, shape and parts of each tensor, with their places in files.

An index may come from a stranger. `read_index` accepts what the files confirm: the parts cover a tensor once
everywhere, and each is a tensor of that dtype and shape in a file that the manifest has. So readers allocate no more
than the files hold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from chunkc.files import Decoder, FormatError, fault_at, read_json, shown
from chunkc.weights.files import DTYPE_NAMES, read_shapes

INDEX_NAME: Final = "index.json"
MAX_NBYTES: Final = 2**30
DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
"""Dtypes that can be stored, by torch's names."""
_MAX_DIMS: Final = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: ``offsets`` and ``sizes`` by dimension, and its name in ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor; ``dtype`` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def read_index(folder: Path, files: Collection[str] | None = None) -> dict[str, StoredTensor]:
    """The index of a checkpoint, confirmed by ``files`` of the manifest, or by all of the folder.

    Raises:
        OSError: a file cannot be read.
        FormatError: with the place in the index and what was found.
    """
    data = read_json(folder / INDEX_NAME, max_nbytes=MAX_NBYTES)
    index: dict[str, StoredTensor] = Decoder().decode(dict[str, StoredTensor], data)
    used = set[tuple[str, str]]()
    for key, stored in index.items():
        with fault_at(shown(key)):
            _check_shape(stored)
            for position, part in enumerate(stored.parts):
                if (part.file, part.name) in used:
                    raise FormatError(f"{part.name!r:.80} of {part.file!r:.80} is a part already", f"parts[{position}]")
                used.add((part.file, part.name))
            _check_cover(stored)
    _check_headers(folder, index, files)
    return index


def _check_shape(stored: StoredTensor) -> None:
    if stored.dtype not in DTYPES:
        raise FormatError(f"must be one of {', '.join(DTYPES)}, found {stored.dtype!r:.60}", "dtype")
    if len(stored.shape) > _MAX_DIMS or math.prod(stored.shape) > 2**60:
        raise FormatError(f"{len(stored.shape)} dimensions are too many, or too large", "shape")
    for position, part in enumerate(stored.parts):
        if not len(part.offsets) == len(part.sizes) == len(stored.shape):
            raise FormatError(f"it has other dimensions than {stored.shape}", f"parts[{position}]")
        for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            if offset + size > stored.shape[dim]:
                reach = f"{offset + size} of {stored.shape[dim]} in dimension {dim}"
                raise FormatError(f"it reaches to {reach}", f"parts[{position}]")


def _check_cover(stored: StoredTensor) -> None:
    """Boxes that share no element, and have as many together as the tensor, cover it.

    A sweep along the dimension with the most beginnings compares few of them.
    """
    boxes = [part for part in stored.parts if math.prod(part.sizes)]
    covered, numel = sum(math.prod(part.sizes) for part in boxes), math.prod(stored.shape)
    if covered != numel or not stored.parts:
        raise FormatError(f"they have {covered} elements and the tensor {numel}", "parts")
    if len(boxes) < 2:
        return
    along = max(range(len(stored.shape)), key=lambda dim: len({part.offsets[dim] for part in boxes}))
    standing: list[Part] = []
    for part in sorted(boxes, key=lambda part: part.offsets[along]):
        standing = [other for other in standing if other.offsets[along] + other.sizes[along] > part.offsets[along]]
        for other in standing:
            if _overlap(part, other):
                raise FormatError(f"those at {other.offsets} and {part.offsets} share elements", "parts")
        standing.append(part)


def _overlap(left: Part, right: Part) -> bool:
    ranges = zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in ranges)


def _check_headers(folder: Path, index: Mapping[str, StoredTensor], files: Collection[str] | None) -> None:
    by_file: dict[str, list[tuple[str, StoredTensor, Part]]] = {}
    for key, stored in index.items():
        for position, part in enumerate(stored.parts):
            by_file.setdefault(part.file, []).append((f"{key!r:.200}.parts[{position}]", stored, part))
    for file, held in by_file.items():
        place = f"{held[0][0]}.file"
        if Path(file).name != file or (files is not None and file not in files):
            raise FormatError(f"{file!r:.200} is no file of the checkpoint that its manifest knows", place)
        headers = _headers(folder / file, place)
        for place, stored, part in held:
            wanted = (DTYPE_NAMES[DTYPES[stored.dtype]], part.sizes)
            if headers.get(part.name) != wanted:
                present = f"{headers.get(part.name, 'nothing')} of the name {part.name!r:.80}"
                raise FormatError(f"{file} has {present}, not {wanted}", place)


def _headers(path: Path, place: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    if not path.is_file():
        raise FormatError(f"{path.name!r:.200} is missing", place)
    try:
        return read_shapes(path)
    except SafetensorError as error:
        raise FormatError(f"{path.name} is no whole safetensors file ({error})", place) from error
