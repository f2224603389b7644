"""Speed of updates on the host beside a thread that launches kernels as Inductor does.

On a GPU, launching a kernel while some 1,000 are pending blocks until one has ended, and Inductor's launcher holds the
GIL meanwhile. Here the GPU is a clock: kernels of a segment end one after the other, and a launch beyond the queue's
depth sleeps in C with the GIL held. The real code of the CUDA streams launches segments, and the worker makes real
updates of chunks whose parameters lie in groups of other hyperparameters, as with weight decay.

    updates alone               no segment is launched
    beside launches             as chunkc launches: segments under way are bounded while the worker has work
    beside unbounded launches   segments are launched as long as the queue takes kernels

    OMP_WAIT_POLICY=passive python benchmarks/updates_beside_launches.py
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import provenance
import torch
from executor_overhead import InstantCuda, InstantStream

from chunkc.ir.actions import Stream
from chunkc.runtime.devices import cuda_streams
from chunkc.runtime.devices.cpu_affinity import HostCores
from chunkc.runtime.devices.cuda_streams import CudaStreams
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.protocol import Event, PlannedLaunch
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import ADAM, AdamHyper
from chunkc.runtime.update.update_inputs import StepInputs

RESULTS = Path(__file__).parent / "results"
QUEUE_DEPTH = 1000
KERNEL_S = 50e-6
NUM_KERNELS = 100
"""Of one segment."""
NUM_PIECES = 16
"""Parameters of a chunk, of two groups in turn."""
KINDS = ("alone", "beside launches", "beside unbounded launches")

_sleep_with_gil = ctypes.PyDLL(None).usleep


@dataclass
class ClockedGpu(InstantCuda):
    """A GPU whose kernels take `KERNEL_S` each; an event is the time at which what is before it has ended."""

    ends_s: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        super().__init__()

    def launch_kernels(self) -> None:
        """Launch the kernels of a segment, each by a call that holds the GIL while the queue is full."""
        for _ in range(NUM_KERNELS):
            while self.ends_s and self.ends_s[0] <= time.perf_counter():
                self.ends_s.popleft()
            if len(self.ends_s) >= QUEUE_DEPTH:
                _sleep_with_gil(max(1, int(1e6 * (self.ends_s[0] - time.perf_counter()))))
            before_s = self.ends_s[-1] if self.ends_s else 0.0
            self.ends_s.append(max(before_s, time.perf_counter()) + KERNEL_S)

    def record(self, stream: InstantStream, used: object = None) -> float:
        return self.ends_s[-1] if stream.cuda_stream == 0 and self.ends_s else 0.0

    def is_done(self, event: object) -> bool:
        return time.perf_counter() >= float(event)  # type: ignore[arg-type]

    def wait_on_host(self, event: object) -> None:
        time.sleep(max(0.0, float(event) - time.perf_counter()))  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the kinds in turn, and write the result; 1 where updates are slower than ``--least``."""
    args = parse(argv)
    updates = [make_update(args.numel, seed) for seed in range(args.chunks)]
    for number in (1, 2):  # states begin at the first step, and what is called is made at the second
        for update in updates:
            update.update(inputs(number))
    seconds("alone", updates, args)
    rounds = [{kind: seconds(kind, updates, args) for kind in KINDS} for _ in range(args.rounds)]
    shares = {kind: statistics.median(r["alone"] / r[kind] for r in rounds) for kind in KINDS[1:]}
    result = {
        **provenance.describe(),
        "kernel_us": KERNEL_S * 1e6,
        "queue_depth": QUEUE_DEPTH,
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "share_of_speed_alone": {kind: round(share, 3) for kind, share in shares.items()},
        "rounds_s": [{kind: round(s, 4) for kind, s in r.items()} for r in rounds],
    }
    print(json.dumps(result["share_of_speed_alone"], indent=2))
    path = args.out or RESULTS / f"updates_beside_launches-{result['date'][:10]}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if shares["beside launches"] >= args.least else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Updates beside a thread that launches kernels with the GIL held.")
    parser.add_argument("--numel", type=int, default=2**20, help="parameters in a chunk")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--passes", type=int, default=40, help="steps of all chunks in one measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--least", type=float, default=0.8, help="least share of their speed alone")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def make_update(numel: int, seed: int) -> ChunkUpdate:
    """The update of a chunk of parameters with and without weight decay in turn."""
    draws = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    bounds = [numel * i // NUM_PIECES for i in range(NUM_PIECES + 1)]
    pieces = [Piece(i, bounds[i], bounds[i + 1]) for i in range(NUM_PIECES)]
    return ChunkUpdate(ADAM, draws.to(torch.bfloat16), (draws, draws * 0, draws * 0), pieces)


def inputs(step: int) -> StepInputs:
    hypers = [AdamHyper(1e-4, 0.9, 0.999, 1e-8, weight_decay, decoupled=True) for weight_decay in (0.0, 0.01)]
    return StepInputs({i: hypers[i % 2] for i in range(NUM_PIECES)}, dict.fromkeys(range(NUM_PIECES), step), NUM_PIECES)


def seconds(kind: str, updates: Sequence[ChunkUpdate], args: argparse.Namespace) -> float:
    """Until the worker has made all updates, from the first launch."""
    gpu = ClockedGpu()
    streams = CudaStreams("clocked", gpu, DebugSettings())  # type: ignore[arg-type]
    streams.launch(Stream.CPU, "use cores", (), HostCores((0,), is_bound=False).take)
    streams.synchronize()
    bound = 10**9 if kind == "beside unbounded launches" else cuda_streams.MAX_SEGMENTS_UNDER_WAY
    done = threading.Event()
    planned = [PlannedLaunch(f"s{i}", f"update c{i} @cpu", Stream.CPU, ()) for i in range(len(updates) * args.passes)]
    works = [partial(update.update, inputs(3 + number)) for number in range(args.passes) for update in updates]
    events = dict[str, Event]()
    with mock.patch.object(cuda_streams, "MAX_SEGMENTS_UNDER_WAY", bound):
        begun_s = time.perf_counter()
        streams.launch_all(planned, works, events)
        streams.launch(Stream.CPU, "end", (), done.set)
        number = 0
        while kind != "alone" and not done.is_set():
            segment = PlannedLaunch(f"f{number % 32}", f"run fwd.{number % 32} @compute", Stream.COMPUTE, (), True)
            streams.launch_all([segment], [gpu.launch_kernels], events)
            number += 1
        done.wait()
        elapsed_s = time.perf_counter() - begun_s
    streams.close()
    return elapsed_s


if __name__ == "__main__":
    sys.exit(main())
