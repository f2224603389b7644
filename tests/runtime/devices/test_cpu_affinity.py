"""Cores of a machine divided between its ranks; updates on them, with the same bits and nothing else changed."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from child_environment import environment
from fake_cuda import GIB, FakeCuda

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.distributed.process_group import Ranks
from chunkc.ir.actions import Stream
from chunkc.runtime.devices import cpu_affinity
from chunkc.runtime.devices.cpu_affinity import (
    HostCores,
    divided,
    leaving_launcher,
    numa_nodes,
    own_cores,
    usable_cores,
)
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.pinned_memory import touch
from chunkc.runtime.update.cpu_update import PARALLEL_NUMEL, Piece
from chunkc.runtime.update.rules import ADAM, AdamHyper
from chunkc.runtime.update.update_inputs import StepInputs

MIB = 2**20
BOTH = tuple(usable_cores()[:2])
ONE = BOTH[-1:]

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound here")
needs_two = pytest.mark.skipif(len(BOTH) < 2, reason="one core only")


# --- dividing ---------------------------------------------------------------------------------------------------------


def span(start: int, end: int) -> tuple[int, ...]:
    return tuple(range(start, end))


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "wanted"),
    [
        ([span(0, 8)], 1, [span(0, 8)]),
        ([span(0, 8)], 2, [span(0, 4), span(4, 8)]),
        ([span(0, 8)], 8, [(core,) for core in range(8)]),
        ([span(0, 8)], 3, [span(0, 2), span(2, 5), span(5, 8)]),
        ([(0,)], 2, [(0,), (0,)]),
        ([(0, 1)], 4, [(0,), (0,), (1,), (1,)]),
        ([span(0, 4), span(4, 8)], 1, [span(0, 8)]),
        ([span(0, 4), span(4, 8)], 2, [span(0, 4), span(4, 8)]),
        ([span(0, 4), span(4, 8)], 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ([(0, 1, 4, 5), (2, 3, 6, 7)], 4, [(0, 1), (4, 5), (2, 3), (6, 7)]),
        ([span(0, 5), span(5, 10)], 4, [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)]),
        # A node with more cores takes more ranks, and no rank crosses as long as all have their even share.
        ([span(0, 8), span(8, 24)], 3, [span(0, 8), span(8, 16), span(16, 24)]),
        ([span(0, 4), span(4, 10)], 4, [(0, 1), (2, 3), (4, 5, 6), (7, 8, 9)]),
        ([span(0, 4), span(4, 8), span(8, 12)], 4, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]),
        # Here one would get too few: it crosses.
        ([span(0, 6), span(6, 12)], 3, [span(0, 4), span(4, 8), span(8, 12)]),
        ([span(0, 5), span(5, 8)], 2, [span(0, 4), span(4, 8)]),
        ([span(0, 2), span(2, 4)], 8, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
    ],
)
def test_cores_are_divided(nodes: Sequence[Sequence[int]], num_ranks: int, wanted: list[tuple[int, ...]]) -> None:
    assert divided(nodes, num_ranks) == wanted


@pytest.mark.parametrize("sizes", [(8,), (7,), (4, 4), (3, 5), (1, 7), (4, 4, 4, 4), (2, 3, 4), (1, 1)])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_division_is_fair(sizes: Sequence[int], num_ranks: int) -> None:
    """Nobody has less than the even share, nobody shares where there are enough, a node is used as a whole or not, and
    a rank crosses only where nodes cannot hold so many even shares."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = [span(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    parts, even = divided(nodes, num_ranks), max(1, sum(sizes) // num_ranks)
    assert len(parts) == num_ranks and all(len(part) >= even for part in parts)
    if sum(sizes) >= num_ranks:
        assert all(not set(a) & set(b) for a, b in combinations(parts, 2))
        taken = {core for part in parts for core in part}
        assert all(taken.issuperset(node) or taken.isdisjoint(node) for node in nodes)
    if sum(size // even for size in sizes) >= num_ranks:
        assert all(any(set(part) <= set(node) for node in nodes) for part in parts)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, cpulist in {0: "0-3,8-11\n", 1: "4-7,12-15\n", 2: "\n", 10: "16\n"}.items():
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist)
    return tmp_path


