"""Cost of a step on the launching thread: microseconds per action, per segment and per parameter.

Small models train on a device whose work takes no time: segments return memory without computing, updates do
nothing, and CUDA, behind the real code of its streams, is a double that carries copies out at once. What is left of the
thread's processor time is Dynamo's guards, autograd, and chunkc. The same forward and backward under torch.compile
alone, whose graphs return memory in the same way, take what is not chunkc's; the rest is. The models differ in how many
actions and parameters a step has; the figures of these are coefficients of a least-squares fit of relative errors to
the least time of all steps, to which other processes add the least. Actions that move saved values have a figure of
their own. A segment's figure is measured alone, since the number of segments grows with that of actions.

``--device emulated`` measures the emulated device in the same way, with its threads for streams.

    OMP_WAIT_POLICY=passive python benchmarks/executor_overhead.py

On a machine that others use too, measure several times, in turn with what is compared; ``--least RESULT...`` then takes
the least time of each case from results of one commit, and fits these.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import provenance
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import chunkc
from chunkc.compiler.device_selection import device_for
from chunkc.compiler.segment_compiler import SegmentCompiler
from chunkc.hardware import PresentGpu
from chunkc.ir.actions import Op
from chunkc.ir.values import SegmentValues
from chunkc.runtime.execution.bound_action import RunEnvironment, running
from chunkc.runtime.update.cpu_update import ChunkUpdate

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
KEPT_NBYTES = 4096
"""For the outputs of the step before."""
MOVES = (Op.OFFLOAD, Op.DISCARD, Op.ALLOCATE, Op.RELOAD)


class InstantStream:
    """A stream on which work is done when it is launched."""

    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream = cuda_stream


class InstantCuda:
    """CUDA's calls, each done at once on the caller's thread; memory is the host's."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._streams = [InstantStream(0)]

    def new_stream(self) -> InstantStream:
        self._streams.append(InstantStream(len(self._streams)))
        return self._streams[-1]

    def current_stream(self) -> InstantStream:
        return self._streams[0]

    def key(self, stream: InstantStream) -> int:
        return stream.cuda_stream

    def run(self, stream: InstantStream, work: Callable[[], None]) -> None:
        work()

    def record(self, stream: InstantStream, used: object = None) -> object:
        return self

    def wait_event(self, stream: InstantStream, event: object) -> None: ...

    def is_done(self, event: object) -> bool:
        return True

    def wait_on_host(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def warm_up(self) -> None: ...

    def memory_info(self) -> tuple[int, int]:
        return 30 * GIB, 32 * GIB

    def allocator_nbytes(self, kind: str, moment: str) -> int:
        return 0

    def reset_peaks(self) -> None: ...

    def release_cached(self) -> None: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        return memory[start : start + nbytes]

    def upload(self, table: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(table)

    def register_host(self, address: int, nbytes: int) -> None: ...

    def unregister_host(self, address: int) -> None: ...

    def kernels(self) -> InstantKernels:
        return InstantKernels()


class InstantKernels:
    """Kernels of chunks that do nothing."""

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        return torch.zeros(len(pieces), 3, dtype=torch.int32)

    make_norm_tiles = make_tiles

    def chunk_update(self, rule: str, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Callable[[], None]:
        return _nothing

    def restore(self, *tensors: torch.Tensor) -> Callable[[], None]:
        return _nothing

    def grad_norm(self, *tensors: torch.Tensor) -> Callable[[], None]:
        return _nothing


def _nothing() -> None: ...


class Instant:
    """A segment that computes once, and then returns memory of the same shapes at every call."""

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run = run
        self._outputs: list[Callable[[], Any]] | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._outputs is None:
            outputs = list(self._run(args))
            self._outputs = [_maker_of(value) for value in outputs]
            return outputs
        args.clear()
        return [empty() for empty in self._outputs]


def _maker_of(value: Any) -> Callable[[], Any]:
    if isinstance(value, torch.Tensor):
        return partial(torch.empty_strided, value.shape, value.stride(), dtype=value.dtype)
    return lambda: value


@dataclass(frozen=True)
class Case:
    """A model, of layers of ``num_linears`` linear modules each, and how it is trained."""

    num_layers: int
    num_linears: int
    width: int
    chunk_numel: int
    clips: bool = False


CASES = (
    Case(12, 2, 16, 1024),
    Case(12, 6, 16, 1024),
    Case(36, 6, 16, 1024),
    Case(36, 6, 16, 1024, clips=True),
    Case(36, 6, 16, 4096),
    Case(12, 18, 16, 4096),
    Case(12, 18, 16, 16384),
    Case(12, 6, 64, 1024),
    Case(12, 6, 64, 4096),
    Case(12, 6, 64, 4096, clips=True),
)


class Layers(nn.Module):
    """Residual layers of a few linear modules each."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(case.width, case.width, bias=False) for _ in range(case.num_linears)))
            for _ in range(case.num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


@dataclass(frozen=True)
class Row:
    """Counts of one case's step, and least values of the launching thread's processor time.

    ``num_moves``: of ``num_actions``, those that move saved values. ``plain_us``: of the forward and backward under
    torch.compile alone.
    """

    case: Case
    num_actions: int
    num_moves: int
    num_segments: int
    num_params: int
    step_us: float
    plain_us: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all models, fit, and write the result."""
    args = parse(argv)
    torch.set_num_threads(1)
    if args.least:
        made, rows, segment = least_of(args.least)
    else:
        made = {**provenance.describe(), "device": args.device}
        rows, segment = [measure(case, args) for case in CASES], segment_us()
    figures = {
        "figures_us": fit(rows, segment, with_torch=False),
        "with_torch_us": fit(rows, segment, with_torch=True),
    }
    result = {
        **made,
        **figures,
        "rows": [asdict(r) for r in rows],
    }
    print(json.dumps(figures, indent=2))
    path = args.out or RESULTS / f"executor_overhead-{result['device']}-{result['date'][:10]}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of a step on the launching thread.")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda", help="cuda: over an instant double")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--least", type=Path, nargs="+", help="results of one commit, measured before")
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def least_of(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Row], float]:
    """What the first of these results says of its making, and the least times of all."""
    results = [json.loads(path.read_text()) for path in paths]
    plans = [[[row[name] for name in ("case", "num_actions")] for row in r["rows"]] for r in results]
    described = [(r["commit"], r["device"], plan) for r, plan in zip(results, plans, strict=True)]
    if any(other != described[0] for other in described):
        raise SystemExit("executor_overhead: --least takes results of one commit and device, with equal plans")
    rows = []
    for same in zip(*(r["rows"] for r in results), strict=True):
        least = {name: min(row[name] for row in same) for name in ("step_us", "plain_us")}
        rows.append(Row(**{**same[0], "case": Case(**same[0]["case"]), **least}))
    made = {name: results[0][name] for name in (*provenance.describe(), "device")}
    return {**made, "runs": len(results)}, rows, min(r["figures_us"]["segment"] for r in results)


