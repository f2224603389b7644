"""Host update of one chunk against torch.optim.AdamW(fused=True) on the same elements, in float32 and bfloat16.

``one memory`` is float32 with the payload as param32 itself. Runs are paired; the figure is the median ratio. Run with
``OMP_WAIT_POLICY=passive python benchmarks/bench_host_adam.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from chunkc.runtime.adam import ChunkUpdate, Piece
from chunkc.runtime.step_inputs import Hyper, StepInputs

HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, decoupled=True)


def measure_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def make_update(sizes: list[int], dtype: torch.dtype, *, is_cast: bool = True) -> Callable[[], None]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    pieces = [Piece(i, end - size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    payload = torch.randn(ends[-1]).to(dtype)
    param32, moments = torch.randn(ends[-1]), (torch.zeros(ends[-1]), torch.zeros(ends[-1]))
    if is_cast:
        update = ChunkUpdate(payload, param32, *moments, pieces)
    else:
        update = ChunkUpdate(param32, param32, *moments, pieces, gradient=payload)
    params = range(len(sizes))
    inputs = StepInputs(dict.fromkeys(params, HYPER), dict.fromkeys(params, 2), len(sizes))
    return lambda: update.update(inputs)


def make_reference(sizes: list[int]) -> Callable[[], object]:
    params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    return torch.optim.AdamW(params, fused=True).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=16 * 2**20)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.2f}")
    cases = {"one tensor": [options.numel], "odd tensors": [options.numel // 16 + 1] * 16, "small": [1000] * 2000}
    for name, sizes in cases.items():
        reference = make_reference(sizes)
        for kind, update in (
            ("float32", make_update(sizes, torch.float32)),
            ("one memory", make_update(sizes, torch.float32, is_cast=False)),
            ("bfloat16", make_update(sizes, torch.bfloat16)),
        ):
            pairs = [(measure_ms(update), measure_ms(reference)) for _ in range(options.runs + 3)][3:]
            ours_ms, theirs_ms = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            rate = f"{sum(sizes) / ours_ms / 1e6:.2f} Gparam/s"
            print(f"{name:12} {kind:10} {ours_ms:7.2f} ms  torch {theirs_ms:7.2f} ms  x{ratio:.2f}  {rate}")


if __name__ == "__main__":
    main()
