"""Contents of a checkpoint of a training run: tensors and objects, by name.

Tensors, by the user's names (the first, for tied parameters):

    model.<name>                            a parameter in the dtype that it was handed over in, or a buffer
    optimizer.state.<name>.exp_avg          as the optimizer names its states, of parameters that were ever stepped
    optimizer.state.<name>.exp_avg_sq
    optimizer.state.<name>.master_param     param32, where the parameter itself was handed over in 16 bits
    object.<n>                              tensors of the objects below

Objects, as JSON (`chunkc.checkpoint.encode`): step counts and groups of the optimizer, the scheduler's state, what
modules keep by ``get_extra_state``, generators of random numbers by rank, and what the user adds. Nothing depends on
chunks, budgets, the compute dtype or the number of ranks, so any of them may be another when the checkpoint is loaded.

Where several ranks train the model, each keeps what stands in its own chunks; where every node has all of the model
data, those of the first node do. Parameters that have no chunks yet, and all else, are rank 0's. Generators are each
rank's own, and rank 0 keeps their states for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from chunkc.checkpoint.encode import Encoder
from chunkc.checkpoint.generators import read_generators
from chunkc.checkpoint.objects import PREFIX
from chunkc.checkpoint.planners import Flats, Kept
from chunkc.checkpoint.shares import Share
from chunkc.distributed.coordination import exchange
from chunkc.distributed.process_group import Kind, Ranks
from chunkc.errors import ChunkcError
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.runtime.optim.state_dict import MASTER_PART, managed
from chunkc.runtime.storage.snapshot import SnapshotReader
from chunkc.weights.tensors import ModelTensors, memory_of


class Stateful(Protocol):
    """A scheduler, or whatever else has a state of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """A run at the moment of the call, ready to be written.

    Attributes:
        step: most steps that a parameter has taken.
        kept: what this rank writes, in the order in which it must be read.
        nbytes: of all tensors, those of the other ranks too.
        objects: everything else, for ``json.dumps``; rank 0's are written.
        reader: of the snapshot that ``kept`` reads, to be ended; None where no parameter has chunks yet, or this rank
            keeps none of them.
        is_lasting: whether all this stays the moment's even when training goes on before it is read.
        ranks: those who write it together, on whatever thread.
    """

    step: int
    kept: Mapping[str, Kept]
    nbytes: int
    objects: Any
    reader: SnapshotReader | None
    is_lasting: bool
    ranks: Ranks


def runtime_of(model: nn.Module) -> ModelRuntime:
    """Runtime of a compiled model whose state can be saved or replaced now: between whole steps.

    Raises:
        ChunkcError: when it is not compiled or a part of what is, in a forked child, when gradients wait, or when an
            update has failed.
    """
    runtime = memory_of(model)
    if not isinstance(runtime, ModelRuntime):
        raise TypeError(f"a compiled model has a {type(runtime).__name__}")
    runtime.device.check_usable()
    runtime.settle()
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


def check_optimizer(optimizer: object, runtime: ModelRuntime) -> ChunkOptimizer:
    """``optimizer``, which must step the model.

    Raises:
        ChunkcError: when it does not.
    """
    if not isinstance(optimizer, ChunkOptimizer):
        raise ChunkcError(f"a checkpoint takes chunkc's optimizers, not {type(optimizer).__module__}'s optimizer")
    if any(managed(param)[0] is not runtime for group in optimizer.param_groups for param in group["params"]):
        raise ChunkcError("the optimizer steps another model than the one given; pass the two that belong together")
    return optimizer


def gather(
    model: nn.Module,
    runtime: ModelRuntime,
    optimizer: ChunkOptimizer,
    scheduler: Stateful | None,
    extra: Any,
    max_copied_nbytes: int,
    agreed: Sequence[str] = (),
) -> Contents:
    """The run as it is now. A snapshot of the chunks is open afterwards, which its reader must end.

    Args:
        agreed: what all ranks must have been told alike, line by line.

    Raises:
        ChunkcError: for what a checkpoint cannot hold; nothing is open then.
    """
    runtime.staging.check_complete()
    runtime.drain()
    tensors, encoder, steps = ModelTensors(model), Encoder(PREFIX), optimizer.step_counts
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
        "extra": encoder.encode(extra, "extra"),
    }
    runtime.ranks.agree(Kind.SAVE, lambda: _lines(agreed, objects))
    objects["generators"], states = _generators(runtime.ranks)
    values = {f"model.{e.name}": tensors.read(e) for e in tensors.entries if e.param is None}
    whole = {key: Kept.whole(value) for key, value in (values | encoder.tensors | states).items()}
    reader = None
    if runtime.is_in_first_replica:
        reader = runtime.snapshot(min(max_copied_nbytes, runtime.device.free_host_nbytes()))
    params = _params(runtime, optimizer.declare(optimizer.param_groups).states.names, steps, reader)
    return Contents(
        step=max(steps.values(), default=0),
        kept=params | whole if runtime.ranks.is_first else params,
        nbytes=sum(found.nbytes for found in (params | whole).values()),
        objects=objects,
        reader=reader,
        is_lasting=not any(runtime.staging.holds(index) for index in range(len(runtime.infos))),
        ranks=runtime.ranks.concurrent(),
    )


