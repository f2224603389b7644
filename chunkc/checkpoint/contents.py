"""Contents of a checkpoint of a training run: tensors and objects, by name.

Tensors, by the user's names (the first, for tied parameters):

    model.<name>                            a parameter in the dtype that it was handed over in, or a buffer
    optimizer.state.<name>.exp_avg          as the optimizer names its states, of parameters that were ever stepped
    optimizer.state.<name>.exp_avg_sq
    optimizer.state.<name>.master_param     param32, where the parameter itself was handed over in 16 bits
    object.<n>                              tensors of the objects below

Objects, as JSON (`chunkc.checkpoint.encode`): step counts and groups of the optimizer, the scheduler's state, modules'
``get_extra_state``, generators by rank, and what the user adds. Nothing depends on chunks, budgets, the compute dtype
or the number of ranks.

Each rank keeps what stands in its own chunks (of the first node, where every node has all model data), but for copies
of what another rank along ``tp`` has. Parameters without chunks are those of the first rank that trains them, and all
else is rank 0's, which also keeps the generators of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from chunkc.checkpoint.encode import Encoder
from chunkc.checkpoint.generators import place_of, read_generators
from chunkc.checkpoint.objects import PREFIX
from chunkc.checkpoint.planners import Flats, Kept
from chunkc.checkpoint.shares import Share, share_of
from chunkc.distributed.agreement import Kind
from chunkc.distributed.coordination import exchange
from chunkc.distributed.process_group import Ranks
from chunkc.distributed.stages import StagePlace
from chunkc.errors import ChunkcError
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.model.program_state import ModelPhase
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.runtime.optim.state_dict import MASTER_PART, managed
from chunkc.runtime.storage.snapshot import SnapshotReader
from chunkc.weights.tensors import ModelTensors, memory_of


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """A run at the moment of the call, ready to be written.

    Attributes:
        step: most steps that a parameter has taken.
        kept: what this rank writes, in the order in which it must be read.
        nbytes: of all tensors of all ranks.
        objects: everything else, for ``json.dumps``; rank 0's are written.
        reader: of the snapshot that ``kept`` reads, to be ended; None where ``kept`` reads no chunks.
        is_lasting: whether training may go on before all this is read.
        ranks: those who write it together, on whatever thread.
        stage: which of a pipeline; None where it is none.
    """

    step: int
    kept: Mapping[str, Kept]
    nbytes: int
    objects: Any
    reader: SnapshotReader | None
    is_lasting: bool
    ranks: Ranks
    stage: StagePlace | None = None


def runtime_of(model: nn.Module) -> ModelRuntime:
    """Runtime of a compiled model whose state can be saved or replaced now: between whole steps.

    Raises:
        ChunkcError: for a model that is not compiled or a part of one, in a forked child, when gradients wait, and when
            an update has failed.
    """
    runtime: ModelRuntime = memory_of(model).runtime
    runtime.device.check_usable()
    runtime.settle()
    given = set(model.parameters())
    outside = [info.name for info, param in zip(runtime.infos, runtime.params, strict=True) if param not in given]
    if outside:
        raise ChunkcError(
            f"{outside[0]} ({len(outside)} in all) is a parameter of the compiled model, but not of the module given. "
            "A checkpoint holds whole models: give the one that chunkc.compile returned"
        )
    if runtime.state.phase is ModelPhase.BROKEN:
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
    """``optimizer``; ChunkcError when it does not step the model."""
    if not isinstance(optimizer, ChunkOptimizer):
        raise ChunkcError(f"a checkpoint takes chunkc's optimizers, not {type(optimizer).__module__}'s optimizer")
    if any(managed(param)[0] is not runtime.steps for group in optimizer.param_groups for param in group["params"]):
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
    """The run as it is now, with an open snapshot of the chunks, which its reader must end.

    Args:
        agreed: lines on which all ranks must agree.

    Raises:
        ChunkcError: for what a checkpoint cannot hold; nothing is open then.
    """
    runtime.parameters.staging.check_complete()
    runtime.parameters.drain()
    tensors, encoder, steps = ModelTensors(model), Encoder(PREFIX), optimizer.step_counts
    scale = runtime.clipping.loss_scale
    state = model.state_dict(keep_vars=True)
    objects = {
        "model": {
            "params": [[info.name, *info.aliases] for info in runtime.infos],
            "buffers": [list(entry.names) for entry in tensors.entries if entry.param is None],
            "others": {n: encoder.encode(state[n], f"{n} of the state dict") for n in tensors.others},
        },
        "optimizer": {
            "class": type(optimizer).__name__,
            "groups": encoder.encode(_named_groups(optimizer, runtime), "optimizer.param_groups"),
            "steps": {runtime.parameters.name_of(index): count for index, count in steps.items()},
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
    if runtime.parameters.is_in_first_replica:
        reader = runtime.parameters.snapshot(min(max_copied_nbytes, runtime.device.free_host_nbytes()))
    params = _params(runtime, optimizer.declare(optimizer.param_groups).states.names, steps, reader)
    return Contents(
        step=max(steps.values(), default=0),
        kept=params | whole if runtime.ranks.is_first_of_job else params,
        nbytes=sum(kept.nbytes for kept in (params | whole).values()),
        objects=objects,
        reader=reader,
        is_lasting=not any(runtime.parameters.staging.holds(index) for index in range(len(runtime.infos))),
        ranks=runtime.ranks.concurrent(),
        stage=runtime.ranks.stage,
    )


def _lines(agreed: Sequence[str], objects: Mapping[str, Any]) -> list[str]:
    """Lines that must be the same on all ranks; of modules' extra states, the names only."""
    parts = [(name, value) for part in ("model", "optimizer") for name, value in objects[part].items()]
    lines = [f"{name}: {sorted(value) if name == 'others' else value}" for name, value in parts]
    return [*agreed, f"scheduler: {'none' if objects['scheduler'] is None else 'one'}", *lines]


