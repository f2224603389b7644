"""Pipelines of ``torch.distributed.pipelining`` whose stages chunkc compiles, and the run that they must equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from staged_families import family_parts
from staged_gpt import LENGTH, VOCABULARY, WIDTH, batch_of, divide, loss_of, parts_of
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import chunkc
from chunkc.distributed.stages import StageLine

NUM_MICRO_BATCHES, MICRO_BATCH = 4, 2
OPTIONS = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
"""With an eps near gradients, so that clipping changes updates."""
MAX_NORM = 0.2
"""A third of the norm of both stages, and about that of the first alone."""
WAIT = timedelta(seconds=300)
NODE: dict[str, Any] = {"shard": "node"}
SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What ranks train: ``mesh`` has sizes of dimensions, the first of which is ``pp``.

    ``family``: of `staged_families`, whose loss is taken in the stage unless it is ``gpt``.
    """

    schedule: str = "1f1b"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"pp": 2})
    hw: str = "emulated-16m-64m"
    num_steps: int = 3
    clips: str = "together"
    loss_in_stage: bool = False
    family: str = "gpt"
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        return self.mesh["pp"] * (2 if self.schedule == "interleaved" else 1)

    @property
    def num_replicas(self) -> int:
        return self.mesh.get("dp_shard", 1) * self.mesh.get("dp_replicate", 1)

    @property
    def parts(self) -> Sequence[nn.Module]:
        return family_parts(self.family, self.num_parts)

    def in_flight(self, part: int) -> int:
        return NUM_MICRO_BATCHES if self.schedule != "1f1b" else min(NUM_MICRO_BATCHES, self.num_parts - part)


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses where there are any, values by ``<part>.<name>``, and `chunkc.stats` of the parts of this rank."""

    losses: list[float]
    params: dict[str, torch.Tensor]
    stats: list[dict[str, int]]


def stages_of(work: Pipeline, parts: Mapping[int, nn.Module], group: Any) -> list[pipelining.PipelineStage]:
    hidden = torch.empty(MICRO_BATCH, LENGTH, WIDTH, dtype=work.dtype, requires_grad=True)
    logits = torch.empty(MICRO_BATCH, LENGTH, VOCABULARY, dtype=work.dtype)
    last = torch.empty(1) if work.loss_in_stage else logits
    return [
        pipelining.PipelineStage(
            *(part, number, work.num_parts, torch.device("cpu")),
            input_args=(batch_of(0, MICRO_BATCH)[0] if number == 0 else hidden,),
            output_args=(last.requires_grad_() if number == work.num_parts - 1 else hidden,),
            group=group,
        )
        for number, part in parts.items()
    ]


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def _scaled_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = output.sum() if output.dim() == 1 else loss_of(output.float(), targets)
    return loss / NUM_MICRO_BATCHES


def train(work: Pipeline) -> Trained:
    """Train the parts of this rank."""
    mesh = init_device_mesh("cpu", tuple(work.mesh.values()), mesh_dim_names=tuple(work.mesh))
    rank, size, built = mesh["pp"].get_local_rank(), work.mesh["pp"], work.parts
    if "tp" in work.mesh:
        for part in built:
            divide(part, mesh["tp"])
    parts, optimizers = {}, []
    for number in range(rank, work.num_parts, size):
        options = {"dtype": work.dtype, "backend": "eager", "chunk_size": 1024, **work.options}
        in_flight = work.in_flight(number)
        part = chunkc.compile(
            built[number], work.hw, mesh=mesh, accumulate=NUM_MICRO_BATCHES, in_flight=in_flight, **options
        )
        own_norm = {"max_grad_norm": MAX_NORM} if work.clips == "by the optimizer" else {}
        parts[number] = part
        optimizers.append(chunkc.AdamW(part.parameters(), **OPTIONS, **own_norm))
    lines = mesh.mesh.movedim(0, -1).reshape(-1, size).tolist()
    group, _ = torch.distributed.new_subgroups_by_enumeration(lines, timeout=WAIT)  # the next stage is captured first
    stages = stages_of(work, parts, group)
    kind = SCHEDULES[work.schedule]
    whole: Any = stages if work.schedule == "interleaved" else stages[0]
    schedule = kind(whole, NUM_MICRO_BATCHES, loss_fn=_scaled_loss, scale_grads=False)
    replica, losses = torch.distributed.get_rank() // work.mesh.get("tp", 1) % work.num_replicas, []
    for step in range(work.num_steps):
        tokens, targets = batch_of(step * work.num_replicas + replica, NUM_MICRO_BATCHES * MICRO_BATCH)
        of_step: list[torch.Tensor] = []
        inputs = (tokens,) if 0 in parts else ()
        is_last = work.num_parts - 1 in parts
        behind: dict[str, Any] = {"target": targets, "losses": of_step} if is_last else {}
        more = {"targets": targets} if is_last and work.loss_in_stage else {}
        schedule.step(*inputs, **behind, **more)
        if work.clips == "together":
            chunkc.clip_grad_norm_(list(parts.values()), MAX_NORM)
        elif work.clips == "one by one":
            for part in parts.values():
                chunkc.clip_grad_norm_(part, MAX_NORM)
        elif work.clips == "alone":
            with patch.object(StageLine, "collect", lambda line, norm: norm):
                chunkc.clip_grad_norm_(list(parts.values()), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses += [float(torch.stack(of_step).detach().sum())] if of_step else []
    params = {f"{i}.{n}": _whole(v) for i, part in parts.items() for n, v in part.state_dict().items()}
    return Trained(losses, params, [chunkc.stats(part) for part in parts.values()])


def train_plainly(work: Pipeline) -> Trained:
    """Plain PyTorch in one process, with fp32 masters: the whole model on the micro-batches of all replicas."""
    model = nn.ModuleList(work.parts)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    model.to(work.dtype)
    optimizer, losses = torch.optim.AdamW(masters.values(), **OPTIONS), []
    for step in range(work.num_steps):
        total = 0.0
        for replica in range(work.num_replicas):
            batch = batch_of(step * work.num_replicas + replica, NUM_MICRO_BATCHES * MICRO_BATCH)
            for tokens, targets in zip(*(part.split(MICRO_BATCH) for part in batch), strict=True):
                loss = _loss_of_whole(work, model, tokens, targets) / work.num_replicas / NUM_MICRO_BATCHES
                loss.backward()
                total += loss.item()
        for name, param in model.named_parameters():
            masters[name].grad = None if param.grad is None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.values(), MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        model.zero_grad()
        losses.append(total)
    first_names = {param: name for name, param in model.named_parameters()}
    tied = model.named_parameters(remove_duplicate=False)
    return Trained(losses, {name: masters[first_names[param]].detach() for name, param in tied}, [])


def _loss_of_whole(work: Pipeline, parts: nn.ModuleList, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = tokens
    for part in parts[:-1]:
        hidden = part(hidden)
    if work.family == "gpt":
        return loss_of(parts[-1](hidden).float(), targets)
    loss: torch.Tensor = parts[-1](hidden, targets)
    return loss.sum()


def refusals() -> dict[str, str]:
    """What ``chunkc.compile`` says to stages that it cannot train."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), dict[str, str]()
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    calls = {"fp16": {"mesh": mesh, "dtype": torch.float16}, "data": {"mesh": other}, "node": {"mesh": mesh} | NODE}
    for name, options in calls.items():
        try:
            chunkc.compile(parts_of(2)[0], "emulated-16m-64m", **options)
        except chunkc.ChunkcError as error:
            found[name] = str(error)
    return found
