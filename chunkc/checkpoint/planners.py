"""Planners of torch.distributed.checkpoint for tensors that exist one at a time, or in parts by rank.

DCP plans from a state dict of tensors. Here these are names with a dtype and a `Share`, which take no memory: a value
is made when storage asks for it, and handed on when it has been read whole.

``save`` and ``load`` go through DCP's steps (local plans, global plan, data, metadata) over chunkc's own ranks, on any
thread; DCP's own functions take the script's process group, or warn without one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from chunkc.checkpoint.index import DTYPES
from chunkc.checkpoint.shares import Box, Share
from chunkc.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from chunkc.distributed.coordination import exchange
from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.weights.files import DTYPE_NAMES

Flats = Sequence[torch.Tensor]
"""The elements of a share: 1-D, one for each of its ranges."""


def stand_in(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of this dtype and shape, whose elements share one."""
    return torch.empty((), dtype=dtype, device="cpu").expand(torch.Size(shape))


@dataclass(frozen=True, slots=True)
class Kept:
    """This rank's share of a tensor that is saved; ``read`` makes the share when its turn comes."""

    dtype: torch.dtype
    share: Share
    read: Callable[[], Flats]

    @property
    def nbytes(self) -> int:
        return math.prod(self.share.whole_shape) * self.dtype.itemsize

    @staticmethod
    def whole(value: torch.Tensor) -> Kept:
        return Kept(value.dtype, Share.whole(value.shape), lambda: (value.contiguous().view(-1),))


@dataclass(frozen=True, slots=True)
class Wanted:
    """This rank's share of a saved tensor to read, in the saved dtype."""

    dtype: torch.dtype
    share: Share


class LazySavePlanner(DefaultSavePlanner):
    def __init__(self, kept: Mapping[str, Kept]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._kept = kept
        self._boxes: dict[MetadataIndex, Box] = {}
        self._left: Counter[str] = Counter()
        self._flats: Flats = ()

    def create_local_plan(self) -> SavePlan:
        items = [item for key, kept in self._kept.items() for item in self._items(key, kept)]
        self.plan = SavePlan(items)
        return self.plan

    def _items(self, key: str, kept: Kept) -> Iterator[WriteItem]:
        if kept.dtype not in DTYPE_NAMES:
            raise ChunkcError(f"{key} is {kept.dtype}, which a checkpoint cannot hold: keep it in `extra`")
        properties, size = TensorProperties(kept.dtype), torch.Size(kept.share.whole_shape)
        for box in kept.share.boxes():
            index = MetadataIndex(key, box.offsets)
            self._boxes[index] = box
            self._left[key] += 1
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(_chunk(box), properties, size))

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The elements of a box; a tensor is made for its first box and freed with its last."""
        kept, key = self._kept[index.fqn], index.fqn
        if not self._flats:
            self._flats = kept.read()
        elements = kept.share.view(self._flats, self._boxes[index])
        self._left[key] -= 1
        if not self._left[key]:
            self._flats = ()
        return elements


class LazyLoadPlanner(DefaultLoadPlanner):
    """Planner of the reads that this rank wants; ``write`` takes each share that is read whole."""

    def __init__(self, wanted: Mapping[str, Wanted], write: Callable[[str, Flats], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted = wanted
        self._write = write
        self._boxes = {(key, box.offsets): box for key, tensor in wanted.items() for box in tensor.share.boxes()}
        self._left: Counter[str] = Counter()
        self._held: dict[str, Flats] = {}

    def create_local_plan(self) -> LoadPlan:
        stored = {} if self.metadata is None else self.metadata.state_dict_metadata
        return LoadPlan([item for key in self._wanted for item in self._items(key, stored.get(key))])

    def _items(self, key: str, stored: object) -> list[ReadItem]:
        if not isinstance(stored, TensorStorageMetadata):
            raise ChunkcError(f"the checkpoint has no tensor {key}")
        share = self._wanted[key].share
        items = create_read_items_for_chunk_list(key, stored, [_chunk(box) for box in share.boxes() if box.numel])
        if sum(torch.Size(item.lengths).numel() for item in items) != share.numel:
            raise ChunkcError(f"the checkpoint does not have all elements of {key}: its index is not whole")
        return items

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Count the items of every tensor; one without elements has none, and is handed on."""
        self._left = Counter(item.dest_index.fqn for item in new_plan.items)
        for key, wanted in self._wanted.items():
            if key not in self._left:
                self._write(key, wanted.share.empty(wanted.dtype))
        return new_plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        wanted = self._wanted[index.fqn]
        if index.fqn not in self._held:
            self._held[index.fqn] = wanted.share.empty(wanted.dtype)
        return wanted.share.view(self._held[index.fqn], self._boxes[index.fqn, tuple(index.offset or ())])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        key = read_item.dest_index.fqn
        self._left[key] -= 1
        if not self._left[key]:
            self._write(key, self._held.pop(key))


def save(writer: SafetensorsWriter, kept: Mapping[str, Kept], ranks: Ranks | None = None) -> None:
    """Write what every rank keeps, in order: together whole tensors. One rank's failure is raised on all."""
    ranks = ranks or Ranks()
    planner = LazySavePlanner(kept)

    def plan_own() -> SavePlan:
        planner.set_up_planner({}, is_coordinator=ranks.is_first_of_job)
        return planner.create_local_plan()

    plans, metadata = planner.create_global_plan(exchange(ranks, plan_own))
    plan = planner.finish_plan(plans[ranks.job_rank])
    by_rank = exchange(ranks, lambda: writer.write(plan, planner))
    places = {index: place for of_rank in by_rank for index, place in of_rank.items()}
    exchange(ranks, lambda: writer.finish(metadata, places) if ranks.is_first_of_job else None)


def load(reader: SafetensorsReader, wanted: Mapping[str, Wanted], write: Callable[[str, Flats], None]) -> None:
    """Read the tensors that this rank wants, in order; all of them must be stored in these shapes."""
    planner = LazyLoadPlanner(wanted, write)
    planner.set_up_planner({}, reader.read_metadata(), is_coordinator=True)
    [plan] = planner.create_global_plan([planner.create_local_plan()])
    reader.read(planner.finish_plan(plan), planner)


def load_whole(reader: SafetensorsReader, keys: Iterable[str], write: Callable[[str, torch.Tensor], None]) -> None:
    """`load` of whole tensors, as they are stored."""
    stored = reader.index()
    wanted = {key: Wanted(DTYPES[stored[key].dtype], Share.whole(stored[key].shape)) for key in keys}
    load(reader, wanted, lambda key, flats: write(key, wanted[key].share.tensor(flats)))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
