"""Where the ranks of lines stand, and what links then take, by hand."""

from dataclasses import replace

import pytest
from costs import LINKS

from chunkc.cost.spread import Dims, Spread, all_gather_ms, all_reduce_ms, neighbours, send_ms, spread_of
from chunkc.errors import HardwareError

MESH = (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))
CASES = {
    "tp within nodes of two": (MESH, "tp", 2, Spread(2, True, 0)),
    "tp of one rank on each node": (MESH, "tp", 1, Spread(2, False, 1)),
    "pairs on neighbouring nodes of two: two lines, a part for each": (MESH, "dp_shard", 2, Spread(2, False, 2)),
    "pairs within nodes of four": (MESH, "dp_shard", 4, Spread(2, True, 0)),
    "replicas on two nodes of four: four lines": (MESH, "dp_replicate", 4, Spread(2, False, 4)),
    "replicas within a node of eight": (MESH, "dp_replicate", 8, Spread(2, True, 0)),
    "four ranks on two nodes, two lines": ((("dp_shard", 4), ("tp", 2)), "dp_shard", 4, Spread(4, True, 4)),
    "tp outside": ((("tp", 2), ("dp_shard", 4)), "tp", 4, Spread(2, False, 4)),
    "a node that is half full receives more": ((("dp_shard", 12),), "dp_shard", 8, Spread(12, True, 8)),
    "no such dimension": (MESH, "pp", 4, Spread(1, False, 0)),
    "no dimension at all": ((), "tp", 4, Spread(1, False, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_lines_on_nodes(name: str) -> None:
    dims, dimension, per_node, wanted = CASES[name]
    assert spread_of(dims, dimension, per_node) == wanted


@pytest.mark.parametrize("dims", [MESH, (("tp", 2), ("dp_shard", 3)), (("dp_shard", 4), ("pp", 3), ("tp", 2))])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 5, 8, 32])
def test_lines_are_those_of_a_grid(dims: Dims, per_node: int) -> None:
    """Against lines listed one by one from coordinates."""
    ranks: list[dict[str, int]] = [{}]
    for name, size in dims:
        ranks = [{**places, name: place} for places in ranks for place in range(size)]
    for name, size in dims:
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, places in enumerate(ranks):
            lines.setdefault(tuple(v for n, v in places.items() if n != name), []).append(rank // per_node)
        nodes = range(-(-len(ranks) // per_node))
        received = [sum(size - line.count(node) for line in lines.values() if node in line) for node in nodes]
        shares = any(len(set(line)) < size for line in lines.values())
        assert spread_of(dims, name, per_node) == Spread(size, shares, max(received))


def test_in_a_node_every_rank_receives_over_its_own_link() -> None:
    assert all_gather_ms(256, neighbours(8, 8), LINKS) == pytest.approx(7.0)
    assert all_reduce_ms(256, neighbours(8, 8), replace(LINKS, hop_us=500.0)) == pytest.approx(2 * (7 / 8 + 7 * 0.5))


def test_between_nodes_the_slower_of_link_and_network_counts() -> None:
    """Sixteen ranks on two nodes: 15 chunks into each rank, 8 of another node through a network for the whole node."""
    slow, fast = (replace(LINKS, node_gb_per_s=rate) for rate in (64e-6, 1.0))
    assert all_gather_ms(256, neighbours(16, 8), slow) == pytest.approx(8 * 4.0)
    assert all_gather_ms(256, neighbours(16, 8), fast) == pytest.approx(15.0)


def test_a_line_without_neighbours_uses_the_network_alone() -> None:
    """Two parts for each node, and a device's own link is not asked."""
    links = replace(LINKS, node_gb_per_s=512e-6)
    assert all_gather_ms(256, spread_of(MESH, "dp_shard", 2), links) == pytest.approx(1.0)


def test_several_nodes_need_a_network() -> None:
    with pytest.raises(HardwareError, match="16 ranks that exchange stand on several nodes of 8, but the machine has"):
        all_gather_ms(256, neighbours(16, 8), LINKS)


def test_what_a_stage_sends_is_as_slow_as_the_busiest_node_or_link() -> None:
    """Stages of four ranks on nodes of eight: the second stage is on the first one's node, the third on another."""
    links = replace(LINKS, node_gb_per_s=64e-6, hop_us=500.0)
    assert send_ms(64, 2, 4, replace(LINKS, hop_us=500.0)) == pytest.approx(64 / 256 + 0.5)
    assert send_ms(64, 3, 4, links) == pytest.approx(4 * 1.0 + 0.5)
    assert send_ms(64, 2, 8, links) == pytest.approx(8 * 1.0 + 0.5)
    # of six ranks two send within a node, and four to the next
    assert send_ms(64, 2, 6, links) == pytest.approx(4 * 1.0 + 0.5)
    with pytest.raises(HardwareError, match="2 stages of 8 ranks stand on several nodes of 8"):
        send_ms(64, 2, 8, LINKS)