def measure(case: Case, args: argparse.Namespace) -> Row:
    """Train one model in little device memory, and read the thread's clock around each step."""
    torch.manual_seed(0)
    nbytes, times_s = 1, list[float]()
    with instant_work():
        while not times_s:
            try:
                plan, times_s = _train(case, nbytes, args)
            except chunkc.BudgetError as error:
                nbytes = error.min_device_nbytes + KEPT_NBYTES
    actions = [a for p in plan.programs if p.is_repeated for a in p.actions]
    row = Row(
        case,
        num_actions=len(actions),
        num_moves=sum(a.op in MOVES for a in actions),
        num_segments=len(plan.segments),
        num_params=case.num_layers * case.num_linears,
        step_us=_least_us(times_s, args),
        plain_us=_least_us(_train_plain(case, args), args),
    )
    print(row, file=sys.stderr, flush=True)
    return row


def _train(case: Case, nbytes: int, args: argparse.Namespace) -> tuple[chunkc.Plan, list[float]]:
    """The plan of ``case`` in ``nbytes`` of device memory, and seconds of each step."""
    hw, _device = machine(args.device, nbytes)
    model = chunkc.compile(Layers(case), hw, dtype=torch.bfloat16, backend="eager", chunk_size=case.chunk_numel)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0 if case.clips else None)
    x = torch.randn(2, case.width, dtype=torch.bfloat16)
    times_s = [_step_s(model, optimizer, x) for _ in range(args.warm_up + args.steps)]
    chunkc.stats(model)
    return chunkc.plan_of(model), times_s


