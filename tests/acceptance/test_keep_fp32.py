"""``keep_fp32``: named parameters stand in fp32 chunks and their modules compute in fp32, beside others in 16 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from pair import Tower, batch
from torch import nn

import chunkc
from chunkc.errors import ChunkcError

NORMS = ("layers.*.0.*",)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
        kept = ".0." in name
        assert param.dtype is param.grad.dtype is (torch.float32 if kept else dtype), name
        assert torch.equal(param.grad.clone(), wanted[name]), name
    layout = chunkc.plan_of(model).layout
    dtypes = {info.name: layout.chunks[layout.placements[i].chunk].dtype for i, info in enumerate(layout.params)}
    assert {dtypes[n] for n in dtypes if ".0." in n} == {"float32"}
    assert dtypes["head.weight"] == str(dtype).removeprefix("torch.")


def test_it_trains_evaluates_and_opens() -> None:
    """Steps, clipping over chunks of both dtypes, evaluation, copies, and plain parameters in between."""
    torch.manual_seed(0)
    model = chunkc.compile(Tower(), "emulated-448k-16m", dtype=torch.bfloat16, backend="eager", keep_fp32=NORMS)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for step in range(6):
        loss = model(*batch(step % 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-2] < losses[0] and losses[-1] < losses[1]
    with torch.no_grad():
        evaluated = [model(*batch(0)).item() for _ in range(3)]
    with chunkc.full_params(model):
        whole = model(*batch(0)).item()
    assert whole == pytest.approx(evaluated[-1], rel=2e-2)
    with torch.no_grad():
        assert copy.deepcopy(model)(*batch(0)).item() == pytest.approx(evaluated[-1], rel=1e-2)
        assert model(*batch(0)).item() == evaluated[-1]


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


def test_a_model_in_fp32_stays_as_it_is() -> None:
    model = chunkc.compile(Tower(), "emulated-64m-1g", dtype=torch.float32, backend="eager", keep_fp32=("*",))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
