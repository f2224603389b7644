"""The executor launches what the plan says, in its order, on its streams, after its waits, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.errors import PlanError
from chunkc.ir.actions import Op, Stream, parse
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.protocol import Event
from chunkc.runtime.execution.binder import Binder
from chunkc.runtime.execution.bound_action import RunEnvironment


class Recorder:
    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[Stream, str, tuple[str, ...]]] = []
        self._names: dict[int, str] = {}
        self._events: list[Event] = []
        self._device = compiled_of(model).runtime.device
        self._launch = self._device.launch
        monkeypatch.setattr(self._device, "launch", self.launch)

    def launch(self, stream: Stream, text: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        self.launches.append((stream, text, tuple(self._names.get(id(e), "before") for e in waits)))
        event = self._launch(stream, text, waits, work)
        self._events.append(event)
        self._names[id(event)] = text
        return event


def trained(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, chunkc.AdamW, Recorder]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    chunkc.compile(model, "emulated-140k-4m", dtype=torch.float32, backend="eager", chunk_size=4160)
    optimizer = chunkc.AdamW(model.parameters())
    iterate(model, optimizer)
    return model, optimizer, Recorder(model, monkeypatch)


def iterate(model: nn.Module, optimizer: chunkc.AdamW) -> None:
    model(torch.ones(4, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def planned_texts(plan: Plan) -> list[str]:
    return [str(a) for name in ("forward", "backward", "step") for a in plan.program(name).actions]


def test_actions_are_launched_in_the_plans_order_on_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, recorder = trained(monkeypatch)
    iterate(model, optimizer)
    iterate(model, optimizer)
    plan = chunkc.plan_of(model)
    assert [text for _, text, _ in recorder.launches] == planned_texts(plan) * 2
    assert all(stream is parse(text).stream for stream, text, _ in recorder.launches)
    assert {stream for stream, _, _ in recorder.launches} == {Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.CPU}


def test_every_wait_is_for_the_latest_run_of_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, recorder = trained(monkeypatch)
    iterate(model, optimizer)
    recorder.launches.clear()
    iterate(model, optimizer)
    plan = chunkc.plan_of(model)
    labelled = {label: str(a) for name in ("forward", "backward", "step") for label, a in plan.program(name).labelled()}
    for _, text, waited in recorder.launches:
        assert waited == tuple(labelled[label] for label in parse(text).waits)
    assert any(waited for _, _, waited in recorder.launches)


def test_bytes_moved_are_those_of_the_plan_in_every_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = trained(monkeypatch)
    for _ in range(3):
        iterate(model, optimizer)
        stats = chunkc.stats(model)
        assert stats["h2d_nbytes"] == stats["planned_h2d_nbytes"] > 0
        assert stats["d2h_nbytes"] == stats["planned_d2h_nbytes"] > 0


REFUSED = {
    "gather g0 @comm": "for a job of 1 ranks, this one has 1",
    "norm c0 @compute": "does not measure gradients",
    "decide @compute": "does not measure gradients",
}


@pytest.mark.parametrize("text", REFUSED)
def test_actions_that_this_plan_or_release_has_no_place_for(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = trained(monkeypatch)
    runtime = compiled_of(model).runtime
    binder = Binder(chunkc.plan_of(model), runtime.parameters.store, runtime.device, {}, RunEnvironment())
    action = parse(text)
    assert action.op not in (Op.RUN, Op.FETCH)
    with pytest.raises(PlanError, match=REFUSED[text]):
        binder.bind(replace(binder.plan.program("forward"), actions=(action,)))
