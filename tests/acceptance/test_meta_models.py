"""Models from the meta device: parameters get their values after chunkc.compile, and none is ever made up."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from models import CASES
from small import OPTIONS, Small
from torch import nn
from torch.nn import functional

import chunkc
from chunkc import ChunkcError

HW = "emulated-96k-64m"
NAMES = ("scale", "unused", "first.weight", "first.bias", "second.weight", "second.bias", "last.weight", "last.bias")


class Plain(nn.Module):
    """Linear layers, an embedding and a norm, which initialise themselves as torch's own do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 24)
        self.head = nn.Linear(24, 32, bias=False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(self.norm(self.embed(tokens)))) + self.empty.sum()
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def real() -> Small:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Small()


def on_meta(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A compiled model whose parameters came without values; its buffer is real."""
    with torch.device("meta"):
        model = Small()
    model.offset = torch.full((4,), 0.5)
    return chunkc.compile(model, HW, dtype=dtype, backend="eager")


def by_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state)


def by_copying(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(state[name])


def by_data(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(state[name])


def in_inference_mode(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        by_copying(model, state)


def by_full_params(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with chunkc.full_params(model), torch.no_grad():
        assert all(bool(p.isnan().all()) and p.device.type == "cpu" for p in model.parameters())
        by_copying(model, state)


WAYS = (by_state_dict, by_copying, by_data, in_inference_mode, by_full_params)


@pytest.mark.long(but="dtype1-by_copying")
@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("dtype", (pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16))
def test_a_model_that_is_loaded_after_compile_is_the_one_that_was_loaded_before(
    load: Callable[..., None], dtype: torch.dtype
) -> None:
    """To the bit, masters of mixed precision included, before and after three steps, under moves."""
    plain = real()
    model, wanted = on_meta(dtype), chunkc.compile(copy.deepcopy(plain), HW, dtype=dtype, backend="eager")
    load(model, plain.state_dict())
    assert_same_state(model, wanted)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    sides = [(m, chunkc.AdamW(m.parameters(), **OPTIONS)) for m in (model, wanted)]
    for _ in range(3):
        losses = []
        for side, optimizer in sides:
            loss = side(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert chunkc.plan_of(model).digest() == chunkc.plan_of(wanted).digest()
    assert_same_state(model, wanted)
    assert not torch.equal(model.state_dict()["first.weight"], plain.state_dict()["first.weight"])


def assert_same_state(model: nn.Module, wanted: nn.Module) -> None:
    found, expected = model.state_dict(), wanted.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_initialisation_in_place_draws_what_plain_pytorch_draws(dtype: torch.dtype) -> None:
    """``reset_parameters`` of torch's modules and ``torch.nn.init``, from the same seed, in the dtype handed over."""
    plain = Plain()
    with torch.device("meta"):
        model = Plain()
    chunkc.compile(model, HW, dtype=dtype, backend="eager")
    for side in (plain, model):
        torch.manual_seed(5)
        for module in (side.embed, side.norm, side.first, side.head):
            module.reset_parameters()
        nn.init.trunc_normal_(side.first.weight, std=0.1)
        nn.init.constant_(side.first.bias, 0.25)
        nn.init.xavier_uniform_(side.head.weight)
    if dtype is torch.float32:
        assert_same_state(model, plain)
    found = model.state_dict()
    for name in ("embed.weight", "norm.weight", "norm.bias", "first.bias", "head.weight", "empty"):
        assert torch.equal(found[name], plain.state_dict()[name]), name
    model(torch.arange(8).view(2, 4)).backward()
    assert bool(model.first.weight.grad.abs().sum() > 0)


def test_a_tied_parameter_is_given_its_value_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
    chunkc.compile(model, HW, dtype=torch.float32, backend="eager")
    nn.init.eye_(value := torch.empty(8, 8))
    with torch.no_grad():
        model[0].weight.copy_(value)
    x = torch.randn(4, 8)
    assert torch.equal(model(x), x)


# --- what has no value ------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[nn.Module], object]] = {
    "a clone": lambda m: m.first.weight.detach().clone(),
    "a sum": lambda m: m.first.weight.sum(),
    "an update in place": lambda m: m.first.weight.data.add_(1),
    "a state dict": lambda m: m.state_dict(),
    "a list": lambda m: m.first.weight.tolist(),
    "a copy of the model": copy.deepcopy,
    "a forward without gradients": lambda m: torch.no_grad()(m)(torch.randn(4, 8)),
    "an optimizer's state": lambda m: m.first.weight.chunkc_store.read_state(m.first.weight.chunkc_index),
}


