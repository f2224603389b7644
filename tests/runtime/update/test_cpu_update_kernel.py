"""The compiled loop: its bits, the GIL, threads, no Dynamo; and the update where nothing can be compiled."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from child_environment import environment
from torch import Tensor
from torch._dynamo.utils import counters

import chunkc
from chunkc._torch_compat.inductor import inductor_loop
from chunkc.runtime.update import cpu_update_kernel as module
from chunkc.runtime.update.cpu_update import PARALLEL_NUMEL, ChunkUpdate, Piece
from chunkc.runtime.update.cpu_update_kernel import host_kernel
from chunkc.runtime.update.rules import (
    ADAM,
    LION,
    SGD,
    SGD_MOMENTUM,
    AdamHyper,
    Hyper,
    LionHyper,
    SgdHyper,
    UpdateRule,
    coefficients_of,
)
from chunkc.runtime.update.update_inputs import StepInputs

HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=False)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RULES: list[tuple[UpdateRule, Hyper]] = [
    (ADAM, HYPER),
    (SGD, SgdHyper(1e-2, 0.0, 0.0, 0.1, nesterov=False)),
    (SGD_MOMENTUM, SgdHyper(1e-2, 0.9, 0.1, 0.1, nesterov=False)),
    (SGD_MOMENTUM, SgdHyper(1e-2, 0.9, 0.0, 0.1, nesterov=True)),
    (SGD_MOMENTUM, SgdHyper(1e-2, 0.0, 0.0, 0.1, nesterov=False)),
    (LION, LionHyper(1e-2, 0.9, 0.99, 0.1)),
]
DTYPES = [(BF16, BF16), (F16, F16), (F32, F32), (F32, None), (BF16, None), (F32, BF16)]


@pytest.fixture(autouse=True)
def keep_num_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def chunk(
    numel: int, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None, rule: UpdateRule = ADAM
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    draws = [torch.randn(numel, generator=generator) for _ in range(2 + len(rule.states.names))]
    tensors = [draws[0].to(gradient_dtype), *draws[1:3], *(draw.square() for draw in draws[3:])]
    if payload_dtype is not None:
        tensors.append(tensors[0] if payload_dtype is gradient_dtype else torch.zeros(numel, dtype=payload_dtype))
    return tensors


CASES = [(dtypes, *of_rule, is_parallel) for dtypes in DTYPES for of_rule in RULES for is_parallel in (False, True)]
QUICK = {(rule, dtypes) for rule, _ in RULES for dtypes in (DTYPES if rule is ADAM else DTYPES[::4])}
"""Adam with all dtypes, each rule with two pairs and several threads: every kernel takes its time to compile."""


@pytest.mark.long(but="adam-torch.float32-torch.bfloat16-True")
@pytest.mark.parametrize(
    ("dtypes", "rule", "hyper", "is_parallel"),
    [
        pytest.param(
            *(dtypes, rule, hyper, is_parallel),
            marks=[] if (rule, dtypes) in QUICK and (is_parallel or rule is ADAM) else pytest.mark.slow,
            id=f"{rule.name}-{dtypes[0]}-{dtypes[1]}-{is_parallel}",
        )
        for dtypes, rule, hyper, is_parallel in CASES
    ],
)
def test_every_range_has_the_bits_of_eager(
    dtypes: tuple[torch.dtype, torch.dtype | None], rule: UpdateRule, hyper: Hyper, is_parallel: bool
) -> None:
    """Odd starts and lengths, so vectors and rests, by one thread and by several; nothing beside the range changes."""
    kernel = host_kernel(rule, *dtypes, is_parallel=is_parallel)
    assert isinstance(kernel, module._Loop)
    coefficients = coefficients_of(hyper, 3, grad_scale=0.3)
    for start, end in [(0, 1), (1, 70), (3, 1003), (5, PARALLEL_NUMEL + 38), *((7, 7 + n) for n in range(1, 66))]:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found, wanted = (chunk(end + 9, *dtypes, rule) for _ in range(2))
            num_read = 2 + len(rule.states.names)
            kernel(found[:num_read], found[1:], start, end, coefficients)()
            module._Eager(rule)(wanted[:num_read], wanted[1:], start, end, coefficients)()
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_eager_roots_are_rounded_to_nearest() -> None:
    """Against integer arithmetic: the root's neighbours in the middle are on its other sides."""
    values = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    for value, root in zip(values.tolist(), module.rounded_sqrt(values).tolist(), strict=True):
        unit = torch.tensor(root).nextafter(torch.tensor(2.0)).item() - root
        low, high = ((root + side * unit / 2).as_integer_ratio() for side in (-1, 1))
        exact = value.as_integer_ratio()
        assert low[0] ** 2 * exact[1] <= exact[0] * low[1] ** 2
        assert high[0] ** 2 * exact[1] >= exact[0] * high[1] ** 2


def test_a_loop_with_other_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def confused(*args: object, **options: object) -> tuple[str, str, list[tuple[str, int]]]:
        library, symbol, order = inductor_loop(*args, **options)  # type: ignore[arg-type]
        swapped = {("output", 0): ("output", 1), ("output", 1): ("output", 0)}
        return library, symbol, [swapped.get(place, place) for place in order]

    monkeypatch.setenv("CHUNKC_CACHE", "0")
    monkeypatch.setattr(module, "inductor_loop", confused)
    module.log_once.cache_clear()
    kernel = host_kernel.__wrapped__(ADAM, F32, None, is_parallel=False)
    assert isinstance(kernel, module._Eager)
    assert "gives other results" in caplog.text


NUM_TRIES = 9


