"""The ranks of a group on nodes, and how long links take to bring each what the others have.

Of eight ranks on nodes of four, under the mesh ``dp_shard=4,tp=2``:

    node                 0           1
    ranks                0 1 2 3     4 5 6 7
    lines along tp       0 1         4 5         within a node: over the links of its devices
                             2 3         6 7
    lines along dp_shard 0   2       4   6       over the network, too: a node receives two parts for
                           1   3       5   7     each of its two lines, and they share the network

All lines along a dimension exchange at the same time. Every rank of a job must price alike, so what the slowest line
and the busiest node take counts for all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from chunkc.cost.rates import Links
from chunkc.errors import HardwareError

Dims = tuple[tuple[str, int], ...]
"""Names and sizes of a mesh's dimensions; neighbours differ along the last one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The ranks of one line, on whatever nodes.

    ``shares_node``: whether some stand on one node. ``num_received``: what the busiest node receives from others for
    all its lines, in parts of one rank each.
    """

    num_ranks: int
    shares_node: bool
    num_received: int


@cache
def spread_of(dims: Dims, name: str, ranks_per_node: int) -> Spread:
    """The lines along the dimension ``name`` of a mesh whose ranks fill nodes in their order."""
    sizes = dict(dims)
    size, stride, num_ranks = sizes.get(name, 1), 1, 1
    for other, length in reversed(dims):
        stride = num_ranks if other == name else stride
        num_ranks *= length
    standing: Counter[tuple[int, int]] = Counter()
    for rank in range(num_ranks):
        first_of_line = rank - rank // stride % size * stride
        standing[first_of_line, rank // ranks_per_node] += 1
    received: Counter[int] = Counter()
    for (_, node), here in standing.items():
        received[node] += size - here
    return Spread(size, max(standing.values()) > 1, max(received.values()))


def neighbours(num_ranks: int, ranks_per_node: int) -> Spread:
    """Ranks that follow each other and are one line."""
    return spread_of((("", num_ranks),), "", ranks_per_node)


def parts_ms(part_nbytes: float, spread: Spread, links: Links) -> float:
    """Milliseconds in which every rank of a line receives ``part_nbytes`` from each other one.

    Raises:
        HardwareError: for ranks of several nodes on a machine of one.
    """
    if spread.num_received and links.node_gb_per_s is None:
        raise HardwareError(
            f"{spread.num_ranks} ranks that exchange stand on several nodes of {links.gpus_per_node}, but the machine "
            "has one node: name a machine with as many"
        )
    in_node_ms = (spread.num_ranks - 1) * part_nbytes / links.gpu_gb_per_s if spread.shares_node else 0.0
    between_ms = 0.0 if links.node_gb_per_s is None else spread.num_received * part_nbytes / links.node_gb_per_s
    return max(in_node_ms, between_ms) * 1e-6


def all_gather_ms(nbytes: float, spread: Spread, links: Links) -> float:
    """Milliseconds of an all-gather (or a reduce-scatter) of ``nbytes`` from every rank of a line."""
    return parts_ms(nbytes, spread, links) + (spread.num_ranks - 1) * links.hop_us * 1e-3


def all_reduce_ms(nbytes: float, spread: Spread, links: Links) -> float:
    """Milliseconds of an all-reduce of ``nbytes``: of a part of each rank, reduced and gathered."""
    return 2 * all_gather_ms(nbytes / spread.num_ranks, spread, links)


def send_ms(nbytes: float, num_stages: int, num_stage_ranks: int, links: Links) -> float:
    """Milliseconds in which every rank of a stage sends ``nbytes`` to its place in the next.

    Between the two stages where it takes longest. Stages follow each other, and ranks fill nodes in their order. What a
    node receives from another comes over its network, for all ranks together.

    Raises:
        HardwareError: for stages on several nodes of a machine of one.
    """
    slowest_ms = 0.0
    for stage in range(1, num_stages):
        receiving: Counter[int] = Counter()
        is_within = False
        for rank in range(stage * num_stage_ranks, (stage + 1) * num_stage_ranks):
            node, sender = rank // links.gpus_per_node, (rank - num_stage_ranks) // links.gpus_per_node
            receiving[node] += node != sender
            is_within |= node == sender
        most = max(receiving.values())
        if most and links.node_gb_per_s is None:
            raise HardwareError(
                f"{num_stages} stages of {num_stage_ranks} ranks stand on several nodes of {links.gpus_per_node}, but "
                "the machine has one node: name a machine with as many"
            )
        in_node_ms = nbytes / links.gpu_gb_per_s if is_within else 0.0
        between_ms = most * nbytes / links.node_gb_per_s if links.node_gb_per_s else 0.0
        slowest_ms = max(slowest_ms, max(in_node_ms, between_ms) * 1e-6 + links.hop_us * 1e-3)
    return slowest_ms
