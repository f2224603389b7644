"""Adapters over a base in 4 bits on the ranks of a job."""

import sys

import torch

import chunkc


def train_qlora(examples: str, num_steps: int, lr: float, eps: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses, and the values of all floating-point entries at the end."""
    sys.path.insert(0, examples)
    try:
        import qlora
    finally:
        sys.path.remove(examples)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = chunkc.compile(qlora.build(64, 2, 4), "emulated-500k-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=eps)
    losses = []
    for step in range(num_steps):
        tokens = qlora.batch_of(step * size + rank)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, {name: value for name, value in state.items() if value.is_floating_point()}
