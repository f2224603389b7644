"""Free host memory within cgroup limits, on file trees as a kernel shows them."""

from pathlib import Path

import psutil
import pytest

from chunkc.errors import HardwareError
from chunkc.hardware.host_memory import HOST_MEMORY, cgroup_headrooms, free_host_nbytes

MIB, GIB = 1024**2, 1024**3


def write_tree(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="ascii")


CGROUPS: list[tuple[dict[str, str], list[int]]] = [
    # version 2: the group's own limit and its parent's; file pages that can be dropped count as free
    (
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/memory.max": "1000\n",
            "sys/fs/cgroup/user/job/memory.current": "700\n",
            "sys/fs/cgroup/user/job/memory.stat": "anon 500\ninactive_file 150\n",
            "sys/fs/cgroup/user/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.current": "800\n",
            "sys/fs/cgroup/memory.max": "5000\n",
            "sys/fs/cgroup/memory.current": "900\n",
        },
        [4100, 450],
    ),
    # version 1, in a container that sees its own group at the root of the mount
    (
        {
            "proc/self/cgroup": "3:cpu:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
        },
        [1520],
    ),
    ({"proc/self/cgroup": "0::/../outside\n"}, []),
    ({}, []),
]


@pytest.mark.parametrize(("files", "headrooms"), CGROUPS)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], headrooms: list[int]) -> None:
    write_tree(tmp_path, files)
    assert cgroup_headrooms(tmp_path) == headrooms
    if headrooms:
        assert free_host_nbytes(tmp_path) == min(headrooms)
    else:
        assert free_host_nbytes(tmp_path) > MIB


def test_a_machine_whose_memory_grows_has_what_is_stated() -> None:
    """Less what is in use; a cgroup's limit counts all the same."""
    machine = psutil.virtual_memory()
    nothing = Path("/nowhere")
    stated_gib = machine.total // GIB + 512
    found = free_host_nbytes(nothing, {HOST_MEMORY: f"{stated_gib}g"})
    wanted = stated_gib * GIB - (machine.total - machine.available)
    assert abs(found - wanted) < GIB, "others take and give memory meanwhile"
    assert free_host_nbytes(nothing, {HOST_MEMORY: "1m"}) == 0
    assert free_host_nbytes(nothing, {HOST_MEMORY: ""}) <= machine.total


def test_a_stated_memory_stays_within_a_cgroup(tmp_path: Path) -> None:
    write_tree(tmp_path, CGROUPS[1][0])
    assert free_host_nbytes(tmp_path, {HOST_MEMORY: "900g"}) == CGROUPS[1][1][0]


@pytest.mark.parametrize("text", ["much", "-1g", "10", "1e9g"])
def test_a_stated_memory_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(HardwareError, match=f"^{HOST_MEMORY}={text}: "):
        free_host_nbytes(Path("/nowhere"), {HOST_MEMORY: text})


def test_free_memory_of_this_machine_is_positive() -> None:
    assert 0 < free_host_nbytes() < 1024**5
