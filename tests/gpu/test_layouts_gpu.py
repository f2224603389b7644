"""Moves to another layout, and losses over several forwards, on a GPU: exact beside plain PyTorch on the same GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from machines import Machine
from pair import CHUNK_SIZE, Tower, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

pytestmark = pytest.mark.gpu
HOST_NBYTES = 1 << 30
STEPS: dict[str, list[Sequence[int]]] = {
    "a longer batch": [[4], [4], [36], [4], [36]],
    "two forwards in a loss": [[12, 12], [12, 8], [12, 12]],
    "three micro-batches, of which the last is longer": [[4, 4, 4], [4, 4, 30], [30, 4, 4]],
}


@pytest.mark.parametrize("name", STEPS)
def test_moves_between_layouts_are_exact(name: str, machine: Machine) -> None:
    torch.manual_seed(0)
    model = Tower()
    plain = copy.deepcopy(model).to(machine.torch_device)
    num, options = max(map(len, STEPS[name])), {"dtype": torch.float32, "backend": "eager", "chunk_size": CHUNK_SIZE}
    hw = machine.named(_enough(max(map(max, STEPS[name])), machine, accumulate=num, **options), HOST_NBYTES)
    ours = chunkc.compile(model, hw, accumulate=num, **options)
    pairs = (
        (ours, chunkc.AdamW(ours.parameters(), lr=1e-2, eps=1e-4)),
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)),
    )
    layouts = list[object]()
    for number, lengths in enumerate(STEPS[name]):
        for one, optimizer in pairs:
            _step(one, optimizer, number, lengths, machine, together=name.startswith("two"))
        layout = compiled_of(ours).runtime.layout
        layouts += [layout] if not layouts or layout is not layouts[-1] else []
    wanted = plain.state_dict()
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(value, wanted[key].cpu(), rtol=0, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert len(layouts) == 2 or not name.startswith("three")
    stats = chunkc.stats(ours)
    assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"]


def _enough(length: int, machine: Machine, **options: Any) -> int:
    """Device bytes with which one forward of ``length`` just fits; twice its activations for a second one."""
    model = chunkc.compile(Tower(), machine.hw(1, HOST_NBYTES), **options)
    with pytest.raises(chunkc.BudgetError) as refusal:
        model(*machine.put(batch(0, length)))
    least = refusal.value.min_device_nbytes
    return least + (least - machine.overhead_nbytes) // 32 + (length < 20) * (400 << 10)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    lengths: Sequence[int],
    machine: Machine,
    *,
    together: bool,
) -> None:
    """A step on the sum of a forward for each length: one backward for all (``together``), or one for each."""
    batches = [machine.put(batch(10 * number + i, length)) for i, length in enumerate(lengths)]
    if together:
        torch.stack([model(*one) for one in batches]).sum().backward()
    else:
        for one in batches:
            model(*one).backward()
    optimizer.step()
    optimizer.zero_grad()
