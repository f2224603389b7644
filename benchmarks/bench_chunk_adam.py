"""The host update beside a pass that only moves its bytes, and PyTorch's fused AdamW with casts.

Everything works on one chunk in place, with a 16-bit gradient that lies in the payload, on a worker thread as in
training, a run each in turn. A ratio is a baseline's time by ours, the median over the rounds. Two must hold, else the
exit code is 1: ``--move``, by a pass that moves the same bytes (gradient, param32 and moments read; param32, moments
and payload written), and ``--fused``, by the better of PyTorch's fused AdamW in cache-sized tiles and whole, with casts
before and after.

The bytes are moved by loops that Inductor compiled from copies, with vectors as wide as the processor's and the same
number of threads: list after list, the same in tiles, and all lists in one loop. The fastest counts.

    OMP_WAIT_POLICY=passive python benchmarks/bench_chunk_adam.py
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import provenance
import torch
from torch import Tensor

from chunkc._torch_compat.inductor import inductor_loop
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import ADAM, AdamHyper
from chunkc.runtime.update.update_inputs import StepInputs

RESULTS = Path(__file__).parent / "results"
HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, decoupled=True)
FUSED_TILE_NUMEL = 256 * 1024
MOVE_TILE_NUMEL = 1024 * 1024
BASELINES = {"move": ("move lists", "move tiles", "move one loop"), "fused": ("fused tiles", "fused whole")}

Work = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    works = make_works(args.numel, getattr(torch, args.dtype))
    load_before = os.getloadavg()
    with ThreadPoolExecutor(1) as worker:
        rounds = [measure_round(works, worker, i) for i in range(args.warm_up + args.rounds)][args.warm_up :]
    result = describe(rounds, load_before, args)
    print(text(result))
    path = args.out or RESULTS / f"chunk_adam-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["holds"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 * 2**20, help="parameters in the chunk")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--move", type=float, default=0.85, help="least ratio to moving the same bytes")
    parser.add_argument("--fused", type=float, default=1.1, help="least ratio to PyTorch's fused AdamW with casts")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def make_works(numel: int, dtype: torch.dtype) -> dict[str, Work]:
    """The measured functions, by name; all work on the same chunk."""
    draws = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).repeat(-(-numel // 2**16))[:numel]
    payload, triple = draws.to(dtype), (draws.clone(), draws * 1e-2, draws.square() * 1e-3)
    update = ChunkUpdate(ADAM, payload, triple, [Piece(0, 0, numel)])
    inputs = StepInputs({0: HYPER}, {0: 1000}, 1)
    return {
        "chunkc": lambda: update.update(inputs),
        "move lists": move_bytes(payload, triple, numel, one_loop=False),
        "move tiles": move_bytes(payload, triple, MOVE_TILE_NUMEL, one_loop=False),
        "move one loop": move_bytes(payload, triple, numel, one_loop=True),
        "fused tiles": fused_adamw(payload, triple, FUSED_TILE_NUMEL),
        "fused whole": fused_adamw(payload, triple, numel),
    }


def move_bytes(payload: Tensor, triple: Sequence[Tensor], tile_numel: int, *, one_loop: bool) -> Work:
    """Read and write every list in place, without arithmetic."""
    lists = (payload, *triple)

    def copies(*inputs: Tensor) -> list[Tensor]:
        *sources, flag = inputs
        if not one_loop:
            return [t.clone() for t in sources]
        return [torch.where(flag != 0, t, 0) for t in sources]  # what they share makes Inductor fuse the copies

    flag = torch.ones((), dtype=payload.dtype)  # 16 bits in every part of the loop give it vectors of full length
    examples = [*(torch.ones(4096, dtype=t.dtype) for t in lists), flag]
    library, symbol, order = inductor_loop(copies, examples, is_parallel=torch.get_num_threads() > 1)
    loop = getattr(ctypes.CDLL(library), symbol)
    loop.argtypes = [ctypes.c_int64 if kind == "numel" else ctypes.c_void_p for kind, _ in order]
    loop.restype = None

    def move() -> None:
        for start in range(0, payload.numel(), tile_numel):
            addresses = [*(t.data_ptr() + start * t.element_size() for t in lists), flag.data_ptr()]
            numel = min(tile_numel, payload.numel() - start)
            loop(*(numel if kind == "numel" else addresses[index] for kind, index in order))

    return move


def fused_adamw(payload: Tensor, triple: Sequence[Tensor], tile_numel: int) -> Work:
    """PyTorch's fused CPU AdamW, which wants one dtype: cast the gradient, update, cast the parameter."""
    numel = payload.numel()
    gradient = torch.empty(min(tile_numel, numel))
    step = torch.tensor(1000.0)

    def update() -> None:
        for start in range(0, numel, tile_numel):
            p, m, v, p16 = (t[start : start + tile_numel] for t in (*triple, payload))
            g = gradient[: p16.numel()].copy_(p16)
            torch._fused_adamw_(
                [p], [g], [m], [v], [], [step], lr=HYPER.lr, beta1=HYPER.beta1, beta2=HYPER.beta2, eps=HYPER.eps,
                weight_decay=HYPER.weight_decay, amsgrad=False, maximize=False,
            )  # fmt: skip
            p16.copy_(p)

    return update


def measure_round(works: dict[str, Work], worker: ThreadPoolExecutor, index: int) -> dict[str, float]:
    """Milliseconds of each work, called in turn; every round starts with another one."""
    names = list(works)
    order = names[index % len(names) :] + names[: index % len(names)]
    return {name: worker.submit(timed_ms, works[name]).result() for name in order}


def timed_ms(work: Work) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def describe(
    rounds: list[dict[str, float]], load_before: tuple[float, float, float], args: argparse.Namespace
) -> dict[str, Any]:
    medians = {name: statistics.median(r[name] for r in rounds) for name in sorted(rounds[0])}
    best = {kind: min(names, key=medians.__getitem__) for kind, names in BASELINES.items()}
    pairs = {kind: [r[name] / r["chunkc"] for r in rounds] for kind, name in best.items()}
    ratios = {kind: statistics.median(values) for kind, values in pairs.items()}
    nbytes = args.numel * (6 * 4 + 2 * 2)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": provenance.command(),
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "ratios_quartiles": {kind: quartiles(values) for kind, values in pairs.items()},
        "limits": {"move": args.move, "fused": args.fused},
        "holds": ratios["move"] >= args.move and ratios["fused"] >= args.fused,
        "baselines": best,
        "median_ms": {name: round(value, 2) for name, value in medians.items()},
        "gparam_per_s": {name: round(args.numel / value / 1e6, 3) for name, value in medians.items()},
        "gbyte_per_s_of_chunkc": round(nbytes / medians["chunkc"] / 1e6, 1),
        "rounds_ms": [{name: round(value, 2) for name, value in r.items()} for r in rounds],
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "niceness": os.nice(0),
        "hardware": {"processor": provenance.processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": provenance.commit(),
    }


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def text(result: dict[str, Any]) -> str:
    lines = [f"{name:14} {ms:8.2f} ms  {result['gparam_per_s'][name]:.3f} Gparam/s" for name, ms in
             result["median_ms"].items()]  # fmt: skip
    for name, ratio in result["ratios"].items():
        lines.append(f"speed by {name}: {ratio:.3f}, at least {result['limits'][name]:.2f} wanted")
    lines.append(f"load {result['load_before'][0]:.2f} before, {result['load_after'][0]:.2f} after")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
