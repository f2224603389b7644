"""Simulated beside published throughput of PatrickStar: every row of its paper on two machines.

The model of PatrickStar (`chunkc.baselines`) is simulated for every model, number of GPUs and batch size of the paper,
and the best batch counts, as there. Machines and figures stand in published.toml, with three constants a machine that
are fitted on three of its models; the other rows are predictions.

    python benchmarks/published.py           # writes docs/published.md
    python benchmarks/published.py --fit     # prints the constants that fit best
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from deep import schedule_of

from chunkc.baselines import POLICIES, Course, Machine, Outcome
from chunkc.cost.sharing import FROM_DEVICE, TO_DEVICE, Capacities
from chunkc.hardware import Hardware

DATA = Path(__file__).with_suffix(".toml")
PAGE = Path(__file__).parents[1] / "docs" / "published.md"
REMARKS = (
    "What differs from the paper's runs, and what explains errors:",
    "",
    "* The models here are GPT-2's blocks, 30,522 words and a head of two classes; the authors trained BERT's blocks",
    "  of the same sizes. No dropout.",
    "* The constants do not know the number of GPUs. The slow link that fits is that of copies from pageable memory,",
    "  which a system makes that allocates memory as chunks move: a guess that fits, not a measurement.",
    "* Offloading of activations, which the authors used where it was faster, is not modelled, nor is fragmentation of",
    "  PyTorch's allocator: larger batches fit here.",
)
"""Below the table."""
SPAN, FINEST = 2.0, 1.02
"""The fit looks at constants times and divided by a factor: from the first, by square roots, down to the second."""


@dataclass(frozen=True)
class Row:
    """One published figure: TFLOPS of all GPUs together; ``fitted`` says whether the constants know it."""

    machine: str
    num_gpus: int
    model: str
    tflops: float
    fitted: bool


@dataclass(frozen=True)
class Predicted:
    """The model's answer for a row: ``batch`` is the best one; no TFLOPS where none fits."""

    row: Row
    tflops: float | None
    batch: int
    outcome: Outcome

    @property
    def error(self) -> float | None:
        """Relative to what was published."""
        return None if self.tflops is None else self.tflops / self.row.tflops - 1


def load() -> dict[str, Any]:
    """The contents of published.toml."""
    return tomllib.loads(DATA.read_text())


def rows_of(data: Mapping[str, Any], machine: str) -> list[Row]:
    """The published rows of one machine, in the order of the file."""
    entry = data["machine"][machine]
    return [
        Row(machine, int(gpus), model, tflops, model in entry["fitted"])
        for gpus, found in entry["tflops"].items()
        for model, tflops in found.items()
    ]


@cache
def course_of(layers: int, hidden: int, batch: int) -> Course:
    """One iteration of a model with GPT-2's blocks."""
    return Course.of(schedule_of(layers, hidden, batch))


def machine_of(alias: str, num_gpus: int, constants: Mapping[str, float]) -> Machine:
    """A rank of the machine with as many of its GPUs, on the constants; the host is all theirs."""
    whole = Hardware.parse(alias)
    if whole.tflops is None or whole.tflops.fp16 is None:
        raise ValueError(f"{alias} has no fp16 rate in the catalogue")
    machine = Machine.of(replace(whole, gpus_per_node=num_gpus, name=f"{num_gpus} of {alias}"))
    rates = machine.rates
    link = constants["host_link_gb_per_s"]
    update = constants["cpu_update_gparam_per_s"] / num_gpus
    if not isinstance(rates.sharing, Capacities):
        raise TypeError("the catalogue's rates share capacities")
    shared = {**rates.sharing.gb_per_s, TO_DEVICE: link, FROM_DEVICE: link}
    rates = replace(
        rates,
        sharing=Capacities(shared),
        matmul_tflops={**rates.matmul_tflops, "float16": whole.tflops.fp16 * constants["matmul_efficiency"]},
        copies={stream: replace(law, gb_per_s=link) for stream, law in rates.copies.items()},
        cpu_update_gparam_per_s=dict.fromkeys(rates.cpu_update_gparam_per_s, update),
    )
    return replace(machine, rates=rates)


def predict(data: Mapping[str, Any], row: Row, constants: Mapping[str, float] | None = None) -> Predicted:
    """The best of all batches, on the machine's own constants unless others are given."""
    constants = data["machine"][row.machine]["constants"] if constants is None else constants
    machine = machine_of(row.machine, row.num_gpus, constants)
    best: Predicted | None = None
    for batch in data["batches"]:
        outcome = POLICIES["patrickstar"](course_of(*data["models"][row.model], batch), machine)
        each = None if outcome.timeline is None else outcome.timeline.patrickstar_tflops
        tflops = None if each is None else each * row.num_gpus
        if best is None or (tflops or 0.0) > (best.tflops or 0.0):
            best = Predicted(row, tflops, batch, outcome)
    if best is None:
        raise ValueError("published.toml names no batches")
    return best


