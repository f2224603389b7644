"""Step time of a tensor-parallel model with chunkc, beside torch alone.

torch alone is DTensor, ``torch.compile`` and fused AdamW. Both train the same fp32 Llama, divided by the plan that
transformers keeps of it, on the same batches with Inductor, in the same processes, a step each in turn (A B A B ...).
A step begins behind a barrier and lasts as long as that of the slowest rank; a step of chunkc until its pending updates
are done. The figure is the median of the ratios of the pairs.
The first rank writes a result under benchmarks/results/; the exit code is 1 where the ratio is above ``--limit``.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive torchrun --nproc-per-node 2 benchmarks/tensor_parallel_step.py
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resident_overhead import (
    RESULTS,
    VOCABULARY_SIZE,
    Step,
    build,
    chunked_step,
    describe,
    parse,
    plain_step,
    plan_facts,
    timed,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from chunkc.scenarios.models import parallelise


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; the first one writes the result. Return the exit code."""
    args = parse(argv)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = build(args)
    plain_model = copy.deepcopy(model)
    for divided in (model, plain_model):
        parallelise(divided, "llama", mesh)
    tokens = [torch.randint(VOCABULARY_SIZE, (args.batch, args.seq)) for _ in range(args.warm_up + args.pairs)]
    plain = plain_step(plain_model, _groups(plain_model))
    managed, chunked = chunked_step(model, args, mesh=mesh)
    for batch in tokens[: args.warm_up]:
        losses = plain(batch), chunked(batch)
    load_before = os.getloadavg()
    pairs = [(_of_slowest(plain, batch), _of_slowest(chunked, batch)) for batch in tokens[args.warm_up :]]
    result = {
        **describe(pairs, load_before, args),
        "ranks": dist.get_world_size(),
        "plan": plan_facts(managed),
        "loss_after_warm_up": {"plain": losses[0], "chunkc": losses[1]},
    }
    is_within = result["median_ratio"] <= args.limit and not result["plan"]["moved_nbytes"]
    if dist.get_rank() == 0:
        _write(result, args)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_within else 1


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """DTensors and other parameters apart: torch's fused kernel takes no mixture."""
    divided = [param for param in model.parameters() if isinstance(param, DTensor)]
    others = [param for param in model.parameters() if not isinstance(param, DTensor)]
    return [{"params": divided}, {"params": others}]


def _of_slowest(step: Step, batch: torch.Tensor) -> float:
    """Seconds of one step, of the rank that takes longest."""
    dist.barrier()
    elapsed_s = torch.tensor(timed(step, batch), dtype=torch.float64)
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)
    return elapsed_s.item()


def _write(result: dict[str, object], args: argparse.Namespace) -> None:
    path: Path = args.out or RESULTS / f"tensor_parallel_step-{str(result['date'])[:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "pairs_s"}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
