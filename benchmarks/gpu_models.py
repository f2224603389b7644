"""GPT-2's architecture at any size, and the arithmetic of its training step.

Pre-norm blocks, learned positions, GELU in its tanh form, causal fused attention, and an output layer tied to the
embedding. It is written out so that every system trains the same modules, whatever is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens, and the ones that follow them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batch: ``batch`` sequences of ``length`` tokens in a step."""

    layers: int
    hidden: int
    heads: int
    batch: int
    length: int = 1024
    vocabulary: int = 50304

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.length

    def build(self) -> Gpt:
        """The model on the meta device: whoever trains it gives it memory, then `initialise`."""
        with torch.device("meta"):
            return Gpt(self)

    def num_params(self) -> int:
        """Parameters, the tied one once."""
        return sum(p.numel() for p in self.build().parameters())

    def step_flops(self) -> float:
        """Useful floating-point operations of one step, forward and backward: 6 N T + 12 L H S T.

        N: parameters in matrix products, so all but positions (the embedding counts once, as the output layer). T:
        tokens. The second term is attention's, L layers of width H over S tokens, counted in full although causal
        (Chowdhery et al., "PaLM", appendix B). What is computed again does not count.
        """
        matmul_params = self.num_params() - self.length * self.hidden
        return float(6 * matmul_params * self.tokens) + self.attention_flops()

    def attention_flops(self) -> float:
        """The second term of `step_flops`."""
        return float(12 * self.layers * self.hidden * self.length * self.tokens)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Tokens to the mean loss of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Parameter(torch.empty(shape.length, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def initialise(model: nn.Module) -> None:
    """Norms at one, biases at zero, everything else normal with deviation 0.02."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif "norm" in name:
                nn.init.ones_(param)
            else:
                nn.init.normal_(param, std=0.02)


def batches(shape: Shape, num: int, device: torch.device) -> list[Batch]:
    """Random tokens with the next ones as labels, the same for every system."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num):
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)
        found.append((tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)))
    return found
