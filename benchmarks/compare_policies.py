"""Compare chunkc's plans with modelled systems: GPT-2-like models on the machines of the papers.

Nothing runs: plans and modelled systems are simulated with the same operators and the same rates (`chunkc.baselines`),
one batch size for all. The modelled systems compute every layer again, as their papers do; chunkc decides by the plan
what is kept, computed again or moved. A row says which system is the fastest that fits, what of chunkc's step no
stream's work explains, and how long a step takes whose updates wait for a decision.

    python benchmarks/compare_policies.py --jobs 2            # writes docs/comparison.md, 90 minutes on 2 cores
    python benchmarks/compare_policies.py --hw v100-240g --models gpt-1b gpt-10b --out /tmp/comparison.md

With ``--journal FILE`` rows are kept as they are made, with the commit that made them, and those of the file are not
made again: a run goes on where one before ended. Begin a new file where the planner has changed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from journal import Journal, records
from provenance import commit
from step_bounds import Step
from tabulate import tabulate

from chunkc.baselines import POLICIES, Course, Machine
from chunkc.cli.advice import shortfall
from chunkc.cost.timeline import OVERHEAD
from chunkc.hardware import Hardware
from chunkc.report.timeline import SHORT_MEANINGS, Timeline, duration
from chunkc.report.units import size
from chunkc.scenarios.models import NAMES, built_in
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

PAGE: Final = Path(__file__).parents[1] / "docs" / "comparison.md"
MACHINES: Final = (
    "v100-240g",
    "8xv100-240g",
    "8xv100-120g",
    "a100-40g-1024g",
    "8xa100-40g-1024g",
    "8xa100pcie-40g-512g",
    "rtx2060-8g-16g",
)
OWN_MODELS: Final = ("gpt-33b",)
"""Built-in names that are ours and in no paper, so that nothing modelled from one is compared by them."""
MODELS: Final = tuple(name for name in NAMES if name.startswith("gpt-") and name not in OWN_MODELS)
ROUNDING: Final = 1e-4
EXPLAIN_ABOVE: Final = 0.06
DECIDED_ABOVE: Final = 0.10
"""Excess over the largest bound from which a row says what the step waits for, without a decision and with one."""


@dataclass(frozen=True)
class Row:
    """One model on one machine; times in milliseconds, of the systems that fit.

    ``own`` is the slowest of the ranks that were simulated, ``activations`` what its plan does with them; ``decided``
    is the first rank of a plan whose updates wait for a decision; the shortages say what misses where there is none.
    """

    hw: str
    model: str
    own: Step | None
    shortage: str
    others_ms: Mapping[str, float]
    decided: Step | None = None
    decided_shortage: str = ""
    activations: str = ""

    @property
    def best_other(self) -> str | None:
        """The fastest modelled system that fits."""
        return min(self.others_ms, key=self.others_ms.__getitem__, default=None)

    @property
    def is_fastest(self) -> bool:
        """Whether no modelled system is faster, rounding apart; also where none fits."""
        if self.best_other is None:
            return True
        return self.own is not None and self.own.timeline.step_ms <= self.others_ms[self.best_other] * (1 + ROUNDING)


def compare(hw: Hardware, model: str, batch: int, sequence: int, scenarios: Scenarios) -> Row:
    """All systems on one machine; those that are modelled compute every layer again."""
    scenario = Scenario(built_in(model), hw, batch, sequence, tracks_grad_norm=False)
    first = scenarios.answer(scenario)
    answer, decided = slowest(first, scenarios), with_decision(first, scenario, scenarios)
    again = replace(scenario, recompute=Recompute.FULL)
    course, machine = Course.of(scenarios.captured(again).schedule, model), Machine.of(hw)
    outcomes = {name: policy(course, machine) for name, policy in POLICIES.items()}
    others = {name: o.timeline.step_ms for name, o in outcomes.items() if o.timeline is not None}
    return Row(
        *(str(hw), model, step_of(answer, hw), shortage_of(answer), others),
        *(step_of(decided, hw), shortage_of(decided), activations_of(answer)),
    )


def activations_of(answer: Answer) -> str:
    """What a plan computes again, and what it moves, in words; empty where there is none."""
    if answer.plan is None or answer.scenario is None:
        return ""
    keep = answer.scenario.keep
    parts = [{1.0: "all kept", 0.0: "all again"}.get(keep, f"{1 - keep:.0%} again")]
    moved_nbytes = sum(value.nbytes for value in answer.plan.moves)
    parts += [f"{size(moved_nbytes)} moved"] if moved_nbytes else []
    return ", ".join(parts)


def step_of(answer: Answer, hw: Hardware) -> Step | None:
    """The simulated step, None where nothing fits."""
    return None if answer.plan is None or answer.timeline is None else Step.of(answer.timeline, answer.plan, hw)


def shortage_of(answer: Answer) -> str:
    """The missing bytes in words, empty where a plan fits."""
    return "" if answer.shortage is None else f"misses {shortfall(answer.shortage)}"


def slowest(first: Answer, scenarios: Scenarios) -> Answer:
    """The slower answer of the first rank, which is given, and the last one.

    They own most and least: padding stands in the last places. What is computed again is the first rank's choice.
    """
    scenario = first.scenario
    if first.timeline is None or scenario is None or scenario.num_ranks == 1:
        return first
    last = scenarios.answer(replace(scenario, rank=scenario.num_ranks - 1))
    if last.timeline is None:
        return last
    return last if last.timeline.step_ms > first.timeline.step_ms else first


def with_decision(first: Answer, scenario: Scenario, scenarios: Scenarios) -> Answer:
    """Plan ``first`` with a decision, with the same layers computed again or others.

    Others are tried where the step does not fit, or is longer than its largest bound by more than `DECIDED_ABOVE`, and
    are taken where they are faster.
    """
    anew = replace(scenario, tracks_grad_norm=True)
    if first.scenario is None or not first.fits:
        return scenarios.answer(anew)
    same = scenarios.answer(replace(first.scenario, tracks_grad_norm=True))
    step = step_of(same, scenario.hw)
    if same.fits and (step is None or step.excess <= DECIDED_ABOVE):
        return same
    other = scenarios.answer(anew)
    if step is None or other.timeline is None:
        return other if other.fits else same
    return other if other.timeline.step_ms < step.timeline.step_ms else same


@dataclass(frozen=True)
class Line:
    """What the page says of a row. ``decided_excess``: over the largest bound; None without such a plan."""

    hw: str
    model: str
    cells: tuple[str, ...]
    is_planned: bool
    is_contested: bool
    is_fastest: bool
    decided_excess: float | None

    @classmethod
    def of(cls, row: Row) -> Line:
        """The line of ``row``."""
        excess = None if row.decided is None else row.decided.excess
        return cls(row.hw, row.model, cells_of(row), row.own is not None, bool(row.others_ms), row.is_fastest, excess)


def waits_of(timeline: Timeline) -> str:
    """Where the critical path goes, the longest parts first."""
    parts = {str(s.stream): s.critical_ms for s in timeline.streams} | {OVERHEAD: timeline.overhead_ms}
    shares = sorted(((ms / timeline.step_ms, name) for name, ms in parts.items()), reverse=True)
    return ", ".join(f"{SHORT_MEANINGS[name]} {share:.0%}" for share, name in shares if share >= 0.05)


def cells_of(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    best = row.best_other
    other = "none fits" if best is None else f"{duration(row.others_ms[best])} ({best})"
    if row.own is None:
        return (row.model, row.shortage or "not simulated", "", other, "", "", "", "", "")
    own, timeline = row.own, row.own.timeline
    speedup = "" if best is None else f"{row.others_ms[best] / timeline.step_ms:.2f}"
    why = waits_of(timeline) if own.excess > EXPLAIN_ABOVE else ""
    bound = f"{duration(own.bounds_ms[own.largest_bound])} ({own.largest_bound})"
    decided = row.decided_shortage if row.decided is None else decided_cell(row.decided)
    measures = (other, speedup, bound, f"{own.excess:+.1%}", why, decided)
    return (row.model, step_and_rate(timeline), row.activations, *measures)


def decided_cell(step: Step) -> str:
    """Time of a step, TFLOPS, how much longer it is than its largest bound; beyond a tenth also why."""
    why = ""
    if step.excess > DECIDED_ABOVE:
        homes = f"{step.num_second_homes} of {step.num_updated_below} chunks have a second home"
        why = f": {waits_of(step.timeline)}; {homes}, host memory has {size(step.host_left_nbytes)} left"
    return f"{step_and_rate(step.timeline)}, {step.excess:+.1%}{why}"


def step_and_rate(timeline: Timeline) -> str:
    """Time of a step, and TFLOPS."""
    tflops = "" if timeline.patrickstar_tflops is None else f"{timeline.patrickstar_tflops:.1f}"
    return f"{duration(timeline.step_ms)}, {tflops}"


HEADINGS: Final = (
    "model", "chunkc: step, TFLOPS", "activations", "fastest other", "times as fast", "largest bound", "beyond it",
    "critical path", "chunkc with a decision",
)  # fmt: skip


def page(rows: Sequence[Line], batch: int, sequence: int, num_commits: int = 1) -> str:
    """The text of docs/comparison.md; ``num_commits``: that made ``rows``."""
    contested = [row for row in rows if row.is_contested]
    won = [row for row in contested if row.is_fastest]
    only = [row for row in rows if row.is_planned and not row.is_contested]
    decided = [row.decided_excess for row in rows if row.decided_excess is not None]
    close = [excess for excess in decided if excess <= DECIDED_ABOVE]
    parts = [
        "# Plans beside other systems",
        "",
        f"Simulated, not measured: GPT-2-like models, batch {batch} a GPU, {sequence} tokens. Systems other than",
        "chunkc are *modelled* from their papers (`chunkc.baselines`), with the same operators, the same rates and the",
        "same engine; they compute every layer again in backward, as their papers do. In chunkc, activations are part",
        "of the plan: a share of the layers is computed again, and of the others what backward reads is kept, or moved",
        "to host memory until then, by simulated time. TFLOPS are one GPU's, counted as PatrickStar counts them:",
        "parameters * tokens * 8 / seconds, which counts a second forward of every layer, computed or not: it is the",
        "time of the step in another unit.",
        "",
        "Of several ranks, the first and the last are simulated, which own most",
        "and least; the slower of the two is shown. No system clips gradients or scales a loss, so no update waits for",
        "a decision; *with a decision* is the same run with clipping, and in fp16 with loss scaling (the first rank):",
        "no update is permitted until backward has ended. Where host memory has room for second homes, updates begin",
        "before that, and are committed, as in steps that clip nothing. `chunkc plan` counts the loss scaling of fp16.",
        "The same layers are computed again as without a decision, or others, where that is faster.",
        "",
        f"There are {len(contested)} cases in which another system fits: chunkc's plan is at least as fast in "
        f"{len(won)}.",
        f"{len(only)} more fit with chunkc alone. *Beyond it* says how much longer the step is than its largest bound,",
        "and so does the last figure with a decision. A bound is the work of one stream; or the *exchange* of one",
        "parameter in one piece: from the first operator that reads it to the one that makes its gradient, then",
        "reduction, update and gathering; or the *round trip* of what moves: to host memory, and then back, since what",
        f"goes last in forward comes first in backward. From {EXPLAIN_ABOVE:.0%} on, or {DECIDED_ABOVE:.0%} with a "
        "decision, the critical path says",
        "where the step goes, and with a decision also how many of the chunks that are updated on the host have a",
        f"second home, and what host memory a rank has left for more. Of {len(decided)} plans with a decision, "
        f"{len(close)} are",
        f"within {DECIDED_ABOVE:.0%}.",
        "",
        "Regenerate with `python benchmarks/compare_policies.py --jobs 2`.",
    ]
    if num_commits > 1:
        parts[-1] += f" Rows are of {num_commits} commits, which do not all plan alike:"
        parts.append("the newest journal of rows in `benchmarks/results` names the commit of each.")
    for hw in dict.fromkeys(row.hw for row in rows):
        own = [row.cells for row in rows if row.hw == hw]
        table = tabulate(own, headers=HEADINGS, tablefmt="github", disable_numparse=True)
        parts += ["", f"## {hw}", "", table]
    return "\n".join(parts) + "\n"


def rows_of(model: str, machines: Sequence[str], batch: int, sequence: int, kept: Path | None = None) -> list[Line]:
    """One model on all machines, but for those that the journal ``kept`` has; a line for each on the way."""
    scenarios, found = Scenarios(), list[Line]()  # captures of one model at a time
    known = {} if kept is None else kept_lines(kept, batch, sequence)
    for spelling in machines:
        began_s, hw = time.perf_counter(), Hardware.of(spelling)
        line = known.get((str(hw), model)) or Line.of(compare(hw, model, batch, sequence, scenarios))
        found.append(line)
        elapsed_s = time.perf_counter() - began_s
        print(f"{spelling:22} {' | '.join(line.cells)}  [{elapsed_s:.1f} s]", file=sys.stderr, flush=True)
        if kept is not None and (str(hw), model) not in known:
            keep(kept, line, batch, sequence)
    return found


def keep(journal: Path, line: Line, batch: int, sequence: int) -> None:
    """Write ``line`` into ``journal``, with the commit that made it."""
    Journal(journal, commit=commit()).write("row", batch=batch, sequence=sequence, **asdict(line))


def kept_lines(journal: Path, batch: int, sequence: int) -> dict[tuple[str, str], Line]:
    """The lines of ``journal`` for these sizes, by machine and model; of equal ones the last."""
    names, asked = [field.name for field in fields(Line)], (batch, sequence)
    rows = [r for r in records(journal) if r["kind"] == "row" and (r["batch"], r["sequence"]) == asked]
    lines = (Line(**{name: row[name] for name in names}) for row in rows)
    return {(line.hw, line.model): replace(line, cells=tuple(line.cells)) for line in lines}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, write the page; exit code 1 where another system is faster somewhere."""
    parser = argparse.ArgumentParser(description="chunkc's plans beside modelled systems, on all machines.")
    parser.add_argument("--hw", nargs="+", default=MACHINES)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=1, help="models that are planned at the same time")
    parser.add_argument("--journal", type=Path, help="a file that keeps rows, to go on from")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    plan = partial(rows_of, machines=args.hw, batch=args.batch, sequence=args.seq, kept=args.journal)
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as workers:
            found = list(workers.map(plan, args.models))
    else:
        found = [plan(model) for model in args.models]
    ordered = [row for machine in zip(*found, strict=True) for row in machine]
    num_commits = 1 if args.journal is None else len({row["commit"] for row in records(args.journal)})
    args.out.write_text(page(ordered, args.batch, args.seq, num_commits), encoding="utf-8")
    return 0 if all(row.is_fastest for row in ordered) else 1


if __name__ == "__main__":
    sys.exit(main())
