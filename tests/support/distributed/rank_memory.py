"""What a rank of a job takes of its device while it trains."""

import torch
from torch import nn

import chunkc


class Blocks(nn.Module):
    """Layers whose activations and parameters are large beside what is alive for an instant."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def peaks(hw: str, depth: int, width: int, num_rows: int, num_steps: int) -> list[tuple[int, int, int]]:
    """Budget, planned and measured peak in bytes after each step from the second on."""
    torch.manual_seed(0)
    model = chunkc.compile(Blocks(depth, width), hw, dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(num_steps):
        x = torch.randn(num_rows, width)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = chunkc.stats(model)
        if step:
            found.append((stats["budget_nbytes"], stats["planned_peak_nbytes"], stats["measured_peak_nbytes"]))
    return found
