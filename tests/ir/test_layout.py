"""Sizes and lookups of a layout, against numbers worked out by hand."""

from dataclasses import replace

import pytest
from plans import distributed, evicting, grad_chunk, resident, spanning

from chunkc.ir.actions import parse
from chunkc.ir.layout import Chunk, ChunkList, Slot
from chunkc.ir.state_spec import StateSpec
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify


def test_bytes_of_a_chunk() -> None:
    chunk = Chunk(0, ChunkList.TRAINED, "bfloat16", 1000, 900, Tier.HOST, Tier.HOST)
    assert (chunk.nbytes, chunk.used_nbytes) == (2000, 1800)


@pytest.mark.parametrize(("names", "nbytes"), [(("exp_avg", "exp_avg_sq"), 12), (("exp_avg",), 8), ((), 4)])
def test_bytes_of_states(names: tuple[str, ...], nbytes: int) -> None:
    """The fp32 master and the states, for the whole chunk, for what a copy moves, and for elements that are trained."""
    layout = replace(resident().layout(), state_spec=StateSpec(names, ("float32",) * len(names)))
    chunk = replace(layout.chunks[0], used_numel=layout.chunks[0].numel - 1)
    assert layout.os_nbytes_of(chunk) == nbytes * chunk.numel
    assert layout.used_os_nbytes_of(chunk) == nbytes * (chunk.numel - 1)
    assert layout.os_nbytes() == nbytes * sum(c.numel for c in layout.chunks if c.os_home is not None)
    params = sum(info.nbytes for info in layout.params)
    trained = (p for p in layout.placements if layout.chunks[p.chunk].list is ChunkList.TRAINED)
    states = nbytes * sum(layout.params[p.param].numel for p in trained)
    assert layout.model_data_nbytes() == params + states


def test_bytes_of_quantised_states() -> None:
    """A byte an element and a scale a block, counted for each parameter; what a chunk stores is aligned."""
    spec = StateSpec(("exp_avg", "exp_avg_sq"), ("uint8", "uint8"))
    assert (spec.nbytes_per_element, spec.nbytes_per_block, spec.block_numel) == (6, 8, 256)
    assert [spec.nbytes_of(n) for n in (0, 1, 256, 257)] == [0, 6 + 8, 6 * 256 + 8, 6 * 257 + 16]
    assert spec.stored_nbytes(256) == 7 * 256 and spec.stored_nbytes(256 * 32) == 256 * 32 * 6 + 256
    entries = {entry.name: entry for entry in spec.lists()}
    assert list(entries) == ["param32", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"]
    assert entries["exp_avg_scale"].entries(512, 1000) == slice(2, 4)


def test_slot_end() -> None:
    assert Slot(0, 256, 100).end == 356


def test_params_of_a_chunk_are_in_order_of_offset_and_include_spanning_ones() -> None:
    layout = spanning().layout()
    assert layout.params_of(0) == (0,)
    assert layout.params_of(1) == (0, 1)
    assert layout.params_of(2) == (2,)


def test_chunks_of_parameters() -> None:
    layout = spanning().layout()
    assert layout.chunks_of((0,)) == (0, 1)
    assert layout.chunks_of({1, 2}) == (1, 2)
    assert layout.chunks_of(frozenset({0, 1})) == (0, 1)


def test_ownership() -> None:
    layout = distributed(rank=1).layout()
    assert [layout.owner(c) for c in range(4)] == [0, 1, 0, 1]
    assert [c.index for c in layout.owned()] == [1, 3]
    assert [layout.group_of(c).index for c in range(4)] == [0, 0, 1, 1]
    assert list(layout.groups[1].chunks) == [2, 3]


def test_bytes_count_only_owned_chunks() -> None:
    layout = distributed().layout()
    assert layout.payload_nbytes() == 2 * 256
    assert layout.os_nbytes() == 2 * 768
    assert layout.nbytes_in(Tier.HOST) == 2 * (256 + 768)


def test_host_bytes_leave_out_what_lives_on_the_device() -> None:
    assert resident().layout().nbytes_in(Tier.HOST) == 0
    assert resident().layout().os_nbytes() == 2 * 768
    assert evicting().layout().nbytes_in(Tier.HOST) == 3 * (256 + 768)
    assert spanning().layout().nbytes_in(Tier.HOST) == 3 * 256 + 2 * 768
    assert grad_chunk().layout().nbytes_in(Tier.HOST) == 2 * 256 + 768


def test_model_data_counts_elements_without_padding() -> None:
    # 96 and 32 trained fp32 elements of 16 bytes, 64 frozen ones of 4
    assert spanning().layout().model_data_nbytes() == (96 + 32) * 16 + 64 * 4


def test_utilisation_leaves_out_gradient_chunks() -> None:
    assert grad_chunk().layout().utilisation() == 1.0
    assert evicting().but(numels=(16, 32, 64, 64)).layout().utilisation() == (16 + 32 + 64 + 64) / 192


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_add_the_exchange_of_means_to_reductions(num_replicas: int) -> None:
    """Each owner of a chunk of 256 bytes makes a part of the mean: it receives that part of the others' chunks, and
    their parts."""
    plan = distributed().build()
    layout = replace(plan.layout, num_replicas=num_replicas)
    verify(replace(plan, layout=layout))
    between = {1: 0, 2: 256, 3: 2 * 256 * 2 // 3}[num_replicas]
    expected = {"gather g0": 256, "reduce g0": 256 + between, "sum": 0}
    assert {text: layout.moved_nbytes(parse(f"{text} @comm")) for text in expected} == expected
    assert layout.num_ranks == 2 * num_replicas
    assert layout.nbytes_in(Tier.HOST) == plan.layout.nbytes_in(Tier.HOST), "every node has all of the model data"
    assert (layout.lines() == plan.layout.lines()) == (num_replicas == 1), "ranks agree on it"
