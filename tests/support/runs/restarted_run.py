"""A script that saves after every step and goes on from what it finds: restarted_run.py DIRECTORY KILLED_RANK DELAY_S

In its first life the killed rank is killed so many seconds after the forward of its third step.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from pair import SMALL, Tower, batch

import chunkc

NUM_STEPS, KILLED_STEP = 6, 2
HW = "emulated-640k-64m"


def train(directory: str, killed_rank: int = -1, delay_s: float = 0.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = chunkc.compile(Tower(depth=2), HW, **SMALL)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    rank, first = torch.distributed.get_rank(), 0
    if any(Path(directory).iterdir()):
        first = chunkc.load_checkpoint(directory, model, optimizer).extra
    for step in range(first, NUM_STEPS):
        loss = model(*batch(2 * step + rank))
        if step == KILLED_STEP and rank == killed_rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            _kill_after(delay_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chunkc.save_checkpoint(directory, model, optimizer, extra=step + 1).result()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _kill_after(delay_s: float) -> None:
    if delay_s:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Rank 0 leaves what it got beside the directory."""
    directory, killed_rank, delay_s = sys.argv[1:]
    torch.set_num_threads(1)
    values = train(directory, int(killed_rank), float(delay_s))
    print(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {os.environ['RANK']} ends well", flush=True)
    if torch.distributed.get_rank() == 0:
        torch.save(values, f"{directory}.pt")


if __name__ == "__main__":
    main()
