"""Find least device budgets of ``least_budget_models.py`` by planning; train steps under some.

With ``--named-only`` a budget is the one that a refusal names, and nothing runs. ``--steps-of`` then trains the models
that it lists under their named budgets on the emulated device; whether the second step's reading was within the plan is
recorded as ``fits``, and a reading above it is no error. The table in docs/memory.md is made so:

    OMP_WAIT_POLICY=passive python benchmarks/least_budgets.py --named-only --out named.json
    OMP_WAIT_POLICY=passive python benchmarks/least_budgets.py --named named.json --steps-of OPT nanoGPT --out now.json
    PYTHONPATH=<checkout before> ... least_budgets.py --named-only --commit <that commit> --out before.json
    python benchmarks/least_budgets.py --join before.json now.json --out benchmarks/results/least_budgets-<date>.json

Without ``--named-only`` the least budget is searched below the named one by bisection, to ``PRECISION``: planning
accepts it and refuses a little less, and two steps run under it. All options of ``chunkc.compile`` are its defaults but
for the backend, so that the script runs on earlier commits too.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from least_budget_models import ALL, LENGTH, Measured
from provenance import describe
from tabulate import tabulate

import chunkc

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- least budgets -->\n\n", "\n<!-- end of least budgets -->\n"
NUM_STEPS = 2
PRECISION = 0.02
"""By how much less than the least budget, relative to it, is refused."""
BY_NAME = {model.name: model for model in ALL}
Record = dict[str, Any]


def machine(nbytes: int) -> chunkc.Hardware:
    """An emulated device of ``nbytes``."""
    hw = chunkc.Hardware.parse("emulated-1m-8g")
    return replace(hw, name=f"emulated-{nbytes}-8g", gpu_memory_nbytes=nbytes)


def planned(model: Measured, nbytes: int, backend: str) -> chunkc.Plan | chunkc.BudgetError:
    """The plan for ``nbytes`` of device memory, from the model on the meta device, or its refusal."""
    with torch.device("meta"):
        module = model.build()
    try:
        return chunkc.plan(module, machine(nbytes), example_inputs=model.batch(), backend=backend)
    except chunkc.BudgetError as error:
        return error
    finally:
        gc.collect()


def named_nbytes(model: Measured, backend: str) -> int:
    """The least device budget that a refusal names."""
    refusal = planned(model, 2**20, backend)
    if not isinstance(refusal, chunkc.BudgetError):
        raise ValueError(f"{model.name} trains in a MiB")
    return refusal.min_device_nbytes


def least_nbytes(model: Measured, named: int, backend: str) -> int:
    """The least device budget that is planned, to ``PRECISION`` of it, if ``named`` bytes are."""
    low, high = 2**20, named
    tried = int(high * (1 - PRECISION))
    while low < int(high * (1 - PRECISION)):
        if isinstance(planned(model, tried, backend), chunkc.BudgetError):
            low = tried
        else:
            high = tried
        tried = (low + high) // 2
    return high


def train_a_step(model: Measured, nbytes: int, backend: str) -> Record:
    """Run steps of AdamW under ``nbytes``; return what was planned, and measured in the last.

    In the first one oneDNN makes what it keeps, which counts in a reading.
    """
    module = chunkc.compile(model.build(), machine(nbytes), backend=backend, fullgraph=True)
    optimizer = chunkc.AdamW(module.parameters(), 1e-3)
    loss = torch.tensor(0.0)
    for _ in range(NUM_STEPS):
        loss = module(**model.batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
    stats, plan = chunkc.stats(module), chunkc.plan_of(module)
    memory = plan.memory
    if not torch.isfinite(loss):
        raise ValueError(f"the loss of {model.name} is {loss.item()}")
    return {
        "loss": loss.item(),
        "planned_peak_nbytes": stats["planned_peak_nbytes"],
        "measured_peak_nbytes": stats["measured_peak_nbytes"],
        "fits": stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"],
        "model_data_nbytes": stats["model_data_nbytes"],
        "arena_nbytes": memory.arena_nbytes,
        "nonmodel_nbytes": memory.nonmodel_nbytes,
        "nonmodel_segment": memory.nonmodel_segment,
        "chunk_numel": plan.layout.chunk_numel,
        "num_segments": len(plan.segments),
    }


def measure(model: Measured, backend: str, known: Record | None = None, *, is_named_only: bool = False) -> Record:
    """Find the least budget of one model, and run steps under it.

    Args:
        known: what was found for the model with ``is_named_only``.
        is_named_only: whether the budget that a refusal names is taken, and nothing runs.
    """
    started_s, cpu_s = time.perf_counter(), time.process_time()
    named = named_nbytes(model, backend) if known is None else known["least_nbytes"]
    record = {"model": model.name, "what": model.what, "length": model.length, "backend": backend}
    if is_named_only:
        record |= {"least_nbytes": named}
    else:
        least = least_nbytes(model, named, backend)
        record |= {"least_nbytes": least, "named_nbytes": named, **train_a_step(model, least, backend)}
    gc.collect()
    seconds = {"elapsed_s": round(time.perf_counter() - started_s, 1), "cpu_s": round(time.process_time() - cpu_s, 1)}
    return record | seconds


def with_steps(named: Mapping[str, Any], names: Sequence[str], about: Mapping[str, Any]) -> Record:
    """The result ``named``, with steps of the models of these names under their budgets.

    Args:
        about: of the run that makes these steps: command, commit, machine.
    """
    models = list[Record]()
    for record in named["models"]:
        name = record["model"]
        steps = train_a_step(BY_NAME[name], record["least_nbytes"], record["backend"]) if name in names else {}
        models.append({**record, **steps})
        gc.collect()
    return {**named, "models": models, "steps": dict(about)}


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> Record:
    """Join both measurements of each model, with their ratio; ``steps`` says where ``after`` ran."""
    earlier = {record["model"]: record for record in before["models"]}
    rows = [
        {"model": record["model"], "what": record["what"], "length": record["length"],
         "ratio": record["least_nbytes"] / earlier[record["model"]]["least_nbytes"],
         "before": earlier[record["model"]], "after": record}
        for record in after["models"]
    ]  # fmt: skip
    short = [row["ratio"] for row in rows if row["length"] == LENGTH]
    found = {
        "median_ratio": statistics.median(short),
        "largest_ratio": max(row["ratio"] for row in rows),
        "models": rows,
        "before": {k: v for k, v in before.items() if k != "models"},
        "after": {k: v for k, v in after.items() if k not in ("models", "steps")},
    }
    return found | ({"steps": after["steps"]} if "steps" in after else {})


def table(result: Mapping[str, Any]) -> str:
    """The rows as Markdown, in MiB; the last column, measured peaks, is empty where no step ran."""

    def mib(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"

    rows = [
        (
            row["model"], row["what"], mib(row["before"]["least_nbytes"]), mib(row["after"]["least_nbytes"]),
            f"{row['ratio']:.2f}", mib(row["after"].get("measured_peak_nbytes")),
        )
        for row in result["models"]
    ]  # fmt: skip
    headers = ("model", "", "before, MiB", "now, MiB", "ratio", "second step, MiB")
    if not any(row[-1] for row in rows):
        rows, headers = [row[:-1] for row in rows], headers[:-1]  # type: ignore[assignment]
    return tabulate(rows, headers, "pipe", disable_numparse=True) + "\n"


def write_page(result: Mapping[str, Any]) -> None:
    """Write the table between its marks."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}{table(result)}{END}{tail}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure or compare least device budgets.")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), help="these models")
    parser.add_argument("--backend", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--named-only", action="store_true", help="take what refusals name, and run no step")
    parser.add_argument("--named", type=Path, metavar="FILE", help="a result with --named-only, to go on from")
    parser.add_argument("--steps-of", nargs="+", choices=list(BY_NAME), help="train these of --named")
    parser.add_argument("--commit", help="of chunkc, where it is another checkout's")
    parser.add_argument("--join", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="write the page's table")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.join:
        before, after = (json.loads(path.read_text()) for path in args.join)
        result = joined(before, after)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        write_page(result)
        print(table(result), f"median {result['median_ratio']:.2f}, largest {result['largest_ratio']:.2f}")
        return 0
    if args.steps_of:
        if not args.named:
            parser.error("--steps-of needs --named: the budgets under which these models train")
        result = with_steps(json.loads(args.named.read_text()), args.steps_of, describe(args.commit))
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    result = describe(args.commit) | {"models": []}
    named = json.loads(args.named.read_text())["models"] if args.named else []
    known = {record["model"]: record for record in named}
    for name in args.only:
        record = measure(BY_NAME[name], args.backend, known.get(name), is_named_only=args.named_only)
        result["models"].append(record)
        print(json.dumps(record), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
