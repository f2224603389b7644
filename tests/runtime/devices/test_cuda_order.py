"""A plan on the CUDA device: the calls of CUDA that it makes keep every wait of the plan, and the results are right."""

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from awaiting import once
from cuda_order import found_faults, record
from fake_cuda import GIB, FakeCuda, FakeEvent, FakeStream
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.device_selection import device_for
from chunkc.ir.actions import Op, Stream
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.devices.cuda_events import CudaEvent, CudaWork
from chunkc.runtime.devices.cuda_streams import CudaStreams
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.storage.parameter_io import ChunkValues

CONTEXT = GIB
EVICTED, ROOMIER, RESIDENT = 140 * 1024, 260 * 1024, 16 * 2**20
STEPS = 5
SETTINGS = [
    pytest.param(DebugSettings(), marks=pytest.mark.slow),
    DebugSettings(poison=True, max_delay_ms=1, seed=5),
]
MIXED = {"num_resident_states": 1, "streamed_share": 0.4}
"""One optimizer state on the device, two streamed, three on the host."""
WHOLE = {"num_resident_states": 1, "keeps_payloads": True, "streamed_share": 0.4}
"""The same, with the parameters of the first beside it."""


def cuda_device(api: FakeCuda, nbytes: int, settings: DebugSettings | None = None) -> CudaDevice:
    return CudaDevice("fake", api, MemoryLedger(api), CONTEXT + nbytes, 1 << 24, settings)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def compiled(
    hw: str, dtype: torch.dtype = torch.float32, wishes: Mapping[str, Any] | None = None, accumulate: int = 1
) -> tuple[nn.Module, chunkc.AdamW]:
    model = chunkc.compile(build(), hw, dtype=dtype, backend="eager", chunk_size=4160, accumulate=accumulate)
    made = compiled_of(model).settings
    made.options = replace(made.options, **(wishes or {}))
    return model, chunkc.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CudaDevice]]:
    devices: list[CudaDevice] = []
    monkeypatch.setattr(
        "chunkc.api.device_for", lambda hw: (chunkc.Hardware.parse(hw), devices[0]) if devices else device_for(hw)
    )
    yield devices
    devices.clear()


def iterate(
    model: nn.Module, optimizer: chunkc.AdamW, num_steps: int, micro_batches: int = 1, bad: Collection[int] = ()
) -> list[float]:
    losses = []
    for step in range(num_steps):
        torch.manual_seed(step)
        for _ in range(micro_batches):
            x = torch.randn(4, 64)
            x[0, 0] = torch.inf if step in bad else 0.0
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states(model: nn.Module, optimizer: chunkc.AdamW) -> list[torch.Tensor]:
    moments = [s[k] for s in optimizer.state_dict()["state"].values() for k in ("exp_avg", "exp_avg_sq")]
    return [*model.state_dict().values(), *moments]


def trained_on_host(nbytes: int, dtype: torch.dtype = torch.float32, micro_batches: int = 1) -> list[torch.Tensor]:
    model, optimizer = compiled(f"emulated-{nbytes >> 10}k-16m", dtype, accumulate=micro_batches)
    iterate(model, optimizer, STEPS, micro_batches)
    return states(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SETTINGS)
