"""The user's training loops, what they leave behind by name, and the two equalities: of bits and of semantics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lion import Lion
from machines import EMULATED, Machine
from models import Batch, Case, loss_of
from torch import nn

import chunkc

Values = dict[str, torch.Tensor]
AfterStep = Callable[[int, torch.optim.Optimizer], None]
GetPlain = Callable[[str, "Recipe"], "Trained"]

GRADIENT_TOLERANCE = 1e-6
UPDATE_TOLERANCE = 1e-3
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. ``seed`` is set before the first step, which takes batch ``first_batch``."""

    num_steps: int = 20
    lr: float = 1e-3
    eps: float = 1e-8
    weight_decay: float = 0.1
    seed: int = 0
    first_batch: int = 0
    optimizer: str = "adamw"

    @property
    def options(self) -> dict[str, float]:
        of_optimizer = {"adamw": {"eps": self.eps}, "sgd": {"momentum": 0.9}, "lion": {}}[self.optimizer]
        return {"lr": self.lr, "weight_decay": self.weight_decay, **of_optimizer}

    def plain(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        makes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}
        return makes[self.optimizer](params, **self.options)

    def ours(self, params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        makes = {"adamw": chunkc.AdamW, "sgd": chunkc.SGD, "lion": chunkc.Lion}
        return makes[self.optimizer](params, **self.options, **options)


PLACEMENT = Recipe()
SEMANTICS = Recipe(eps=1e-4)


@dataclass(slots=True)
class Trained:
    """What a run leaves behind by name; ``exp_avg`` is the first moment whatever an optimizer calls it."""

    losses: list[float] = field(default_factory=list)
    gradients: Values = field(default_factory=dict)
    params: Values = field(default_factory=dict)
    exp_avg: Values = field(default_factory=dict)
    exp_avg_sq: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    largest_update: float = 0.0


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    after_step: AfterStep | None = None,
) -> Trained:
    found = Trained()
    torch.manual_seed(recipe.seed)
    for step in range(recipe.num_steps):
        loss = loss_of(model(**batches[(recipe.first_batch + step) % len(batches)]))
        loss.backward()
        if step == 0:
            found.gradients = {n: to_host(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        if after_step is not None:
            after_step(step, optimizer)
        optimizer.zero_grad()
        found.losses.append(loss.item())
    read_state(found, model, optimizer)
    return found


def read_state(found: Trained, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(p): n for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    state = {n: to_host(v) for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    found.params = {n: state[n] for n in names.values()}
    found.buffers = {n: to_host(v) for n, v in buffers.items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    for index, moments in optimizer.state_dict()["state"].items():
        for name, values in (
            ("exp_avg", found.exp_avg),
            ("momentum_buffer", found.exp_avg),
            ("exp_avg_sq", found.exp_avg_sq),
        ):
            if name in moments:
                values[order[index]] = to_host(moments[name])


def to_host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True)


def train_plain(case: Case, recipe: Recipe, machine: Machine = EMULATED, dtype: torch.dtype = torch.float32) -> Trained:
    model = case.build().to(machine.torch_device, dtype)
    batches = [cast(batch, dtype) for batch in machine.put(case.batches())]
    return train_measured(model, batches, recipe.plain(model.parameters()), recipe)


def train_measured(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    after_step: AfterStep | None = None,
) -> Trained:
    """``train`` of a plain model that measures the largest update of one step."""
    before = [p.detach().clone() for p in model.parameters()]
    largest = 0.0

    def measure(step: int, optimizer: torch.optim.Optimizer) -> None:
        nonlocal largest
        if after_step is not None:
            after_step(step, optimizer)
        for p, q in zip(model.parameters(), before, strict=True):
            if p.numel():
                largest = max(largest, float((p.detach() - q).abs().max()))
            q.copy_(p.detach())

    found = train(model, batches, optimizer, recipe, measure)
    found.largest_update = largest
    return found


def train_plain_16(
    case: Case, recipe: Recipe, dtype: torch.dtype = torch.bfloat16, machine: Machine = EMULATED
) -> Trained:
    """Eager PyTorch in ``dtype``, inputs cast and floating buffers as they are, with fp32 masters that AdamW steps."""
    model = case.build().to(machine.torch_device)
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in names.items()}
    for p in model.parameters():
        p.data = p.data.to(dtype)
    optimizer = recipe.plain(masters.values())
    found = Trained()
    batches = [cast(batch, dtype) for batch in machine.put(case.batches())]
    torch.manual_seed(recipe.seed)
    for step in range(recipe.num_steps):
        loss = loss_of(model(**batches[(recipe.first_batch + step) % len(batches)]))
        loss.backward()
        for n, p in names.items():
            masters[n].grad = None if p.grad is None else p.grad.float()
        if step == 0:
            found.gradients = {n: to_host(m.grad) for n, m in masters.items() if m.grad is not None}
        optimizer.step()
        with torch.no_grad():
            for n, p in names.items():
                p.copy_(masters[n])
        model.zero_grad()
        found.losses.append(loss.item())
    found.params = {n: to_host(p) for n, p in model.named_parameters()}
    found.params.update({n: to_host(m) for n, m in masters.items()})
    return found


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}


def assert_same_bits(found: Trained, wanted: Trained) -> None:
    """Acceptance (a): parameters, both moments, buffers and losses are equal to the bit."""
    assert found.losses == wanted.losses, f"losses differ: {found.losses} and {wanted.losses}"
    for kind in ("gradients", "params", "exp_avg", "exp_avg_sq", "buffers"):
        values, others = getattr(found, kind), getattr(wanted, kind)
        assert values.keys() == others.keys(), f"{kind} of {values.keys() ^ others.keys()} are in one run only"
        unequal = [f"{n}: {_difference(values[n], others[n])}" for n in others if not same_bits(values[n], others[n])]
        assert not unequal, f"{kind} differ in {len(unequal)} of {len(others)} tensors: {'; '.join(unequal[:5])}"


def same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit; a NaN is never right."""
    if value.dtype != other.dtype or value.shape != other.shape or bool(value.isnan().any()):
        return False
    return torch.equal(value.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def _difference(value: torch.Tensor, other: torch.Tensor) -> str:
    if value.dtype != other.dtype or value.shape != other.shape:
        return f"{value.dtype}{tuple(value.shape)} and {other.dtype}{tuple(other.shape)}"
    unequal = (value != other).sum().item()
    return f"{unequal} of {value.numel()} elements, by up to {(value - other).abs().max().item():.3g}"


def assert_same_gradients(found: Values, wanted: Values, tolerance: float = GRADIENT_TOLERANCE) -> None:
    """Every element within ``tolerance`` of the model's largest gradient; the same parameters have one."""
    assert found.keys() == wanted.keys(), f"gradients of {found.keys() ^ wanted.keys()} are in one run only"
    assert_close_elements(found, wanted, tolerance * largest(wanted), "gradients")


def assert_same_semantics(found: Trained, wanted: Trained, exact: Trained | None = None) -> None:
    """Acceptance (b); ``wanted`` is plain PyTorch's run with its largest update measured.

    ``exact``, in float64: parameters may be as far from ``wanted`` as two runs rounded as ``wanted`` are.
    """
    assert_same_gradients(found.gradients, wanted.gradients)
    allowed = UPDATE_TOLERANCE * wanted.largest_update
    if exact is not None:
        allowed = max(allowed, 2 * largest_error(wanted.params, exact.params))
    assert_close_elements(found.params, wanted.params, allowed, "parameters")
    for kind in ("exp_avg", "exp_avg_sq"):
        values, others = getattr(found, kind), getattr(wanted, kind)
        assert values.keys() == others.keys(), f"{kind} of {values.keys() ^ others.keys()} are in one run only"
        if others:
            assert_close_elements(values, others, UPDATE_TOLERANCE * largest(others), kind)
    for step, (loss, other) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(loss - other) <= LOSS_TOLERANCE * abs(other), f"step {step}: loss {loss}, plain PyTorch {other}"


def assert_close_elements(found: Mapping[str, Any], wanted: Mapping[str, Any], atol: float, kind: str) -> None:
    """Every element of every tensor within ``atol``; the message names the worst tensor."""
    assert atol > 0, f"{kind}: nothing to compare with"
    errors = {n: _largest_error(found[n], value) for n, value in wanted.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= atol, f"{kind}: {worst} is off by {errors[worst]:.3g}, allowed {atol:.3g}"


def largest(values: Mapping[str, torch.Tensor]) -> float:
    return max((float(v.abs().max()) for v in values.values() if v.numel()), default=0.0)


def largest_error(found: Values, wanted: Values) -> float:
    return max(_largest_error(found[n], value) for n, value in wanted.items())


def largest_loss_error(found: Iterable[float], wanted: Iterable[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def _largest_error(value: torch.Tensor, other: torch.Tensor) -> float:
    assert value.shape == other.shape, f"shapes {tuple(value.shape)} and {tuple(other.shape)}"
    if not other.numel():
        return 0.0
    error = float((value.double() - other.double()).abs().max())
    return float("inf") if error != error else error
