"""Gradients that do not come from the compiled graph: eager operators use parameters, scripts assign ``grad``."""

import torch
from torch import nn

import chunkc

LR = 1e-2
NUM_ROWS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 7))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = model(x) @ model.weight.t()  # type: ignore[operator, union-attr]
    return (hidden - x).pow(2).mean() + 0.1 * model.bias.pow(2).sum()  # type: ignore[operator, union-attr]


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUM_ROWS, 13, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + 3 * rank)


def train(num_steps: int, max_norm: float, assigned: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients and parameters of every step, on this rank; ``assigned``: each rank gives bias a gradient by hand."""
    torch.manual_seed(0)
    model = chunkc.compile(Layer(), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=LR, eps=1e-4)
    rank, seen = torch.distributed.get_rank(), []
    for step in range(num_steps):
        loss_of(model, rows(rank, step)).backward()
        if assigned:
            model.bias.grad = torch.full((7,), 1.0 + rank)  # type: ignore[union-attr]
        else:
            seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        chunkc.clip_grad_norm_(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
    return seen


def train_plainly(num_steps: int, max_norm: float, assigned: bool, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)
    seen = []
    for step in range(num_steps):
        torch.stack([loss_of(model, rows(rank, step)) for rank in range(num_ranks)]).mean().backward()
        if assigned:
            model.bias.grad = torch.full((7,), 1.0 + (num_ranks - 1) / 2)
        else:
            seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
    return seen
