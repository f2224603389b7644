"""The Llama of examples/tensor_parallel.py and a GPT-2 in small, with parallel plans for them."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import Batch, Case
from torch import nn

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from tensor_parallel import LENGTH, NUM_HEADS, VOCABULARY, WIDTH, Llama, apply_tp

NUM_LAYERS, NUM_BATCHES = 2, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length = x.shape[:2]
        heads = (w(x).view(size, length, -1, WIDTH // NUM_HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(size, length, -1))


class GptBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.up, self.down = Attention(), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class Gpt(nn.Module):
    """With biases, positions that are learned, and the output tied to the embedding: neither is divided."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GptBlock(dropout) for _ in range(NUM_LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), labels.flatten())


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(NUM_BATCHES)]
    return [{"input_ids": tokens, "labels": tokens.roll(-1, 1)} for tokens in made]


def seeded_llama() -> Llama:
    torch.manual_seed(0)
    return Llama()


PARALLEL_CASES: Mapping[str, Case] = {
    "llama": Case("llama", seeded_llama, batches),
    "llama_sequence": Case("llama_sequence", seeded_llama, batches),
    "gpt": Case("gpt", Gpt, batches),
    "gpt_dropout": Case("gpt_dropout", lambda: Gpt(dropout=0.5), batches),
}


def parallelise(name: str, model: Any, mesh: Any) -> None:
    """Apply the parallel plan of the case ``name`` over ``mesh``, the dimension ``tp``, in place."""
    if name.startswith("gpt"):
        _parallelise_gpt(model, mesh)
    else:
        apply_tp(model, mesh, in_sequence=name == "llama_sequence")


def _parallelise_gpt(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.h:
        plan = {f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"attn.wo": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
