"""What cannot be honoured: a clear error before anything changes, or the right thing, and nothing lost.

Every message names the rule and what was found. After a refused ``compile`` the model has the same parameter objects
with the same values, and trains as plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small import HW, OPTIONS, Small, twins_at
from torch import nn

import chunkc
from chunkc import BudgetError, ChunkcError


def changed(**tensors: nn.Parameter) -> nn.Module:
    """A small model with more parameters."""
    model = Small()
    for name, tensor in tensors.items():
        model.register_parameter(name, tensor)
    return model


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    """A small model with another buffer."""
    model = Small()
    model.register_buffer("ghost", buffer)
    return model


def overlapping() -> nn.Module:
    """Two parameters over one storage that are not the same parameter."""
    model, memory = Small(), torch.randn(20)
    model.one, model.two = nn.Parameter(memory[:12]), nn.Parameter(memory[8:])
    return model


def with_gradient() -> nn.Module:
    """A model in the middle of an iteration."""
    model = Small()
    model(torch.randn(2, 8)).backward()
    return model


def hooked(name: str) -> Callable[[], nn.Module]:
    """A model with a gradient hook on a parameter."""

    def make() -> nn.Module:
        model = Small()
        getattr(model.second.weight, name)(lambda *_: None)
        return model

    return make


BAD_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), "Sequential has no parameters"),
    "only empty ones": (lambda: changed_empty(), "has no parameters"),
    "integers": (lambda: changed(ids=nn.Parameter(torch.arange(4), requires_grad=False)), r"ids \(torch.int64"),
    "complex": (lambda: changed(phase=nn.Parameter(torch.randn(3, dtype=torch.cfloat))), r"phase \(torch.complex64"),
    "double": (lambda: changed(exact=nn.Parameter(torch.randn(3, dtype=torch.double))), r"exact \(torch.float64"),
    "sparse": (lambda: changed(table=nn.Parameter(torch.eye(4).to_sparse())), r"table .* sparse"),
    "meta": (lambda: with_buffer(torch.empty(3, device="meta")), r"buffers ghost .* meta device"),
    "overlap": (overlapping, "one and parameter two are different tensors over the same memory"),
    "gradients": (with_gradient, r"first\.weight .* hold gradients"),
    "hook": (hooked("register_hook"), r"second\.weight .* gradient hooks"),
    "accumulation hook": (hooked("register_post_accumulate_grad_hook"), r"second\.weight .* gradient hooks"),
}


def changed_empty() -> nn.Module:
    """A model whose only parameter has no elements."""
    model = nn.Module()
    model.register_parameter("none", nn.Parameter(torch.empty(0, 3)))
    return model


def unchanged(model: nn.Module, compile_: Callable[[], object], error: type[Exception], match: str) -> None:
    """``compile_`` raises, and the model is what it was."""
    params = dict(model.named_parameters())
    values = {n: p.detach().clone() for n, p in params.items()}
    with pytest.raises(error, match=match):
        compile_()
    assert dict(model.named_parameters()) is not params and list(dict(model.named_parameters())) == list(params)
    for name, param in model.named_parameters():
        assert param is params[name] and type(param) is nn.Parameter
        assert torch.equal(param.to_dense() if param.is_sparse else param, values[name].to_dense())
    assert model._compiled_call_impl is None and not model._state_dict_hooks
    assert "_apply" not in model.__dict__


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_models_that_cannot_be_trained_are_refused_whole(kind: str) -> None:
    """The rule, the parameter, its dtype and shape; the model stays as it was."""
    make, match = BAD_MODELS[kind]
    model = make()
    unchanged(model, lambda: chunkc.compile(model, HW, dtype=torch.float32, backend="eager"), ChunkcError, match)


BAD_OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "hw": ({"hw": "v1000-240g"}, "v100"),
    "ambiguous hw": ({"hw": "v100-32g"}, "32g"),
    "several gpus": ({"hw": "8xv100-240g"}, "8 devices, but this job has 1 rank"),
    "dtype": ({"dtype": torch.int8}, "int8"),
    "loss_scale": ({"loss_scale": 0.0}, "loss_scale=0.0"),
    "backend": ({"backend": "cudagraphs"}, "cudagraphs"),
    "chunk_size": ({"chunk_size": 0}, "chunk_size=0"),
    "chunk_size text": ({"chunk_size": "big"}, "'big'"),
    "accumulate": ({"accumulate": 0}, "accumulate=0.*1 to 4,096"),
    "accumulate_too_many": ({"accumulate": 10**12}, "accumulate=1000000000000.*1 to 4,096"),
    "keep_fp32": ({"keep_fp32": ("norm",)}, "keep_fp32"),
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_options_that_cannot_be_honoured_are_refused_whole(kind: str) -> None:
    """Also options that a later release will build: never ignored."""
    options, match = BAD_OPTIONS[kind]
    model = Small()
    options = {"hw": HW, "dtype": torch.float32, "backend": "eager", **options}
    unchanged(model, lambda: chunkc.compile(model, **options), ChunkcError, match)  # type: ignore[arg-type]
    trains_plainly(model)


def test_what_is_no_module_is_refused() -> None:
    """A function, a class, an optimizer."""
    for thing in (lambda x: x, Small, torch.optim.SGD(Small().parameters(), lr=1.0)):
        with pytest.raises(TypeError, match=r"takes an nn\.Module, found"):
            chunkc.compile(thing, HW)  # type: ignore[arg-type]


def trains_plainly(model: nn.Module) -> None:
    """A step of torch's own optimizer moves every trained parameter as it does in a copy that chunkc never saw."""
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    for side in (model, twin):
        optimizer = torch.optim.AdamW(side.parameters(), **OPTIONS)
        side(x).backward()
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def test_unknown_hardware_lists_what_is_known() -> None:
    """So that the next try is right."""
    with pytest.raises(ChunkcError, match=r"rtx4090") as caught:
        chunkc.compile(Small(), "rtx9999-64g")
    assert all(name in str(caught.value) for name in ("v100", "a100", "h100"))


