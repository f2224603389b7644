"""Training runs that are killed at random moments: ``python killed_runs.py DIRECTORY NUM_KILLS SEED``.

This process trains a few steps, so that all that a run imports is here, lets go of the model, and forks: a run begins
at once. Each goes on from the newest checkpoint, trains, and saves every second step, every other time beside training;
it is killed (SIGKILL) some time after its start or, mostly, after its first step. What the runs said is printed as JSON
at the end:

    reference   losses of a run that was left alone, as hexadecimal numbers
    runs        of each: where it began, its losses, whether a save was under way, the last step known to be saved, and
                whether the next one began anew because this one was near the end
"""

import gc
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import chunkc

MAX_STEPS = 240
KEEP = 3


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.second = nn.Linear(48, 48)
        self.norm = nn.BatchNorm1d(48)
        self.last = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(self.first(x)), 0.3, self.training)
        hidden = hidden + nn.functional.dropout(self.norm(self.second(hidden)), 0.3, self.training)
        return self.last(hidden).square().mean()


def say(pipe: int, *words: object) -> None:
    os.write(pipe, (" ".join(map(str, words)) + "\n").encode())


def train(directory: Path | None, pipe: int, num_steps: int = MAX_STEPS) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = chunkc.compile(Tiny(), "emulated-96k-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MAX_STEPS)
    first = 0
    if directory is not None and any(directory.glob("0*")):
        first = chunkc.load_checkpoint(directory, model, optimizer, scheduler).extra["next"]
    say(pipe, "begun", first)
    for step in range(first, num_steps):
        rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = model(rows)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        say(pipe, "loss", step, loss.item().hex())
        if directory is not None and step % 2:
            say(pipe, "saving", step + 1)
            extra, beside = {"next": step + 1}, step % 4 == 3
            future = chunkc.save_checkpoint(
                directory, model, optimizer, scheduler, extra, keep=KEEP, asynchronous=beside, max_copied_nbytes=20_000
            )
            future.add_done_callback(lambda _, reached=step + 1: say(pipe, "saved", reached))
    if directory is not None:
        future.result()


def warm_up() -> None:
    """Import and initialise all that a run does, torch.fx's progress bar too, whose lock all forks would share."""
    tqdm.set_lock(threading.RLock())
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as directory:
        for num_steps in (4, 8):
            train(Path(directory), write, num_steps)
            gc.collect()
    os.close(read)
    os.close(write)


def fork(directory: Path | None) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            train(directory, write)
            code = 0
        except BaseException:
            say(write, "failed", traceback.format_exc().replace("\n", " | "))
        finally:
            os._exit(code)
    os.close(write)
    return pid, read


def listen(pipe: int, until_s: float, heard: bytearray, word: bytes | None = None) -> bool:
    """Take in what a run says, until a moment, its end, or a word; whether it goes on."""
    while (left_s := until_s - time.monotonic()) > 0 and not (word is not None and word in heard):
        if not select.select([pipe], [], [], left_s)[0]:
            break
        part = os.read(pipe, 65536)
        if not part:
            return False
        heard += part
    return True


def told(heard: bytearray) -> dict[str, Any]:
    lines = [line.split(" ", 2) for line in heard.decode().split("\n")[:-1]]
    found: dict[str, Any] = {"begun": None, "losses": {}, "under_way": False, "saved": 0}
    for kind, value, *rest in lines:
        if kind == "failed":
            raise SystemExit(f"a run failed: {value} {rest}")
        if kind == "loss":
            found["losses"][int(value)] = rest[0]
        elif kind == "begun":
            found["begun"] = int(value)
        elif kind == "saving":
            found["under_way"] = True
        else:
            found["under_way"], found["saved"] = False, int(value)
    return found


def killed(directory: Path, generator: random.Random) -> dict[str, Any]:
    pid, pipe = fork(directory)
    heard = bytearray()
    if generator.random() < 0.2:
        listen(pipe, time.monotonic() + generator.uniform(0, 0.8), heard)
    elif listen(pipe, time.monotonic() + 60, heard, b"loss"):
        listen(pipe, time.monotonic() + generator.uniform(0, 0.3), heard)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    listen(pipe, time.monotonic() + 5, heard)
    os.close(pipe)
    return told(heard)


def main(directory: Path, num_kills: int, seed: int) -> None:
    warm_up()
    pid, pipe = fork(None)
    heard = bytearray()
    listen(pipe, time.monotonic() + 120, heard)
    os.waitpid(pid, 0)
    reference = told(heard)
    generator, runs = random.Random(seed), []
    for _ in range(num_kills):
        runs.append(killed(directory, generator))
        runs[-1]["restarted"] = max(runs[-1]["losses"], default=0) >= MAX_STEPS - 20
        if runs[-1]["restarted"]:
            shutil.rmtree(directory)
            directory.mkdir()
    print(json.dumps({"reference": reference["losses"], "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
