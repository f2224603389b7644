"""Where values, gradients and states stand on another device than the host: fake tensors refuse to mix two."""

from collections.abc import Iterator

import pytest
import torch
from layouts import layout_of
from torch import nn

from chunkc._torch_compat.core import FakeTensorMode
from chunkc.ir.layout import Layout
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.model.parameters import Parameters
from chunkc.runtime.params.managed_tensor import _fill, inner_of
from chunkc.runtime.params.shell import Shell

FAR = torch.device("meta")
HOST = torch.device("cpu")
SHAPES: list[tuple[int, ...]] = [(13, 7), (1,), (200,), (0, 3)]


class FarDevice(EmulatedDevice):
    def __init__(self) -> None:
        super().__init__("far", 1 << 20, 1 << 20)
        self.torch_device = FAR

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=FAR)

    def free_arena(self, arena: torch.Tensor) -> None:
        """Nothing to give back."""

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST)

    def free_home(self, home: torch.Tensor) -> None:
        """Nothing to give back."""


def fake_shell(info: ParamInfo, device: torch.device, *, requires_grad: bool) -> torch.Tensor:
    dtype = getattr(torch, info.dtype)
    return torch.empty_strided(info.shape, info.stride, dtype=dtype, device=device, requires_grad=requires_grad)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Shell, "of", fake_shell)
    mode = FakeTensorMode()
    mode.allow_meta = True
    with mode:
        yield


def runtime_of(layout: Layout, *, adopted: bool = True) -> ModelRuntime:
    for _ in range(2):  # the mode holds on to the first result of an operator, which then cannot be swapped
        params = [nn.Parameter(torch.empty(info.shape, device=HOST)) for info in layout.params]
    runtime = ModelRuntime(layout.params, params, FarDevice())
    if adopted:
        count = len(layout.chunks)
        static = {f"c{i}": i for i in range(count)} | {f"os{i}": count + i for i in range(count)}
        runtime.parameters.adopt(layout, static if layout.slots else {})
    return runtime


@pytest.fixture(params=["host homes", "static residents", "staged"])
def memory(request: pytest.FixtureRequest) -> Parameters:
    layout = layout_of(SHAPES, "bfloat16", on_device=request.param == "static residents")
    return runtime_of(layout, adopted=request.param != "staged").parameters


def test_a_parameter_stands_on_the_device_and_so_does_what_is_read_of_it(memory: Parameters) -> None:
    for index, param in enumerate(memory.params):
        assert param.device == inner_of(param).device == FAR
        assert memory.read_param(index).device == FAR
        assert memory.read_param(index).dtype is torch.bfloat16


def test_what_is_handed_out_of_the_whole_model_stands_in_host_memory(memory: Parameters) -> None:
    for index in range(len(memory.params)):
        assert memory.read_exact(index).device == HOST
        assert {t.device for t in memory.read_state(index)} == {HOST}


@pytest.mark.parametrize("source", [FAR, HOST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_states_are_written_from_anywhere(
    memory: Parameters, source: torch.device, dtype: torch.dtype
) -> None:
    for index, info in enumerate(memory.infos):
        value = torch.ones(info.shape, dtype=dtype, device=source)
        memory.write_param(index, value)
        moments = torch.ones(info.shape, device=source)
        memory.write_state(index, {"exp_avg": moments, "exp_avg_sq": moments}, value.float())
        memory.write_param(index, value)


@pytest.mark.parametrize("on_device", [False, True])
def test_gradients_show_on_the_device_and_wait_in_host_memory(on_device: bool) -> None:
    runtime = runtime_of(layout_of(SHAPES, "bfloat16", on_device=on_device))
    gradients, memory = runtime.gradients, runtime.gradient_values
    gradients.begin(1, 1)
    gradients.land(range(len(SHAPES)))
    gradients.publish(memory, memory.averaged, range(len(SHAPES)))
    for index, info in enumerate(runtime.infos):
        grad = runtime.params[index].grad
        assert grad is not None and grad.device == FAR
        gradients.add(index, torch.ones(info.shape, dtype=torch.bfloat16, device=FAR))
        assert gradients.host_grads[index].device == HOST
        assert memory.read_grad(index, gradients.stamp).device == FAR
        memory.write_grad(index, gradients.stamp, torch.ones(info.shape, dtype=torch.bfloat16, device=FAR))
    memory.spill(range(len(SHAPES)))
    assert not gradients.chunk_grads and {t.device for t in gradients.host_grads.values()} == {HOST}
    assert memory.read_grad(0, gradients.stamp).device == FAR
    memory.write_grad(0, gradients.stamp, torch.ones(SHAPES[0], dtype=torch.bfloat16, device=FAR))
    assert gradients.host_grads[0].device == HOST
    memory.move_into_chunks()
    assert not gradients.host_grads


def test_handing_out_gradients_allocates_nothing() -> None:
    runtime = runtime_of(layout_of(SHAPES, "bfloat16"))
    runtime.gradients.begin(1, 1)
    runtime.gradients.publish(runtime.gradient_values, runtime.gradient_values.averaged, range(len(SHAPES)))
    for param in runtime.params:
        assert param.grad is not None
        grad, inner = inner_of(param.grad), inner_of(param)
        assert grad.untyped_storage()._cdata == inner.untyped_storage()._cdata
        assert not grad.requires_grad and (grad.shape, grad.stride()) == (inner.shape, inner.stride())


def test_filling_draws_on_the_parameters_device() -> None:
    memory = runtime_of(layout_of(SHAPES, "bfloat16"), adopted=False).parameters
    drawn: list[torch.device] = []
    write = memory.write_param

    def spy(index: int, value: torch.Tensor) -> None:
        drawn.append(value.device)
        write(index, value)

    memory.write_param = spy  # type: ignore[method-assign]
    _fill(torch.ops.aten.normal_.default, memory.params[0], (), {})  # fake insides would be traced, not dispatched
    assert drawn == [FAR]