def test_parameters_that_a_graph_holds_are_refused_whole() -> None:
    """A forward that still waits for its backward holds on to the parameters' insides; all of them come back."""
    model, x = Small(), torch.randn(4, 8)
    loss = model(x)
    unchanged(
        model, lambda: chunkc.compile(model, HW, dtype=torch.float32, backend="eager"), ChunkcError, "cannot be managed"
    )
    loss.backward()
    assert model.first.weight.grad is not None
    model.zero_grad()
    trains_plainly(model)


def test_a_second_compile_is_refused_and_the_first_goes_on() -> None:
    """Also after training began, and of a part of the model."""
    for phase in ("staged", "graded", "settled"):
        twins = twins_at(phase)
        for part in (twins.model, twins.model.second, nn.Sequential(twins.model, nn.Linear(2, 2))):
            with pytest.raises(ChunkcError, match="compiled already"):
                chunkc.compile(part, HW)
        twins.check_training()


class Decaying(nn.Module):
    """A forward that writes its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return self.linear(x).pow(2).mean()


class ThroughData(Decaying):
    """The same through ``.data``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.mul_(0.9)
        return self.linear(x).pow(2).mean()


@pytest.mark.parametrize("make", [Decaying, ThroughData])
def test_a_forward_that_writes_its_weight_is_refused_by_name_and_loses_nothing(make: type[nn.Module]) -> None:
    """At the first forward, before the weight has changed."""
    model = make()
    before = model.linear.weight.detach().clone()
    chunkc.compile(model, HW, dtype=torch.float32, backend="eager")
    with pytest.raises(ChunkcError, match=r"weight"):
        model(torch.randn(2, 8))
    assert torch.equal(model.linear.weight, before)
    assert torch.equal(model.state_dict()["linear.weight"], before)


def test_an_optimizer_of_ours_made_before_compile_is_refused() -> None:
    """It would step tensors that the model has given up."""
    model = Small()
    with pytest.raises(ChunkcError, match="compile the model before making the optimizer"):
        chunkc.AdamW(model.parameters())
    with pytest.raises(ChunkcError, match="belong to one compiled model"):
        chunkc.AdamW([*twins_at("staged").model.parameters(), *twins_at("staged").model.parameters()])


def test_a_budget_that_cannot_fit_says_what_would_and_that_works() -> None:
    """``BudgetError`` at the first forward: moment, tensors, bytes; the smallest device and host memory then train."""
    twins = twins_at("staged", hw="emulated-4k-64m")
    expected = [p.detach().clone() for p in twins.plain.parameters()]
    with pytest.raises(BudgetError, match="too few") as caught:
        twins.model(twins.x)
    error = caught.value
    assert error.moment.startswith(("fwd.", "bwd.")) and error.missing_nbytes > 0
    assert set(error.tensors) <= dict(twins.plain.named_parameters()).keys()
    assert error.min_device_nbytes == (4 << 10) + error.missing_nbytes
    for p, value in zip(twins.model.parameters(), expected, strict=True):
        assert torch.equal(p, value), "nothing is lost"
    fits = twins_at("staged", hw=emulated(error.min_device_nbytes, error.min_host_nbytes))
    fits.check_training()
    for device, host in ((-1, 0), (0, -1)):
        less = emulated(error.min_device_nbytes + device, error.min_host_nbytes + host)
        with pytest.raises(BudgetError):
            twins_at("settled", hw=less)


def emulated(device_nbytes: int, host_nbytes: int) -> str:
    """The machine with exactly these bytes, in the grammar's unit."""
    return f"emulated-{device_nbytes / 1024}k-{host_nbytes / 1024}k"


class Branching(Small):
    """A branch on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.last(self.second(hidden)).mean()


def test_a_graph_break_is_refused_with_its_line_and_nothing_is_lost() -> None:
    """The source line of the branch."""
    model = Branching()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    chunkc.compile(model, HW, dtype=torch.float32, backend="eager", fullgraph=True)
    with pytest.raises(chunkc.CaptureError, match=r"test_bad_input\.py.*\n?.*if hidden\.sum\(\) > 0|hidden\.sum"):
        model(torch.randn(2, 8))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
