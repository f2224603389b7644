"""A small Llama for tests of memory, its tokens, and a step of training."""

import torch
from machines import Machine
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def llama(hidden: int = 256, layers: int = 6, heads: int = 4) -> LlamaForCausalLM:
    """5.3 million parameters by default; the same values every time."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, vocab_size=1024, max_position_embeddings=256,
        )  # fmt: skip
        return LlamaForCausalLM(config)


def sized(machine: Machine) -> LlamaForCausalLM:
    """`llama`, and on a stand-in, which computes a GPU's kernels on the host, a smaller one."""
    return llama() if machine.kind == "cuda" else llama(hidden=64, layers=2, heads=2)


def ids(machine: Machine, seed: int = 0, batch: int = 4, length: int = 128) -> torch.Tensor:
    found: torch.Tensor = machine.put(
        torch.randint(0, 1024, (batch, length), generator=torch.Generator().manual_seed(seed))
    )
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
