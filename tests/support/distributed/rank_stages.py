"""Stages of a pipeline without its schedule: each rank trains a layer, so that only norms go between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import chunkc
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.scenarios.models import Stage, Transformer
from chunkc.scenarios.models.stages import StageModule

LR = 0.5


@dataclass(frozen=True, slots=True)
class Refused:
    """What a rank saw of a step of which the stages clipped otherwise.

    Attributes:
        kept: whether its parameters and gradients are as before.
        norm: of the gradients of all stages by the clip that followed, on which all agreed.
        clipped: the gradient of that clip.
    """

    kind: str
    text: str
    after_s: float
    kept: bool
    norm: torch.Tensor
    clipped: torch.Tensor


def layer(place: int) -> nn.Module:
    torch.manual_seed(place)
    return nn.Linear(3, 3, bias=False)


def batch(place: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(place))


def stage_of(mesh: Any, place: int, max_grad_norm: float | None = None) -> tuple[nn.Module, ChunkOptimizer]:
    stage = chunkc.compile(layer(place), "emulated-16m-64m", mesh=mesh, dtype=torch.float32, backend="eager")
    return stage, chunkc.SGD(stage.parameters(), lr=LR, max_grad_norm=max_grad_norm)


def clip_otherwise(clips: str) -> Refused:
    """Clip in a step as ``clips`` says, where ranks differ, then alike."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), torch.distributed.get_rank()
    by_optimizer = clips.startswith("optimizer")
    stage, optimizer = stage_of(mesh, rank, 1.0 - rank / 2 if by_optimizer else None)
    if clips == "optimizer refused":
        optimizer.max_grad_norm = 1.0 - 2 * rank
    calls: dict[str, Callable[[], object]] = {
        "norm": lambda: chunkc.clip_grad_norm_(stage, 1.0 - rank / 2),
        "type": lambda: chunkc.clip_grad_norm_(stage, 1.0, 2.0 + rank),
        "refused": lambda: chunkc.clip_grad_norm_([stage] * (1 + rank), 1.0),
    }
    stage(batch(rank)).square().sum().backward()
    before = stage.weight.grad.clone()
    begun_s, kind, text = time.monotonic(), "", ""
    try:
        calls.get(clips, optimizer.step)()
    except (chunkc.ChunkcError, ValueError) as error:
        kind, text = type(error).__name__, str(error)
    after_s = time.monotonic() - begun_s
    kept = torch.equal(stage.weight.detach(), layer(rank).weight) and torch.equal(stage.weight.grad, before)
    norm = chunkc.clip_grad_norm_(stage, 0.1)
    return Refused(kind, text, after_s, kept, norm.clone(), stage.weight.grad.clone())


def clip_in_other_orders() -> torch.Tensor:
    """The norm of two stages on each rank, which rank 1 hands over in another order than rank 0."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), torch.distributed.get_rank()
    found = [stage_of(mesh, place)[0] for place in (rank, rank + 2)]
    for place, stage in zip((rank, rank + 2), found, strict=True):
        stage(batch(place)).square().sum().backward()
    return chunkc.clip_grad_norm_(found[:: 1 - 2 * rank], 1.0).clone()


def save_stages(root: str) -> dict[str, str]:
    """Save and load two stages of the same shapes on each rank; the errors by what was tried, "" for none.

    ``<root>/<rank>.<model>`` are theirs, and ``<root>/both`` is where the first of each rank begins to save at a time.
    """
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), torch.distributed.get_rank()
    trained = [stage_of(mesh, place) for place in (rank, rank + 2)]
    for place, (stage, optimizer) in zip((rank, rank + 2), trained, strict=True):
        stage(batch(place)).square().sum().backward()
        optimizer.step()
        chunkc.save_checkpoint(f"{root}/{rank}.{place // 2}", stage, optimizer)
    torch.distributed.barrier()
    first = trained[0]
    calls: dict[str, Callable[[], object]] = {
        "own": lambda: chunkc.load_checkpoint(f"{root}/{rank}.0", *first),
        "of other ranks": lambda: chunkc.load_checkpoint(f"{root}/{1 - rank}.0", *first),
        "other model": lambda: chunkc.load_checkpoint(f"{root}/{rank}.1", *first),
        "again": lambda: chunkc.save_checkpoint(f"{root}/{rank}.0", *first),
        "into other's": lambda: chunkc.save_checkpoint(f"{root}/{1 - rank}.0", *first),
        "both": lambda: chunkc.save_checkpoint(f"{root}/both", *first),
        "then": lambda: chunkc.load_checkpoint(f"{root}/both", *first),
    }
    before, found = first[0].weight.detach().clone(), dict[str, str]()
    for name, call in calls.items():
        torch.distributed.barrier()
        try:
            call()
            found[name] = ""
        except chunkc.CheckpointError as error:
            found[name] = str(error)
        assert torch.equal(first[0].weight.detach(), before), name
    return found


def plain_gradients(num: int) -> list[torch.Tensor]:
    """Of the first ``num`` layers, by plain PyTorch."""
    found = []
    for place in range(num):
        plain = layer(place)
        plain(batch(place)).square().sum().backward()
        found += [p.grad for p in plain.parameters() if p.grad is not None]
    return found


def stage_text(model: Transformer, hw: chunkc.Hardware, accumulate: int) -> str:
    """The text of the plan that this rank makes of its stage of ``model``, trained for one micro-batch of 16 tokens."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stage = Stage.of(model, mesh.get_local_rank(), 2)
    built = getattr(transformers, model.head).from_config(stage.configuration()).train()
    part = chunkc.compile(
        StageModule(built, is_first=stage.is_first, is_last=stage.is_last),
        hw,
        mesh=mesh,
        dtype=torch.float32,
        backend="eager",
        accumulate=accumulate,
        in_flight=stage.in_flight(accumulate),
        activations="keep",
        reserve=stage.buffers_nbytes(1, 16, accumulate, torch.float32, hw),
    )
    _optimizer = chunkc.AdamW(part.parameters())
    examples = {name: torch.ones_like(value, device="cpu") for name, value in stage.inputs(1, 16).items()}
    part(**{name: value.requires_grad_(value.is_floating_point()) for name, value in examples.items()})
    return replace(chunkc.plan_of(part), model="", stages=()).text()
