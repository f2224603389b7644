"""The matrix: every architecture trains as plain PyTorch does, in little more than its least memory.

For each model of ``architecture_models.py`` and ``handwritten_models.py``: eager PyTorch with ``torch.optim.AdamW``
trains five steps in fp32, then chunkc does on an emulated device of 1.05 times the smallest budget that ``BudgetError``
names. Compared are all elements of the first gradients, of the final parameters and both moments, and the losses. Then
each is trained under every choice for its activations (`activation_choices`). The script prints two tables, writes them
to docs/architectures.md, and ends with exit code 1 when a model fails.

    OMP_WAIT_POLICY=passive python benchmarks/architectures.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import activation_choices
import torch
import transformers
from architecture_models import ALL as OF_TRANSFORMERS
from architecture_models import Architecture as OfTransformers
from architecture_models import Batch
from handwritten_models import ALL as HANDWRITTEN
from handwritten_models import Handwritten
from torch import nn

import chunkc

DOCUMENT = Path(__file__).parent.parent / "docs" / "architectures.md"
NUM_STEPS, SPARE = 5, 1.05
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
TOLERANCES = {"gradients": 1e-6, "parameters": 1e-3, "m": 1e-3, "v": 1e-3, "loss": 1e-5}
Values = dict[str, torch.Tensor]
Architecture = OfTransformers | Handwritten
ALL: tuple[Architecture, ...] = (*OF_TRANSFORMERS, *HANDWRITTEN)
BY_NAME = {architecture.name: architecture for architecture in ALL}


@dataclass(slots=True)
class Run:
    """State after five steps, by parameter name; ``largest_update``: of any element in one step."""

    losses: list[float] = field(default_factory=list)
    gradients: Values = field(default_factory=dict)
    parameters: Values = field(default_factory=dict)
    m: Values = field(default_factory=dict)
    v: Values = field(default_factory=dict)
    largest_update: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the matrix; ``errors`` are relative, against ``TOLERANCES``."""

    name: str
    backend: str
    num_params: int
    num_segments: int
    least_nbytes: int
    budget_nbytes: int
    model_data_nbytes: int
    moved_nbytes: int
    errors: Mapping[str, float]
    is_planned_ahead: bool

    @property
    def failures(self) -> list[str]:
        """List what is not as it must be."""
        found = [f"{kind} off by {e:.1e}" for kind, e in self.errors.items() if not e <= TOLERANCES[kind]]
        found += [] if self.moved_nbytes > 0 else ["nothing moved"]
        return found + ([] if self.is_planned_ahead else ["chunkc.plan plans otherwise"])


def measure(architecture: Architecture, backend: str = "eager") -> Row:
    """Train ``architecture`` both ways and compare.

    Raises:
        ChunkcError: when it cannot be compiled to one graph or trained.
    """
    wanted = train_plain(architecture)
    least = least_nbytes(architecture, backend)
    hw = machine(int(SPARE * least))
    model = chunkc.compile(architecture.build(), hw, dtype=torch.float32, backend=backend, fullgraph=True)
    found = train(model, architecture.batches(), chunkc.AdamW(model.parameters(), **OPTIMIZER))
    stats, plan = chunkc.stats(model), chunkc.plan_of(model)
    return Row(
        name=architecture.name,
        backend=backend,
        num_params=sum(p.numel() for p in model.parameters()),
        num_segments=len(plan.segments),
        least_nbytes=least,
        budget_nbytes=stats["budget_nbytes"],
        model_data_nbytes=stats["model_data_nbytes"],
        moved_nbytes=stats["h2d_nbytes"] + stats["d2h_nbytes"],
        errors=errors_of(found, wanted),
        is_planned_ahead=backend == "inductor" or plan_ahead(architecture, hw, backend).digest() == plan.digest(),
    )


def least_nbytes(architecture: Architecture, backend: str) -> int:
    """The smallest device budget, as a refusal names it."""
    try:
        plan_ahead(architecture, machine(1), backend)
    except chunkc.BudgetError as error:
        return error.min_device_nbytes
    raise ValueError(f"{architecture.name} trains in one byte")


def plan_ahead(architecture: Architecture, hw: chunkc.Hardware, backend: str) -> chunkc.Plan:
    """The plan for ``hw``, from the model on the meta device."""
    with torch.device("meta"):
        model = architecture.build()
    batch = architecture.batches()[0]
    return chunkc.plan(model, hw, example_inputs=batch, dtype=torch.float32, backend=backend)


def machine(nbytes: int) -> chunkc.Hardware:
    """An emulated device of ``nbytes``."""
    hw = chunkc.Hardware.parse("emulated-1m-1g")
    return replace(hw, name=f"emulated-{nbytes}-1g", gpu_memory_nbytes=nbytes)


def train_plain(architecture: Architecture) -> Run:
    """Eager PyTorch in fp32."""
    model = architecture.build()
    before = [p.detach().clone() for p in model.parameters()]
    largest = [0.0]

    def measure_update() -> None:
        for p, q in zip(model.parameters(), before, strict=True):
            largest.append(float((p.detach() - q).abs().max()))
            q.copy_(p.detach())

    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    found = train(model, architecture.batches(), optimizer, measure_update)
    found.largest_update = max(largest)
    return found


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """The usual loop; the same code for a compiled model and a plain one."""
    found = Run()
    for step in range(NUM_STEPS):
        loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        if step == 0:
            found.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    names = [name for name, _ in model.named_parameters()]
    found.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        found.m[names[index]], found.v[names[index]] = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    return found


