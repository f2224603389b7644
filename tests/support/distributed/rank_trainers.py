"""Libraries that drive the loop, on the ranks of a job: plain under DDP, and over a compiled model."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import chunkc


@dataclass(frozen=True, slots=True)
class LoopRun:
    """``values``: of the model at the end; ``largest_update``: of any element in any step, where it was measured."""

    losses: list[float]
    values: dict[str, torch.Tensor]
    largest_update: float = 0.0


@contextmanager
def as_under_torchrun() -> Iterator[None]:
    """The variables by which libraries learn of the job that this process has joined."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # Lightning takes some away itself
            os.environ |= {} if value is None else {name: value}


def train_by_trainer(directory: str, changed: Mapping[str, Any]) -> tuple[LoopRun, LoopRun]:
    """A fine-tuning by transformers' Trainer, which wraps the model in DDP, and by ChunkcTrainer."""
    import trainers as t

    with as_under_torchrun():
        measured = t.LargestUpdate(model := t.seeded())
        plain = t.transformers.Trainer(
            model,
            t.arguments(Path(directory) / "plain", **changed),
            train_dataset=t.TRAIN,
            eval_dataset=t.EVAL,
            callbacks=[measured],
        )
        plain.train()
        ours = t.compiled(t.seeded(), t.saving(Path(directory) / "ours", **changed))
        ours.train()
        assert ours.model_wrapped is ours.model and plain.model_wrapped is not plain.model
        keys = ("loss", "eval_loss", "grad_norm", "learning_rate")
        runs = [[value for key in keys for value in t.logged(trainer, key)] for trainer in (plain, ours)]
        return LoopRun(runs[0], t.values(model), measured.largest), LoopRun(runs[1], t.values(ours.model))


def resume_trainer(directory: str, changed: Mapping[str, Any]) -> LoopRun:
    """The rest of a run of `train_by_trainer` from its first checkpoint."""
    import trainers as t

    with as_under_torchrun():
        ours = t.compiled(t.seeded(), t.saving(Path(directory) / "again", **changed))
        ours.train(resume_from_checkpoint=str(Path(directory) / "ours" / "checkpoint-3"))
        return LoopRun(t.logged(ours, "loss"), t.values(ours.model))


def find_batch_size(directory: str, hw: str) -> tuple[int, list[float]]:
    """The samples of a batch that ``auto_find_batch_size`` came to, from eight on, and its losses."""
    import trainers as t

    with as_under_torchrun():
        args = t.arguments(Path(directory), **t.SEARCHING)
        ours = t.compiled(t.seeded(), args, hw=hw)
        ours.train()
        return ours._train_batch_size, t.logged(ours, "loss")


def train_loop(library: str, is_ours: bool, directory: str, first_epoch: int = 0) -> LoopRun:
    """A run of `loops` on this rank; from a state saved after the first epoch where ``first_epoch`` is 1."""
    import loops

    folder = Path(directory)
    with as_under_torchrun():
        if library == "accelerate":
            return LoopRun(*loops.train_by_accelerate(is_ours, folder, first_epoch))
        changed: dict[str, Any] = {"devices": dist.get_world_size(), "use_distributed_sampler": True}
        changed |= {} if is_ours else {"strategy": "ddp"}
        return LoopRun(*loops.train_by_lightning(is_ours, folder, bool(first_epoch), **changed))


def train_by_trl(kind: str, is_ours: bool, directory: str) -> LoopRun:
    """A run of `trl_runs` on this rank."""
    import trl_runs

    os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}  # nothing is asked of the hub, or told
    with as_under_torchrun():
        losses, values, _ = trl_runs.run(kind, is_ours, Path(directory))
        return LoopRun(losses, values)


def train_qlora(examples: str, num_steps: int, lr: float, eps: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses, and the values of all floating-point entries at the end."""
    sys.path.insert(0, examples)
    try:
        import qlora
    finally:
        sys.path.remove(examples)
    rank, size = dist.get_rank(), dist.get_world_size()
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
