"""Tensors that exist one at a time: planners of torch.distributed.checkpoint over names instead of values.

DCP plans from a state dict of tensors. Here these are stand-ins that have a dtype and a shape and take no memory. A
value is made when storage asks for it, and handed on when it has been read whole. So a save or a load takes the memory
of one tensor beside the model.

``save`` and ``load`` make the calls of ``torch.distributed.checkpoint.save`` and ``load`` for one process, whatever
its thread. (Those warn in every call without a process group, and filters of warnings are the whole process's.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


def stand_in(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of this dtype and shape, whose elements are all one."""
    return torch.empty((), dtype=dtype, device="cpu").expand(torch.Size(shape))


class LazySavePlanner(DefaultSavePlanner):
    """Plans from stand-ins; ``read`` gives the tensor of a key when it is to be written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The value behind a stand-in."""
        return self._read(index.fqn)


class LazyLoadPlanner(DefaultLoadPlanner):
    """Plans from stand-ins; ``write`` takes each tensor once all of it has been read."""

    def __init__(self, write: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._write = write
        self._left: Counter[str] = Counter()
        self._held: dict[str, torch.Tensor] = {}

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Count the parts of every tensor; one without elements has none, and is handed on."""
        self._left = Counter(item.dest_index.fqn for item in new_plan.items)
        for key, wanted in self.state_dict.items():
            if key not in self._left:
                self._write(key, torch.empty(wanted.shape, dtype=wanted.dtype))
        return new_plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Memory for a tensor, the same for all its parts."""
        if index.fqn not in self._held:
            wanted = self.state_dict[index.fqn]
            self._held[index.fqn] = torch.empty(wanted.shape, dtype=wanted.dtype, device="cpu")
        return self._held[index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Hand a tensor on with its last part."""
        key = read_item.dest_index.fqn
        self._left[key] -= 1
        if not self._left[key]:
            self._write(key, self._held.pop(key))


def save(writer: StorageWriter, stand_ins: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> None:
    """Write every tensor of ``stand_ins``, in order."""
    planner = LazySavePlanner(read)
    planner.set_up_planner(dict(stand_ins), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def load(
    reader: StorageReader, stand_ins: Mapping[str, torch.Tensor], write: Callable[[str, torch.Tensor], None]
) -> None:
    """Read every tensor of ``stand_ins``, in order, all of which must be stored in these shapes."""
    planner = LazyLoadPlanner(write)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(stand_ins), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    [plan] = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
