"""What could not be known without a GPU: parameters without memory, pinning, alignment, attention, rates of copies."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch
import triton
from equalities import check_sixteen_bits
from machines import Machine
from models import Case
from placements import smallest
from plan_runner import GetRunner, PlanRunner
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import PLACEMENT, train_plain, train_plain_16

import chunkc
from chunkc.calibrate import activities
from chunkc.calibrate.memory import Shares, regions, scale_for
from chunkc.calibrate.timing import Timer
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.update.rules import ADAM

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
MIB = 1 << 20


def test_torch_was_built_for_this_gpu(cuda: Machine, note: Note) -> None:
    major, minor = torch.cuda.get_device_capability()
    archs = torch.cuda.get_arch_list()
    note(
        "GPU", f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {torch.cuda.get_device_properties(0).total_memory}"
    )
    note("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}")
    note("torch.cuda.get_arch_list()", archs)
    note("context_nbytes", cuda.context_nbytes)
    note("overhead_nbytes", cuda.overhead_nbytes)
    numbers = [int("".join(filter(str.isdigit, arch))) for arch in archs]
    assert any(n // 10 == major and n % 10 <= minor for n in numbers) or any(a.startswith("compute_") for a in archs)


def test_parameters_without_memory(machine: Machine) -> None:
    gc.collect()  # what earlier tests left must not go in between
    before = torch.cuda.memory_allocated() if machine.kind == "cuda" else 0
    shell = torch.empty_strided((512, 1024), (1, 512), device=machine.torch_device)
    shell.untyped_storage().resize_(0)
    assert (shell.shape, shell.stride(), shell.dtype) == ((512, 1024), (1, 512), torch.float32)
    assert shell.device == machine.torch_device and shell.untyped_storage().nbytes() == 0
    if machine.kind == "cuda":
        assert torch.cuda.memory_allocated() == before
    model = chunkc.compile(nn.Linear(1024, 4096), machine.hw(64 * MIB, 256 * MIB), dtype=torch.float32)
    assert model.weight.device == machine.torch_device and model.weight.shape == (4096, 1024)
    if machine.kind == "cuda":
        assert torch.cuda.memory_allocated() == before, "a managed parameter takes device memory before its first use"


@pytest.mark.parametrize("nbytes", [5000, 3 * MIB + 4096, 96 * MIB + 1])
def test_homes_are_pinned_as_asked(nbytes: int, machine: Machine, note: Note) -> None:
    """Not rounded up to a power of two; every byte of them is pinned."""
    device = machine.make_device(MIB, 256 * MIB, DebugSettings())
    device.synchronize()
    free, resident = device.free_host_nbytes(), psutil.Process().memory_info().rss
    home = device.allocate_home(nbytes)
    home.fill_(1)
    taken = psutil.Process().memory_info().rss - resident
    note(f"resident host bytes for a home of {nbytes}", taken)
    assert home.numel() == nbytes and free - device.free_host_nbytes() == nbytes
    assert taken <= nbytes + 4 * MIB
    if machine.kind == "cuda":
        assert all(part.is_pinned() for part in (home, home[:1], home[-1:], home[nbytes // 2 :]))
    device.free_home(home)
    device.close()


@pytest.mark.parametrize(("name", "dtype"), [("odd", torch.bfloat16), ("llama", torch.float32)])
def test_parameters_stand_where_kernels_take_them(name: str, dtype: torch.dtype, runner_of: GetRunner) -> None:
    """In every slot every parameter starts on 256 bytes; Inductor asks for 16."""
    runner = runner_of(name, dtype)
    runner.train(smallest(runner), replace(PLACEMENT, num_steps=1))
    layout, store = runner.plan.layout, runner.compiled.runtime.parameters.store
    used = {p for segment in runner.plan.segments for p in (*segment.reads, *segment.lands)}
    whole = [p for p in used if layout.placements[p].num_chunks == 1 and layout.params[p].numel]
    views = [store.param_in_slot(p, slot.index) for p in whole for slot in layout.slots]
    assert views and all(view.data_ptr() % 256 == 0 for view in views)


def test_inductor_does_not_clone_what_stands_in_slots(cuda: Machine, runner_of: GetRunner) -> None:
    """The allocator's history names who took memory; the copy of a misaligned input shows there, ours do not."""

    def misaligned() -> None:
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        memory = torch.zeros(4097, device="cuda")
        compiled = torch.compile(double, dynamic=False)
        compiled(memory[:4096])
        compiled(memory[1:])

    assert "clone_preserve_strides" in allocating_functions(misaligned), "the check sees no clone"
    runner = runner_of("odd", torch.bfloat16, "inductor")
    short = replace(PLACEMENT, num_steps=2)
    runner.train(smallest(runner), short)
    assert "clone_preserve_strides" not in allocating_functions(lambda: runner.run_steps(short))


def allocating_functions(work: Callable[[], object]) -> set[str]:
    """Names of the Python functions on the stack of any allocation in ``work``."""
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    try:
        work()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return {f["name"] for trace in snapshot["device_traces"] for event in trace for f in event.get("frames", ())}


class Attending(nn.Module):
    """Two layers of causal attention with heads of 64, as flash attention takes them, without a mask, as it must be."""

    def __init__(self, width: int = 128, vocabulary: int = 97) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for norm, into, out in zip(self.norms, self.inputs, self.outputs, strict=True):
            heads = into(norm(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(-2))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), input_ids[:, 1:].flatten())


