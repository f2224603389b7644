"""A transformers model under tensor parallelism, divided by the parallel plan of its architecture.

    torchrun --nproc-per-node 2 examples/tp_plan.py --hw emulated-1m-64m
    torchrun --nproc-per-node 4 examples/tp_plan.py --hw emulated-1m-64m --tp 2

``chunkc.compile(mesh="dp_shard=2,tp=2")`` divides the linear layers and the embedding as transformers has it in
``config.base_model_tp_plan``; the script has no code for it. ``--compare`` trains the same model without chunkc on
every rank, and compares the losses. As [tensor_parallel.py](tensor_parallel.py) it does not run on GPUs yet.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from ranks import joined
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 96}
LENGTH = 16


class Plain:
    """``model`` trained by PyTorch alone, on all batches of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def step(self, batches: list[torch.Tensor]) -> float:
        """The mean loss of ``batches``: int64 [rows, LENGTH] each."""
        losses = [self._model(input_ids=tokens, labels=tokens).loss for tokens in batches]
        loss = torch.stack(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", default="auto")
    parser.add_argument("--tp", type=int, default=2, help="ranks that compute one forward together")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--compare", action="store_true", help="with the model without chunkc")
    options = parser.parse_args()
    with joined() as ranks:
        num_data = ranks.size // options.tp
        mesh = f"dp_shard={num_data},tp={options.tp}"
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
        num_whole = sum(param.numel() for param in model.parameters())
        plain = Plain(model) if options.compare else None
        model = chunkc.compile(model, hw=options.hw, mesh=mesh, dtype=torch.float32, backend=options.backend)
        parts = sum(param.numel() for param in model.parameters())
        print(f"a rank has {parts:,} of {num_whole:,} parameters")
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        generator = torch.Generator().manual_seed(1)
        for step in range(options.steps):
            batches = [torch.randint(0, 96, (2, LENGTH), generator=generator) for _ in range(num_data)]
            tokens = batches[ranks.rank // options.tp]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = ranks.mean(loss)
            beside = f", without chunkc {plain.step(batches):.6f}" if plain else ""
            print(f"step {step}: loss {mean:.6f}{beside}")
        print(f"device peak {chunkc.stats(model)['planned_peak_nbytes']:,} bytes")
        dist.barrier()


if __name__ == "__main__":
    main()