def errors_of(found: Run, wanted: Run) -> dict[str, float]:
    """Largest error of an element: of parameters by the largest update, of others by their largest."""
    errors = {kind: _error(getattr(found, kind), getattr(wanted, kind)) for kind in ("gradients", "m", "v")}
    losses = zip(found.losses, wanted.losses, strict=True)
    return {
        **errors,
        "parameters": _error(found.parameters, wanted.parameters, wanted.largest_update),
        "loss": max(abs(a - b) / abs(b) for a, b in losses),
    }


def _error(found: Values, wanted: Values, scale: float | None = None) -> float:
    if found.keys() != wanted.keys() or not wanted:
        return float("inf")
    largest = max(float(value.abs().max()) for value in wanted.values() if value.numel())
    error = max(float((found[n].double() - value.double()).abs().max()) for n, value in wanted.items() if value.numel())
    return error / (largest if scale is None else scale)


# --- the command ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "architecture", "backend", "parameters", "segments", "smallest budget KiB", "budget KiB", "model data / budget",
    "moved KiB a step", "gradients", "parameters, relative", "m", "v", "result",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what was asked for, print and write the matrix, and return the exit code."""
    args = parse(argv)
    runs = [(name, "eager") for name in args.only or BY_NAME] + [(name, "inductor") for name in args.inductor]
    tables = [(COLUMNS, cells_of), (activation_choices.COLUMNS, activation_choices.cells_of)]
    lines, num_failed = [], 0
    for columns, measure_cells in tables[args.activations_only :]:
        print(" | ".join(columns))
        lines.append([])
        for name, backend in runs:
            cells, is_good = measure_cells(BY_NAME[name], backend)
            num_failed += not is_good
            lines[-1].append(f"| {' | '.join(cells)} |")
            print(lines[-1][-1], flush=True)
    if args.out is not None:
        args.out.write_text(document(*lines, args.inductor))
    return 1 if num_failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train every architecture in the least memory, against PyTorch.")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), help="these architectures (and write no file)")
    parser.add_argument("--inductor", nargs="*", choices=list(BY_NAME), default=["llama", "bert", "gpt2"])
    parser.add_argument("--activations-only", action="store_true", help="only the second table (and write no file)")
    parser.add_argument("--out", type=Path, help=f"the document (default: {DOCUMENT.name} in docs, of all models)")
    args = parser.parse_args(argv)
    if args.activations_only and args.out is not None:
        parser.error("--activations-only writes no file: the page has both tables")
    if args.out is None and args.only is None and not args.activations_only:
        args.out = DOCUMENT
    return args


def cells_of(architecture: Architecture, backend: str) -> tuple[list[str], bool]:
    """The cells of one line, and whether all is well. A refusal is a line too: the others go on."""
    try:
        row = measure(architecture, backend)
    except (chunkc.ChunkcError, RuntimeError) as error:
        blank = [""] * (len(COLUMNS) - 3)
        return [
            architecture.name,
            backend,
            *blank,
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        ], False
    kib = [f"{nbytes / 1024:,.1f}" for nbytes in (row.least_nbytes, row.budget_nbytes, row.moved_nbytes)]
    errors = [f"{row.errors[kind]:.1e}" for kind in ("gradients", "parameters", "m", "v")]
    share = f"{row.model_data_nbytes / row.budget_nbytes:.1f}"
    result = "; ".join(row.failures) or "exact"
    start = [row.name, row.backend, f"{row.num_params:,}", str(row.num_segments)]
    return [*start, *kib[:2], share, kib[2], *errors, result], not row.failures


def document(lines: Sequence[str], choices: Sequence[str], inductor: Sequence[str]) -> str:
    """Both tables as a page; ``choices``: the lines of the second."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, chunkc {chunkc.__version__}"
    allowed = {kind: f"{tolerance:.0e}" for kind, tolerance in TOLERANCES.items()}
    text = f"""\
Small random models of {len(ALL)} architectures, each trained {NUM_STEPS} steps in fp32 on an emulated device, beside eager PyTorch
with `torch.optim.AdamW` (eps={OPTIMIZER["eps"]}). The budget is {SPARE} times the smallest one that `BudgetError` names, so
that parameters and gradients move. Errors are those of the worst element, relative: first gradients against the
largest gradient (allowed: {allowed["gradients"]}), final parameters against the largest update of a step ({allowed["parameters"]}), both
moments against their largest element ({allowed["m"]}). *exact*: all are within that, every loss within {allowed["loss"]}, and
bytes have moved. Each model compiles to one graph, and `chunkc.plan` of the model on the meta device makes the very
plan that the interpreter runs. `make architectures` writes this page.

{datetime.now(UTC).date()}, {versions}. Compiled with Inductor, beside the interpreter: {", ".join(inductor) or "none"}.
"""  # noqa: E501
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *lines]
    return "\n".join(["# Architectures", "", text, *table, "", *activation_choices.section(choices)])


if __name__ == "__main__":
    sys.exit(main())
