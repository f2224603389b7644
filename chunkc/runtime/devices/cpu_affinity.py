"""The cores of a machine that a rank's updates run on.

The ranks of one machine divide the cores that all may use, evenly and in rank order, node by node where every rank
keeps its even share so. Cores that a rank has to itself (``taskset``, ``numactl``) stay its own. Number of threads and
affinity belong to a thread, so the script's threads stay as they are.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil
import torch

from chunkc.distributed.process_group import Ranks

_LOGGER = logging.getLogger("chunkc")

NUM_LAUNCHER_CORES: Final = 2


@dataclass(frozen=True, slots=True)
class HostCores:
    """Cores of one rank; threads are kept on them where ``is_bound``, else only their number counts."""

    ids: tuple[int, ...]
    is_bound: bool

    def take(self) -> None:
        """Run parallel kernels that the calling thread starts from here on on these cores, a thread on each."""
        self.bind()
        torch.get_num_threads()  # a thread gets PyTorch's number when it first asks, and would get it later otherwise
        set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if os.name == "posix" else None
        if set_num_threads is not None:
            set_num_threads(len(self.ids))
        if torch.get_num_threads() != len(self.ids):
            _LOGGER.warning(
                "updates on the host keep PyTorch's %d threads instead of one on each of this rank's %d cores: this "
                "build of PyTorch has no OpenMP that can be told; set OMP_NUM_THREADS",
                *(torch.get_num_threads(), len(self.ids)),
            )

    def bind(self) -> None:
        """Keep the calling thread, and what it starts, on these cores; nothing where they are not bound."""
        if not self.is_bound:
            return
        try:
            os.sched_setaffinity(0, self.ids)
        except OSError as error:
            _LOGGER.warning(
                "updates on the host are not kept on this rank's cores %s: %s; start the ranks by numactl instead",
                *(list(self.ids), error),
            )


def leaving_launcher(cores: HostCores | None) -> HostCores | None:
    """``cores``, or all where these are None, but for those of the thread that launches and of autograd's.

    Two are left where that is at most half. Returns None where these are None and PyTorch has so few threads already.
    """
    ids, num_threads = tuple(usable_cores()) if cores is None else cores.ids, torch.get_num_threads()
    num_cores = min(len(ids), psutil.cpu_count(logical=False) or len(ids)) if cores is None else len(ids)
    num_used = num_cores - NUM_LAUNCHER_CORES if num_cores >= 2 * NUM_LAUNCHER_CORES else num_cores
    if cores is None:
        return None if num_threads <= num_used else HostCores(ids[:num_used], is_bound=False)
    return HostCores(ids[:num_used], cores.is_bound)


def own_cores(ranks: Ranks, root: Path = Path("/")) -> HostCores | None:
    """Return this rank's cores, or None where no other rank is on its machine. Collective."""
    own_place = [_machine(root), usable_cores()]
    places = [json.loads(text) for text in ranks.collect_from_job(json.dumps(own_place).encode())]
    if sum(machine == own_place[0] for machine, _ in places) == 1:
        return None
    alike = [rank for rank, place in enumerate(places) if place == own_place]
    nodes = numa_nodes(usable_cores(), root)
    return HostCores(divided(nodes, len(alike))[alike.index(ranks.job_rank)], len(nodes) > 1)


def usable_cores() -> list[int]:
    """Cores that the calling thread may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def numa_nodes(usable: Sequence[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Group ``usable`` by NUMA node, in order; cores without one come last, as a node of their own."""
    files = list((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    files.sort(key=lambda file: int(file.parent.name.removeprefix("node")))
    node_cores = [_parse(file.read_text(encoding="ascii")) for file in files]
    elsewhere = set(usable).difference(*node_cores)
    return [node for cores in (*node_cores, elsewhere) if (node := tuple(sorted(cores.intersection(usable))))]


def divided(nodes: Sequence[Sequence[int]], num_ranks: int) -> list[tuple[int, ...]]:
    """Divide cores evenly and in order; within one node, if all ranks can have their even share so."""
    num_ranks_on = [0] * len(nodes)
    for _ in range(num_ranks):  # to where a rank gets most: no other way leaves the worst off more
        best = max(range(len(nodes)), key=lambda i: len(nodes[i]) / (num_ranks_on[i] + 1))
        num_ranks_on[best] += 1
    used = [(node, count) for node, count in zip(nodes, num_ranks_on, strict=True) if count]
    cores = [core for node in nodes for core in node]
    if min(len(node) // count for node, count in used) >= max(1, len(cores) // num_ranks):
        return [part for node, count in used for part in _cut(node, count)]
    return _cut(cores, num_ranks)


def _cut(cores: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    bounds = [part * len(cores) // num_parts for part in range(num_parts + 1)]
    return [tuple(cores[start : max(end, start + 1)]) for start, end in pairwise(bounds)]


def _parse(cpulist: str) -> set[int]:
    """Parse a core list of the kernel, for example ``0-3,8``; a node of memory only has an empty one."""
    ranges = [part.split("-") for part in cpulist.strip().split(",") if part]
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}


def _machine(root: Path) -> str:
    """Return an identifier that all processes on this machine share, in any container, and no others."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