def _lines(agreed: Sequence[str], objects: Mapping[str, Any]) -> list[str]:
    """Lines that must be the same on all ranks.

    Extra states of modules stand there by name only: their values are each rank's own, as buffers are.
    """
    parts = [(name, value) for part in ("model", "optimizer") for name, value in objects[part].items()]
    found = [f"{name}: {sorted(value) if name == 'others' else value}" for name, value in parts]
    return [*agreed, f"scheduler: {'none' if objects['scheduler'] is None else 'one'}", *found]


def _generators(ranks: Ranks) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The states of all ranks by rank, encoded, and their tensors."""
    encoder = Encoder(f"{PREFIX}.rank{ranks.rank}")
    encoded = encoder.encode(read_generators(), "generators")
    arrays = {key: value.numpy() for key, value in encoder.tensors.items()}  # torch cannot pickle its unsigned integers
    found = exchange(ranks, lambda: (encoded, arrays))
    tensors = {key: torch.from_numpy(array) for _, states in found for key, array in states.items()}
    return {str(rank): states for rank, (states, _) in enumerate(found)}, tensors


def _params(
    runtime: ModelRuntime, states: Sequence[str], steps: Mapping[int, int], reader: SnapshotReader | None
) -> dict[str, Kept]:
    """This rank's shares of all tensors of parameters, by key, in the order of chunks."""
    found: dict[str, Kept] = {}
    for index in _in_chunk_order(runtime):
        info, dtype = runtime.infos[index], runtime.staging.dtypes[index]
        ranges = runtime.own_ranges(index) if runtime.is_in_first_replica else ()
        share = Share(info.shape, info.stride, ranges)
        own = states if index in steps else ()
        for key, stored, position in _stored(info.name, dtype, runtime.is_trained(index), own):
            state = own[position - 1] if position else ""
            read: Callable[[], Flats] = partial(_read_staged, runtime, index, state, stored, share)
            if reader is not None and info.numel and not runtime.staging.holds(index):
                read = partial(_read_chunks, reader, index, position, stored)
            found[key] = Kept(stored, share, read)
    return found


def _stored(
    name: str, dtype: torch.dtype, is_trained: bool, states: Sequence[str]
) -> Iterator[tuple[str, torch.dtype, int]]:
    """Keys of one parameter, with the dtype of each and its place among the lists of a chunk."""
    yield f"model.{name}", dtype, 0
    for position, state in enumerate(states, 1):
        yield f"optimizer.state.{name}.{state}", torch.float32, position
    if is_trained and dtype is not torch.float32:
        yield f"optimizer.state.{name}.{MASTER_PART}", torch.float32, 0


def _in_chunk_order(runtime: ModelRuntime) -> list[int]:
    layout = runtime.layout
    indexes = list(range(len(runtime.infos)))
    if layout is None:
        return indexes
    places = layout.placements
    return sorted(indexes, key=lambda index: (places[index].chunk, places[index].offset))


def _read_chunks(reader: SnapshotReader, index: int, position: int, dtype: torch.dtype) -> Flats:
    return [flat.to(dtype) for flat in reader.read(index, position)]


def _read_staged(runtime: ModelRuntime, index: int, name: str, dtype: torch.dtype, share: Share) -> Flats:
    """A parameter that has no chunks, or its state called ``name``: rank 0 has all of it."""
    if not runtime.infos[index].numel:
        return share.empty(dtype)
    value, state = runtime.staging.kept(index)
    if name:
        held = None if state is None else state.lists.get(name)
        value = torch.zeros(value.shape) if held is None else held
    elif state is not None and state.param32 is not None and dtype is torch.float32:
        value = state.param32
    return share.flats(value.detach().to(dtype))


def _named_groups(optimizer: ChunkOptimizer, runtime: ModelRuntime) -> list[dict[str, Any]]:
    """The parameter groups, with names in place of parameters."""
    named = []
    for group in optimizer.param_groups:
        names = [runtime.name_of(managed(param)[1]) for param in group["params"]]
        named.append({**group, "params": names})
    return named
