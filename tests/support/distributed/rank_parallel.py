"""A transformers model that the ranks of a job divide, beside the whole one."""

from typing import Any

import torch
from divided_models import seeded

from chunkc._torch_compat.fake_job import first_line
from chunkc.scenarios.models import Transformer, parallelise

FUSED = ".c_attn."
"""In names of GPT-2's matrices of queries, keys and values, whose columns operators see in the order of ranks."""


def differences(transformer: Transformer) -> tuple[int, float]:
    """How many values of both were compared, loss and gradients, and the largest difference of an element."""
    whole, divided = (seeded(transformer) for _ in range(2))
    size = torch.distributed.get_world_size()
    parallelise(divided, transformer.label, first_line(size, "tp"))
    batch = {
        name: torch.arange(value.numel()).view(value.shape) % 2 for name, value in transformer.inputs(2, 16).items()
    }
    losses = [model(**batch).loss for model in (whole, divided)]
    for loss in losses:
        loss.backward()
    wanted = {"loss": losses[0].detach()} | {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    found = {"loss": losses[1].detach()} | {n: _whole(p.grad) for n, p in divided.named_parameters() if n in wanted}
    found = {name: _swapped(grad, size, 3) if FUSED in name else grad for name, grad in found.items()}
    return len(wanted), max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def _swapped(columns: torch.Tensor, num_outer: int, num_inner: int) -> torch.Tensor:
    """``num_outer`` groups of columns, each of ``num_inner`` equal parts, by part and then by group."""
    grouped = columns.detach().unflatten(-1, (num_outer, num_inner, -1))
    return grouped.transpose(-3, -2).flatten(-3)


def _whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach()
