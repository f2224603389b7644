"""``keep_fp32``: named parameters stand in fp32 chunks and their modules compute in fp32, beside others in 16 bits."""

from __future__ import annotations

import copy
import pickle
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from pair import Tower, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.errors import ChunkcError

NORMS = ("layers.*.0.*",)
IN_BF16: dict[str, Any] = {"dtype": torch.bfloat16, "backend": "eager", "keep_fp32": NORMS}


def is_kept(name: str) -> bool:
    return fnmatchcase(name, NORMS[0])


class Reference(nn.Module):
    """Casts around a normalisation, as a person would write them."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.dtype = norm, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.float()).to(self.dtype)


def tower(dtype: torch.dtype) -> Tower:
    """A tower in ``dtype`` whose normalisations compute in fp32."""
    torch.manual_seed(0)
    model = Tower().to(dtype)
    for layer in model.layers:
        layer[0] = Reference(layer[0].float(), dtype)
    return model


def by_name(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".norm.", "."): value for name, value in values.items()}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float16])
def test_modules_compute_in_fp32(dtype: torch.dtype) -> None:
    """Loss and gradients equal those of a model that casts by hand; the named parameters stand in fp32 chunks."""
    torch.manual_seed(0)
    model = chunkc.compile(Tower(), "emulated-448k-16m", dtype=dtype, backend="eager", keep_fp32=NORMS, loss_scale=1.0)
    plain = tower(dtype)
    losses = [found(*batch(0)) for found in (model, plain)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    wanted = by_name({n: p.grad for n, p in plain.named_parameters()})
    for name, param in model.named_parameters():
        assert param.dtype is param.grad.dtype is (torch.float32 if is_kept(name) else dtype), name
        assert torch.equal(param.grad.clone(), wanted[name]), name
    layout = chunkc.plan_of(model).layout
    dtypes = {info.name: layout.chunks[layout.placements[i].chunk].dtype for i, info in enumerate(layout.params)}
    assert {dtypes[n] for n in dtypes if is_kept(n)} == {"float32"}
    assert {dtypes[n] for n in dtypes if not is_kept(n)} == {str(dtype).removeprefix("torch.")}


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """Six steps, clipped over chunks of both dtypes."""
    torch.manual_seed(0)
    model = chunkc.compile(Tower(), "emulated-448k-16m", **IN_BF16)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for step in range(6):
        loss = model(*batch(step % 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-2] < losses[0] and losses[-1] < losses[1]
    return model


def in_fp32(state: dict[str, torch.Tensor]) -> Tower:
    plain = Tower()
    plain.load_state_dict(state)
    return plain


@pytest.mark.long
def test_evaluation_casts_and_plain_parameters_do_not(trained: nn.Module) -> None:
    """Programs and the gathered path; within ``full_params`` modules are as the user made them, each of them."""
    plain = in_fp32(trained.state_dict())
    with torch.no_grad():
        evaluated = [trained(*batch(0)).item() for _ in range(3)]
        with chunkc.full_params(trained):
            assert trained(*batch(0)).item() == plain(*batch(0)).item()
            hidden = torch.randn(2, 48)
            assert torch.equal(trained.layers[0](hidden), plain.layers[0](hidden))
        before = chunkc.stats(trained)["num_compiles"]
        assert trained(*batch(0)).item() == evaluated[-1]
        assert chunkc.stats(trained)["num_compiles"] == before
    assert evaluated == [evaluated[0]] * 3
    assert evaluated[0] == pytest.approx(plain(*batch(0)).item(), rel=2e-2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_plain_models(trained: nn.Module, copied: Any) -> None:
    """In the dtypes in which parameters were handed over, casting nothing."""
    found, plain = copied(trained), in_fp32(trained.state_dict())
    loss, wanted = found(*batch(0)), plain(*batch(0))
    assert loss.dtype is torch.float32 and loss.item() == wanted.item()


@pytest.mark.long
def test_the_plan_is_known_ahead() -> None:
    """The model is left as it was."""
    ahead, hw = Tower(), "emulated-448k-16m"
    planned = chunkc.plan(ahead, hw, example_inputs=batch(0), **IN_BF16)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ahead.modules())
    model = chunkc.compile(Tower(), hw, **IN_BF16)
    model(*batch(0)).backward()
    assert planned.digest() == chunkc.plan_of(model).digest()
    without = {**IN_BF16, "keep_fp32": ()}
    unkept = chunkc.plan(ahead, hw, example_inputs=batch(0), **without)
    assert unkept.digest() != planned.digest()
    for options, wanted in ((IN_BF16, planned), (without, unkept)):
        assert chunkc.plan(model, hw, example_inputs=batch(0), **options).digest() == wanted.digest()


class Scaled(nn.Module):
    """A module with a parameter of its own around others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((24,), 0.5))
        self.inner = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.scale * x, self.inner.weight) + self.inner(x)


def test_a_module_around_others_computes_in_fp32_as_a_whole() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 24), Scaled(), nn.Linear(24, 24))

    x, plain = torch.randn(4, 24), build().to(torch.bfloat16)
    plain[1] = Reference(build()[1], torch.bfloat16)
    model = chunkc.compile(build(), "emulated-64m-1g", **{**IN_BF16, "keep_fp32": ("1.*",)})
    assert torch.equal(model(x), plain(x.bfloat16()))
    with pytest.raises(ChunkcError, match=r"keeps scale of 1 \(Scaled\), but not its inner\.bias, inner\.weight"):
        chunkc.compile(build(), "emulated-64m-1g", **{**IN_BF16, "keep_fp32": ("1.scale",)})


def test_a_model_in_16_bits_keeps_them_too() -> None:
    """From the dtype of the model, without ``dtype=``."""
    plain = tower(torch.bfloat16)
    model = chunkc.compile(Tower().to(torch.bfloat16), "emulated-64m-1g", backend="eager", keep_fp32=NORMS)
    model.load_state_dict(by_name(plain.state_dict()))
    assert model(*batch(0)).item() == plain(*batch(0)).item()
    assert {p.dtype for n, p in model.named_parameters() if is_kept(n)} == {torch.float32}
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


def test_what_cannot_be_kept_is_refused() -> None:
    for patterns, message in (
        (("nothing.*",), "matches no parameter"),
        ("layers.*", "give a sequence"),
        (("layers.0.1.weight",), r"keeps weight of layers\.0\.1 \(Linear\), but not its bias"),
    ):
        model = Tower()
        with pytest.raises(ChunkcError, match=message):
            chunkc.compile(model, "emulated-64m-1g", dtype=torch.bfloat16, keep_fp32=patterns)
        assert type(model.head.weight) is nn.Parameter


@pytest.mark.parametrize("is_trained", [True, False])
def test_gradients_that_pass_frozen_fp16_are_scaled(is_trained: bool) -> None:
    """As those of adapters in fp32 do."""
    model = Tower()
    model.requires_grad_(False)
    model.head.requires_grad_(is_trained)
    model = chunkc.compile(model, "emulated-64m-1g", dtype=torch.float16, keep_fp32=("head.*",))
    assert (compiled_of(model).runtime.clipping.loss_scale is not None) == is_trained


def test_a_model_in_fp32_stays_as_it_is() -> None:
    model = chunkc.compile(Tower(), "emulated-64m-1g", dtype=torch.float32, backend="eager", keep_fp32=("*",))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