def fit(data: Mapping[str, Any], machine: str, say: Callable[[str], object] = print) -> dict[str, float]:
    """Constants with the least sum of squared log ratios to the published, by search along each in turn."""
    rows = [row for row in rows_of(data, machine) if row.fitted]

    def loss(constants: Mapping[str, float]) -> float:
        found = [predict(data, row, constants) for row in rows]
        return sum(math.log(p.tflops / p.row.tflops) ** 2 if p.tflops else 100.0 for p in found)

    best = dict(data["machine"][machine]["constants"])
    least, factor = loss(best), SPAN
    while factor >= FINEST:
        moved = False
        for name in best:
            for times in (factor, 1 / factor):
                tried = {**best, name: best[name] * times}
                if (found := loss(tried)) < least:
                    best, least, moved = tried, found, True
        say(f"{machine}: {least:.4f} { ({n: round(v, 3) for n, v in best.items()}) }")
        factor = factor if moved else math.sqrt(factor)
    return {name: float(f"{value:.3g}") for name, value in best.items()}


def median_error(predicted: Sequence[Predicted]) -> float:
    """Of the rows that were not fitted; one that does not fit counts as wholly wrong."""
    return statistics.median(1.0 if p.error is None else abs(p.error) for p in predicted if not p.row.fitted)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, or write the page."""
    parser = argparse.ArgumentParser(description="Simulated against published throughput of PatrickStar.")
    parser.add_argument("--fit", action="store_true", help="print the constants that fit best, and write nothing")
    args = parser.parse_args(argv)
    data = load()
    if args.fit:
        for machine in data["machine"]:
            print(machine, fit(data, machine, lambda line: print(line, file=sys.stderr)))
        return 0
    predicted = [predict(data, row) for machine in data["machine"] for row in rows_of(data, machine)]
    PAGE.write_text(page(data, predicted))
    return 0


def digest() -> str:
    """Of everything that the page depends on here: figures, constants, and this way to use them."""
    return hashlib.sha256(DATA.read_bytes()).hexdigest()[:12]


def page(data: Mapping[str, Any], predicted: Sequence[Predicted]) -> str:
    """docs/published.md."""
    open_rows = [p for p in predicted if not p.row.fitted]
    within = sum(1 for p in open_rows if p.error is not None and abs(p.error) <= 0.2)
    lines = [
        "# PatrickStar, published and simulated",
        "",
        "`chunkc.baselines` models PatrickStar in the simulator of plans. Here it is held against the throughput that",
        "its authors published (Fang et al., 2021, figures 11 to 13), all rows. Figures are TFLOPS of all GPUs",
        "together, as the paper counts: parameters * tokens * 8 / seconds; the best batch of "
        + _listed(data["batches"])
        + " for each GPU,",
        "activation checkpointing on. Nothing here was run: predicted means simulated.",
        "",
        f"**Median error of the rows that were not fitted: {100 * median_error(predicted):.1f} %** ({within} of"
        f" {len(open_rows)} within 20 %); by machine: {_by_machine(data, predicted)}.",
        "",
        "Regenerate with `python benchmarks/published.py`; `--fit` finds the constants.",
        "",
        *_constants(data),
        "",
        "| machine | GPUs | model | published | predicted | error | batch | fitted |",
        "|---|---:|---|---:|---:|---:|---:|---|",
        *(line_of(p) for p in predicted),
        "",
        *REMARKS,
        "",
        f"<!-- published.toml: {digest()} -->",
    ]
    return "\n".join(lines) + "\n"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _by_machine(data: Mapping[str, Any], predicted: Sequence[Predicted]) -> str:
    parts = []
    for machine in data["machine"]:
        for gpus in (1, 8):
            found = [p for p in predicted if (p.row.machine, p.row.num_gpus) == (machine, gpus)]
            parts.append(f"{machine} with {gpus} GPU{'s' if gpus > 1 else ''} {100 * median_error(found):.1f} %")
    return ", ".join(parts)


def _constants(data: Mapping[str, Any]) -> list[str]:
    names = list(next(iter(data["machine"].values()))["constants"])
    lines = ["| machine | " + " | ".join(names) + " | fitted on |", "|---|" + "---:|" * len(names) + "---|"]
    for machine, entry in data["machine"].items():
        values = " | ".join(f"{entry['constants'][name]:g}" for name in names)
        lines.append(f"| {machine} | {values} | {', '.join(entry['fitted'])} |")
    return lines


def line_of(found: Predicted) -> str:
    """A row of the page."""
    row = found.row
    predicted = "does not fit" if found.tflops is None else f"{found.tflops:.1f}"
    error = "" if found.error is None else f"{100 * found.error:+.1f} %"
    fitted = "fitted" if row.fitted else ""
    batch = "" if found.tflops is None else str(found.batch)
    cells = (row.machine, row.num_gpus, row.model, f"{row.tflops:g}", predicted, error, batch, fitted)
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
