"""Layouts of a job's ranks by named dimensions: columns, lines along ``tp``, and what is refused."""

from __future__ import annotations

import pytest

from chunkc.distributed.mesh import RankMesh, rank_mesh
from chunkc.errors import ChunkcError

DATA = RankMesh.of_data(8, 8)


def test_without_tensor_parallelism_all_ranks_are_one_column() -> None:
    nodes = RankMesh.of_data(8, 4)
    assert nodes.shape == (2, 4, 1) and nodes.columns == (tuple(range(8)),)
    assert [nodes.place_of(rank) for rank in range(8)] == [(rank, 0) for rank in range(8)]
    assert rank_mesh(None, 8, nodes) is nodes


def test_tensor_ranks_are_neighbours() -> None:
    mesh = rank_mesh("dp_replicate=2,dp_shard=2,tp=2", 8, DATA)
    assert mesh.shape == (2, 2, 2) and str(mesh) == "dp_replicate=2,dp_shard=2,tp=2"
    assert mesh.columns == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.tensor_lines == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.place_of(5) == (2, 1)


def test_ranks_with_slices_of_the_same_sequences_divide_chunks() -> None:
    mesh = rank_mesh("dp_replicate=2,cp=2", 8, DATA)
    assert mesh.shape == (2, 4, 1) and str(mesh) == "dp_replicate=2,dp_shard=2,cp=2"
    assert mesh.num_context == 2 and mesh.context_lines == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.dims == (("dp_replicate", 2), ("dp_shard", 2), ("cp", 2))
    assert rank_mesh("cp=8", 8, DATA).context_lines == (tuple(range(8)),)
    assert DATA.context_lines == tuple((rank,) for rank in range(8))


def test_plans_state_a_mesh_that_sizes_alone_do_not() -> None:
    dims = (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))
    assert rank_mesh("dp_replicate=2,dp_shard=2,tp=2", 8, DATA).dims == dims
    assert rank_mesh("tp=2,dp_replicate=1", 8, DATA).dims == (("dp_shard", 4), ("tp", 2))
    assert rank_mesh("pp=2", 8, DATA).dims == (("pp", 2), ("dp_shard", 4))
    for mesh in ("dp_shard=8", "dp_replicate=2,dp_shard=4", None):
        assert rank_mesh(mesh, 8, DATA).dims == ()


def test_stages_have_ranks_of_their_own() -> None:
    mesh = rank_mesh("pp=2,dp_replicate=2", 8, DATA, rank=6)
    assert str(mesh) == "pp=2,dp_replicate=2,dp_shard=2" and mesh.num_stages == 2
    assert mesh.stages == ((0, 1, 2, 3), (4, 5, 6, 7)) and mesh.ranks == mesh.stages[1]
    assert mesh.stage_lines == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.columns == (mesh.ranks,) and mesh.place_of(6) == (2, 0)


def test_ranks_of_a_stage_compute_together() -> None:
    mesh = rank_mesh("pp=2,dp_shard=2,tp=2", 8, DATA, rank=5)
    assert str(mesh) == "pp=2,dp_shard=2,tp=2" and mesh.ranks == (4, 5, 6, 7)
    assert mesh.tensor_lines == ((4, 5), (6, 7)) and mesh.columns == ((4, 6), (5, 7))
    assert mesh.stage_lines == ((0, 4), (1, 5), (2, 6), (3, 7)) and mesh.place_of(5) == (0, 1)


def test_all_ranks_make_the_groups_of_all_columns_in_one_order() -> None:
    for rank in range(8):
        mesh = rank_mesh("pp=2,dp_shard=2,tp=2", 8, DATA, rank=rank)
        assert mesh.columns_of_stages == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize("text", ["tp=4", "tp=4,dp_shard=2", " dp_shard=2, tp=4"])
def test_dp_shard_takes_what_is_left(text: str) -> None:
    assert rank_mesh(text, 8, DATA).shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ep=2", "supported are pp, dp_replicate, dp_shard, cp, tp"),
        ("cp=2,tp=2,dp_shard=2", "has cp beside tp or pp"),
        ("data=8", "supported are"),
        ("tp=3", "has 3 ranks, and the job has 8"),
        ("tp=2,dp_shard=2", "has 4 ranks, and the job has 8"),
        ("auto", "`chunkc plan --mesh auto`, which names the fastest mesh"),
        ("tp", "each dimension once"),
        ("tp=0", "each dimension once"),
        ("tp=2,tp=4", "each dimension once"),
        ("dp_replicate=4,dp_shard=1,tp=2", "name that dimension dp_shard"),
    ],
)
def test_others_are_refused(text: str, part: str) -> None:
    with pytest.raises(ChunkcError, match=part):
        rank_mesh(text, 8, DATA)


def test_a_mesh_is_a_mesh_or_a_text() -> None:
    with pytest.raises(ChunkcError, match="give a DeviceMesh, a text"):
        rank_mesh(8, 8, DATA)  # type: ignore[arg-type]
