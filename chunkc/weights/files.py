"""Safetensors files: found, headers read, checked and written, tensors mapped one at a time.

A model's weights are one file, or several *shards* with an index that says which tensor stands in which. Opening reads
headers only; safetensors maps a file, so that a tensor is pages of the file until it is copied.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from chunkc.errors import ChunkcError
from chunkc.files import Decoder, FormatError, fault_at, read_json, shown

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
_INDEX_MAX_NBYTES: Final = 2**28

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of the dtypes that it stores."""
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items() if name not in ("U64", "U32", "U16")}
"""Dtypes of parameters and buffers, by safetensors' names."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file by its header; ``dtype`` is safetensors' name."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of one saved model: ``stored`` by name, ``path`` as it was asked for."""

    def __init__(self, path: str | Path) -> None:
        """Read the headers of a safetensors file, of an index's files, or of the folder of either.

        Raises:
            ChunkcError: naming the file that is missing, damaged or of another kind. safetensors keeps no checksums of
                data.
        """
        self.path = Path(path)
        self.stored: dict[str, Stored] = {}
        files, weight_map = _find(self.path)
        for file in files:
            for stored in _read_header(file):
                other = self.stored.setdefault(stored.name, stored)
                if other is not stored:
                    raise ChunkcError(f"{stored.name} stands both in {other.file} and in {file}; save the model again")
        for name, file in weight_map.items():
            if name not in self.stored or self.stored[name].file != file:
                raise ChunkcError(
                    f"the index of {self.path} says that {name} stands in {file}, which has no such tensor: index and "
                    "shards are not of one model. Copy or download them again"
                )

    def values(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Values of ``names``, file by file; each maps its part of the file and must not be written to."""
        for file in dict.fromkeys(stored.file for stored in self.stored.values()):
            wanted = [name for name, stored in self.stored.items() if stored.file == file and name in names]
            if wanted:
                with safe_open(file, framework="pt") as opened:
                    for name in wanted:
                        yield name, opened.get_tensor(name)

    def value(self, name: str) -> torch.Tensor:
        with safe_open(self.stored[name].file, framework="pt") as opened:
            value: torch.Tensor = opened.get_tensor(name)
            return value


def read_shapes(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """safetensors' dtype name and the shape of every tensor of a file; SafetensorError if it is damaged."""
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def encode_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], aliases: Mapping[str, str]) -> bytes:
    """Header of a safetensors file whose tensors follow without gaps in this order, by dtype and shape.

    The header's length in 8 bytes, little-endian, then JSON padded with spaces to a multiple of 8 bytes (README of
    safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(value: torch.Tensor) -> memoryview:
    dense = value.detach().to("cpu").contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data  # of one element: any stride


def _find(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and the file of each tensor by an index."""
    if path.is_dir():
        for candidate in (path / WEIGHTS_NAME, path / INDEX_NAME):
            if candidate.is_file():
                return _find(candidate)
        single = sorted(path.glob("*.safetensors"))
        if len(single) == 1:
            return single, {}
        raise ChunkcError(_nothing_found(path, single))
    if not path.is_file():
        raise ChunkcError(
            f"there is no file or folder {path}. Give the folder that save_pretrained wrote, or a safetensors file; "
            "for a model of the Hugging Face hub, the folder that huggingface_hub.snapshot_download(name) returns"
        )
    if path.name.endswith(".json"):
        weight_map = _read_index(path)
        return list(dict.fromkeys(weight_map.values())), weight_map
    return [path], {}


def _nothing_found(path: Path, several: list[Path]) -> str:
    if several:
        return f"{path} holds {len(several)} safetensors files and no {INDEX_NAME}: give one of the files, or the index"
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{path} holds {pickles[0]}, which is pickled, and no safetensors. Convert it once: `AutoModel."
            f"from_pretrained({str(path)!r}).save_pretrained(folder)` with the model's own class"
        )
    return f"{path} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}: give the folder that save_pretrained wrote"


def _read_index(path: Path) -> dict[str, Path]:
    try:
        index = Decoder().decode(dict[str, Any], read_json(path, max_nbytes=_INDEX_MAX_NBYTES))
        if "weight_map" not in index:
            raise FormatError("fields missing: weight_map")
        with fault_at("weight_map"):
            weight_map = Decoder().decode(dict[str, str], index["weight_map"])
    except (OSError, FormatError) as error:
        raise ChunkcError(
            f"{path} is no index of safetensors shards ({error}); it must be JSON with a `weight_map` from names to "
            "files. Copy or download it again"
        ) from error
    outside = [name for name in weight_map.values() if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ChunkcError(
            f"{path} names {shown(outside[0])}, which is outside of its folder; shards stand beside their index. These "
            "files are not to be trusted: download the model from where it was published"
        )
    files = {name: path.parent / file for name, file in weight_map.items()}
    missing = sorted({str(file) for file in files.values() if not os.path.isfile(file)})
    if missing:
        raise ChunkcError(f"{path} names {missing[0]}, which is missing ({len(missing)} in all); copy or download it")
    return files


def _read_header(file: Path) -> list[Stored]:
    try:
        return [Stored(name, file, shape, dtype) for name, (dtype, shape) in read_shapes(file).items()]
    except (SafetensorError, OSError) as error:
        raise ChunkcError(
            f"{file} is no whole safetensors file ({error}): it was cut off, damaged or is of another kind. Copy or "
            "download it again"
        ) from error
