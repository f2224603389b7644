"""Models of transformers that see slices: for good, or within a block, after which they are as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divided_models import DIVIDED_CASES
from torch import nn

from chunkc.distributed.mesh import RankMesh
from chunkc.errors import CaptureError
from chunkc.scenarios.slicing import sliced_ahead


def slices(num: int) -> RankMesh:
    return RankMesh(1, num, 1, tuple(range(num)), num_context=num)


def makers(model: Any) -> list[object]:
    """What makes biases in each layer that has a table of them, if it is not the class."""
    return [vars(layer).get("compute_bias") for layer in model.modules() if hasattr(layer, "compute_bias")]


def test_a_model_that_sees_slices_goes_on_to_after_it_is_planned_with_others() -> None:
    model = DIVIDED_CASES["t5"].build()
    plain = makers(model)
    assert len(plain) > 2 and not any(plain)
    with sliced_ahead(model, slices(2)):
        before = makers(model)
        assert all(before)
        with sliced_ahead(model, slices(4)):
            assert all(one is not other for one, other in zip(makers(model), before, strict=True))
        assert makers(model) == before
        assert model.config._attn_implementation == "chunkc_slices"
    assert makers(model) == plain and model.config._attn_implementation == "sdpa"


def test_models_with_one_configuration_are_as_before() -> None:
    """As a teacher and a student; also where an encoder attends otherwise than its model."""
    first: Any = DIVIDED_CASES["t5"].build()
    first.encoder.set_attn_implementation("eager")
    second = type(first)(first.config)
    both = nn.ModuleList([first, second])
    before = [part.config._attn_implementation for part in both.modules() if hasattr(part, "config")]
    assert set(before) == {"eager", "sdpa"}
    with sliced_ahead(both, slices(2)):
        pass
    assert [part.config._attn_implementation for part in both.modules() if hasattr(part, "config")] == before


def test_a_mask_that_is_handed_to_attention_of_a_t5_is_refused() -> None:
    model: Any = DIVIDED_CASES["t5"].build()
    layer = model.encoder.block[0].layer[0].SelfAttention
    with sliced_ahead(model, slices(2)), pytest.raises(CaptureError, match="attention of a T5 is handed a mask"):
        layer(torch.ones(1, 3, 32), mask=torch.zeros(1, 1, 3, 6), position_bias=torch.zeros(1, 4, 3, 6))
