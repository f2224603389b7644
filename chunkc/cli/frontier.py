"""``chunkc frontier``: the largest built-in model and batch that a machine trains fast enough.

A larger model of a family, or a larger batch, needs no less memory: the largest model that fits with one sequence, and
its largest batch of 1, 2, 4, ... 64, are found by bisection. Throughput is not monotone over models, since it falls
when data starts to move: from the largest model downwards, the first that meets the bar is the answer, asked of the
largest batch that fits, then of half of it and so on, as long as throughput does not fall.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from chunkc.cli.advice import missing
from chunkc.cli.options import DTYPES, MAX_RANKS, MAX_SEQUENCE, positive, up_to
from chunkc.cli.output import show, tell
from chunkc.cli.subjects import add_activations
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.progress import within
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import SHORT_MEANINGS, duration
from chunkc.scenarios.models import FAMILIES, Transformer, family
from chunkc.scenarios.scenario import RECOMPUTATION, Answer, Scenario, Scenarios

HELP = "the largest built-in model and batch that fit a machine and meet a bar of throughput"
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hw", default="auto", help="for example v100-240g or 8xv100-240g (default: this machine)")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0], help="(default: %(default)s)")
    parser.add_argument("--seq", type=up_to(MAX_SEQUENCE), metavar="N", help="tokens of a sequence (default: 1024)")
    parser.add_argument("--world-size", type=up_to(MAX_RANKS), metavar="N", help="ranks (default: the GPUs of --hw)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="compute dtype (default: auto)")
    add_activations(parser, "recompute")
    bar = parser.add_mutually_exclusive_group()
    bar.add_argument("--min-tflops", type=positive, metavar="X", help="of each rank, recomputation not counted")
    bar.add_argument("--min-tokens-per-s", type=positive, metavar="X", help="of all ranks together")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Search; exit code 1 where no model fits and meets the bar."""
    search = Search(_scenario(args), Scenarios(tell), bar_of(args))
    largest = search.largest(family(args.family))
    if args.json:
        row = None if largest is None else _row(largest)
        show(json.dumps({"found": row, "tried": [_row(answer) for answer in search.tried]}))
    else:
        show(_render(search.tried, largest))
    return 0 if largest is not None else 1


def _scenario(args: argparse.Namespace) -> Scenario:
    smallest = family(args.family)[0]
    return Scenario(
        smallest,
        Hardware.of(args.hw),
        batch=1,
        sequence=args.seq or smallest.default_sequence,
        recompute=RECOMPUTATION[args.activations],
        activations=args.activations,
        dtype=DTYPES[args.dtype],
        world_size=args.world_size,
    )


def bar_of(args: argparse.Namespace) -> Callable[[Answer], bool]:
    def meets(answer: Answer) -> bool:
        least = args.min_tflops or args.min_tokens_per_s
        if least is None:
            return True
        if answer.timeline is None:
            raise ChunkcError(f"a bar of throughput needs rates: {answer.unpriced}")
        timeline = answer.timeline
        return bool((timeline.model_tflops if args.min_tflops else timeline.tokens_per_s or 0.0) >= least)

    return meets


@dataclass(slots=True)
class Search:
    """The search; ``base`` holds what all its scenarios share, ``tried`` what was planned."""

    base: Scenario
    scenarios: Scenarios
    meets: Callable[[Answer], bool]
    tried: list[Answer] = field(default_factory=list)
    _known: dict[tuple[str, int], Answer] = field(default_factory=dict)

    def largest(self, models: Sequence[Transformer]) -> Answer | None:
        """The answer for the largest of ``models`` that fits and meets the bar; None where none does."""
        num_fitting = _count(lambda i: self._answer(models[i], BATCHES[0]).fits, len(models))
        for model in reversed(models[:num_fitting]):
            answer = self._largest_batch(model)
            if answer is not None:
                return answer
        return None

    def _largest_batch(self, model: Transformer) -> Answer | None:
        num_fitting = _count(lambda i: self._answer(model, BATCHES[i]).fits, len(BATCHES))
        fastest = 0.0
        for batch in reversed(BATCHES[:num_fitting]):
            answer = self._answer(model, batch)
            if self.meets(answer):
                return answer
            tokens_per_s = 0.0 if answer.timeline is None else answer.timeline.tokens_per_s or 0.0
            if tokens_per_s < fastest:
                break
            fastest = tokens_per_s
        return None

    def _answer(self, model: Transformer, batch: int) -> Answer:
        key = (model.label, batch)
        if key not in self._known:
            with within(f"try {len(self.tried) + 1}"):
                self._known[key] = self.scenarios.answer(replace(self.base, model=model, batch=batch))
            self.tried.append(self._known[key])
        return self._known[key]


def _count(fits: Callable[[int], bool], size: int) -> int:
    """How many of the first ``size`` positions fit, where none fits behind one that does not."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _render(tried: Sequence[Answer], largest: Answer | None) -> str:
    rows = [list(_cells(answer, answer is largest)) for answer in tried]
    headers = ("model", "batch", "again", "fits", "step", "tokens/s", "TFLOPS", "bound", "")
    answers = table(headers, rows, "lrllrrrll")
    reasons = "\n".join(_reasons(tried))
    verdict = "nothing fits and meets the bar" if largest is None else f"largest: {largest.scenario}"
    verdict = wrapped(f"{verdict}; times are simulated, not measured", "  ")
    return "\n\n".join(part for part in (answers, reasons, verdict) if part)


def _reasons(tried: Sequence[Answer]) -> Iterator[str]:
    for answer in tried:
        if answer.shortage is not None:
            row = _row(answer)
            yield wrapped(f"{row['model']}, batch {row['batch']} does not fit: {missing(answer.shortage)}", "  ")


def _cells(answer: Answer, is_largest: bool) -> Iterator[str]:
    row = _row(answer)
    yield from (str(row["model"]), str(row["batch"]), str(row["recompute"]))
    yield "yes" if answer.fits else "no"
    yield "" if row["step_ms"] is None else duration(row["step_ms"])
    yield "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
    yield "" if row["model_tflops"] is None else f"{row['model_tflops']:.4g}"
    yield "" if row["bound"] is None else SHORT_MEANINGS[row["bound"]]
    yield "<" if is_largest else ""


def _row(answer: Answer) -> dict[str, Any]:
    scenario, timeline = answer.scenario, answer.timeline
    if scenario is None:
        raise ValueError("the models of a search are data")
    names = ("step_ms", "tokens_per_s", "model_tflops", "bound")
    return {
        "model": scenario.model.label,
        "batch": scenario.batch,
        "recompute": str(scenario.recompute),
        "fits": answer.fits,
        "missing_nbytes": 0 if answer.shortage is None else answer.shortage.missing_nbytes,
        **{name: None if timeline is None else getattr(timeline, name) for name in names},
    }
