"""Sessions of the tests of checkpoints, by every rank of a job and alike by the test's own process as the only rank."""

import hashlib
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from job_rank import Report
from pair import SMALL, Tower
from resumed import Bits, Dropping
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import chunkc

HW = "emulated-640k-64m"
NUM_ROWS = 12
"""Rows of a batch of all ranks together: 1, 2, 3 and 4 ranks have as many each."""

LENGTH = 8
VOCABULARY = 50
Op = tuple[Any, ...]


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (2, NUM_ROWS, LENGTH), generator=generator)
    own = slice(rank() * NUM_ROWS // num_ranks(), (rank() + 1) * NUM_ROWS // num_ranks())
    return tokens[0, own], tokens[1, own]


class Odd(Tower):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.scale = nn.Parameter(torch.randn(48) + 2, requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(53, 48).t())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale * self.one
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = hidden + (hidden @ self.turned) @ self.turned.t() * 1e-2
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, "dropping": Dropping}


class Session:
    """A training run of all ranks (``model``: a key of `MODELS`); its methods return what the test sees."""

    def __init__(
        self, model: str = "odd", seed: int = 0, handed_over: str = "float32", hw: str = HW, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        plain = MODELS[model]().to(getattr(torch, handed_over))
        torch.manual_seed(10 * seed + rank())
        random.seed(10 * seed + rank())
        self.model = chunkc.compile(plain, hw, **{**SMALL, **options})
        weights = [p for p in self.model.parameters() if p.dim() > 1 and p.requires_grad]
        others = [p for p in self.model.parameters() if p.dim() <= 1 and p.requires_grad]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = chunkc.AdamW8bit if options.get("optimizer") == "adamw8bit" else chunkc.AdamW
        self.optimizer = optimizer(groups, lr=1e-3)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=[1e-2, 2e-2], total_steps=300)
        self.future: Future[Path] | None = None

    def train(self, first: int, last: int) -> list[float]:
        """Losses of this rank in steps ``first`` to ``last``."""
        losses = []
        for step in range(first, last):
            loss = self.model(*rows(step))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, **options: Any) -> Path:
        saved = chunkc.save_checkpoint(
            directory, self.model, self.optimizer, self.scheduler, extra={"rank": rank()}, **options
        )
        return saved.result()

    def begin_save(self, directory: Path) -> bool:
        self.future = chunkc.save_checkpoint(
            directory, self.model, self.optimizer, self.scheduler, asynchronous=True, max_copied_nbytes=0
        )
        return self.future.done()

    def end_save(self) -> Path:
        assert self.future is not None
        return self.future.result(60)

    def save_full(self, directory: Path, full_rank: int) -> str:
        with full_disk(is_full=rank() == full_rank):
            return raised(lambda: self.save(directory))

    def save_refused(self, directory: Path, refusing_rank: int) -> str:
        extra = object() if rank() == refusing_rank else None
        return raised(lambda: chunkc.save_checkpoint(directory, self.model, self.optimizer, extra=extra))

    def load(self, directory: Path) -> tuple[int, Any]:
        found = chunkc.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)
        return found.step, found.extra

    def load_refused(self, directory: Path) -> str:
        return raised(lambda: self.load(directory))

    def bits(self) -> Bits | None:
        """Parameters, buffers, fp32 masters, moments, counts and learning rates, on rank 0."""
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        for key, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{order[key]} {name}": value for name, value in state.items()}
        found |= {f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)}
        return found if rank() == 0 else None

    def digest(self) -> str | None:
        found = self.bits()
        return None if found is None else digest_of(found)

    def draws(self) -> tuple[list[float], float]:
        return torch.rand(3).tolist(), random.random()


def digest_of(bits: Bits) -> str:
    found = hashlib.sha256()
    for name, value in sorted(bits.items()):
        found.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def session(options: dict[str, Any], ops: Sequence[Op]) -> list[Any]:
    run = Session(**options)
    return [getattr(run, name)(*args) for name, *args in ops]


def sessions(runs: Sequence[tuple[dict[str, Any], Sequence[Op]]]) -> list[list[Any]]:
    return [session(options, ops) for options, ops in runs]


def save_for_ever(report: Report, directory: Path) -> None:
    """Trains, and saves after every step, every other time beside the next ones; goes on from what is there."""
    run = Session(model="dropping")
    step = run.load(directory)[0] if any(directory.glob("0*")) else 0
    report(f"from {step}")
    for number in range(step, 100_000):
        run.train(number, number + 1)
        chunkc.save_checkpoint(directory, run.model, run.optimizer, run.scheduler, asynchronous=number % 2 == 1, keep=3)
        report(f"step {number + 1}.")


@contextmanager
def full_disk(*, is_full: bool) -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def raised(work: Callable[[], Any]) -> str:
    try:
        work()
    except (chunkc.ChunkcError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing, in process {os.getpid()}"
