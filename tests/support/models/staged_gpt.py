"""A small GPT-2-like model in parts that follow each other, each a module: the stages of a pipeline."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

VOCABULARY, LENGTH, WIDTH, NUM_HEADS = 48, 16, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward layer, with normalisation before each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.before_attention(hidden)).view(batch, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        hidden = hidden + self.proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.feed_forward(self.before_feed_forward(hidden))


class Part(nn.Module):
    """Some blocks; the first part has the embeddings before them, the last one the head behind them."""

    def __init__(self, num_blocks: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if is_first else None
        self.positions = nn.Embedding(LENGTH, WIDTH) if is_first else None
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH) if is_last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of tokens or hidden states; of the last part logits, or with ``targets`` the loss: [1]."""
        if self.tokens is not None and self.positions is not None:
            hidden = self.tokens(hidden) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        if self.norm is None or self.head is None:
            return hidden
        logits = self.head(self.norm(hidden))
        return logits if targets is None else loss_of(logits, targets).view(1)


def parts_of(num_parts: int, blocks_in_each: int = 1) -> list[Part]:
    """The parts, with the same values at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [Part(blocks_in_each, is_first=i == 0, is_last=i == num_parts - 1) for i in range(num_parts)]


def divide(part: Part, mesh: DeviceMesh) -> None:
    """Divide the feed-forward layers over ``mesh``, the dimension ``tp``, in place."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"blocks.*.feed_forward.0": ColwiseParallel(), "blocks.*.feed_forward.2": RowwiseParallel()}
    parallelize_module(part, mesh, plan)


def batch_of(number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets: int64 [size, LENGTH]."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (2, size, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