def test_evicted_training_equals_the_emulated_devices_bits(
    on_cuda: list[CudaDevice], settings: DebugSettings, dtype: torch.dtype
) -> None:
    wanted = trained_on_host(EVICTED, dtype)
    on_cuda.append(cuda_device(FakeCuda(), EVICTED, settings))
    model, optimizer = compiled(f"emulated-{EVICTED >> 10}k-16m", dtype)
    iterate(model, optimizer, STEPS)
    assert chunkc.stats(model)["h2d_nbytes"] > 0
    assert all(torch.equal(a, b) for a, b in zip(states(model, optimizer), wanted, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_resident_training_updates_by_kernels_with_one_upload_a_step(
    on_cuda: list[CudaDevice], dtype: torch.dtype, tolerance: float
) -> None:
    wanted = trained_on_host(RESIDENT, dtype)
    api = FakeCuda()
    on_cuda.append(cuda_device(api, RESIDENT))
    model, optimizer = compiled(f"emulated-{RESIDENT >> 10}k-16m", dtype)
    iterate(model, optimizer, STEPS)
    assert chunkc.stats(model)["h2d_nbytes"] == 0
    assert len(api.uploads) == 2 * STEPS + 1, "row_of_param and rows once a step for all chunks, and control once"
    for found, right in zip(states(model, optimizer), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=tolerance)  # an update is of size 1e-2


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_states_are_updated_by_kernels_and_on_the_host_in_one_step(
    on_cuda: list[CudaDevice], dtype: torch.dtype, tolerance: float, settings: DebugSettings
) -> None:
    wanted = trained_on_host(ROOMIER, dtype)
    api = FakeCuda()
    on_cuda.append(cuda_device(api, ROOMIER, settings))
    model, optimizer = compiled(f"emulated-{ROOMIER >> 10}k-16m", dtype, MIXED)
    iterate(model, optimizer, STEPS)
    updates = [a for a in chunkc.plan_of(model).program("step").actions if a.op is Op.UPDATE]
    assert [a.stream for a in updates].count(Stream.CPU) == 3 and len(updates) == 6
    assert len(api.uploads) == 2 * STEPS + 1
    for found, right in zip(states(model, optimizer), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=tolerance)
    assert compiled_of(model).counts_since_warm_up()["num_unasked_syncs"] == 0


def train_decided(nbytes: int, wishes: Mapping[str, Any]) -> tuple[nn.Module, chunkc.AdamW]:
    model, optimizer = compiled(f"emulated-{nbytes >> 10}k-16m", torch.float16, wishes)
    optimizer.max_grad_norm = 1e-3
    iterate(model, optimizer, STEPS, bad={2})
    return model, optimizer


@pytest.mark.long
@pytest.mark.parametrize(
    ("nbytes", "wishes"),
    [(EVICTED, {}), (ROOMIER, MIXED), (ROOMIER, WHOLE), (RESIDENT, {})],
    ids=["host", "mixed", "whole", "resident"],
)
def test_gradients_are_unscaled_clipped_and_skipped_wherever_updates_run(
    nbytes: int, wishes: Mapping[str, Any], on_cuda: list[CudaDevice]
) -> None:
    wanted, wanted_optimizer = train_decided(nbytes, wishes)
    on_cuda.append(cuda_device(FakeCuda(), nbytes, DebugSettings(poison=True, max_delay_ms=1, seed=5)))
    model, optimizer = train_decided(nbytes, wishes)
    scales = [compiled_of(m).runtime.clipping.loss_scale.state_dict() for m in (model, wanted)]
    assert scales[0] == scales[1] and scales[0]["scale"] < 2.0**16
    for found, right in zip(states(model, optimizer), states(wanted, wanted_optimizer), strict=True):
        tolerance = 1e-2 * min(float(right.abs().max()), 0.1)  # an update is of size 1e-2
        torch.testing.assert_close(found, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("nbytes", "wishes"), [(EVICTED, {}), (ROOMIER, MIXED), (ROOMIER, WHOLE)], ids=["host", "mixed", "whole"]
)
def test_every_wait_of_the_plan_is_kept(
    nbytes: int,
    wishes: Mapping[str, Any],
    dtype: torch.dtype,
    on_cuda: list[CudaDevice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeCuda()
    on_cuda.append(cuda_device(api, nbytes))
    model, optimizer = compiled(f"emulated-{nbytes >> 10}k-16m", dtype, wishes)
    iterate(model, optimizer, 2)
    recorder = record(on_cuda[0], api, monkeypatch)
    iterate(model, optimizer, 2)
    plan = chunkc.plan_of(model)
    texts = [str(a) for name in ("forward", "backward", "step") for a in plan.program(name).actions]
    assert [launch.label for launch in recorder.launches if launch.label != "read the norms"] == texts * 2
    waits = [(launch.stream, recorder.launches[w].stream) for launch in recorder.launches for w in launch.waits]
    crossings = {pair for pair in waits if pair[0] is not pair[1]}
    assert crossings >= {
        (Stream.COMPUTE, Stream.H2D),
        (Stream.D2H, Stream.COMPUTE),
        (Stream.CPU, Stream.D2H),
        (Stream.H2D, Stream.CPU),
    }
    assert ((Stream.CPU, Stream.COMPUTE) in crossings) == (dtype is torch.float16)
    assert found_faults(recorder, on_cuda[0], api) == []


@pytest.mark.parametrize(
    ("nbytes", "wishes"), [(EVICTED, {}), (ROOMIER, MIXED), (ROOMIER, WHOLE)], ids=["host", "mixed", "whole"]
)
def test_every_wait_of_several_micro_batches_is_kept(
    nbytes: int, wishes: Mapping[str, Any], on_cuda: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient chunks come back for the next micro-batch; updates of the step before still read them at home."""
    api = FakeCuda()
    on_cuda.append(cuda_device(api, nbytes))
    model, optimizer = compiled(f"emulated-{nbytes >> 10}k-16m", wishes=wishes, accumulate=3)
    iterate(model, optimizer, 2, 3)
    recorder = record(on_cuda[0], api, monkeypatch)
    iterate(model, optimizer, 2, 3)
    texts = [str(action) for _, _, action in chunkc.plan_of(model).labelled()]
    assert [launch.label for launch in recorder.launches] == texts * 2
    assert found_faults(recorder, on_cuda[0], api) == []


@pytest.mark.long
def test_several_micro_batches_equal_the_emulated_devices_bits(on_cuda: list[CudaDevice]) -> None:
    wanted = trained_on_host(EVICTED, torch.bfloat16, 3)
    on_cuda.append(cuda_device(FakeCuda(), EVICTED, DebugSettings(poison=True, max_delay_ms=1, seed=5)))
    model, optimizer = compiled(f"emulated-{EVICTED >> 10}k-16m", torch.bfloat16, accumulate=3)
    iterate(model, optimizer, STEPS, 3)
    stats = chunkc.stats(model)
    assert stats["h2d_nbytes"] == stats["planned_h2d_nbytes"] > 0
    assert all(torch.equal(a, b) for a, b in zip(states(model, optimizer), wanted, strict=True))


def stopped(stream: object, work: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("way", ["write", "recover"])
def test_streams_are_behind_what_the_caller_does_between_programs(
    way: str, on_cuda: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the caller's thread go to the compute stream and are no launches: no event stands for them."""
    api = FakeCuda()
    on_cuda.append(cuda_device(api, ROOMIER))
    model, optimizer = compiled(f"emulated-{ROOMIER >> 10}k-16m", wishes=MIXED)
    iterate(model, optimizer, 2)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    recorder = record(on_cuda[0], api, monkeypatch)
    by_caller: tuple[type, str] = (ChunkValues, "write_param") if way == "write" else (Executor, "recover")
    method = getattr(*by_caller)
    monkeypatch.setattr(*by_caller, lambda self, *a, **k: recorder.between_programs(partial(method, self, *a, **k)))
    if way == "write":
        model.load_state_dict(values)
    else:
        with monkeypatch.context() as failing:
            failing.setattr(api, "run", stopped)
            with pytest.raises(RuntimeError, match="on purpose"):
                model(torch.randn(4, 64))
    iterate(model, optimizer, 2)
    streams = {launch.stream for launch in recorder.launches}
    assert streams > {Stream.H2D, Stream.D2H} and any("the caller does" in x.label for x in recorder.launches)
    assert found_faults(recorder, on_cuda[0], api) == []


@pytest.mark.parametrize("pair", [("h2d", "cpu"), ("compute", "h2d"), ("d2h", "compute")])
def test_a_wait_that_is_forgotten_is_found(
    pair: tuple[str, str], on_cuda: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: leave out all waits of one kind."""
    api = FakeCuda()
    on_cuda.append(cuda_device(api, EVICTED))
    model, optimizer = compiled(f"emulated-{EVICTED >> 10}k-16m")
    iterate(model, optimizer, 2)
    recorder, streams = record(on_cuda[0], api, monkeypatch), on_cuda[0]._streams
    keys = {"compute": 0} | {str(s): stream.key for s, stream in streams._side.items()}
    wait_event = api.wait_event

    def forgetful(stream: FakeStream, event: FakeEvent) -> None:
        source = next(call.stream for call in api.calls if (call.kind, call.value) == ("record", event.number))
        if (stream.key, source) != (keys[pair[0]], keys.get(pair[1])):
            wait_event(stream, event)

    monkeypatch.setattr(api, "wait_event", forgetful)
    if pair == ("h2d", "cpu"):
        monkeypatch.setattr(CudaWork, "is_ready", lambda self: True)
        monkeypatch.setattr(CudaStreams, "_await", lambda self, event: None)
    iterate(model, optimizer, 2)
    found = found_faults(recorder, on_cuda[0], api)
    assert found and all(f"@{pair[0]}" in text for text in found[:1])


def test_a_worker_that_does_not_sleep_on_its_events_is_found(
    on_cuda: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeCuda()
    on_cuda.append(cuda_device(api, EVICTED))
    model, optimizer = compiled(f"emulated-{EVICTED >> 10}k-16m")
    iterate(model, optimizer, 2)
    recorder = record(on_cuda[0], api, monkeypatch)
    monkeypatch.setattr(CudaEvent, "join", lambda self: None)
    iterate(model, optimizer, 1)
    assert any(text.startswith("update") for text in found_faults(recorder, on_cuda[0], api))


@pytest.mark.long
def test_a_steady_state_makes_the_host_wait_for_the_worker_only(on_cuda: list[CudaDevice]) -> None:
    wanted = trained_on_host(EVICTED)
    on_cuda.append(cuda_device(FakeCuda(), EVICTED))
    model, optimizer = compiled(f"emulated-{EVICTED >> 10}k-16m")
    iterate(model, optimizer, STEPS)
    assert compiled_of(model).counts_since_warm_up()["num_unasked_syncs"] == 0
    assert all(torch.equal(a, b) for a, b in zip(states(model, optimizer), wanted, strict=True))
    assert {"allocated_peak_nbytes", "reserved_peak_nbytes"} <= chunkc.metrics(model).keys()


def test_out_of_memory_names_the_action_and_the_live_set(
    on_cuda: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeCuda()
    on_cuda.append(cuda_device(api, EVICTED))
    model, optimizer = compiled(f"emulated-{EVICTED >> 10}k-16m")
    iterate(model, optimizer, 2)
    before = [value.clone() for value in model.state_dict().values()]
    runs, run = [0], api.run

    def short_of_memory(stream: object, work: object) -> None:
        runs[0] += stream is api.current
        if runs[0] == 3:
            runs[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        run(stream, work)  # type: ignore[arg-type]

    monkeypatch.setattr(api, "run", short_of_memory)
    with pytest.raises(chunkc.DeviceMemoryError) as caught:
        model(torch.randn(4, 64))
    text = str(caught.value)
    plan = chunkc.plan_of(model)
    assert any(f"`{action}`" in text for action in plan.program("forward").actions)
    assert "in use: c" in text and "planned peak" in text and "Tried to allocate 2.00 GiB" in text
    assert f"arena {plan.layout.arena_nbytes} bytes" in text
    monkeypatch.undo()
    after = list(model.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "the model is as it was"


def test_a_gather_of_what_is_held_back_does_not_keep_the_caller_waiting() -> None:
    api, hold, order = FakeCuda(), threading.Event(), list[str]()
    streams = CudaStreams("fake", api, DebugSettings())
    update = streams.launch(Stream.CPU, "update", [], hold.wait)  # type: ignore[arg-type]
    for number in "01":
        fetch = streams.launch(Stream.H2D, "fetch", [update], partial(order.append, f"fetch {number}"))
        streams.launch(Stream.COMM, "gather", [fetch], partial(order.append, f"gather {number}"))
    streams.launch(Stream.COMPUTE, "run", [], partial(order.append, "run"))
    api.synchronize()
    assert order == ["run"] and streams.num_worker_waits == 0
    with once(lambda: streams.num_worker_waits == 1, hold.set):
        streams.enqueue_exchanges()
    api.synchronize()
    assert update.done() and [text for text in order if "gather" in text] == ["gather 0", "gather 1"]
    assert all(order.index(f"fetch {number}") < order.index(f"gather {number}") for number in "01")
    assert streams.num_worker_waits == 1
    streams.close()
