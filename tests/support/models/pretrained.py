"""Tiny transformers models, saved by transformers itself, and compiled ones from the meta device to load them into."""

from pathlib import Path

import torch
from models import CASES, Batch
from torch import nn

import chunkc

HW = "emulated-64m-1g"


def saved(name: str, folder: Path, max_shard_size: str = "5GB") -> nn.Module:
    plain = CASES[name].build()
    plain.save_pretrained(folder, max_shard_size=max_shard_size)
    return plain


def from_meta(name: str, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None) -> nn.Module:
    """The case's model with parameters in ``dtype`` and without values, compiled to train in ``compute`` dtype."""
    with torch.device("meta"):
        model = CASES[name].build()
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return chunkc.compile(model, HW, dtype=compute or dtype, backend="eager")


@torch.no_grad()
def logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    was_training = model.training
    found: torch.Tensor = model.eval()(**batch).logits
    model.train(was_training)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Two state dicts with the same names in the same order and bit-equal values in the same dtypes."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name
