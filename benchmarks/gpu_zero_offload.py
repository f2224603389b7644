"""ZeRO-Offload for one GPU: parameters on the GPU, gradients and optimizer states on the host.

As Ren et al. ("ZeRO-Offload", 2021) describe it: parameters in bf16 stand on the GPU. Each gradient is copied to pinned
host memory on a stream of its own as soon as backward has made it, and its device memory is free again. After backward
the host updates fp32 parameters and moments with torch's fused AdamW, bucket by bucket, and each bucket's new
parameters travel back in bf16 while the next one is updated. A bucket is what one block of the model holds.

Without a GPU the same code runs with plain host memory and copies that are done at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpu_trace import HOST_UPDATE
from torch import nn

Piece = tuple[nn.Parameter, slice]


class Bucket:
    """Parameters updated together: fp32 states in host memory, bf16 lists in pinned host memory."""

    def __init__(self, params: Sequence[nn.Parameter], device: torch.device, lr: float) -> None:
        self.pieces: list[Piece] = []
        start = 0
        for param in params:
            self.pieces.append((param, slice(start, start + param.numel())))
            start += param.numel()
        is_pinned = device.type == "cuda"
        self.grads16 = torch.zeros(start, dtype=torch.bfloat16, pin_memory=is_pinned)
        self.params16 = torch.zeros(start, dtype=torch.bfloat16, pin_memory=is_pinned)
        self.master = nn.Parameter(torch.zeros(start))
        for param, piece in self.pieces:
            self.master.data[piece].copy_(param.detach().flatten())
        self.optimizer = torch.optim.AdamW([self.master], lr=lr, fused=True)

    def update(self, scratch: torch.Tensor) -> None:
        """Step the masters by the gradients that have landed; ``scratch`` is fp32 memory for them."""
        grads = scratch[: self.grads16.numel()]
        self.master.grad = grads.copy_(self.grads16)
        self.optimizer.step()
        self.master.grad = None
        self.params16.copy_(self.master.detach())


class ZeroOffload:
    """The optimizer of a model whose bf16 parameters are on ``device``. Call `step` after each backward.

    Args:
        buckets: the parameters in groups, each parameter once.
    """

    def __init__(self, buckets: Iterable[Sequence[nn.Parameter]], device: torch.device, lr: float) -> None:
        self._buckets = [Bucket(params, device, lr) for params in buckets]
        self._scratch = torch.zeros(max(bucket.grads16.numel() for bucket in self._buckets))
        self._device = device
        self._down, self._up = (None, None) if device.type != "cuda" else (torch.cuda.Stream(), torch.cuda.Stream())
        for bucket in self._buckets:
            for param, piece in bucket.pieces:
                param.register_post_accumulate_grad_hook(self._landing(bucket.grads16[piece]))

    def step(self) -> None:
        """Update everything; what comes next on the GPU runs after the new parameters have arrived."""
        if self._down is not None:
            self._down.synchronize()
        for bucket in self._buckets:
            with torch.profiler.record_function(HOST_UPDATE):
                bucket.update(self._scratch)
            with _on(self._up), torch.no_grad():
                for param, piece in bucket.pieces:
                    param.copy_(bucket.params16[piece].view(param.shape), non_blocking=True)
        if self._up is not None:
            torch.cuda.current_stream().wait_stream(self._up)

    def _landing(self, target: torch.Tensor) -> Any:
        """A hook that sends a gradient to ``target``, behind the work that makes it, and lets go of it."""

        def land(param: torch.Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is None:
                return
            if self._down is not None:
                self._down.wait_stream(torch.cuda.current_stream())
                grad.record_stream(self._down)
            with _on(self._down):
                target.copy_(grad.flatten(), non_blocking=True)

        return land


def buckets_of(model: nn.Module, blocks: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """The parameters of each block, and all others together; a tied parameter once."""
    found = [list(block.parameters()) for block in blocks]
    seen = {id(param) for params in found for param in params}
    return [*found, [param for param in model.parameters() if id(param) not in seen]]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
