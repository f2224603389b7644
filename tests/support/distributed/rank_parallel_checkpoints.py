"""Training runs over any mesh that save checkpoints and go on from them, and whole values of what they then have."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accumulating import micro_batches
from divided_models import DIVIDED_CASES
from models import Case, loss_of
from parallel_models import PARALLEL_CASES
from rank_tensor import Parallel, compiled, read_whole, whole
from torch import nn
from training import Trained

import chunkc

ALONE = ()
"""The mesh of one process."""
NUM_PARTS = 4
"""Batches of a step, whose ranks take as many each, one after the other."""
HW = "emulated-640k-64m"


@dataclass(slots=True)
class Resumed:
    """What a rank sees of a run: losses, its values before it trained, and what its generator draws in the end."""

    losses: list[float] = field(default_factory=list)
    before: Trained = field(default_factory=Trained)
    draws: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the case ``name`` over ``mesh``, whose every step is of the same batches, whatever the mesh."""

    name: str
    mesh: tuple[tuple[str, int], ...] = ALONE
    dtype: str = "float32"
    optimizer: str = "AdamW"

    @property
    def case(self) -> Case:
        return (PARALLEL_CASES | DIVIDED_CASES)[self.name]

    @property
    def num_data(self) -> int:
        sizes = dict(self.mesh)
        return sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)

    @property
    def data_rank(self) -> int:
        return self._rank() // dict(self.mesh).get("tp", 1)

    def _rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        dtype, accumulate = getattr(torch, self.dtype), NUM_PARTS // self.num_data
        if "tp" in dict(self.mesh):
            model = compiled(Parallel(self.name, self.mesh, dtype=dtype, accumulate=accumulate), HW)
        else:
            options = {"backend": "eager", "dtype": dtype, "accumulate": accumulate}
            model = chunkc.compile(self.case.build(), HW, **options)
        return model, getattr(chunkc, self.optimizer)(model.parameters(), lr=1e-2)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        """Losses of steps ``first`` to ``last``: of this rank's batches."""
        batches, losses = self.case.batches(), []
        for step in range(first, last):
            own = micro_batches(batches, step, NUM_PARTS)[self.data_rank :: self.num_data]
            for part in own:
                loss = loss_of(model(**part))
                (loss / len(own)).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses


def train_and_save(run: Run, folder: Path) -> tuple[Resumed, Resumed]:
    """Train two steps, save, and train two more: what resumes there sees, and this run itself."""
    model, optimizer = run.begin()
    torch.manual_seed(5 + run.data_rank)
    saved, gone_on = Resumed(run.train(model, optimizer, 0, 2)), Resumed()
    chunkc.save_checkpoint(folder, model, optimizer, extra={"mesh": list(run.mesh)}).result()
    read_whole(saved.before, model, optimizer)
    gone_on.losses = run.train(model, optimizer, 2, 4)
    gone_on.draws = torch.rand(3).tolist()
    return saved, gone_on


def load_and_train(run: Run, folder: Path, is_stepped: bool = False) -> Resumed:
    """Load, before the first step or after one, and train two steps more."""
    model, optimizer = run.begin()
    torch.manual_seed(99 + run.data_rank)
    if is_stepped:
        run.train(model, optimizer, 7, 8)
    found = Resumed()
    assert chunkc.load_checkpoint(folder, model, optimizer).step == 2
    read_whole(found.before, model, optimizer)
    found.losses = run.train(model, optimizer, 2, 4)
    found.draws = torch.rand(3).tolist()
    return found


def save_while_training(run: Run, folder: Path) -> Resumed:
    """Save beside training, with no room for copies; the values at the call."""
    model, optimizer = run.begin()
    found = Resumed(run.train(model, optimizer, 0, 2))
    read_whole(found.before, model, optimizer)
    future = chunkc.save_checkpoint(folder, model, optimizer, asynchronous=True, max_copied_nbytes=0)
    run.train(model, optimizer, 2, 4)
    future.result(60)
    return found


def load_other_model(run: Run, folder: Path) -> str:
    """The error of loading what another model has saved."""
    model, optimizer = run.begin()
    try:
        chunkc.load_checkpoint(folder, model, optimizer)
    except chunkc.CheckpointError as error:
        return str(error)
    return ""


def load_weights(name: str, mesh: tuple[tuple[str, int], ...], folder: Path, on_meta: bool) -> dict[str, Any]:
    """What a model of transformers has after it has loaded files: whole values, and its loss."""
    work = Parallel(name, mesh, is_text=True)
    batch = work.case.batches()[0]
    if on_meta:
        with torch.device("meta"):
            model = work.case.build()
        model = chunkc.compile(model, HW, mesh=_text(mesh), dtype=torch.float32, backend="eager")
    else:
        model = compiled(work, HW)
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = chunkc.load_pretrained(model, folder)
    values = {key: whole(value) for key, value in model.state_dict().items()}
    return {"report": report, "values": values, "loss": loss_of(model(**batch)).item()}


def load_part_of_weights(folder: Path) -> tuple[tuple[str, ...], str]:
    """Names that the files lack and that stay without a value, and the error of the next forward."""
    work = Parallel("llama_untied", (("tp", 2),), is_text=True)
    with torch.device("meta"):
        model = work.case.build()
    model = chunkc.compile(model, HW, mesh="tp=2", dtype=torch.float32, backend="eager")
    report = chunkc.load_pretrained(model, folder)
    try:
        model(**work.case.batches()[0])
    except chunkc.ChunkcError as error:
        return report.missing_keys, str(error)
    return report.missing_keys, ""


def save_for_transformers(name: str, folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Train a step and save what ``from_pretrained`` loads; whole values, and the error of ``save_pretrained``."""
    work = Parallel(name, is_text=True)
    model: Any = compiled(work, HW)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    loss_of(model(**work.case.batches()[0])).backward()
    optimizer.step()
    chunkc.save_safetensors(model, folder)
    model.config.save_pretrained(folder)
    text = ""
    try:
        model.save_pretrained(folder)
    except chunkc.ChunkcError as error:
        text = str(error)
    return {key: whole(value) for key, value in model.state_dict().items()}, text


def _text(mesh: tuple[tuple[str, int], ...]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh)
