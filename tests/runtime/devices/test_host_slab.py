"""Slabs against the kernel's own books: /proc says which pages exist, in this process and in its forked children."""

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from chunkc.errors import HardwareError
from chunkc.runtime.devices.host_slab import FreedPages, Slab, allocate_slab

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20


def resident_nbytes(address: int, pid: int | str = "self") -> int | None:
    """Resident bytes of the mapping that contains ``address``; None when nothing is mapped there."""
    inside = False
    with open(f"/proc/{pid}/smaps", encoding="utf-8") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                low, high = (int(bound, 16) for bound in first.split("-"))
                inside = low <= address < high
            elif inside and first == "Rss:":
                return int(line.split()[1]) * 1024
    return None


def shared_out_nbytes(*pids: int) -> int:
    """Sum of the proportional set sizes: what the processes take of the machine's memory together, mapped files (which
    they share with whatever other processes come and go) left out."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as lines:
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return total


@contextmanager
def forked_child() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_in_child(work: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * MIB + 5])
def test_a_slab_is_exact_zeroed_and_page_aligned(nbytes: int) -> None:
    memory, slab = allocate_slab(nbytes)
    assert memory.dtype == torch.uint8
    assert memory.numel() == nbytes == slab.nbytes
    assert slab.address % mmap.PAGESIZE == 0
    assert slab.mapped_nbytes % mmap.PAGESIZE == 0
    assert nbytes <= slab.mapped_nbytes < max(nbytes, 1) + mmap.PAGESIZE
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes
    if nbytes:
        assert memory.data_ptr() == slab.address


def test_close_returns_the_pages_while_views_live() -> None:
    freed: list[int] = []
    memory, slab = allocate_slab(64 * MIB, on_free=freed.append)
    view = memory.view(torch.float32)[MIB:]
    memory.fill_(3)
    before = resident_nbytes(slab.address)
    slab.close()
    after = resident_nbytes(slab.address)
    assert freed == [64 * MIB]
    assert before is not None
    assert after is not None, "the addresses stay mapped"
    assert before - after == 64 * MIB
    assert not view.any(), "a stale read sees zeros and does not crash"
    slab.close()
    del memory
    gc.collect()
    del view
    gc.collect()
    assert freed == [64 * MIB], "reported exactly once"


def test_the_mapping_goes_with_its_last_view() -> None:
    freed: list[int] = []
    memory, slab = allocate_slab(8 * MIB, on_free=freed.append)
    view = memory.fill_(1)[MIB : 2 * MIB]
    del memory
    gc.collect()
    assert freed == []
    assert int(view.sum(dtype=torch.int64)) == MIB
    before = virtual_nbytes()
    del view
    gc.collect()
    assert freed == [8 * MIB]
    assert before - virtual_nbytes() >= 8 * MIB
    slab.close()
    assert freed == [8 * MIB]


def virtual_nbytes() -> int:
    with open("/proc/self/statm", encoding="utf-8") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


def test_huge_pages_are_asked_for() -> None:
    memory, slab = allocate_slab(8 * MIB)
    flags = ""
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        inside = False
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                low, high = (int(bound, 16) for bound in first.split("-"))
                inside = low <= slab.address < high
            elif inside and first == "VmFlags:":
                flags = line
    assert " dc" in flags, "not copied on fork"
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert " hg" in flags
    assert memory.numel() == 8 * MIB


def test_a_fork_neither_has_nor_doubles_the_memory() -> None:
    """A forked process copies other pages, too, some tens of MiB where tests have filled the heap before."""
    memory, slab = allocate_slab(256 * MIB)
    memory.fill_(1)
    before = shared_out_nbytes(os.getpid())
    with forked_child() as child:
        assert resident_nbytes(slab.address, child) is None
        memory.fill_(2)
        assert shared_out_nbytes(os.getpid(), child) - before < 128 * MIB
    assert int(memory[::4096].sum(dtype=torch.int64)) == 2 * 256 * MIB // 4096


def test_the_same_measurement_sees_ordinary_memory_double() -> None:
    memory = torch.ones(64 * MIB, dtype=torch.uint8)
    before = shared_out_nbytes(os.getpid())
    with forked_child() as child:
        memory.fill_(2)
        assert shared_out_nbytes(os.getpid(), child) - before > 60 * MIB


def test_a_multiprocessing_worker_has_no_mapping() -> None:
    memory, slab = allocate_slab(4 * MIB)
    memory.fill_(1)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=lambda: sender.send(resident_nbytes(slab.address)))
    worker.start()
    assert receiver.recv() is None
    worker.join()
    assert worker.exitcode == 0


def test_a_child_that_drops_or_closes_its_copy_harms_nothing() -> None:
    """The child maps something of its own at the slab's addresses; collecting the inherited tensor must spare it."""
    freed: list[int] = []
    holder = [allocate_slab(4 * MIB, on_free=freed.append)]

    def drop_and_look() -> bool:
        slab: Slab = holder[0][1]
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        map_fixed = 0x10
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed
        own = libc.mmap(slab.address, slab.mapped_nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        cells = (ctypes.c_ubyte * slab.nbytes).from_address(own)
        cells[MIB] = 9
        slab.close()
        holder.clear()
        gc.collect()
        return cells[MIB] == 9 and freed == []

    assert run_in_child(drop_and_look) == 0
    assert freed == []
    assert not holder[0][0].any(), "the parent's memory is untouched"


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(HardwareError, match=str(2**60)):
        allocate_slab(2**60)
    with pytest.raises(ValueError, match="-1"):
        allocate_slab(-1)


KEEPING = """
import resource, sys
import torch
from chunkc.runtime.devices.host_slab import keep_freed_pages

if sys.argv[1] == "kept":
    keep_freed_pages(64 << 20)
for warm_up in range(3):
    parts = [torch.ones(1 << 20) for _ in range(10)]
    del parts
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(10):
    parts = [torch.ones(1 << 20) for _ in range(10)]
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.long(but="as it is-environment2")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize(
    ("how", "environment"),
    [
        ("kept", {}),
        ("kept", {"MALLOC_TRIM_THRESHOLD_": "0"}),
        ("as it is", {"MALLOC_MMAP_THRESHOLD_": "131072"}),
    ],
)
def test_malloc_keeps_freed_pages_unless_the_user_says_otherwise(how: str, environment: dict[str, str]) -> None:
    """Ten times 40 MiB that come and go, in pages that the kernel hands out anew.

    As it is, malloc raises its threshold with what was freed, and keeps pages or not by what lies behind them.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", KEEPING, how],
        capture_output=True,
        text=True,
        check=True,
        env={**inherited, **environment},
    )
    num_pages, num_faults = 10 * (40 << 20) // mmap.PAGESIZE, int(done.stdout)
    assert (num_faults < num_pages // 20) == (how == "kept" and not environment), (num_faults, num_pages)


def test_pages_of_tensors_freed_one_by_one_are_given_back_every_16_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[None] = []
    monkeypatch.setattr("chunkc.runtime.devices.host_slab.return_freed_pages", lambda: returned.append(None))
    freed = FreedPages()
    for number, expected in ((0, 0), (15 << 20, 0), (1 << 20, 1), (15 << 20, 1), (33 << 20, 1), (32 << 20, 2), (1, 2)):
        freed.add(number)
        assert len(returned) == expected
