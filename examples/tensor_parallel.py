"""A Llama under tensor and sequence parallelism, by the calls of torchtitan's ``apply_tp``.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --hw emulated-2m-1g
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --hw emulated-2m-1g --tp 4

Ranks that follow each other compute one forward together; the others take batches of their own and divide chunks.
The mesh is one of CPUs: parameters that ``parallelize_module`` has moved to a GPU are refused, so this does not run on
GPUs yet.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import joined
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import chunkc

VOCABULARY, WIDTH, NUM_HEADS, LENGTH = 64, 32, 4, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of as many heads as there are in what the rank's part of the weights makes."""
        size, length = x.shape[:2]
        heads = (w(x).view(size, length, -1, WIDTH // NUM_HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).reshape(size, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """As torchtitan's in names and order; without rotary positions, of which nothing is divided."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(num_layers)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(input_ids)
        for layer in self.layers.values():
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def apply_tp(model: Llama, mesh: DeviceMesh, *, in_sequence: bool = True) -> None:
    """Divide ``model`` over ``mesh``, the dimension ``tp``, in place.

    ``in_sequence``: activations between blocks are divided along the sequence (Korthikanti et al., "Reducing activation
    recomputation in large transformer models", 2022, section 4.2.2); else each rank has all of them.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between: Any = Shard(1) if in_sequence else Replicate()
    top: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    layer_plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
        "feed_forward.w3": ColwiseParallel(),
    }
    if in_sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        top["norm"] = SequenceParallel()
        layer_plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        layer_plan |= {"attention": whole, "feed_forward": whole}
    parallelize_module(model, mesh, top)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, layer_plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", default="auto")
    parser.add_argument("--tp", type=int, default=2, help="ranks that compute one forward together")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with joined() as ranks:
        shape = (ranks.size // options.tp, options.tp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
        torch.manual_seed(0)
        model = Llama()
        apply_tp(model, mesh["tp"])
        model = chunkc.compile(model, hw=options.hw, mesh=mesh, dtype=torch.float32)
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        data_rank = mesh["dp_shard"].get_local_rank()
        generator = torch.Generator().manual_seed(1 + data_rank)
        for step in range(options.steps):
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
            loss = model(input_ids=tokens, labels=tokens.roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {ranks.mean(loss):.4f}")
        dist.barrier()


if __name__ == "__main__":
    main()
