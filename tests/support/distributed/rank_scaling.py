"""Training in fp16 on the ranks of a job, with gradients that overflow on one of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fp16_training import BAD, inputs
from job_rank import Failure
from overflows import INTERVAL, Poisoned, grow_soon, scale_of
from pair import CHUNK_SIZE, batch
from rank_divergence import attempt
from scripted_loops import EPS, LR

import chunkc

NUM_STEPS = 7
BAD_RANK = 1


@dataclass(slots=True)
class Scaled:
    """What one rank saw; ``unchanged``: steps after which parameters and states were bit for bit those before."""

    scales: list[float] = field(default_factory=list)
    unchanged: list[int] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    exp_avg: list[torch.Tensor] = field(default_factory=list)
    counts: set[float] = field(default_factory=set)


def model_of() -> Poisoned:
    torch.manual_seed(0)
    return Poisoned()


def rank_inputs(step: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bad = inputs(step)[2] if rank == BAD_RANK else torch.zeros(192)
    return (*batch(step * num_ranks + rank), bad)


def micro_batches(step: int, rank: int, num_ranks: int, num: int) -> list[tuple[torch.Tensor, ...]]:
    """The batch of a step ``num`` times; only in the first of them is what overflows."""
    tokens, targets, bad = rank_inputs(step, rank, num_ranks)
    return [(tokens, targets, bad if part == 0 else torch.zeros_like(bad)) for part in range(num)]


def train_scaled(hw: str, by_scaler: bool = False, accumulate: int = 1, **options: Any) -> Scaled:
    """Built in, or by `chunkc.GradScaler`; with ``accumulate`` micro-batches a step, whose losses are averaged;
    ``options`` of `chunkc.compile`."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    options |= {"dtype": torch.float16, "backend": "eager", "chunk_size": CHUNK_SIZE, "accumulate": accumulate}
    model = chunkc.compile(model_of(), hw, **options)
    optimizer = chunkc.AdamW(model.parameters(), lr=LR, eps=EPS)
    scaler = chunkc.GradScaler(growth_interval=INTERVAL) if by_scaler else None
    found = Scaled()
    if scaler is None:
        grow_soon(model)
    for step in range(NUM_STEPS):
        before = _state(model, optimizer)
        for part in micro_batches(step, rank, num_ranks, accumulate):
            loss = model(*part) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
            found.scales.append(scale_of(model))
        else:
            scaler.step(optimizer)
            scaler.update()
            found.scales.append(scaler.get_scale())
        optimizer.zero_grad()
        if _same(_state(model, optimizer), before):
            found.unchanged.append(step)
    states = optimizer.state_dict()["state"]
    found.params = {n: v.clone() for n, v in model.state_dict().items()}
    found.exp_avg = [state["exp_avg"].clone() for state in states.values()]
    found.counts = {float(state["step"]) for state in states.values()}
    return found


def other_scales(hw: str) -> list[Failure | None]:
    """What ranks raise whose scalers begin at different scales, or are set apart later."""
    rank = torch.distributed.get_rank()
    model = chunkc.compile(model_of(), hw, dtype=torch.float16, backend="eager", chunk_size=CHUNK_SIZE)
    optimizer = chunkc.AdamW(model.parameters(), lr=LR, eps=EPS)

    def one_step(scaler: chunkc.GradScaler) -> None:
        scaler.scale(model(*rank_inputs(0, 0, 1))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    found = [attempt(lambda: one_step(chunkc.GradScaler(init_scale=2.0 ** (8 + rank))))]
    optimizer.zero_grad()
    scaler = chunkc.GradScaler(init_scale=2.0**8)
    found.append(attempt(lambda: one_step(scaler)))
    if rank == 1:
        scaler.update(2.0**9)
    found.append(attempt(lambda: one_step(scaler)))
    return found


def train_plain(num_ranks: int) -> Scaled:
    """torch.amp.GradScaler over plain PyTorch in fp32 on the global batch, where the same steps overflow."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    found = Scaled()
    for step in range(NUM_STEPS):
        parts = [rank_inputs(step, rank, num_ranks) for rank in range(num_ranks)]
        tokens, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
        scaler.scale(model(tokens, targets, parts[BAD_RANK][2])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.scales.append(scaler.get_scale())
    states = optimizer.state_dict()["state"]
    found.unchanged = [step for step in BAD if step < NUM_STEPS]
    found.exp_avg = [state["exp_avg"] for state in states.values()]
    found.counts = {float(state["step"]) for state in states.values()}
    return found


def _state(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"].values()
    moments = [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq", "master_param")]
    return [*(v.clone() for v in model.state_dict().values()), *moments]


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
