"""Updates of chunks on the device: launches are made ready once, and every step finds its own numbers in the tables."""

from collections.abc import Sequence

import pytest
import torch
from fake_cuda import FakeCuda, TorchKernels

from chunkc.runtime.devices.cuda_norm import GpuNorm, NormScratch
from chunkc.runtime.devices.cuda_update import GpuUpdate, StepTables
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import ADAM, LION, SGD, SGD_MOMENTUM, AdamHyper, Hyper, LionHyper, SgdHyper, UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs

CPU = torch.device("cpu")
NUMEL = 48
SLOW, FAST = (AdamHyper(lr, 0.9, 0.999, 1e-8, 0.0, decoupled=True) for lr in (1e-3, 1e-1))


def made(kernels: TorchKernels, tables: StepTables) -> tuple[GpuUpdate, torch.Tensor]:
    payload, gradient = torch.ones(NUMEL), torch.ones(NUMEL)
    triple = [torch.ones(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)]
    pieces = [Piece(0, 0, 16), Piece(1, 16, NUMEL)]
    return GpuUpdate(kernels, tables, ADAM, payload, triple, pieces, gradient), payload


def inputs(hypers: Sequence[Hyper], step: int, control: torch.Tensor | None = None) -> StepInputs:
    active = dict(enumerate(hypers))
    return StepInputs(active, dict.fromkeys(active, step), len(hypers), control=control)


def test_launches_are_made_ready_once_for_all_steps() -> None:
    api, kernels = FakeCuda(), TorchKernels()
    tables = StepTables(api.upload, CPU)
    updates = [made(kernels, tables)[0] for _ in range(3)]
    for step in range(1, 6):
        of_step = inputs([SLOW, FAST] if step > 1 else [SLOW, SLOW], step)
        for update in updates:
            update.update(of_step)
        if step == 2:
            num_built = kernels.num_built
    assert num_built == 3 + 3 * 2, "a restore each, and an update for one row and for two"
    assert kernels.num_built == num_built
    for update in updates:
        update.restore()
    assert kernels.num_built == num_built


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "hyper"),
    [
        (SGD, SgdHyper(0.1, 0.0, 0.0, 0.1, nesterov=False)),
        (SGD_MOMENTUM, SgdHyper(0.1, 0.9, 0.5, 0.1, nesterov=False)),
        (LION, LionHyper(0.1, 0.9, 0.99, 0.1)),
    ],
)
def test_every_rule_gives_the_bits_of_the_host(rule: UpdateRule, hyper: Hyper) -> None:
    """Over a first step, which begins from states of zero, and two more."""
    tables, pieces = StepTables(FakeCuda().upload, CPU), [Piece(0, 0, 16), Piece(1, 16, NUMEL)]
    draws = torch.randn(4, NUMEL, generator=torch.Generator().manual_seed(0))
    lists = [[draws[0].clone(), *(torch.full((NUMEL,), torch.nan) for _ in rule.states.names)] for _ in range(2)]
    payloads = [torch.zeros(NUMEL, dtype=torch.bfloat16) for _ in range(2)]
    gradients = draws[1].clone()
    on_gpu = GpuUpdate(TorchKernels(), tables, rule, payloads[0], lists[0], pieces, gradients)
    on_host = ChunkUpdate(rule, payloads[1], lists[1], pieces, gradient=gradients)
    for step in (1, 2, 3):
        gradients.copy_(draws[step])
        of_step = inputs([hyper, hyper], step)
        on_gpu.update(of_step)
        on_host.update(of_step)
    assert all(torch.equal(a, b) for a, b in zip((*lists[0], payloads[0]), (*lists[1], payloads[1]), strict=True))
    assert not torch.equal(lists[0][0], draws[0])


def test_a_step_of_fewer_rows_reads_its_own() -> None:
    """Tables stay where they are, and what they held before lies behind."""
    api = FakeCuda()
    tables = StepTables(api.upload, CPU)
    update, payload = made(TorchKernels(), tables)
    update.update(inputs([SLOW, FAST], 1))
    assert torch.allclose(payload[:16], torch.full((16,), 1 - 1e-3), rtol=0, atol=1e-6)
    assert torch.allclose(payload[16:], torch.full((32,), 1 - 1e-1), rtol=0, atol=1e-6)
    before = payload.clone()
    update.update(inputs([FAST, FAST], 2))
    assert torch.allclose(before - payload, torch.full((NUMEL,), 1e-1), rtol=0, atol=1e-4)


def test_updates_of_two_models_share_tables_and_not_numbers() -> None:
    kernels, tables = TorchKernels(), StepTables(FakeCuda().upload, CPU)
    (small, of_small), (large, of_large) = made(kernels, tables), made(kernels, tables)
    skipped = torch.tensor([1.0, 1.0])
    for step in (1, 2):
        large.update(inputs([SLOW] * 7, step))
        small.update(inputs([FAST, FAST], step, control=skipped))
    assert torch.equal(of_small, torch.ones(NUMEL)), "its decision says that nothing is to change"
    assert torch.allclose(of_large, torch.full((NUMEL,), 1 - 2e-3), rtol=0, atol=1e-5)


def test_tables_made_in_inference_mode_serve_steps_outside_of_it() -> None:
    update, payload = made(TorchKernels(), StepTables(FakeCuda().upload, CPU))
    with torch.inference_mode():
        update.update(inputs([SLOW, SLOW], 1))
    update.update(inputs([SLOW, SLOW], 2))
    assert torch.allclose(payload, torch.full((NUMEL,), 1 - 2e-3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("numel", [16, NUMEL])
def test_norms_are_made_ready_once_and_again_when_their_memory_grows(numel: int) -> None:
    kernels, scratch = TorchKernels(), NormScratch(CPU)
    gradient, out = torch.full((NUMEL,), 2.0), torch.zeros(2, dtype=torch.float64)
    norm = GpuNorm(kernels, scratch, gradient, [Piece(0, 0, numel)], out)
    for _ in range(3):
        norm()
    assert kernels.num_built == 1 and out.tolist() == [4.0 * numel, 0.0]
    pieces = [Piece(param, 16 * param, 16 * param + 16) for param in range(3)]
    GpuNorm(kernels, scratch, gradient, pieces, torch.zeros(2, dtype=torch.float64))()
    gradient.fill_(3.0)
    for _ in range(3):
        norm()
    assert kernels.num_built == 3 and out.tolist() == [9.0 * numel, 0.0]