@pytest.mark.parametrize("what", READS)
def test_reading_what_has_no_value_is_refused_by_name(what: str) -> None:
    model = on_meta()
    with torch.no_grad():
        model.scale.fill_(1)
        model.unused.zero_()
    with pytest.raises(ChunkcError, match=r"first\.weight.* came on the meta device"):
        READS[what](model)
    by_copying(model, real().state_dict())
    model(torch.randn(4, 8)).backward()


def test_training_without_values_is_refused_with_all_names_before_anything_changes() -> None:
    """Also when only a parameter that no graph uses is missing; afterwards the model can be loaded and trained."""
    model, state = on_meta(), real().state_dict()
    with pytest.raises(ChunkcError) as caught:
        model(torch.randn(4, 8))
    assert all(name in str(caught.value) for name in NAMES[:5]) and "and 3 more" in str(caught.value)
    assert "load_state_dict" in str(caught.value)
    model.load_state_dict({n: v for n, v in state.items() if n != "unused"}, strict=False)
    with pytest.raises(ChunkcError, match=r"^unused came on the meta device and were never given a value"):
        model(torch.randn(4, 8))
    with pytest.raises(chunkc.PlanNotReadyError):
        chunkc.plan_of(model)
    model.load_state_dict(state)
    model(torch.randn(4, 8)).backward()


def test_a_block_of_full_params_that_writes_some_leaves_the_others_without_value() -> None:
    model = on_meta()
    with chunkc.full_params(model), torch.no_grad():
        model.first.weight.fill_(2.0)
    assert torch.equal(model.first.weight.detach().clone(), torch.full((16, 8), 2.0))
    with pytest.raises(ChunkcError, match=r"first\.bias came on the meta device"):
        model.first.bias.sum()


def test_memory_is_taken_when_a_parameter_is_written() -> None:
    model = on_meta()
    staging = next(model.parameters()).chunkc_store.staging
    assert staging.nbytes() == 0
    with torch.no_grad():
        model.first.weight.fill_(1.0)
    assert staging.nbytes() == model.first.weight.numel() * 4


def test_moments_that_are_loaded_first_wait_for_the_values() -> None:
    """``optimizer.load_state_dict`` before the model's."""
    donor = chunkc.compile(real(), HW, dtype=torch.float32, backend="eager")
    optimizer, x = chunkc.AdamW(donor.parameters(), **OPTIONS), torch.randn(4, 8)
    donor(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    model = on_meta()
    second = chunkc.AdamW(model.parameters(), **OPTIONS)
    second.load_state_dict(optimizer.state_dict())
    model.load_state_dict(donor.state_dict())
    for side, stepper in ((donor, optimizer), (model, second)):
        side(x).backward()
        stepper.step()
        stepper.zero_grad()
    assert_same_state(model, donor)


def test_buffers_on_meta_are_refused_by_name_and_real_ones_are_not() -> None:
    with torch.device("meta"):
        model = Small()
    with pytest.raises(ChunkcError, match=r"buffers offset \(torch.float32, \(4,\)\) are on the meta device.*Assign"):
        chunkc.compile(model, HW, backend="eager")
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    model.offset = torch.zeros(4)
    chunkc.compile(model, HW, backend="eager")


@pytest.mark.long
def test_a_transformers_model_trains_from_meta() -> None:
    """Its buffers are given values by hand; the gradients are those of the model built on the CPU."""
    plain = CASES["llama"].build()
    with torch.device("meta"):
        model = CASES["llama"].build()
    for name, buffer in plain.named_buffers():
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._buffers[key] = buffer.clone()
    chunkc.compile(model, "emulated-64m-1g", dtype=torch.float32, backend="eager")
    model.load_state_dict(plain.state_dict())
    batch = CASES["llama"].batches()[0]
    for side in (model, plain):
        side(**batch).loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.clone(), q[1].grad, rtol=0, atol=1e-6, msg=name)
