"""QLoRA: adapters over a base whose weights stand in 4 bits, trained within a small budget.

    python examples/qlora.py --steps 20 --hw emulated-400k-64m

The base is frozen. Its weights are packed in 4 bits, NormalFloat in blocks of 64 with one scale each (Dettmers et al.,
"QLoRA: Efficient Finetuning of Quantized LLMs", 2023, section 3 and appendix E). Chunks hold the packed bits: a forward
moves half a byte a weight to the device and unpacks it there, and backward unpacks it again. Adapters are trained as
any other parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc

BLOCK = 64
"""Weights that share a scale."""
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NormalFloat4: quantiles of a normal distribution, from -1 to 1."""


class QuantizedLinear(nn.Module):
    """A frozen ``nn.Linear`` in 4 bits with a low-rank adapter: ``x W^T + x A^T B^T`` for ``x`` [..., in]."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.shape = base.weight.shape
        blocks = base.weight.detach().float().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
        levels = torch.tensor(LEVELS)
        codes = ((blocks / scales).unsqueeze(-1) - levels).abs().argmin(-1).to(torch.uint8)
        self.packed = nn.Parameter((codes[:, 0::2] << 4) | codes[:, 1::2], requires_grad=False)
        self.register_buffer("scales", scales)
        self.register_buffer("levels", levels)
        self.down = nn.Linear(self.shape[1], rank, bias=False)
        self.up = nn.Linear(rank, self.shape[0], bias=False)
        nn.init.zeros_(self.up.weight)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight unpacked: ``dtype`` [out, in]."""
        codes = torch.stack([self.packed >> 4, self.packed & 15], dim=-1).flatten(1).int()
        return (self.levels[codes] * self.scales).reshape(self.shape).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = nn.functional.linear(x, self.weight(x.dtype)) + self.up(self.down(x))
        return output


def quantize(model: nn.Module, rank: int) -> nn.Module:
    """Freeze ``model``, and put its linear layers inside of blocks in 4 bits with adapters, in place."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head" and child.weight.numel() % BLOCK == 0:
                setattr(module, name, QuantizedLinear(child, rank))
    return model


def build(hidden: int, layers: int, rank: int) -> nn.Module:
    """A small Llama with random weights, in 4 bits with adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return quantize(LlamaForCausalLM(config), rank).train()


def batch_of(step: int, rows: int = 2, length: int = 8) -> torch.Tensor:
    """Counting tokens: int64 [rows, length]."""
    first = torch.randint(256, (rows, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(length)) % 256


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    """Train the adapters; the loss of each step."""
    losses = []
    for step in range(num_steps):
        tokens = batch_of(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print the losses and what the base takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hw", default="auto")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=4)
    args = parser.parse_args(argv)
    model = chunkc.compile(build(args.hidden, args.layers, args.rank), args.hw, backend=args.backend)
    optimizer = chunkc.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = train(model, optimizer, args.steps)
    packed = sum(p.numel for p in chunkc.plan_of(model).layout.params if p.dtype == "uint8")
    stats = chunkc.stats(model)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"base in 4 bits: {packed:,} bytes of {stats['model_data_nbytes']:,}; peak {stats['measured_peak_nbytes']:,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
