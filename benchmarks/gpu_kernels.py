"""Bandwidth of chunkc's kernels against device copies of as many bytes: median ratio of pairs.

python benchmarks/gpu_kernels.py -o kernels.json [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from chunkc._torch_compat.cuda import cuda_sleep
from chunkc.runtime.update.rules import AdamHyper
from chunkc.runtime.update.update_inputs import StepInputs, tables_of
from chunkc.triton_kernels.cast import restore
from chunkc.triton_kernels.chunk_update import chunk_update_launch
from chunkc.triton_kernels.grad_norm import grad_norm, make_norm_tiles
from chunkc.triton_kernels.launch import make_tiles

Work = Callable[[], object]
AHEAD_CYCLES = 2_000_000  # a millisecond
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description="chunkc's kernels against copies on the device.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of the result, JSON")
    parser.add_argument("--quick", action="store_true", help="small chunks, few pairs")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(1 << 14 if args.quick else 1 << 28, 5 if args.quick else 41, device)
    args.output.write_text(json.dumps(found) + "\n")
    return 0


def measure(numel: int, pairs: int, device: torch.device) -> dict[str, Any]:
    """Every kernel on chunks of ``numel`` elements, in bf16 beside fp32.

    ``ratio`` is the copy's time over the kernel's.

    Bytes are those that must move: each list read or written once.
    """
    payload = torch.randn(numel, device=device).mul_(1e-2).bfloat16()
    triple = [torch.rand(numel, device=device).mul_(1e-2) for _ in range(3)]
    tiles, norm_tiles = (make([(0, numel, 0)], device) for make in (make_tiles, make_norm_tiles))
    rows, row_of_param = tables_of(StepInputs({0: HYPER}, {0: 7}, 1))
    control = torch.tensor([1.0, 0.0], device=device)
    tables = (tiles, row_of_param.to(device), rows.to(device), control)
    adam = chunk_update_launch("adam", triple, payload, payload, *tables)
    norm = torch.zeros(2, device=device)
    kernels: dict[str, tuple[Work, int]] = {
        "chunk_adam": (adam.run, 28),  # bf16 gradient read and parameter written in place, three fp32 lists both ways
        "restore": (lambda: restore(triple[0], payload, tiles), 6),
        "grad_norm": (lambda: grad_norm(payload, norm_tiles, norm), 2),
    }
    words = torch.randint(2**31 - 1, (14 * numel // 4,), dtype=torch.int32, device=device)
    source = words.view(torch.uint8)  # random, as equal bytes may move faster
    target = torch.empty_like(source)
    found = {}
    for name, (work, nbytes) in kernels.items():
        half = nbytes * numel // 2
        found[name] = paired(work, copying(target[:half], source[:half]), nbytes * numel, pairs, device)
    return {"numel": numel, "kernels": found}


def copying(target: torch.Tensor, source: torch.Tensor) -> Work:
    """A copy on the device; it moves twice the bytes of ``source``."""
    return lambda: target.copy_(source)


def paired(work: Work, copy: Work, nbytes: int, pairs: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of both in turn, after three of each."""
    for _ in range(3):
        work(), copy()
    times = [(milliseconds(work, device), milliseconds(copy, device)) for _ in range(pairs)]
    kernel_ms, copy_ms = (statistics.median(side) for side in zip(*times, strict=True))
    ratios = sorted(copied / ran for ran, copied in times)
    return {
        "kernel_ms": round(kernel_ms, 4),
        "copy_ms": round(copy_ms, 4),
        "gb_per_s": round(nbytes / kernel_ms / 1e6, 1),
        "copy_gb_per_s": round(nbytes / copy_ms / 1e6, 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_20_80": [round(ratios[len(ratios) // 5], 4), round(ratios[len(ratios) * 4 // 5], 4)],
    }


def milliseconds(work: Work, device: torch.device) -> float:
    """By CUDA events, behind a pause in which the host gets ahead; by the clock where there is no GPU."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        work()
        return (time.perf_counter() - started_s) * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cuda_sleep(AHEAD_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


if __name__ == "__main__":
    sys.exit(main())
