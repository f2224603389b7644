"""Whole parameters through chunks: what is written is read back, element by element, wherever a layout puts it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CHUNK_NUMEL, layout_of, values_of

from chunkc.errors import ChunkcError
from chunkc.ir.layout import Chunk, ChunkList, Group, Layout, Placement
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.tiers import Tier
from chunkc.runtime.storage.staging import StagingStore

shapes = st.lists(
    st.sampled_from([(1,), (53,), (13, 7), (0, 3), (64,), (65,), (200,), (3, 50), ()]), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_every_parameter_and_moment_comes_back(shapes: list[tuple[int, ...]], dtype: str, on_device: bool) -> None:
    values = values_of(layout_of(shapes, dtype, on_device=on_device))
    generator = torch.Generator().manual_seed(len(shapes))
    given_values = [torch.randn(s, generator=generator) for s in shapes]
    values.load(StagingStore([v.clone() for v in given_values]))
    for index, value in enumerate(given_values):
        values.write_states(index, {"exp_avg": value + 1, "exp_avg_sq": value + 2})
    for index, value in enumerate(given_values):
        assert torch.equal(values.read_param(index), value), "param32 is exact in every dtype"
        assert torch.equal(values.read_gradient(index).float(), value.to(getattr(torch, dtype)).float()), "the payload"
        exp_avg, exp_avg_sq = (values.read_state(index, name) for name in ("exp_avg", "exp_avg_sq"))
        assert torch.equal(exp_avg, value + 1) and torch.equal(exp_avg_sq, value + 2)


def test_states_that_are_not_given_are_zero_and_others_are_refused() -> None:
    values = values_of(layout_of([(13, 7), (200,)], "float32", on_device=True))
    values.load(StagingStore([torch.ones(13, 7), torch.ones(200)]))
    for index in (0, 1):
        values.write_states(index, {"exp_avg": torch.ones_like(values.read_param(index))})
        assert bool((values.read_state(index, "exp_avg") == 1).all())
        assert not bool(values.read_state(index, "exp_avg_sq").any())
    with pytest.raises(ChunkcError, match="room for param32, exp_avg, exp_avg_sq, and none for momentum_buffer"):
        values.write_states(0, {"momentum_buffer": torch.ones(13, 7)})
    with pytest.raises(ChunkcError, match="none for momentum_buffer"):
        values.read_state(0, "momentum_buffer")


def test_a_gradient_in_the_payload_does_not_touch_the_master() -> None:
    values = values_of(layout_of([(13, 7), (200,)], "float32"))
    values.load(StagingStore([torch.ones(13, 7), torch.ones(200)]))
    values.write_gradient(1, torch.full((200,), 5.0))
    values.write_param(0, torch.full((13, 7), 2.0), payload=False)
    assert torch.equal(values.read_param(1), torch.ones(200))
    assert torch.equal(values.read_gradient(1), torch.full((200,), 5.0))
    assert torch.equal(values.read_param(0), torch.full((13, 7), 2.0))
    assert torch.equal(values.read_gradient(0), torch.ones(13, 7)), "param16 was left alone"


def test_strides_survive() -> None:
    weight = torch.randn(6, 4).t()
    info = ParamInfo("w", (), (4, 6), tuple(weight.stride()), "float32", True)
    chunk = Chunk(0, ChunkList.TRAINED, "float32", CHUNK_NUMEL, 24, Tier.HOST, Tier.HOST)
    values = values_of(Layout((info,), (Placement(0, 0, 0),), (chunk,), (Group(0, 0, 1),), CHUNK_NUMEL))
    values.load(StagingStore([weight]))
    assert torch.equal(values.read_param(0), weight)
    assert values.read_param(0).stride() == weight.stride()
    values.write_param(0, weight.contiguous() + 1, payload=True)
    assert torch.equal(values.read_gradient(0), weight + 1)


def test_staging_forgets_what_it_handed_over() -> None:
    staging = StagingStore([torch.ones(2)])
    staging.write_state(0, {"exp_avg": torch.full((2,), 3.0), "exp_avg_sq": torch.full((2,), 4.0)}, None)
    assert torch.equal(staging.read_state(0, ["exp_avg"])[0], torch.full((2,), 3.0))
    assert torch.equal(staging.exact(0), torch.ones(2))
    staging.forget(0)
    assert staging.state(0) is None and not staging.holds(0)
    with pytest.raises(KeyError, match="left the staging store"):
        staging.value(0)