def seen_while(work: Callable[[], object]) -> int:
    """How often this thread runs Python in the middle half of ``work``, which another thread does."""
    span: list[float] = []

    def timed() -> None:
        span.append(time.perf_counter())
        work()
        span.append(time.perf_counter())

    worker = threading.Thread(target=timed)
    seen = []
    worker.start()
    while worker.is_alive():
        seen.append(time.perf_counter())
        time.sleep(0)
    start, end = span
    quarter = (end - start) / 4
    return sum(start + quarter < at < end - quarter for at in seen)


def test_python_runs_meanwhile() -> None:
    """And does not where the same loop is called without releasing the GIL. On a busy machine either may look like the
    other in some tries, so they take turns, and it must be seen more often."""
    numel = 1 << 23
    tensors, coefficients = chunk(numel, BF16, BF16), coefficients_of(HYPER, 3)
    kernel = host_kernel(ADAM, BF16, BF16, is_parallel=False)
    assert isinstance(kernel, module._Loop)
    library, symbol, order = inductor_loop(module._outputs_anew(ADAM, BF16), examples(BF16), is_parallel=False)
    holding = module._Loop(getattr(ctypes.PyDLL(library), symbol), order, 3)
    num_seen = {kernel: 0, holding: 0}
    for loop in (kernel, holding) * NUM_TRIES:
        num_seen[loop] += bool(seen_while(loop(tensors[:4], tensors[1:], 0, numel, coefficients)))
    assert num_seen[kernel] > num_seen[holding] + NUM_TRIES // 4, num_seen


def examples(dtype: torch.dtype) -> list[Tensor]:
    sizes, dtypes = (4096, 4096, 4096, 4096, 9), (dtype, F32, F32, F32, F32)
    return [torch.ones(size, dtype=d) for size, d in zip(sizes, dtypes, strict=True)]


def test_threads_are_pytorchs_and_stay_as_they_were() -> None:
    torch.set_num_threads(3)
    found: list[int] = []
    library = inductor_loop(module._outputs_anew(ADAM, BF16), examples(BF16), is_parallel=True)[0]
    openmp = ctypes.CDLL(library)
    numel = PARALLEL_NUMEL * 2
    payload, *triple = chunk(numel, BF16, None)

    def work() -> None:
        update = ChunkUpdate(ADAM, payload, triple, [Piece(0, 0, numel)])
        update.update(StepInputs({0: HYPER}, {0: 2}, 1))
        found.extend((openmp.omp_get_max_threads(), torch.get_num_threads()))

    for num_threads in (3, 2):
        torch.set_num_threads(num_threads)
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert torch.get_num_threads() == num_threads
    assert found == [3, 3, 2, 2]


def test_dynamo_counts_nothing() -> None:
    before = {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")}
    assert isinstance(host_kernel.__wrapped__(ADAM, F16, F16, is_parallel=False), module._Loop)
    assert before == {name: dict(counters[name]) for name in before}


@torch.inference_mode()
def test_a_kernel_can_be_made_in_inference_mode_and_under_another_default_device() -> None:
    with torch.device("meta"):
        assert isinstance(host_kernel.__wrapped__(ADAM, BF16, None, is_parallel=False), module._Loop)


def train() -> str:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7))
    model = chunkc.compile(model, hw="emulated-1m-64m", backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(5, 40)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    total = sum(p.double().abs().sum().item() for p in model.state_dict().values())
    return float(total).hex()


@pytest.mark.long
def test_without_a_compiler_the_same_bits_are_trained_eagerly(tmp_path: Path) -> None:
    run = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {__name__.rpartition('.')[2]} as test"
    )
    env = environment(CXX="/nonexistent/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-c", f"{run}; print(test.train())"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the host update runs eagerly") == 1
    assert done.stdout.strip() == train()


def test_the_comparison_of_bits_sees_a_skipped_element() -> None:
    eager = module._Eager(ADAM)

    def short(
        read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> Callable[[], None]:
        return eager(read, written, start, end - 1, coefficients)

    assert module._agree(eager, eager, BF16, BF16)
    assert not module._agree(short, eager, BF16, BF16)


def test_ranges_of_a_chunk_are_one_call_without_the_gil() -> None:
    """Short and long ranges, whose loops differ, with coefficients of their own: the bits of each called alone."""
    loops = [host_kernel(ADAM, BF16, BF16, is_parallel=is_parallel) for is_parallel in (False, True, False)]
    ranges = [(3, 40), (40, 40 + PARALLEL_NUMEL), (PARALLEL_NUMEL + 50, PARALLEL_NUMEL + 1000)]
    coefficients = [coefficients_of(HYPER, step) for step in (2, 3, 4)]
    together, alone = (chunk(PARALLEL_NUMEL + 1009, BF16, BF16) for _ in range(2))

    def calls(tensors: list[Tensor]) -> list[Callable[[], None]]:
        parts = zip(loops, ranges, coefficients, strict=True)
        return [loop(tensors[:4], tensors[1:], start, end, own) for loop, (start, end), own in parts]

    call = module.in_one_call(calls(together))
    assert isinstance(call, partial) and call.func is module._loop_caller(len(calls(together)[0].values))  # type: ignore[attr-defined]
    call()
    for one in calls(alone):
        one()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(alone[1], chunk(PARALLEL_NUMEL + 1009, BF16, BF16)[1])


def test_calls_that_are_no_loops_are_made_in_turn() -> None:
    called = list[int]()
    module.in_one_call([partial(called.append, 1), partial(called.append, 2)])()
    module.in_one_call([])()
    assert called == [1, 2]
