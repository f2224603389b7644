"""A script that saves after every step and goes on from what it finds; torchrun starts it, and starts it again.

    restarted_run.py DIRECTORY KILLED_STEP

In its first life rank 1 is killed in the midst of step ``KILLED_STEP``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from pair import Tower, batch

import chunkc

NUM_STEPS = 5
HW = "emulated-640k-64m"


def train(directory: str, killed_step: int = -1) -> dict[str, torch.Tensor]:
    """The parameters after all steps, on every rank."""
    torch.manual_seed(0)
    model = chunkc.compile(Tower(depth=2), HW, dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    rank, first = torch.distributed.get_rank(), 0
    if any(Path(directory).iterdir()):
        first = chunkc.load_checkpoint(directory, model, optimizer).extra
    for step in range(first, NUM_STEPS):
        loss = model(*batch(2 * step + rank))
        if step == killed_step and rank == 1 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chunkc.save_checkpoint(directory, model, optimizer, extra=step + 1).result()
    return {name: value.clone() for name, value in model.state_dict().items()}


def main() -> None:
    """Rank 0 leaves what it got beside the directory."""
    directory, killed_step = sys.argv[1:]
    torch.set_num_threads(1)
    values = train(directory, int(killed_step))
    print(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {os.environ['RANK']} ends well", flush=True)
    if torch.distributed.get_rank() == 0:
        torch.save(values, f"{directory}.pt")


if __name__ == "__main__":
    main()