def test_nodes_are_read_from_the_system(two_nodes: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    assert numa_nodes(range(17), two_nodes) == [first, second, (16,)]
    assert numa_nodes([1, 8, 5], two_nodes) == [(1, 8), (5,)]
    assert numa_nodes([1, 8], two_nodes) == [(1, 8)]
    assert numa_nodes([5, 40], two_nodes) == [(5,), (40,)], "a core that no node lists"
    assert numa_nodes([0, 1], tmp_path_factory.mktemp("bare")) == [(0, 1)]


def test_this_machine_has_nodes_with_all_usable_cores() -> None:
    assert sorted(core for node in numa_nodes(usable_cores()) for core in node) == usable_cores()


class ToldRanks(Ranks):
    def __init__(self, rank: int, others: Sequence[tuple[str, list[int]]]) -> None:
        self.job_rank, self.job_size, self._others = rank, len(others), others

    def collect_from_job(self, data: bytes) -> list[bytes]:
        told = [json.dumps(other).encode() for other in self._others]
        told[self.job_rank] = data
        return told


def name_machine(root: Path) -> None:
    boot = root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("machine-a\n")


HERE = usable_cores()
APART = [core + 1000 for core in HERE]


@pytest.mark.parametrize(
    ("rank", "others", "wanted"),
    [
        (0, [("machine-a", HERE)], None),
        (1, [("machine-b", HERE), ("machine-a", HERE), ("machine-b", HERE)], None),
        (0, [("machine-a", HERE), ("machine-a", APART)], divided([HERE], 1)[0]),
        (0, [("machine-a", HERE), ("machine-a", HERE)], divided([HERE], 2)[0]),
        (1, [("machine-a", HERE), ("machine-a", HERE)], divided([HERE], 2)[1]),
        (2, [("machine-b", HERE), ("machine-a", HERE), ("machine-a", HERE)], divided([HERE], 2)[1]),
        (3, [("machine-a", APART)] * 2 + [("machine-a", HERE)] * 2, divided([HERE], 2)[1]),
    ],
)
def test_ranks_of_one_machine_divide_what_they_have_in_common(
    rank: int, others: Sequence[tuple[str, list[int]]], wanted: tuple[int, ...] | None, tmp_path: Path
) -> None:
    name_machine(tmp_path)
    assert own_cores(ToldRanks(rank, others), tmp_path) == (None if wanted is None else HostCores(wanted, False))


@needs_two
def test_cores_are_bound_where_there_are_several_nodes(tmp_path: Path) -> None:
    for node, core in enumerate(HERE):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{core}\n")
    name_machine(tmp_path)
    found = own_cores(ToldRanks(1, [("machine-a", HERE)] * 2), tmp_path)
    assert found == HostCores(tuple(HERE[len(HERE) // 2 :]), True)


# --- updates on them --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread_as_under_torchrun() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


Device = EmulatedDevice | CudaDevice


@pytest.fixture(params=["emulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "emulated":
        made: Device = EmulatedDevice("emulated", 64 * MIB, 256 * MIB)
    else:
        api = FakeCuda()
        made = CudaDevice("fake", api, MemoryLedger(api), 3 * GIB, 256 * MIB, DebugSettings())
    yield made
    made.close()


def affinities() -> dict[int, set[int]]:
    found = {}
    for tid in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            found[tid] = set(os.sched_getaffinity(tid))
    return found


class Updating:
    def __init__(self, device: Device, numel: int = 4 * PARALLEL_NUMEL + 38) -> None:
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randn(numel, generator=generator) for _ in range(4)]
        self.tensors = [device.allocate_home(numel * size).view(dtype) for size, dtype in self.kinds()]
        for tensor, draw in zip(self.tensors, (*draws[:3], draws[3].square()), strict=True):
            tensor.copy_(draw)
        self._device = device
        self._update = device.make_update(Stream.CPU, ADAM, self.tensors[0], self.tensors[1:], [Piece(0, 0, numel)])

    @staticmethod
    def kinds() -> list[tuple[int, torch.dtype]]:
        return [(2, torch.bfloat16), *[(4, torch.float32)] * 3]

    def run(self) -> None:
        hyper = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
        inputs = StepInputs({0: hyper}, {0: 2}, 1)
        self._device.launch(Stream.CPU, "update", (), lambda: self._update.update(inputs))
        self._device.synchronize()


def on_worker(device: Device) -> tuple[int, int]:
    found: list[int] = []
    work = lambda: found.extend((threading.get_native_id(), torch.get_num_threads()))  # noqa: E731
    device.launch(Stream.CPU, "look", (), work)
    device.synchronize()
    return found[0], found[1]


@needs_two
@needs_affinity
def test_an_update_uses_the_cores_it_was_given(device: Device) -> None:
    """Under one thread for the process: a second one comes to help the worker, and no other thread changes."""
    updating = Updating(device)
    alone_tid, num_threads = on_worker(device)
    assert num_threads == 1
    device.use_cores(HostCores(BOTH, False))
    assert on_worker(device) == (alone_tid, 2)
    before = affinities()
    updating.run()
    after = affinities()
    assert len(after.keys() - before.keys()) == 1
    assert all(after[tid] == before[tid] for tid in before.keys() & after.keys())
    assert torch.get_num_threads() == 1
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [1]


@needs_two
@needs_affinity
def test_bound_cores_bind_the_worker_and_what_it_starts_alone(device: Device) -> None:
    """Two threads, both on one core: the worker is bound to it, and the thread that it starts inherits that."""
    updating = Updating(device)
    tid, _ = on_worker(device)
    before = affinities()
    device.use_cores(HostCores(ONE * 2, True))
    assert on_worker(device) == (tid, 2)
    updating.run()
    after = affinities()
    helpers = after.keys() - before.keys()
    assert len(helpers) == 1
    assert all(after[bound] == set(ONE) for bound in (tid, *helpers))
    assert all(after[other] == before[other] for other in before.keys() & after.keys() if other != tid)


@needs_affinity
def test_results_do_not_depend_on_the_cores() -> None:
    found = []
    for cores in (None, HostCores(ONE, True), HostCores(BOTH, False), HostCores(BOTH * 2, True)):
        device = EmulatedDevice("emulated", 64 * MIB, 256 * MIB)
        if cores is not None:
            device.use_cores(cores)
        updating = Updating(device)
        updating.run()
        found.append([tensor.clone() for tensor in updating.tensors])
        device.close()
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_two
@needs_affinity
def test_in_synchronous_mode_the_caller_keeps_its_cores_and_threads() -> None:
    device = EmulatedDevice("emulated", MIB, MIB, DebugSettings(synchronous=True))
    device.use_cores(HostCores(ONE * 2, True))
    assert os.sched_getaffinity(0) == set(HERE) and torch.get_num_threads() == 1
    device.close()


@needs_affinity
def test_cores_that_the_system_refuses_are_said_and_the_update_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "chunkc")
    device = EmulatedDevice("emulated", MIB, 4 * MIB)
    device.use_cores(HostCores((1023,), True))
    assert on_worker(device)[1] == 1
    device.close()
    assert "not kept on this rank's cores [1023]" in caplog.text and "numactl" in caplog.text


@needs_two
@needs_affinity
@pytest.mark.parametrize("is_bound", [True, False])
def test_homes_are_touched_on_bound_cores(is_bound: bool) -> None:
    seen: list[set[int]] = []

    class Memory(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.Tensor.zero_:
                seen.append(os.sched_getaffinity(0))
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    memory = torch.ones(4096, dtype=torch.uint8)
    touch(memory.as_subclass(Memory), HostCores(ONE, is_bound))
    assert not memory.any()
    assert os.sched_getaffinity(0) == set(HERE)
    assert seen == [set(ONE) if is_bound else set(HERE)]


# --- ranks of a job ---------------------------------------------------------------------------------------------------

JOB_WAIT_S = 300


def tell_threads() -> None:
    torch.set_num_threads(len(HERE) + 1)
    model = chunkc.compile(torch.nn.Linear(8, 8), hw="2xemulated-1m-64m", backend="eager")
    device = compiled_of(model).runtime.device
    line = f"threads {on_worker(device)[1]} {torch.get_num_threads()}\n"
    os.write(1, line.encode())  # as a whole, beside the other rank's


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_under_torchrun_divide_the_machine() -> None:
    """Whatever the number of a rank's other threads, its updates get an even share of the cores."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    ran = subprocess.run(
        [sys.executable, *command],
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=JOB_WAIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    shares = sorted(len(part) for part in divided(numa_nodes(HERE), 2))
    assert sorted(ran.stdout.splitlines()) == [f"threads {share} {len(HERE) + 1}" for share in shares]


if __name__ == "__main__":
    tell_threads()


# --- cores of the launching threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_cores", "num_physical", "num_threads", "num_used"),
    [(16, 16, 16, 14), (128, 64, 64, 62), (4, 4, 4, 2), (3, 3, 3, None), (16, 16, 8, None), (16, None, 16, 14)],
    ids=["server", "two threads a core", "least", "too few to leave any", "told to take fewer", "unknown processor"],
)
def test_cores_are_left_to_the_launching_threads(
    num_cores: int,
    num_physical: int | None,
    num_threads: int,
    num_used: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_affinity, "usable_cores", lambda: list(range(num_cores)))
    monkeypatch.setattr(cpu_affinity.psutil, "cpu_count", lambda logical: num_physical)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    wanted = None if num_used is None else HostCores(tuple(range(num_used)), is_bound=False)
    assert leaving_launcher(None) == wanted


def test_ranks_leave_cores_of_their_own() -> None:
    assert leaving_launcher(HostCores((8, 9, 10, 11, 12), True)) == HostCores((8, 9, 10), True)
    assert leaving_launcher(HostCores((8, 9, 10), False)) == HostCores((8, 9, 10), False)
