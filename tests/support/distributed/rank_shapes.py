"""Training whose plans change between steps, on the ranks of a job, and what one process finds for all batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from data_dependent import MaskedLoss
from data_dependent import batch as rows
from pair import SMALL, Tower, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

Values = dict[str, torch.Tensor]
Losses = Callable[[nn.Module, int, int], torch.Tensor]
"""Loss of a model for a step and a rank."""


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MaskedLoss() if name == "masked" else Tower(depth=2)


def loss_of(model: nn.Module, name: str, lengths: Sequence[int], step: int, rank: int) -> torch.Tensor:
    """Of forwards of these lengths (sequences, or rows of which data pick some), or of one for each rank ("ragged")."""
    total = torch.zeros(())
    lengths = [lengths[rank]] if name == "ragged" else lengths
    for number, length in enumerate(lengths):
        seed = 100 * step + 10 * rank + number
        total = total + model(*(rows(seed, length) if name == "masked" else batch(seed, length)))
    return total


def train_changing(name: str, hw: str, steps: Sequence[Sequence[int]]) -> tuple[Values, int, int]:
    """Parameters after ``steps``, each a loss over forwards of such lengths; layouts; bytes moved in the last step."""
    rank, num = torch.distributed.get_rank(), 1 if name == "ragged" else max(map(len, steps))
    model = chunkc.compile(model_of(name), hw, accumulate=num, **SMALL)
    optimizer, layouts = chunkc.AdamW(model.parameters(), lr=1e-2, eps=1e-4), list[object]()
    for number, lengths in enumerate(steps):
        loss_of(model, name, lengths, number, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        layout = compiled_of(model).runtime.layout
        if not layouts or layout is not layouts[-1]:
            layouts.append(layout)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    return values, len(layouts), chunkc.stats(model)["h2d_nbytes"]


def train_plainly(name: str, steps: Sequence[Sequence[int]], num_ranks: int) -> Values:
    """The same in plain PyTorch on the mean of all ranks' losses."""
    model = copy.deepcopy(model_of(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for number, lengths in enumerate(steps):
        losses = [loss_of(model, name, lengths, number, rank) for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.state_dict().items()}