def attending() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Attending()


def attended_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"input_ids": torch.randint(97, (2, 64), generator=generator)} for _ in range(4)]


FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
KERNELS = {
    "flash": [FLASH, EFFICIENT, SDPBackend.MATH],
    "efficient": [EFFICIENT, FLASH, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, FLASH, EFFICIENT, SDPBackend.MATH],
}
"""Kernels of attention by preference. Flash and cuDNN's take no fp32; the CPU has flash attention only."""


@contextmanager
def attention_by(kernel: str) -> Iterator[None]:
    """Prefer a kernel of attention. cuDNN's, which a Hopper GPU takes by default, is none of the deterministic ones."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic and kernel != "cudnn")
    try:
        with sdpa_kernel(KERNELS[kernel], set_priority=True):
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic)


@pytest.mark.parametrize("kernel", KERNELS)
def test_segments_hold_fused_attention(kernel: str, machine: Machine, note: Note) -> None:
    """The operator in the captured graphs is the fused one, and what it trains is as good as plain bf16."""
    case = Case("attending", attending, attended_batches)
    with attention_by(kernel):
        runner = PlanRunner(case, torch.bfloat16, "eager", machine)
        targets = {o.target for graph in runner.captured.schedule.graphs for o in graph.operators}
        fused = sorted(t for t in targets if "scaled_dot_product" in t)
        note("attention operators", fused)
        assert any("backward" in t for t in fused) and any("backward" not in t for t in fused), sorted(targets)
        wanted = kernel if machine.kind == "cuda" else "flash"
        assert all(wanted in t for t in fused), f"{wanted} attention was preferred, the graphs hold {fused}"
        check_sixteen_bits(
            runner,
            lambda _, recipe: train_plain(case, recipe, machine),
            lambda _, recipe: train_plain_16(case, recipe, machine=machine),
        )


def test_copies_both_ways(machine: Machine, note: Note) -> None:
    nbytes = 256 * MIB if machine.kind == "cuda" else 4 * MIB
    device = machine.make_device(2 * nbytes, 2 * nbytes, DebugSettings())
    device.reserve(2 * nbytes)
    arena = device.allocate_arena(2 * nbytes)
    homes = [device.allocate_home(nbytes) for _ in range(2)]
    up, down = arena[:nbytes], arena[nbytes:]
    homes[0].copy_(torch.randint(256, (nbytes,), dtype=torch.uint8))
    down.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8))
    copies = {
        Stream.H2D: lambda: up.copy_(homes[0], non_blocking=True),
        Stream.D2H: lambda: homes[1].copy_(down, non_blocking=True),
    }

    def seconds(streams: Sequence[Stream]) -> float:
        found = []
        for _ in range(5):
            device.synchronize()
            started_s = time.perf_counter()
            for stream in streams:
                device.launch(stream, f"copy @{stream}", (), copies[stream])
            device.synchronize()
            found.append(time.perf_counter() - started_s)
        return sorted(found)[2]

    alone = {stream: seconds([stream]) for stream in copies}
    together_s = seconds(list(copies))
    for stream, taken_s in alone.items():
        note(f"{stream} alone, GB/s", round(nbytes / taken_s / 1e9, 2))
    note("both ways together, GB/s", round(2 * nbytes / together_s / 1e9, 2))
    assert torch.equal(up.cpu(), homes[0]) and torch.equal(down.cpu(), homes[1])
    if machine.kind == "cuda":
        assert together_s < 0.9 * sum(alone.values()), "copies do not overlap"
    device.close()


@contextmanager
def launching(machine: Machine) -> Iterator[list[int]]:
    weight, num_calls, is_over = machine.put(torch.zeros(64, 64)), [0], threading.Event()

    @torch.compile(dynamic=False)
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.relu(x @ weight + 1)
        return x

    def keep_launching() -> None:
        while not is_over.is_set():
            chain(weight)
            num_calls[0] += 1

    chain(weight)
    thread = threading.Thread(target=keep_launching, daemon=True)
    thread.start()
    try:
        yield num_calls
    finally:
        is_over.set()
        thread.join()


def test_host_updates_beside_a_thread_that_launches(machine: Machine, note: Note) -> None:
    """Rates alone and beside a thread that needs the interpreter all the time, as the training loop does."""
    hw = machine.hw(64 * MIB, 256 * MIB)
    device = machine.make_device(64 * MIB, 256 * MIB, DebugSettings())
    scale = scale_for(device, hw)
    timer, rates = Timer(device, batch_ms=10.0, num_batches=3), {}
    with regions(device, Shares.of(device, scale)) as memory:
        update, numel = activities.update(device, memory, scale, Stream.CPU, torch.bfloat16, ADAM)
        length = timer.length(update)
        for name in ("alone", "beside launches", "alone again"):
            if name == "beside launches":
                with launching(machine) as num_calls:
                    rates[name] = numel / timer.time_us(update, length) / 1e3
            else:
                rates[name] = numel / timer.time_us(update, length) / 1e3
            note(f"host update {name}, Gparam/s", round(rates[name], 3))
    note("launches beside it", num_calls[0])
    assert num_calls[0] > 0 and all(rate > 0 for rate in rates.values())
    device.close()