def _train_plain(case: Case, args: argparse.Namespace) -> list[float]:
    """Seconds of each forward and backward under torch.compile alone."""
    torch._dynamo.reset()
    model, x = Layers(case).to(torch.bfloat16), torch.randn(2, case.width, dtype=torch.bfloat16)
    backend = aot_autograd(fw_compiler=_instant_graph, bw_compiler=_instant_graph)
    compiled = torch.compile(model, backend=backend)
    optimizer, times_s = torch.optim.SGD(model.parameters(), lr=0.0), list[float]()
    for _ in range(args.warm_up + args.steps):
        begun_s = time.thread_time()
        compiled(x).backward()
        optimizer.zero_grad()
        times_s.append(time.thread_time() - begun_s)
    return times_s


def _instant_graph(module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    instant = Instant(lambda args: module(*args))

    def run(args: list[Any]) -> Sequence[Any]:
        return instant(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _least_us(times_s: Sequence[float], args: argparse.Namespace) -> float:
    return round(min(times_s[args.warm_up :]) * 1e6, 1)


def _step_s(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    begun_s = time.thread_time()
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.thread_time() - begun_s


def machine(kind: str, device_nbytes: int) -> tuple[chunkc.Hardware, object]:
    """The machine and its device, which lives as long as the object returned."""
    if kind == "emulated":
        return device_for(replace(chunkc.Hardware.of("emulated-1g-1g"), gpu_memory_nbytes=device_nbytes))
    gpu = PresentGpu(index=63, gpu="h200", memory_nbytes=32 * GIB, capability=(9, 0))
    hw = replace(chunkc.Hardware.parse("h200-1g-1g"), gpu_memory_nbytes=max(device_nbytes, 2 * GIB + 1))
    return device_for(hw, lambda: gpu, lambda _: InstantCuda())


@contextmanager
def instant_work() -> Iterator[None]:
    """Let segments compute once and updates of the host never."""
    compile_real = SegmentCompiler.compile

    def compile_instant(self: SegmentCompiler, graph: Any) -> list[Any]:
        return [Instant(run) for run in compile_real(self, graph)]

    nothing = mock.patch.object(ChunkUpdate, "update", lambda self, inputs: None)
    with nothing, mock.patch.object(SegmentCompiler, "compile", compile_instant):
        yield


def segment_us() -> float:
    """Microseconds to give a segment 6 values and 6 payloads, and to take 6 values from it."""
    inputs = tuple(f"value_{i // 2}" if i % 2 == 0 else f"param_{i // 2}" for i in range(12))
    outputs, params = tuple(f"output_{i}" for i in range(6)), tuple((2 * i + 1, i) for i in range(6))
    segment, env = SegmentValues(inputs, params, outputs, dies=(0, 4, 8)), RunEnvironment()
    slots = {name: slot for slot, name in enumerate((*inputs, *outputs))}
    payloads, made = [(i, torch.empty(0)) for i, _ in params], [torch.empty(0)] * len(outputs)
    work, rounds_us = running(segment, lambda _: made, payloads, env, slots, _nothing, {}), list[float]()
    for _ in range(50):
        values = [[torch.empty(0)] * len(slots) for _ in range(200)]
        begun_s = time.thread_time()
        for env.values in values:
            work()
        rounds_us.append((time.thread_time() - begun_s) / len(values) * 1e6)
    return min(rounds_us)


def fit(rows: Sequence[Row], segment: float, *, with_torch: bool) -> dict[str, float]:
    """Microseconds per action, move and parameter where a ``segment`` takes so many, and per step."""
    counts = np.array([[r.num_actions - r.num_moves, r.num_moves, r.num_params, 1] for r in rows], dtype=float)
    times_us = np.array([r.step_us - r.num_segments * segment - (0.0 if with_torch else r.plain_us) for r in rows])
    found, *_ = np.linalg.lstsq(counts / times_us[:, None], np.ones(len(rows)), rcond=None)
    error = float(np.abs(counts @ found / times_us - 1).max())
    action, move, parameter, step = found
    figures = {"action": action, "move": move, "segment": segment, "parameter": parameter, "step": step}
    figures["largest_error"] = error
    return {name: round(float(value), 3) for name, value in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
