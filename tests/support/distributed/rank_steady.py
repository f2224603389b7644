"""What a steady step of several ranks does, beside what the plan says, seen from each rank."""

import gc
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from models import CASES, loss_of
from rank_training import Work, compiled, hw_of, parts_of
from steady import executor_of

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.distributed.process_group import DP_REPLICATE, DP_SHARD
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList

NUM_STEPS = 3


class CountingGroup:
    """A process group that counts the payload that comes to this rank: the parts of the others."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group
        self.received_nbytes = 0

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.received_nbytes += sum(tensor.nbytes for tensor in tensors)
        return self._group.recv(tensors, source, tag)

    def _allgather_base(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        self.received_nbytes += whole.nbytes - own.nbytes
        return self._group._allgather_base(whole, own)

    def _reduce_scatter_base(self, own: torch.Tensor, whole: torch.Tensor, options: Any) -> Any:
        self.received_nbytes += whole.nbytes - own.nbytes
        return self._group._reduce_scatter_base(own, whole, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def counted(data: Any) -> CountingGroup:
    """A data group of a model's ranks, counted from now on, also where chunks are sent directly."""
    group = data._group = CountingGroup(data._group)
    if data._direct is not None:
        data._direct._group = group
    return group


def no_longer_counted(data: Any) -> None:
    data._group = data._group._group


@dataclass(frozen=True, slots=True)
class Steady:
    """Numbers of one rank in steady steps; no exchange may be held back behind ``settled_at`` actions.

    Bytes of payloads are of trained parameters as the model has them; those of chunks count padding and all ranks.
    """

    trace: list[str]
    planned_trace: list[str]
    settled_at: list[int]
    planned_ends: list[int]
    stats: dict[str, int]
    received_nbytes: float
    planned_nbytes: dict[str, int]
    payload_nbytes: int
    chunks_nbytes: int
    taken_host_nbytes: int


def steady(work: Work) -> Steady:
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = parts_of(CASES[work.name], work.recipe, rank, num_ranks)[0]
    model = compiled(work, hw_of(work, batch))
    gc.collect()
    runtime: Any = compiled_of(model).runtime
    group = counted(runtime.ranks._data_groups[DP_SHARD])
    optimizer = chunkc.AdamW(model.parameters(), **work.recipe.options)
    trace: list[str] = []
    settled_at: list[int] = []
    for step in range(2 + NUM_STEPS):
        if step == 2:
            executor_of(model).trace = trace
            runtime.device.enqueue_exchanges = lambda: settled_at.append(len(trace))
            group.received_nbytes = 0
        for _ in range(work.accumulate):
            loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    executor, stats = executor_of(model), chunkc.stats(model)
    del runtime.device.enqueue_exchanges
    no_longer_counted(runtime.ranks._data_groups[DP_SHARD])
    plan, device = executor.plan, runtime.device
    planned = {"gather": 0, "reduce": 0}
    for _, _, action in plan.labelled():
        if action.op in (Op.GATHER, Op.REDUCE) and action.stream is Stream.COMM:
            chunks = [plan.layout.chunks[c] for c in plan.layout.groups[action.index].chunks]
            planned[action.op.value] += sum(c.nbytes for c in chunks) * (num_ranks - 1) // num_ranks
    trained = {c.index for c in plan.layout.chunks if c.list is ChunkList.TRAINED}
    programs = [len(list(group)) for _, group in groupby(plan.labelled(), lambda item: item[0])] * NUM_STEPS
    return Steady(
        trace=list(executor.trace or ()),
        planned_trace=[str(action) for _, _, action in plan.labelled()] * NUM_STEPS,
        settled_at=settled_at,
        planned_ends=list(accumulate(programs)),
        stats=stats,
        received_nbytes=group.received_nbytes / NUM_STEPS,
        planned_nbytes=planned,
        payload_nbytes=sum(plan.layout.params[p.param].nbytes for p in plan.layout.placements if p.chunk in trained),
        chunks_nbytes=sum(plan.layout.chunks[c].nbytes for c in trained),
        taken_host_nbytes=device.host_budget_nbytes - device.free_host_nbytes(),
    )


def received_on_nodes(work: Work) -> tuple[int, int, dict[str, int]]:
    """Bytes of a step from the ranks of its node and from other nodes, counted at the groups; its statistics."""
    batch = parts_of(CASES[work.name], work.recipe, torch.distributed.get_rank(), torch.distributed.get_world_size())[0]
    model = compiled(work, hw_of(work, batch))
    ranks: Any = compiled_of(model).runtime.ranks
    groups = [counted(ranks._data_groups[dim]) for dim in (DP_SHARD, DP_REPLICATE)]
    optimizer = chunkc.AdamW(model.parameters(), **work.recipe.options)
    loss_of(model(**batch)).backward()
    optimizer.step()
    stats = chunkc.stats(model)
    for data in ranks._data_groups.values():
        no_longer_counted(data)
    return groups[0].received_nbytes, groups[1].received_nbytes, stats


def two_models(work: Work) -> dict[str, Any]:
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = parts_of(CASES[work.name], work.recipe, rank, num_ranks)
    hw = chunkc.Hardware.parse("emulated-16m-64m")
    models = [compiled(work, hw) for _ in range(2)]
    optimizers = [chunkc.AdamW(model.parameters(), **work.recipe.options) for model in models]
    device: Any = compiled_of(models[0]).runtime.device
    losses: list[list[float]] = [[], []]
    taken = []
    for step, batch in enumerate(batches):
        if step == 3:
            taken.append(device.host_budget_nbytes - device.free_host_nbytes())
            del models[0], optimizers[0]
            gc.collect()
            taken.append(device.host_budget_nbytes - device.free_host_nbytes())
        for model, optimizer, found in zip(models, optimizers, losses[-len(models) :], strict=True):
            loss = loss_of(model(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    params = {n: v.clone() for n, v in models[-1].state_dict().items()}
    return {"losses": losses, "taken": taken, "host": chunkc.stats(models[-1])["host_nbytes"], "params": params}
