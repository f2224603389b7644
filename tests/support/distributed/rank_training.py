"""Training a named model on the ranks of a job, each on its part of the batches, and the runs that it must equal.

Step ``s`` of rank ``r`` takes batch ``s * num_ranks + r``. The reference is `train_large`, or `train_averaged` where
parts of a batch do not mean what they mean together (batch norms).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accumulating import micro_batches, train_in_parts
from machines import EMULATED
from models import CASES, Batch, Case, loss_of
from torch import nn
from training import SEMANTICS, Recipe, Trained, assert_close_elements, assert_same_bits, largest, read_state, to_host
from training import assert_same_semantics as assert_same_as_plain
from training import train as run_loop

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.hardware import Hardware
from chunkc.ir.actions import Op

QUICK = replace(SEMANTICS, num_steps=5)
GIB = 1 << 30
ROOMY = "emulated-64m-1g"
"""One device for each rank; everything is resident."""


@dataclass(frozen=True, slots=True)
class Work:
    """What ranks train; without ``hw``, on the smallest machine that `chunkc.BudgetError` names."""

    name: str
    recipe: Recipe = QUICK
    hw: str | None = ROOMY
    dtype: torch.dtype = torch.float32
    backend: str = "eager"
    wishes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank trained; ``num_opened``: chunks that its backward opens."""

    trained: Trained
    stats: dict[str, int]
    num_opened: int


def machine_of(device_nbytes: int, host_nbytes: int, num_nodes: int = 1) -> Hardware:
    per_node = torch.distributed.get_world_size() // num_nodes
    named = EMULATED.named(device_nbytes, host_nbytes * per_node)
    return replace(named, gpus_per_node=per_node, num_nodes=num_nodes)


def compiled(work: Work, hw: Hardware | str) -> nn.Module:
    options: dict[str, Any] = {"dtype": work.dtype, "backend": work.backend, "accumulate": work.accumulate}
    options |= {"shard": "node"} if work.num_nodes > 1 else {}
    model = chunkc.compile(CASES[work.name].build(), hw, **options)
    settings = compiled_of(model).settings
    settings.options = replace(settings.options, **work.wishes)
    return model


def smallest(work: Work, batch: Batch) -> tuple[int, int]:
    model = compiled(work, machine_of(1, GIB, work.num_nodes))
    _optimizer = work.recipe.ours(model.parameters(), **work.options)  # clipping takes some memory
    try:
        model(**batch)
    except chunkc.BudgetError as error:
        return error.min_device_nbytes, error.min_host_nbytes
    raise AssertionError("one byte of device memory was found to suffice")


def hw_of(work: Work, batch: Batch) -> Hardware | str:
    return work.hw if work.hw is not None else machine_of(*smallest(work, batch), work.num_nodes)


def parts_of(case: Case, recipe: Recipe, rank: int, num_ranks: int) -> list[Batch]:
    batches = case.batches()
    return [micro_batches(batches, step, num_ranks)[rank] for step in range(recipe.num_steps)]


def train(work: Work) -> Done:
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = parts_of(CASES[work.name], work.recipe, rank, num_ranks)
    model = compiled(work, hw_of(work, batches[0]))
    optimizer = work.recipe.ours(model.parameters(), **work.options)
    trained = run_loop(model, batches, optimizer, work.recipe)
    num_opened = sum(action.op is Op.OPEN for action in chunkc.plan_of(model).program("backward").actions)
    return Done(trained, chunkc.stats(model), num_opened)


def train_in_micro_batches(work: Work) -> Trained:
    """Step ``s`` adds up micro-batches whose losses are divided by their number; each rank takes its own of them."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches, num = CASES[work.name].batches(), work.accumulate
    own = [
        part
        for step in range(work.recipe.num_steps)
        for part in micro_batches(batches, step, num * num_ranks)[rank * num : (rank + 1) * num]
    ]
    model = compiled(work, hw_of(work, own[0]))
    optimizer = work.recipe.ours(model.parameters(), **work.options)
    return train_in_parts(model, own, optimizer, work.recipe, num)[0]


def train_under(work: Work, emulation: str, seed: int = 0) -> Trained:
    own_seed = seed * torch.distributed.get_world_size() + torch.distributed.get_rank()
    os.environ["CHUNKC_EMULATED"] = f"{emulation},seed={own_seed}"
    try:
        found = train_in_micro_batches(work) if work.accumulate > 1 else train(work).trained
        return replace(found, gradients={}) if work.dtype is torch.float16 else found  # of a skipped step: not finite
    finally:
        del os.environ["CHUNKC_EMULATED"]


def train_all(works: Sequence[Work]) -> list[Done]:
    return [train(work) for work in works]


def train_averaged(case: Case, recipe: Recipe, num_ranks: int) -> tuple[Trained, list[dict[str, torch.Tensor]]]:
    """Plain PyTorch in one process doing what ranks do; also the buffers of each at the end."""
    model, batches, found = case.build(), case.batches(), Trained()
    optimizer = torch.optim.AdamW(model.parameters(), **recipe.options)
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(num_ranks)]
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(recipe.num_steps):
        losses = []
        for own, part in zip(buffers, micro_batches(batches, step, num_ranks), strict=True):
            _copy(own, dict(model.named_buffers()))
            loss = loss_of(model(**part))
            (loss / num_ranks).backward()
            losses.append(loss.item())
            _copy(dict(model.named_buffers()), own)
        if step == 0:
            found.gradients = {n: to_host(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(sum(losses) / num_ranks)
        for p, q in zip(model.parameters(), before, strict=True):
            found.largest_update = max(found.largest_update, float((p.detach() - q).abs().max()) if p.numel() else 0.0)
            q.copy_(p.detach())
    read_state(found, model, optimizer)
    return found, buffers


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)


def together(runs: Sequence[Trained]) -> Trained:
    """What the ranks found, once: state and gradients equal to the bit on all of them, the mean of their losses."""
    shared = [replace(run, losses=[], buffers={}) for run in runs]
    for other in shared[1:]:
        assert_same_bits(other, shared[0])
    losses = [sum(of_step) / len(runs) for of_step in zip(*(run.losses for run in runs), strict=True)]
    return replace(shared[0], losses=losses)


def check_semantics(runs: Sequence[Trained], wanted: Trained) -> None:
    """Acceptance (b) over ranks: they agree, and together equal one process on the global batch."""
    assert_same_as_plain(together(runs), wanted)


def check_buffers(runs: Sequence[Trained], wanted: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for run, buffers in zip(runs, wanted, strict=True):
        assert run.buffers.keys() == buffers.keys()
        assert_close_elements(run.buffers, buffers, 1e-5 * largest(buffers), "buffers")
