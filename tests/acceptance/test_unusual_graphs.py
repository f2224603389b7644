"""Graphs in which parameters are split, shared, returned or added: gradients and updates equal plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

WIDTH = 24


class Split(nn.Module):
    """Parts of one weight are used far apart; other weights between them claim its slot."""

    def __init__(self, split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH)
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self._split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._split(self.weight)
        x = torch.tanh(x @ first.reshape(-1, WIDTH, WIDTH)[0])
        for layer in self.between:
            x = torch.tanh(layer(x))
        for other in others:
            x = torch.tanh(x @ other.reshape(-1, WIDTH, WIDTH)[0])
        return x.square().sum()


class Diagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        diagonal = self.weight.diagonal()
        for layer in self.between:
            x = torch.tanh(layer(x))
        return (x * diagonal).square().sum()


class AddsLast(nn.Module):
    """The gradient of ``shift`` is the tangent of an output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


class AddsTwo(nn.Module):
    """Two parameters, and the input, have one gradient tensor between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, WIDTH))
        self.second = nn.Parameter(torch.randn(8, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(x + self.first + self.second)).square().sum()


class ReturnsCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, self.weight.clone()


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with other keys splits its one input projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x[:1].unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0), need_weights=False)
        return self.after(attended).square().sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chunk": lambda: Split(lambda w: w.chunk(3)),
    "unbind": lambda: Split(lambda w: w.unbind()),
    "split": lambda: Split(lambda w: w.split([1, 2])),
    "diagonal": Diagonal,
    "adds last": AddsLast,
    "adds two": AddsTwo,
    "returns copy": ReturnsCopy,
    "cross attention": CrossAttention,
}


def smallest(model: nn.Module, x: torch.Tensor) -> chunkc.Hardware:
    """The smallest machine on which ``model`` trains."""
    hw = chunkc.Hardware.parse("emulated-1k-64m")
    with pytest.raises(chunkc.BudgetError) as caught:
        chunkc.plan(
            copy.deepcopy(model), hw, example_inputs=(x.clone().requires_grad_(),), dtype=torch.float32, backend="eager"
        )
    nbytes = caught.value.min_device_nbytes
    return replace(hw, name=f"emulated-{nbytes}-64m", gpu_memory_nbytes=nbytes)


def scalar(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return sum(part.square().sum() for part in output) if isinstance(output, tuple) else output.sum()


@pytest.mark.long(but="cross attention")
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_plain_pytorch_in_the_least_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_EMULATED", "poison")
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    x = torch.randn(8, WIDTH)
    chunkc.compile(model, smallest(model, x), dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(3):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        scalar(model(ours)).backward()
        scalar(plain(theirs)).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None, key
            torch.testing.assert_close(p.grad.clone(), q.grad, rtol=1e-5, atol=1e-5)
        for stepped in (optimizer, plain_optimizer):
            stepped.step()
            stepped.zero_grad()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=2e-5)


def test_zeroing_gradients_in_place_is_no_accumulation() -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    plain = copy.deepcopy(model)
    chunkc.compile(model, "emulated-1m-4m", dtype=torch.float32, backend="eager")
    pairs = [
        (model, chunkc.AdamW(model.parameters(), lr=1e-2, eps=1e-4)),
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)),
    ]
    for module, optimizer in pairs:
        for _ in range(3):
            module(torch.ones(2, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=1e-6)


def test_an_update_that_fails_halfway_is_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    chunkc.compile(model, "emulated-1m-4m", dtype=torch.float32, backend="eager", chunk_size=1024)
    optimizer = chunkc.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    device = compiled_of(model).runtime.device
    launch, calls = device.launch, [0]

    def failing(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("in the middle")
        return launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(device, "launch", failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            optimizer.step()
    with pytest.raises(chunkc.ChunkcError, match="already called"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(chunkc.ChunkcError, match="halfway"):
        model(torch.ones(2, WIDTH))


def test_a_loaded_master_survives_until_the_chunks_are_there() -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
    values = copy.deepcopy(model.state_dict())
    chunkc.compile(model, "emulated-1m-4m", backend="eager")
    optimizer = chunkc.AdamW(model.parameters())
    masters = [p.detach().float() + 1e-4 for p in values.values()]
    state = {i: {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(m), "exp_avg_sq": torch.ones_like(m),
                 "master_param": m} for i, m in enumerate(masters)}  # fmt: skip
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    model.load_state_dict({key: m.to(torch.bfloat16) for key, m in zip(values, masters, strict=True)})
    with torch.no_grad():
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
    for index, master in enumerate(masters):
        assert torch.equal(optimizer.state_dict()["state"][index]["master_param"], master)


def test_loading_fp32_values_into_mixed_precision_rounds_nothing() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    chunkc.compile(model, "emulated-1m-4m", dtype=torch.bfloat16, backend="eager")
    for _ in range(2):
        model.load_state_dict(other.state_dict())
        for key, value in other.state_dict().items():
            assert torch.equal(model.state_dict()[key], value)
        model(torch.ones(1, WIDTH)).sum().backward()
        model.zero_grad()


def test_graphs_of_foreign_compilers_hold_no_parameters() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    chunkc.compile(model, "emulated-1m-4m", dtype=torch.float32, backend="eager")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def penalty() -> torch.Tensor:
        return model.weight.square().sum()

    with pytest.raises(Exception, match=r"inside another torch\.compile"):
        penalty()


def test_a_float_input_changed_in_place_under_mixed_precision_is_refused() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.linear(x).sum()

    model = chunkc.compile(Changes(), "emulated-1m-4m", dtype=torch.bfloat16, backend="eager")
    with pytest.raises(chunkc.CaptureError, match="input in place"):
        model(torch.ones(2, WIDTH))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(4), "is lazy"),
        (lambda: nn.Embedding(8, 4, sparse=True), "sparse gradients"),
    ],
)
def test_modules_that_cannot_be_compiled_are_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(chunkc.ChunkcError, match=message):
        chunkc.compile(make(), "emulated-1m-4m")
