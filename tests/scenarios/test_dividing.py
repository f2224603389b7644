"""Division of a user's model along tp: what is divided, what is left, what is refused, and that errors undo it.

tests/distributed/test_tensor_parallel.py trains such models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from divided_models import DIVIDED_CASES
from torch import nn

from chunkc._torch_compat.fake_job import fake_job, first_line
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import ChunkcError
from chunkc.scenarios.dividing import divided

TWO = RankMesh(1, 1, 2, (0, 1), dims=(("tp", 2),))
DATA = RankMesh.of_data(2, 2)


@pytest.fixture(autouse=True)
def pair() -> Iterator[None]:
    with fake_job(2):
        yield


def placements(model: nn.Module) -> dict[str, Any]:
    params: dict[str, Any] = dict(model.named_parameters())
    return {name: param.placements for name, param in params.items() if hasattr(param, "placements")}


def contents(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """Attributes of all modules, tables among them by what they hold."""
    return {
        name: {key: dict(held) if isinstance(held, dict) else held for key, held in vars(module).items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("mesh", ["tp=2", None])
def test_a_model_is_divided_by_the_plan_of_its_architecture(mesh: str | None) -> None:
    """Over the ranks that a text names, and over a mesh of the user's."""
    model = DIVIDED_CASES["llama_tied"].build()
    with divided(model, mesh or first_line(2, "tp"), TWO, "cpu"):
        pass
    assert len(placements(model)) == 2 * 7 + 1


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = DIVIDED_CASES["llama_tied"].build()
    before = contents(model)
    with pytest.raises(ZeroDivisionError), divided(model, "tp=2", TWO, "cpu"):
        assert placements(model) and contents(model) != before
        raise ZeroDivisionError
    assert contents(model) == before
    with divided(model, "tp=2", TWO, "cpu"):
        assert placements(model), "it can be divided after that"


def test_hooks_of_the_user_outlive_an_error() -> None:
    model = DIVIDED_CASES["llama_tied"].build()
    calls = list[str]()
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append("called"))  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), divided(model, "tp=2", TWO, "cpu"):
        raise ZeroDivisionError
    handle.remove()
    model(**DIVIDED_CASES["llama_tied"].batches()[0])
    assert calls == [] and not model.lm_head._forward_hooks


def test_other_models_are_left() -> None:
    model = nn.Linear(4, 4)
    with divided(model, "tp=2", TWO, "cpu"):
        assert placements(model) == {}


def test_without_tp_nothing_is_divided() -> None:
    model = DIVIDED_CASES["llama_tied"].build()
    with divided(model, "dp_shard=2", DATA, "cpu"):
        assert placements(model) == {}


def test_a_model_that_its_user_has_divided_is_left() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = DIVIDED_CASES["llama_tied"].build()
    parallelize_module(model, first_line(2, "tp"), {"model.layers.*.mlp.up_proj": ColwiseParallel()})
    before = placements(model)
    with divided(model, "tp=2", TWO, "cpu"):
        assert placements(model) == before and len(before) == 2


REFUSED = {
    "llama_tied": ("cuda", "on emulated devices alone so far, and LlamaForCausalLM is to train on cuda"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name: str) -> None:
    device_type, pattern = REFUSED[name]
    model = DIVIDED_CASES[name].build()
    before = contents(model)
    with pytest.raises(ChunkcError, match=pattern), divided(model, "tp=2", TWO, device_type):
        pass
    assert contents(model) == before


def test_another_layer_in_place_of_conv1d_is_refused() -> None:
    """A linear layer has its weight the other way round, and adapters would see columns in another order."""
    model: Any = DIVIDED_CASES["gpt2"].build()
    model.transformer.h[1].attn.c_attn = nn.Linear(32, 96)
    before = contents(model)
    with pytest.raises(ChunkcError, match="Linear in place of Conv1D"), divided(model, "tp=2", TWO, "cpu"):
        pass
    assert contents(model) == before


def test_layers_that_torch_cannot_divide_are_refused() -> None:
    """As those with adapters; what was divided before them is undone."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.adapter = base, nn.Linear(base.in_features, base.out_features)

    model: Any = DIVIDED_CASES["llama_tied"].build()
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    before = contents(model)
    with pytest.raises(ChunkcError, match="divides a layer that torch's styles cannot, such as one with adapters"):
        with divided(model, "tp=2", TWO, "cpu"):
            pass
    assert contents(model) == before


def test_heads_that_do_not_divide_are_refused() -> None:
    model: Any = DIVIDED_CASES["llama_tied"].build()
    model.config.num_key_value_heads = 1
    with pytest.raises(ChunkcError, match="tp=2 does not divide the 1 of num_key_value_heads of LlamaForCausalLM"):
        with divided(model, "tp=2", TWO, "cpu"):
            pass
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
