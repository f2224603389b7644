"""Storage for torch.distributed.checkpoint in safetensors and JSON.

Nothing that is loaded can run code (DCP's own storage pickles its metadata), and each tensor is written as soon as it
is resolved (`HuggingFaceStorageWriter` holds a whole file). DCP's planners do the resharding. In a checkpoint's folder:

    rank-00000.float32.safetensors   tensors of one rank and dtype, aligned in whatever order they come
    index.json                       DCP's metadata: of each tensor its dtype, shape, and the parts with their places

DCP's `HuggingFaceStorageReader` reads the files too. A checksum (SHA-256) is taken of what goes to each.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem

from chunkc.checkpoint.index import DTYPES, INDEX_NAME, Part, StoredTensor, read_index
from chunkc.errors import CheckpointError
from chunkc.files import FormatError, synced_file
from chunkc.weights.files import bytes_of, encode_header

_PIECE_NBYTES: Final = 2**24
Places = dict[MetadataIndex, dict[str, str]]
"""File and name of each box."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    nbytes: int
    sha256: str


class SafetensorsWriter:
    """Writes the tensors of one rank into files of the folder ``path``, one tensor at a time.

    ``digests`` are of the written files of this rank, and of the index on the coordinator.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.digests: dict[str, FileDigest] = {}
        self._path = path
        self._rank = rank

    def write(self, plan: SavePlan, planner: SavePlanner) -> Places:
        """Write the items in the order of the plan, and wait until they are on disk."""
        by_dtype: dict[torch.dtype, list[WriteItem]] = {}
        for item in plan.items:
            by_dtype.setdefault(_data(item).properties.dtype, []).append(item)
        with ExitStack() as stack:
            files = {d: self._open(d, items, stack) for d, items in by_dtype.items()}
            places = {item.index: _write(files[_data(item).properties.dtype], item, planner) for item in plan.items}
            for file in files.values():
                self.digests[file.path.name] = file.finish()
        return places

    def _open(self, dtype: torch.dtype, items: Sequence[WriteItem], stack: ExitStack) -> DigestedFile:
        path = self._path / f"rank-{self._rank:05d}.{str(dtype).removeprefix('torch.')}.safetensors"
        file = DigestedFile(path, stack.enter_context(path.open("wb")))
        tensors = {_name(item): (dtype, _data(item).chunk.sizes) for item in items}
        file.write(memoryview(encode_header(tensors, {})))
        return file

    def finish(self, metadata: Metadata, places: Places) -> None:
        """Write the index; ``places`` are those of all ranks."""
        index = {
            fqn: {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": list(tensor.size),
                "parts": [
                    {"offsets": list(c.offsets), "sizes": list(c.sizes), **places[MetadataIndex(fqn, c.offsets)]}
                    for c in tensor.chunks
                ],
            }
            for fqn, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self.digests[INDEX_NAME] = write_json(self._path / INDEX_NAME, index)


class SafetensorsReader:
    """Reads what `SafetensorsWriter` wrote, whole or in parts, for any number of ranks.

    Only ``files`` may be read; None allows every file of the folder.
    """

    def __init__(self, path: Path, files: Collection[str] | None = None) -> None:
        self._path = path
        self._files = files
        self._index: Mapping[str, StoredTensor] | None = None
        self._parts: dict[MetadataIndex, Part] = {}

    def read_metadata(self) -> Metadata:
        index = self.index()
        self._parts = {MetadataIndex(fqn, p.offsets): p for fqn, stored in index.items() for p in stored.parts}
        return Metadata({fqn: _tensor_metadata(stored) for fqn, stored in index.items()})

    def index(self) -> Mapping[str, StoredTensor]:
        """Stored tensors by key, confirmed by the files; the index is read once.

        Raises:
            CheckpointError: when the index is missing, damaged or not that of the files; with the place in it.
        """
        if self._index is None:
            try:
                self._index = read_index(self._path, self._files)
            except OSError as error:
                raise self._damaged(f"not readable ({error.strerror})") from error
            except FormatError as error:
                raise self._damaged(f"no index of its files: {error}") from error
        return self._index

    def _damaged(self, fault: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: {INDEX_NAME} is {fault}", path=self._path, damaged=(INDEX_NAME,)
        )

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for item in plan.items:
                part = self._parts[item.storage_index]
                if part.file not in files:
                    files[part.file] = stack.enter_context(safe_open(self._path / part.file, framework="pt"))
                _read(files[part.file], part.name, item, planner)


class DigestedFile:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._sha256 = hashlib.sha256()
        self._nbytes = 0

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_NBYTES):
            piece = data[start : start + _PIECE_NBYTES]
            self._file.write(piece)
            self._sha256.update(piece)
        self._nbytes += len(data)

    def finish(self) -> FileDigest:
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileDigest(self._nbytes, self._sha256.hexdigest())


def write_json(path: Path, value: object) -> FileDigest:
    """Write a file of JSON and wait until it is on disk."""
    data = json.dumps(value, separators=(",", ":")).encode()
    with synced_file(path) as file:
        file.write(data)
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def digest_of(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _write(file: DigestedFile, item: WriteItem, planner: SavePlanner) -> dict[str, str]:
    value: Any = planner.resolve_data(item)
    file.write(bytes_of(value))
    return {"file": file.path.name, "name": _name(item)}


def _read(file: Any, name: str, item: ReadItem, planner: LoadPlanner) -> None:
    stored = file.get_tensor(name)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(stored)
    planner.commit_tensor(item, target)


def _data(item: WriteItem) -> Any:
    return item.tensor_data


def _name(item: WriteItem) -> str:
    """The key, followed by its place in the tensor where the item is a part of one."""
    data = _data(item)
    whole = tuple(data.chunk.sizes) == tuple(data.size)
    return item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _tensor_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    parts = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in stored.parts]
    return TensorStorageMetadata(TensorProperties(DTYPES[stored.dtype]), torch.Size(stored.shape), parts)
