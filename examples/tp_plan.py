"""A transformers model under tensor parallelism, by the plan that transformers keeps of it.

    torchrun --nproc-per-node 2 examples/tp_plan.py --hw emulated-1m-64m
    torchrun --nproc-per-node 4 examples/tp_plan.py --hw emulated-1m-64m --tp 2

``config.base_model_tp_plan`` names the layers that ranks divide, and how. Embedding and output stay whole here.
``--compare`` trains the same model without chunkc on every rank, and compares the losses. As
[tensor_parallel.py](tensor_parallel.py) it does not run on GPUs yet.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from ranks import joined
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 96}
LENGTH = 16


def divide(model: Any, mesh: DeviceMesh) -> list[str]:
    """Divide the linear layers of ``model`` over ``mesh``, the dimension ``tp``, in place; their names."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    styles: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    by_name = {f"{model.base_model_prefix}.{name}": style for name, style in model.config.base_model_tp_plan.items()}
    plan = {name: styles[style]() for name, style in by_name.items() if style in styles}
    parallelize_module(model, mesh, plan)
    return list(plan)


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
        shape = (ranks.size // options.tp, options.tp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
        plain = Plain(model) if options.compare else None
        print("divided:", *divide(model, mesh["tp"]))
        model = chunkc.compile(model, hw=options.hw, mesh=mesh, dtype=torch.float32, backend=options.backend)
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        generator = torch.Generator().manual_seed(1)
        for step in range(options.steps):
            batches = [torch.randint(0, 96, (2, LENGTH), generator=generator) for _ in range(shape[0])]
            tokens = batches[mesh["dp_shard"].get_local_rank()]
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
