"""Ranks whose losses reach different outputs of one model, and the one process that they must equal."""

from collections.abc import Sequence

import torch
from heads import BehindBreak, Broken, Heads, loss_of, rows
from torch import nn

import chunkc

Used = Sequence[Sequence[Sequence[str]]]
"""By step, micro-batch and rank: the heads that the loss uses."""
MODELS = {"heads": Heads, "broken": Broken}
MAX_NORM = 0.05
OPTIONS = {"lr": 1e-2, "eps": 1e-4}


def _batch(step: int, part: int, rank: int) -> torch.Tensor:
    return rows(100 * step + 10 * part + rank)


def _seen(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found | {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(name: str, used: Used) -> tuple[list[dict[str, torch.Tensor]], dict[int, float]]:
    """What every step found on this rank, and the step counts at the end."""
    torch.manual_seed(0)
    model = chunkc.compile(
        MODELS[name](), "emulated-1m-16m", dtype=torch.float32, backend="eager", accumulate=len(used[0])
    )
    optimizer = chunkc.AdamW(model.parameters(), **OPTIONS, max_grad_norm=MAX_NORM)
    rank, seen = torch.distributed.get_rank(), []
    for step, parts in enumerate(used):
        for part, of_ranks in enumerate(parts):
            loss_of(of_ranks[rank])(model(_batch(step, part, rank))).backward()
        seen.append(_seen(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {key: float(state["step"]) for key, state in optimizer.state_dict()["state"].items()}


def train_plainly(name: str, used: Used) -> tuple[list[dict[str, torch.Tensor]], dict[int, float]]:
    torch.manual_seed(0)
    model, seen = MODELS[name](), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step, parts in enumerate(used):
        for part, of_ranks in enumerate(parts):
            losses = [loss_of(heads)(model(_batch(step, part, rank))) for rank, heads in enumerate(of_ranks)]
            torch.stack(losses).mean().backward()
        seen.append(_seen(model))
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return seen, {key: float(state["step"]) for key, state in optimizer.state_dict()["state"].items()}


def freeze_on_one() -> str:
    torch.manual_seed(0)
    model = chunkc.compile(Heads(), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    loss = loss_of("ab")(model(rows(0)))
    if torch.distributed.get_rank() == 1:
        model.first.bias.requires_grad_(False)  # type: ignore[union-attr]
    try:
        loss.backward()
    except chunkc.ChunkcError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reach_other_graphs(num_steps: int, heads: Sequence[str]) -> str:
    """The error of a backward in which each rank uses its own ``heads``; those in capitals are used times zero."""
    torch.manual_seed(0)
    model = chunkc.compile(BehindBreak(), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), **OPTIONS)
    for step in range(num_steps):
        loss_of("ab")(model(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    used, outputs = heads[torch.distributed.get_rank()], model(rows(9))
    loss = loss_of([head for head in used if head.islower()])(outputs)
    for head in filter(str.isupper, used):
        loss = loss + 0 * outputs["AB".index(head)].sum()
    try:
        loss.backward()
        optimizer.step()
    except chunkc.ChunkcError as error:
        return f"{type(error).__name__}: {error}"
    return ""
