"""What a checkpoint holds of a training run, and how it is put back.

Tensors, by the user's names (the first, for tied parameters):

    model.<name>                            a parameter in the dtype that it was handed over in, or a buffer
    optimizer.state.<name>.exp_avg          moments, of parameters that were ever stepped
    optimizer.state.<name>.exp_avg_sq
    optimizer.state.<name>.master_param     param32, where the parameter itself was handed over in 16 bits
    object.<n>                              tensors of the objects below

Objects, as JSON (`chunkc.checkpoint.encode`): step counts and groups of the optimizer, the scheduler's state, what
modules keep by ``get_extra_state``, generators of random numbers by rank, and what the user adds. Nothing depends on
chunks, budgets or the compute dtype, so any of them may be another when the checkpoint is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from chunkc.checkpoint.encode import Encoder, decode
from chunkc.checkpoint.generators import read_generators
from chunkc.checkpoint.planners import stand_in
from chunkc.errors import ChunkcError
from chunkc.runtime.model import ModelRuntime
from chunkc.runtime.optimizer import Adam, AdamW
from chunkc.runtime.optimizer_state import managed
from chunkc.runtime.snapshot import SnapshotReader
from chunkc.weights.tensors import ModelTensors, memory_of

OBJECTS_NAME: Final = "objects.json"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MASTER: Final = "master_param"
_PREFIX: Final = "object"
Optimizer = Adam | AdamW


class Stateful(Protocol):
    """A scheduler, or whatever else has a state of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """A run at the moment of the call, ready to be written.

    Attributes:
        step: most steps that a parameter has taken.
        stand_ins: dtype and shape of every tensor, in the order in which they must be read.
        read: gives one of them.
        objects: everything else, for ``json.dumps``.
        reader: of the snapshot that ``read`` reads, to be ended; None where parameters have no chunks yet.
    """

    step: int
    stand_ins: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    objects: Any
    reader: SnapshotReader | None

    @property
    def is_lasting(self) -> bool:
        """Whether all this stays the moment's even when training goes on before it is read."""
        return self.reader is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.stand_ins.values())


def runtime_of(model: nn.Module) -> ModelRuntime:
    """What runs a compiled model whose state can be saved or replaced now: between whole steps.

    Raises:
        ChunkcError: when it is not compiled or a part of what is, in a forked child, when gradients wait, or when an
            update has failed.
    """
    runtime = memory_of(model)
    if not isinstance(runtime, ModelRuntime):
        raise TypeError(f"a compiled model has a {type(runtime).__name__}")
    runtime.device.check_usable()
    given = set(model.parameters())
    outside = [info.name for info, param in zip(runtime.infos, runtime.params, strict=True) if param not in given]
    if outside:
        raise ChunkcError(
            f"{outside[0]} ({len(outside)} in all) is a parameter of the compiled model, but not of the module given. "
            "A checkpoint holds whole models: give the one that chunkc.compile returned"
        )
    if runtime.is_broken:
        raise ChunkcError(
            "an update failed halfway through the last step(), so parameters are of two steps and no checkpoint: load "
            "an earlier one into a newly compiled model"
        )
    if runtime.gradients.pending and runtime.gradients.waiting():
        raise ChunkcError(
            "gradients wait to be stepped, and a checkpoint holds whole steps: call it after optimizer.step(), or "
            "discard them with zero_grad()"
        )
    return runtime


def check_optimizer(optimizer: object, runtime: ModelRuntime) -> Optimizer:
    """``optimizer``, which must step the model.

    Raises:
        ChunkcError: when it does not.
    """
    if not isinstance(optimizer, (Adam, AdamW)):
        raise ChunkcError(f"a checkpoint takes chunkc's AdamW or Adam, not {type(optimizer).__module__}'s optimizer")
    if any(managed(param)[0] is not runtime for group in optimizer.param_groups for param in group["params"]):
        raise ChunkcError("the optimizer steps another model than the one given; pass the two that belong together")
    return optimizer


