"""A small training by accelerate's and by Lightning's loop, plain and over a compiled model, for the tests of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import llama
from torch import nn
from torch.utils.data import DataLoader, Dataset

import chunkc

HW = "emulated-320k-16m"
NUM_SAMPLES, LR, EPS = 12, 1e-2, 1e-4
COMPILED: dict[str, Any] = {"backend": "eager", "dtype": torch.float32}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; every sample is its own labels."""

    def __init__(self) -> None:
        self.tokens = torch.randint(3, 97, (NUM_SAMPLES, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def seeded() -> nn.Module:
    torch.manual_seed(0)
    model = llama(layers=1)
    model.config.use_cache = False
    return model.train()


def loader() -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Samples(), batch_size=2)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_by_accelerate(is_ours: bool, folder: Path, first_epoch: int = 0, **options: Any) -> tuple[list[float], Any]:
    """Two epochs with accumulation, clipping and a schedule; a state is saved after the first, or loaded before the
    second where ``first_epoch`` is 1. Losses of this rank, and the values at the end."""
    from accelerate import Accelerator

    from chunkc.integrations.accelerate import ChunkcAccelerator

    model, losses = seeded(), []
    accelerator = (ChunkcAccelerator if is_ours else Accelerator)(gradient_accumulation_steps=2, cpu=True)
    if is_ours:
        chunkc.compile(model, HW, accumulate=2, **COMPILED, **options)
    kind = chunkc.AdamW if is_ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=LR, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    wrapped, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    if first_epoch:
        accelerator.load_state(str(folder))
    for epoch in range(first_epoch, 2):
        for batch in batches:
            with accelerator.accumulate(wrapped):
                loss = wrapped(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(str(folder))
    if is_ours:
        assert accelerator.unwrap_model(wrapped) is wrapped is model
    return losses, values(model)


def train_by_lightning(is_ours: bool, folder: Path, resume: bool = False, **changed: Any) -> tuple[list[float], Any]:
    """Two epochs with accumulation, clipping and a schedule, ``folder/last.ckpt`` being of the first; or the second
    alone from there. Losses of this rank, and the values at the end."""
    import lightning.pytorch as pl

    from chunkc.integrations.lightning import ChunkcStrategy

    module = loop_module(chunkc.AdamW if is_ours else torch.optim.AdamW)
    strategy = ChunkcStrategy(HW, compile_options={"backend": "eager"}) if is_ours else "auto"
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    alone = {"devices": 1, "use_distributed_sampler": False}  # which shuffles
    options = (
        alone
        | {"strategy": strategy, "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        | changed
    )
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, **quiet, **options)
    module.folder = None if resume else folder / "last.ckpt"
    trainer.fit(module, loader(), ckpt_path=folder / "last.ckpt" if resume else None)
    return module.losses, values(module.model)


def loop_module(make_optimizer: Any) -> Any:
    """A LightningModule with ``losses``; it saves to ``folder`` at the end of its first epoch."""
    import lightning.pytorch as pl

    class LoopModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses, self.folder = seeded(), [], None

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            self.losses.append(float(loss))
            return loss

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0 and self.folder is not None:
                self.trainer.save_checkpoint(self.folder)

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.parameters(), lr=LR, eps=EPS)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)]

    return LoopModule()