def _generators(ranks: Ranks) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    place = place_of(ranks)
    encoder = Encoder(f"{PREFIX}.rank{place}")
    encoded = encoder.encode(read_generators(), "generators")
    arrays = {key: value.numpy() for key, value in encoder.tensors.items()}  # torch cannot pickle its unsigned integers
    by_rank = exchange(ranks, lambda: (place, encoded, arrays))
    tensors = {key: torch.from_numpy(array) for _, _, states in by_rank for key, array in states.items()}
    return {place: states for place, states, _ in by_rank}, tensors


def _params(
    runtime: ModelRuntime, states: Sequence[str], steps: Mapping[int, int], reader: SnapshotReader | None
) -> dict[str, Kept]:
    """This rank's shares of all tensors of parameters, by key, in the order of chunks."""
    params: dict[str, Kept] = {}
    for index in _in_chunk_order(runtime):
        info, dtype = runtime.infos[index], runtime.parameters.staging.dtypes[index]
        share = share_of(runtime.parameters, index, runtime.parameters.saved_ranges(index))
        own = states if index in steps else ()
        for key, stored, position in _stored(info.name, dtype, runtime.parameters.is_trained(index), own):
            state = own[position - 1] if position else ""
            read: Callable[[], Flats] = partial(_read_staged, runtime, index, state, stored, share)
            if reader is not None and info.numel and not runtime.parameters.staging.holds(index):
                read = partial(_read_chunks, reader, index, position, stored)
            params[key] = Kept(stored, share, read)
    return params


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
    indexes = list(range(len(runtime.infos)))
    if runtime.layout is None:
        return indexes
    places = runtime.layout.placements
    return sorted(indexes, key=lambda index: (places[index].chunk, places[index].offset))


def _read_chunks(reader: SnapshotReader, index: int, position: int, dtype: torch.dtype) -> Flats:
    return [flat.to(dtype) for flat in reader.read(index, position)]


def _read_staged(runtime: ModelRuntime, index: int, name: str, dtype: torch.dtype, share: Share) -> Flats:
    """A parameter without chunks, or its state ``name``: the first rank that trains it has all of it."""
    if not runtime.infos[index].numel:
        return share.empty(dtype)
    value, state = runtime.parameters.staging.kept(index)
    if name:
        held = None if state is None else state.lists.get(name)
        value = torch.zeros(value.shape) if held is None else held
    elif state is not None and state.param32 is not None and dtype is torch.float32:
        value = state.param32
    return share.flats(value.detach().to(dtype))


def _named_groups(optimizer: ChunkOptimizer, runtime: ModelRuntime) -> list[dict[str, Any]]:
    name_of = runtime.parameters.name_of
    return [{**g, "params": [name_of(managed(param)[1]) for param in g["params"]]} for g in optimizer.param_groups]