def gather(
    model: nn.Module,
    runtime: ModelRuntime,
    optimizer: Optimizer,
    scheduler: Stateful | None,
    extra: Any,
    max_copied_nbytes: int,
) -> Contents:
    """The run as it is now. A snapshot of the chunks is open afterwards, which its reader must end.

    Raises:
        ChunkcError: for what a checkpoint cannot hold; nothing is open then.
    """
    runtime.staging.check_complete()
    runtime.drain()
    tensors, encoder, steps = ModelTensors(model), Encoder(_PREFIX), optimizer.step_counts
    scale = runtime.loss_scale
    held = model.state_dict(keep_vars=True)
    objects = {
        "model": {
            "params": [[info.name, *info.aliases] for info in runtime.infos],
            "buffers": [list(entry.names) for entry in tensors.entries if entry.param is None],
            "others": {n: encoder.encode(held[n], f"{n} of the state dict") for n in tensors.others},
        },
        "optimizer": {
            "class": type(optimizer).__name__,
            "groups": encoder.encode(_named_groups(optimizer, runtime), "optimizer.param_groups"),
            "steps": {runtime.name_of(index): count for index, count in steps.items()},
        },
        "scheduler": None if scheduler is None else encoder.encode(scheduler.state_dict(), "scheduler.state_dict()"),
        "loss_scale": scale.state_dict() if scale is not None and scale.is_dynamic else None,
        "generators": {"0": encoder.encode(read_generators(), "generators")},
        "extra": encoder.encode(extra, "extra"),
    }
    held_tensors = {f"model.{e.name}": tensors.read(e) for e in tensors.entries if e.param is None} | encoder.tensors
    reader = runtime.snapshot(min(max_copied_nbytes, runtime.device.free_host_nbytes()))
    sources = _param_sources(runtime, steps, reader)
    stand_ins = {key: shape for key, (shape, _) in sources.items()}
    stand_ins |= {key: stand_in(t.dtype, t.shape) for key, t in held_tensors.items()}

    def read(key: str) -> torch.Tensor:
        return sources[key][1]() if key in sources else held_tensors[key]

    return Contents(max(steps.values(), default=0), stand_ins, read, objects, reader)


Source = tuple[torch.Tensor, Callable[[], torch.Tensor]]


def _param_sources(runtime: ModelRuntime, steps: Mapping[int, int], reader: SnapshotReader | None) -> dict[str, Source]:
    """Stand-in and reading of all tensors of parameters, in the order of chunks."""
    found: dict[str, Source] = {}
    for index in _in_chunk_order(runtime):
        info, dtype = runtime.infos[index], runtime.staging.dtypes[index]
        for key, stored, position in _stored(info.name, dtype, runtime.is_trained(index), index in steps):
            read = partial(_read_staged, runtime, index, position, stored)
            if reader is not None:
                read = partial(_read_chunks, reader, index, position, stored)
            found[key] = stand_in(stored, info.shape), read
    return found


def _stored(
    name: str, dtype: torch.dtype, is_trained: bool, is_stepped: bool
) -> Iterator[tuple[str, torch.dtype, int]]:
    """Keys of one parameter, with the dtype of each and its place in the triple."""
    yield f"model.{name}", dtype, 0
    if is_stepped:
        for position, moment in enumerate(MOMENTS, 1):
            yield f"optimizer.state.{name}.{moment}", torch.float32, position
    if is_trained and dtype is not torch.float32:
        yield f"optimizer.state.{name}.{MASTER}", torch.float32, 0


def _in_chunk_order(runtime: ModelRuntime) -> list[int]:
    layout = runtime.layout
    indexes = list(range(len(runtime.infos)))
    if layout is None:
        return indexes
    places = layout.placements
    return sorted(indexes, key=lambda index: (places[index].chunk, places[index].offset))


def _read_chunks(reader: SnapshotReader, index: int, position: int, dtype: torch.dtype) -> torch.Tensor:
    return reader.read(index, position).to(dtype)


def _read_staged(runtime: ModelRuntime, index: int, position: int, dtype: torch.dtype) -> torch.Tensor:
    if position == 0 and dtype is runtime.staging.dtypes[index]:
        return runtime.read_exact(index)
    exp_avg, exp_avg_sq, param32 = runtime.read_state(index)
    return (param32, exp_avg, exp_avg_sq)[position].to(dtype)


def _named_groups(optimizer: Optimizer, runtime: ModelRuntime) -> list[dict[str, Any]]:
    """The parameter groups, with names in place of parameters."""
    named = []
    for group in optimizer.param_groups:
        names = [runtime.name_of(managed(param)[1]) for param in group["params"]]
        named.append({**group, "params": names})
    return named


def read_objects(path: Path) -> dict[str, Any]:
    """The objects of a checkpoint, still encoded."""
    found: dict[str, Any] = json.loads((path / OBJECTS_NAME).read_text(encoding="utf-8"))
    return found


def is_object(key: str) -> bool:
    """Whether a key is that of a tensor of the objects."""
    return key.startswith(f"{_PREFIX}.")


def decode_all(objects: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The objects as they were."""
    found: dict[str, Any] = decode(objects, tensors)
    return found
