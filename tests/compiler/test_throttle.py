"""The law of a throttled device: the cost model's times for the very actions, and how a device comes by it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from costs import calibration, rates, with_work
from plans import streaming
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.device_selection import device_for
from chunkc.compiler.throttle import pace_law
from chunkc.cost.rates import cost_rates
from chunkc.cost.sharing import HOST_DRAM, Capacities
from chunkc.cost.simulate import simulate_with
from chunkc.errors import HardwareError
from chunkc.ir.actions import Stream

WIDTH = 64


def measured(hw: str) -> chunkc.Hardware:
    return replace(chunkc.Hardware.parse(hw), rates=calibration({}))


def test_every_action_of_a_plan_has_the_pace_that_the_simulator_gives_it() -> None:
    plan, machine = with_work(streaming().build(), 3), rates(sharing=Capacities({HOST_DRAM: 1e-6}))
    law, timeline = pace_law(machine), simulate_with(plan, machine)
    paces = law.paces(plan)
    assert paces.keys() == {str(a) for p in plan.programs for a in p.actions}
    assert {s.action: s.alone_ms for s in timeline.slices} == {
        s.action: paces[s.action].alone_ms for s in timeline.slices
    }
    uses = {str(s.stream): paces[s.action].use for s in timeline.slices if s.alone_ms > 0}
    together = tuple(uses[str(stream)] for stream in (Stream.H2D, Stream.CPU))
    assert law.speeds(together) == machine.sharing.speeds(together)
    assert max(law.speeds(together)) < 1


def test_the_variable_throttles_devices_to_the_machine_that_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = with_work(streaming().build(), 3)
    profile = tmp_path / "profile.json"
    measured("emulated-4m-16m").save(profile)
    assert device_for(profile)[1].paced_launch(plan) is None
    monkeypatch.setenv("CHUNKC_EMULATED", "throttle")
    assert device_for(profile)[1].paced_launch(plan) is not None
    with pytest.raises(HardwareError, match="how fast emulated-4m-16m is has to be measured"):
        device_for("emulated-4m-16m")


def test_training_is_equal_to_the_bit_when_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    hw = measured("emulated-120k-4m")

    def train() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = chunkc.compile(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))),
            replace(hw),
            dtype=torch.float32,
            backend="eager",
            chunk_size=4160,
        )
        optimizer = chunkc.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        device = compiled_of(model).runtime.device
        assert (device.paced_launch(chunkc.plan_of(model)) is not None) == device.settings.throttle
        assert chunkc.plan_of(model).moved_nbytes(Stream.D2H) > 0
        return model.state_dict()

    plain = train()
    monkeypatch.setenv("CHUNKC_EMULATED", "throttle,poison")
    throttled = train()
    assert cost_rates(hw).runs_inline
    assert all(torch.equal(plain[name], throttled[name]) for name in plain)
