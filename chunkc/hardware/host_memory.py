"""Host memory that this process may still take: the machine's free memory within its cgroups.

A process that passes the limit of its cgroup is killed without an error. A cgroup's usage counts file pages that the
kernel drops when memory is short, so they count as free here. Some virtual machines are given memory as they use it:
there `HOST_MEMORY` says how much there is, which nothing else can.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

from chunkc.errors import HardwareError
from chunkc.hardware.spelling import parse_size

HOST_MEMORY: Final = "CHUNKC_HOST_MEMORY"
"""The environment variable that says how much memory this machine comes to have, as sizes in ``hw`` are written."""

# (directory below /sys/fs/cgroup, limit, usage, key of droppable file pages in memory.stat)
_V2: Final = (".", "memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_nbytes(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Host bytes to be had without swapping or passing a cgroup limit; raises as `stated_host_nbytes`."""
    machine, stated_nbytes = psutil.virtual_memory(), stated_host_nbytes(environ)
    available_nbytes = machine.available
    if stated_nbytes is not None:
        available_nbytes += stated_nbytes - machine.total
    return max(0, min([available_nbytes, *cgroup_headrooms(root)]))


def stated_host_nbytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Host memory in bytes as `HOST_MEMORY` states it, if set; HardwareError when that is no size."""
    text = environ.get(HOST_MEMORY, "")
    if not text:
        return None
    try:
        return parse_size(text)
    except HardwareError as error:
        raise HardwareError(f"{HOST_MEMORY}={text}: {error}") from error


def cgroup_headrooms(root: Path = Path("/")) -> list[int]:
    """Limit less usage, in bytes, of each limited memory cgroup (v1 or v2) above this process."""
    headrooms = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            scheme = _V2
        elif "memory" in controllers.split(","):
            scheme = _V1
        else:
            continue
        base = root / "sys/fs/cgroup" / scheme[0]
        inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(inside) + 1):
            headroom = _headroom(base.joinpath(*inside[:depth]), *scheme[1:])
            if headroom is not None:
                headrooms.append(headroom)
    return headrooms


def _headroom(group: Path, limit_file: str, usage_file: str, droppable_key: str) -> int | None:
    """Bytes left in one cgroup; ``None`` where it sets no limit or is not visible here."""
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not (limit.isdecimal() and usage.isdecimal()):
        return None
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
    return int(limit) - int(usage) + int(stat.get(droppable_key, 0))


def _read(path: Path) -> str:
    """Text of the file; empty where there is none, as outside Linux or at the root of the hierarchy."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
