"""AdamW8bit trains as its definition, to the same bits wherever states stand, and exchanges states with AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pair import batch
from resumed import Bits, Run, check_equal
from torch import nn

import chunkc
from chunkc.runtime.update.block_quantisation import dequantise, is_signed, quantise


def make(params: Any) -> torch.optim.Optimizer:
    return chunkc.AdamW8bit(params, lr=1e-3)


def run_of(**options: Any) -> Run:
    return Run(**{"dtype": torch.bfloat16, "make": make, **options})


@pytest.fixture(scope="module")
def whole() -> tuple[list[float], Bits]:
    run = run_of()
    return run.train(0, 4), run.bits()


PLACEMENTS: dict[str, dict[str, Any]] = {
    "all resident": {"hw": "emulated-16m-16m"},
    "other chunks": {"chunk_size": 3000},
    "large chunks": {"chunk_size": 5000},
    "states on the device": {"wishes": {"num_resident_states": 2}},
    "streamed states": {"wishes": {"streamed_share": 0.5}},
}


@pytest.mark.long(but="states on the device")
@pytest.mark.parametrize("name", PLACEMENTS)
def test_neither_placement_nor_chunks_change_a_bit(name: str, whole: tuple[list[float], Bits]) -> None:
    run = run_of(**PLACEMENTS[name])
    assert run.train(0, 4) == whole[0]
    check_equal(run.bits(), whole[1])
    plan = chunkc.plan_of(run.model)
    assert all(chunk.numel % 256 == 0 for chunk in plan.layout.chunks)
    assert all(placed.offset % 256 == 0 for placed in plan.layout.placements)


def test_a_checkpoint_loads_under_other_chunks(whole: tuple[list[float], Bits], tmp_path: Path) -> None:
    """Blocks are the parameters' own: codes come back bit for bit, and training goes on as it would have."""
    first, second = run_of(), run_of(chunk_size=3000, seed=5)
    first.train(0, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    check_equal(second.bits(), first.bits())
    assert second.train(2, 4) == whole[0][2:]
    check_equal(second.bits(), whole[1])
    assert chunkc.plan_of(second.model).layout.chunk_numel != chunkc.plan_of(first.model).layout.chunk_numel


def test_states_are_exchanged_with_adamw(tmp_path: Path) -> None:
    """Those of AdamW are rounded when they enter chunks, in blocks of their parameter; the way back is exact."""
    fp32, coded = run_of(make=lambda p: chunkc.AdamW(p, lr=1e-3)), run_of(seed=3)
    fp32.train(0, 2)
    fp32.save(tmp_path / "fp32")
    coded.load(tmp_path / "fp32")
    check_equal(coded.bits(), fp32.bits())
    coded.model(*batch(0)).backward()
    coded.optimizer.zero_grad()
    found, num_rounded = coded.bits(), 0
    for name, value in fp32.bits().items():
        if name.endswith(("exp_avg", "exp_avg_sq")):
            signed = is_signed(name)
            rounded = dequantise(*quantise(value.flatten(), signed=signed), signed=signed).view_as(value)
            assert torch.equal(found[name], rounded), name
            num_rounded += not torch.equal(rounded, value)
    assert num_rounded > 4
    coded.save(tmp_path / "coded")
    back = run_of(make=lambda p: chunkc.AdamW(p, lr=1e-3), seed=4)
    back.load(tmp_path / "coded")
    check_equal(back.bits(), coded.bits())


def reference_step(
    params: list[nn.Parameter], states: list[list[torch.Tensor]], step: int, lr: float, decay: float
) -> None:
    """AdamW in float64 on decoded states, which are encoded again by `quantise`."""
    for param, state in zip(params, states, strict=True):
        assert param.grad is not None
        grad = param.grad.double().flatten()
        new = [0.9 * state[0].double() + 0.1 * grad, 0.999 * state[1].double() + 0.001 * grad**2]
        update = lr / (1 - 0.9**step) * new[0] / ((new[1] / (1 - 0.999**step)).sqrt() + 1e-8)
        param.data.copy_((param.data.double().flatten() * (1 - lr * decay) - update).view_as(param))
        for position, signed in enumerate((True, False)):
            state[position] = dequantise(*quantise(new[position].float(), signed=signed), signed=signed)


def test_training_is_that_of_the_definition() -> None:
    """Five steps beside a reference in float64; one code apart, an element's next step may differ by a few percent."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 100), nn.Tanh(), nn.Linear(100, 7))
    model = nn.Sequential(nn.Linear(24, 100), nn.Tanh(), nn.Linear(100, 7))
    model.load_state_dict(plain.state_dict())
    model = chunkc.compile(model, "emulated-1m-64m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW8bit(model.parameters(), lr=1e-2, weight_decay=0.1)
    params = list(plain.parameters())
    states = [[torch.zeros(p.numel()) for _ in range(2)] for p in params]
    for step in range(1, 6):
        for one in (model, plain):
            one.zero_grad()
            torch.manual_seed(step)
            one(torch.randn(16, 24)).square().mean().backward()
        optimizer.step()
        reference_step(params, states, step, 1e-2, 0.1)
    errors = [(p - q.detach()).abs().flatten() for p, q in zip(model.state_dict().values(), params, strict=True)]
    assert float(torch.cat(errors).median()) < 1e-6 and float(torch.cat(errors).max()) < 1e-3
    found = optimizer.state_dict()["state"]
    for index, state in enumerate(states):
        for name, wanted in zip(("exp_avg", "exp_avg_sq"), state, strict=True):
            near = (found[index][name].flatten() - wanted).abs() <= 1e-5 * wanted.abs().max()
            assert float(near.double().mean()) > 0.98, (index, name)


def test_the_plan_counts_codes_and_scales() -> None:
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    inputs = (torch.zeros(5, 12),)
    plan = chunkc.plan(model, "emulated-1m-64m", example_inputs=inputs, dtype=torch.bfloat16, optimizer="adamw8bit")
    numels = [p.numel() for p in model.parameters()]
    nbytes = sum(2 * n + 6 * n + 2 * 4 * -(-n // 256) for n in numels)
    assert plan.layout.model_data_nbytes() == nbytes
    words = " ".join(plan.summary().split())
    assert "6 bytes per element and 8 per block of 256" in words and "exp_avg_sq (8-bit)" in words


def test_adamw_finds_no_room_in_a_plan_of_codes() -> None:
    model = chunkc.compile(
        nn.Linear(4, 4), "emulated-1m-64m", dtype=torch.float32, backend="eager", optimizer="adamw8bit"
    )
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(chunkc.ChunkcError, match=r"room for the states of 8-bit Adam .*chunkc\.AdamW keeps"):
        chunkc.AdamW(model.parameters())
    chunkc.AdamW8bit(model.parameters()).step()
