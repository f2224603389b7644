"""Acceptance (b), (c) and case 2 on a GPU: training is that of plain PyTorch on the same GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equalities import check_semantics, check_sixteen_bits, train_same_partition
from machines import Machine
from models import CASES, loss_of
from placements import coarse, smallest
from plan_runner import GetRunner, Setup
from steady import options, smallest_hw
from torch import nn
from training import SEMANTICS, GetPlain, assert_same_semantics, train_measured

import chunkc
from chunkc.passes import PlanOptions
from chunkc.runtime.devices.debug_settings import DebugSettings

pytestmark = pytest.mark.gpu
SLOW = pytest.mark.slow
SCHEDULED = replace(SEMANTICS, num_steps=8)
SGD = replace(SEMANTICS, optimizer="sgd", lr=0.05)
DROPOUT = replace(SEMANTICS, num_steps=8, seed=11)
MODELS = ("odd", "gpt2", "llama", "t5", "vit", "resnet")
OTHERS = [pytest.param(name, marks=SLOW) for name in ("bert", "albert")]


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_trains_as_plain_pytorch(name: str, runner_of: GetRunner, plain_of: GetPlain) -> None:
    runner = runner_of(name)
    check_semantics(runner, plain_of(name, SEMANTICS), smallest(runner))


@pytest.mark.parametrize("name", ["odd", "gpt2_small", *(pytest.param(n, marks=SLOW) for n in ("llama", "t5", "vit"))])
def test_trains_as_plain_pytorch_under_inductor(name: str, runner_of: GetRunner, plain_of: GetPlain) -> None:
    runner = runner_of(name, torch.float32, "inductor")
    check_semantics(runner, plain_of(name, SEMANTICS), coarse(runner))


@pytest.mark.parametrize("name", ["odd", "llama", "resnet"])
def test_updates_on_the_device_are_torchs(
    name: str, runner_of: GetRunner, plain_of: GetPlain, plain_64_of: GetPlain
) -> None:
    runner = runner_of(name)
    found = runner.train(Setup(PlanOptions(os_home="device")), SEMANTICS)
    assert runner.stats()["h2d_nbytes"] == 0
    assert_same_semantics(found, plain_of(name, SEMANTICS), plain_64_of(name, SEMANTICS))


@pytest.mark.parametrize("os_home", ["device", "host"])
def test_sgd_is_torchs(os_home: str, runner_of: GetRunner, plain_of: GetPlain) -> None:
    runner = runner_of("odd")
    setup = smallest(runner) if os_home == "host" else Setup(PlanOptions(os_home="device"))
    found = runner.train(setup, SGD)
    assert (runner.stats()["h2d_nbytes"] > 0) == (os_home == "host")
    assert_same_semantics(found, plain_of("odd", SGD))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.3, "betas": (0.8, 0.99)},
    ]


def reschedule(step: int, optimizer: torch.optim.Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group.update(lr=group["lr"] * (0.5 if (step + number) % 2 else 1.9), weight_decay=0.05 * step * number)


@pytest.mark.parametrize("os_home", ["device", "host"])
@pytest.mark.parametrize("kinds", [(chunkc.AdamW, torch.optim.AdamW), (chunkc.Adam, torch.optim.Adam)])
def test_hyperparameters_are_those_of_their_group_at_the_call_of_step(
    os_home: str, kinds: tuple[Any, Any], runner_of: GetRunner, machine: Machine
) -> None:
    """Case 3: they change in every step, in tables that are copied to the device while the host goes on."""
    runner, options = runner_of("odd"), SCHEDULED.options
    setup = smallest(runner) if os_home == "host" else Setup(PlanOptions(os_home="device"))
    setup = replace(setup, settings=DebugSettings(poison=True, max_delay_ms=0.5, seed=5))
    found = runner.train(setup, SCHEDULED, lambda model: kinds[0](groups(model), **options), reschedule)
    plain = runner.case.build().to(machine.torch_device)
    optimizer = kinds[1](groups(plain), **options)
    assert_same_semantics(found, train_measured(plain, runner.batches, optimizer, SCHEDULED, reschedule))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_bf16_is_as_good_as_plain_bf16(
    backend: str, runner_of: GetRunner, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    check_sixteen_bits(runner_of("odd", torch.bfloat16, backend), plain_of, plain_16_of)


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=SLOW) for n in ("llama", "t5", "vit"))])
def test_models_in_bf16_are_as_good_as_plain_bf16(
    name: str, runner_of: GetRunner, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    check_sixteen_bits(runner_of(name, torch.bfloat16), plain_of, plain_16_of)


@pytest.mark.parametrize(
    ("name", "backend"), [("gpt2_dropout", "eager"), ("gpt2_checkpointed", "eager"), ("odd_dropout", "inductor")]
)
def test_masks_are_those_of_torch_compile(name: str, backend: str, runner_of: GetRunner, machine: Machine) -> None:
    """The same seed, the same partition: the device's generator gives segments the masks that it gives whole graphs."""
    runner = runner_of(name, backend=backend)
    found = runner.train(smallest(runner), DROPOUT)
    wanted = train_same_partition(CASES[name], backend, DROPOUT, machine)
    assert_same_semantics(found, wanted)
    if backend == "eager":
        assert found.losses[0] == wanted.losses[0]


class MaskedRun:
    def __init__(self, hw: chunkc.Hardware, backend: str, machine: Machine) -> None:
        case = CASES["gpt2_checkpointed"]
        self.model = chunkc.compile(case.build(), hw, **options(backend))
        self.optimizer = chunkc.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = machine.put(case.batches())

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = loss_of(self.model(**self.batches[step % len(self.batches)]))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_masks_that_are_computed_again_go_on_after_a_resume(backend: str, machine: Machine, tmp_path: Path) -> None:
    """Two steps, a checkpoint and two more in a new model are four steps to the bit, whatever was drawn meanwhile."""
    hw = smallest_hw(machine, "gpt2_checkpointed", backend)
    torch.manual_seed(21)
    whole = MaskedRun(hw, backend, machine)
    losses = whole.train(0, 2)
    path = chunkc.save_checkpoint(tmp_path, whole.model, whole.optimizer).result()
    losses += whole.train(2, 4)
    wanted = {name: value.cpu() for name, value in whole.model.state_dict().items()}
    assert len(set(losses)) == 4
    del whole
    torch.manual_seed(22)
    resumed = MaskedRun(hw, backend, machine)
    resumed.train(3, 4)  # what is compiled now has seeded hidden generators, if there are any
    chunkc.load_checkpoint(path, resumed.model, resumed.optimizer)
    assert resumed.train(2, 4) == losses[2:]
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value.cpu(), wanted[name]), name
