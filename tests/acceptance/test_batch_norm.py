"""Batch normalisation in mixed precision: its parameters stay fp32 beside bf16 convolutions, as its buffers do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import chunkc


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )  # fmt: skip


@pytest.mark.parametrize("hw", ["emulated-8m-16m", "emulated-292k-16m"])
def test_trains_beside_plain_mixed_precision(hw: str) -> None:
    model = network()
    plain = copy.deepcopy(model)
    for module in plain:
        if not isinstance(module, nn.BatchNorm2d):
            module.to(torch.bfloat16)
    x = torch.randn(4, 3, 8, 8)
    chunkc.compile(model, hw, dtype=torch.bfloat16, backend="eager")
    assert model[1].weight.dtype is torch.float32
    assert model[0].weight.dtype is torch.bfloat16
    assert chunkc.plan(network(), hw, example_inputs=(x,), dtype=torch.bfloat16, backend="eager").layout.chunks
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        ours, theirs = model(x), plain(x.to(torch.bfloat16))
        assert ours.dtype is torch.bfloat16
        ours.float().square().sum().backward()
        theirs.float().square().sum().backward()
        if not optimizer.state_dict()["state"]:
            assert torch.equal(ours, theirs)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                torch.testing.assert_close(p.grad.clone(), q.grad, rtol=2**-6, atol=float(q.grad.abs().max()) * 2**-7)
            for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(a, b, msg=name)
            optimizer.step()
    assert all(v.dtype is torch.float32 for k, v in model.state_dict().items() if "tracked" not in k)
