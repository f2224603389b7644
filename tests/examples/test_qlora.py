"""A base in 4 bits: packed bits stand in chunks, and adapters train as in plain PyTorch on one rank and on two."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from job import Pool
from rank_trainers import train_qlora
from torch import nn
from training import UPDATE_TOLERANCE, assert_close_elements

import chunkc
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.actions import Op
from chunkc.ir.layout import ChunkList

LR, EPS, NUM_STEPS = 1e-2, 1e-4, 5
EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture
def qlora(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import qlora

    return qlora


def plain_run(qlora: ModuleType, num_ranks: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of the mean over ranks' batches, each of which ``qlora.batch_of`` makes."""
    model = qlora.build(64, 2, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=EPS)
    losses = []
    for step in range(NUM_STEPS):
        tokens = torch.cat([qlora.batch_of(step * num_ranks + rank) for rank in range(num_ranks)])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.long
def test_adapters_over_packed_bits_train_as_in_plain_pytorch(qlora: ModuleType) -> None:
    """Acceptance (b); the base keeps its bits, moves as bits, and backward saves no unpacked weight."""
    wanted, values = plain_run(qlora)
    losses, found, plan, stats = qlora_run(qlora)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert found.keys() == values.keys()
    adapters = [name for name in values if ".up." in name or ".down." in name]
    assert_close_elements({n: found[n] for n in adapters}, {n: values[n] for n in adapters}, UPDATE_TOLERANCE * LR, "")
    rest = found.keys() - set(adapters)
    assert all(torch.equal(found[name], values[name]) for name in rest)
    packed = [p for p in plan.layout.params if p.dtype == "uint8"]
    assert len(packed) == 14 and sum(p.nbytes for p in packed) == 2 * (4 * 64 * 64 + 3 * 64 * 128) // 2
    chunks = {f"c{c.index}" for c in plan.layout.chunks if c.dtype == "uint8"}
    assert chunks and all(c.list is ChunkList.FROZEN for c in plan.layout.chunks if c.dtype == "uint8")
    assert any(a.op is Op.FETCH and a.target in chunks for p in plan.programs for a in p.actions)
    assert stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


def qlora_run(qlora: ModuleType) -> tuple[list[float], dict[str, torch.Tensor], chunkc.Plan, dict[str, int]]:
    model = chunkc.compile(qlora.build(64, 2, 4), "emulated-400k-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=EPS)
    losses = qlora.train(model, optimizer, NUM_STEPS)
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, values, chunkc.plan_of(model), chunkc.stats(model)


def test_backward_unpacks_again_and_saves_no_weight(qlora: ModuleType) -> None:
    """Bits are read in forward and in backward; the values kept between them are activations."""
    layers = [nn.Linear(128, 128, bias=False) for _ in range(3)]
    packed = nn.Sequential(*(qlora.QuantizedLinear(layer, 4) for layer in layers))
    for kept in (1.0, 0.0):  # of the layers' activations
        schedule = capture_ahead(packed, None, (torch.ones(2, 128),), "eager", lambda _, kept=kept: (kept, "")).schedule
        assert 0 < sum(value.nbytes for value in schedule.saved_values()) < 4 * 128 * 128 // 4
    read_twice = {schedule.params[p].name for p in schedule.backward.read_params()}
    assert {"1.packed", "2.packed"} <= read_twice


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_train_adapters_over_packed_bits(qlora: ModuleType, two_ranks: Pool) -> None:
    wanted, values = plain_run(qlora, 2)
    runs = two_ranks.run(train_qlora, EXAMPLES, NUM_STEPS, LR, EPS)
    assert [sum(of_step) / 2 for of_step in zip(*(losses for losses, _ in runs), strict=True)] == pytest.approx(
        wanted, rel=1e-5
    )
    for _, found in runs:
        assert_close_elements(found, {n: v for n, v in values.items() if n in found}, UPDATE_TOLERANCE * LR, "")


@pytest.mark.long
def test_the_example_runs(qlora: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--hw=emulated-400k-16m", "--backend=eager", "--steps=3", "--hidden=64", "--layers=2"]
    assert qlora.main(args) == 0
    assert "base in 4 bits: 40,960 bytes of" in capsys.readouterr().out
    assert "qlora" in sys.modules


class Quantized(torch.nn.Parameter):
    """As a library keeps what a tensor cannot hold."""


def test_packed_parameters_of_a_library_are_refused_by_name() -> None:
    model = torch.nn.Linear(4, 4)
    model.base = Quantized(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(chunkc.ChunkcError, match=r"base \(torch.uint8, \(8,\)\) are packed by a library"):
        chunkc.compile(model, "emulated-1m-16m")
    with pytest.raises(chunkc.ChunkcError, match="choose 'auto', float32, bfloat16, float16"):
        chunkc.compile(torch.nn.Linear(4, 4), "emulated-1m-16m", dtype=torch.uint8)
