"""A Llama and a GPT-2 in small, with the parallel plans that torchtitan's kind of users write for them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from models import Batch, Case
from torch import nn

VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH = 64, 32, 4, 2, 16
NUM_BATCHES = 4


class Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length = x.shape[:2]
        heads = (w(x).view(size, length, -1, WIDTH // NUM_HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(size, length, -1))


class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(bias=False), GatedFeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """As torchtitan's: no positions here, since nothing of them is divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class GptBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.up, self.down = Attention(bias=True), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
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


PARALLEL_CASES: Mapping[str, Case] = {
    "llama": Case("llama", Llama, batches),
    "llama_sequence": Case("llama_sequence", Llama, batches),
    "gpt": Case("gpt", Gpt, batches),
    "gpt_dropout": Case("gpt_dropout", lambda: Gpt(dropout=0.5), batches),
}


def parallelise(name: str, model: Any, mesh: Any) -> None:
    """Apply the parallel plan of the case ``name`` over ``mesh``, the dimension ``tp``, in place."""
    if name.startswith("gpt"):
        _parallelise_gpt(model, mesh)
    else:
        _parallelise_llama(model, mesh, in_sequence=name == "llama_sequence")


def _parallelise_gpt(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.h:
        plan = {f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"attn.wo": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


def _parallelise_llama(model: Any, mesh: Any, *, in_sequence: bool) -> None:
    """The calls of torchtitan's ``apply_tp``; without ``in_sequence`` activations between blocks are whole."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between: Any = Shard(1) if in_sequence else Replicate()
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    top = {"tok_embeddings": embedding, "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate())}
    parallelize_module(model, mesh, top | ({"norm": SequenceParallel()} if in_sequence else {}))
    inputs = {"input_layouts": (between,), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
        plan |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.wo", "feed_forward.w2")}
        if in_sequence:
            plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
            plan |= {name: PrepareModuleInput(**inputs) for name in ("attention", "feed_forward")}
        parallelize_module(layer, mesh, plan)
