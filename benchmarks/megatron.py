"""Simulated throughput of tensor and pipeline parallelism beside Megatron-LM's, 1.7B to 1,008B.

A stage is planned without data parallelism, over ``tp`` ranks of one node, with two layers and with four: what two
layers add gives the time of one, what is left that of embedding, head and loss, which the last stage has here. The
stages of a row then run as 1F1B, plain or interleaved (`chunkc.cost.pipeline`), and replicas add their gradients up
behind the last backward of a step, in two bytes for each parameter, where nothing hides it. The best micro-batch and
number of stages on a rank count. The figures stand in megatron.toml, with the one constant that is fitted, on three
rows; the other seven are predictions.

    python benchmarks/megatron.py            # writes docs/megatron.md; ten minutes
    python benchmarks/megatron.py --fit      # prints the constant that fits best
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from chunkc._torch_compat.fake_job import fake_job
from chunkc.cost.pipeline import StageTimes, pipeline_order, simulate_pipeline
from chunkc.cost.rates import CostRates, Links, cost_rates
from chunkc.cost.simulate import simulate_with
from chunkc.cost.spread import all_reduce_ms, spread_of
from chunkc.hardware import Hardware
from chunkc.ir.plan import Plan
from chunkc.scenarios.models.transformer import Head, Transformer
from chunkc.scenarios.scenario import Recompute, Scenario, Scenarios

DATA = Path(__file__).with_suffix(".toml")
PAGE = Path(__file__).parents[1] / "docs" / "megatron.md"
SHALLOW, DEEPER = 2, 4
GPUS_PER_NODE = 8
GRADIENT_NBYTES = 2
EFFICIENCIES = tuple(round(0.3 + 0.01 * i, 2) for i in range(61))
HEADER = (
    *("model", "tp", "pp", "GPUs", "published", "predicted", "error", "share of the peak", "bubble"),
    *("micro-batch", "stages a rank", ""),
)


@dataclass(frozen=True)
class Row:
    """One published figure: ``tflops`` of a GPU; ``batch``: sequences of a step."""

    name: str
    num_heads: int
    width: int
    num_layers: int
    num_tensor: int
    num_stages: int
    num_gpus: int
    batch: int
    tflops: float
    fitted: bool

    @property
    def num_replicas(self) -> int:
        return self.num_gpus // self.num_tensor // self.num_stages

    def flops(self, vocabulary: int, sequence: int) -> float:
        """Operations of a step as the paper counts them (section 5.1, equation 3)."""
        head = 1 + sequence / (6 * self.width) + vocabulary / (16 * self.num_layers * self.width)
        return 96 * self.batch * sequence * self.num_layers * self.width**2 * head


@dataclass(frozen=True)
class Predicted:
    """The answer for a row with its best ``micro_batch`` and ``num_chunks``, stages on a rank.

    ``bubble``: share of the ranks' time.
    """

    row: Row
    tflops: float
    micro_batch: int
    num_chunks: int
    bubble: float

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.tflops / self.row.tflops - 1


def load() -> dict[str, Any]:
    """The contents of megatron.toml."""
    return tomllib.loads(DATA.read_text())


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """All rows, in the order of the file."""
    return [Row(name, *figures, fitted=name in data["fitted"]) for name, figures in data["rows"].items()]


@cache
def stage_plan(row: Row, num_layers: int, micro_batch: int, vocabulary: int, sequence: int) -> Plan:
    """The plan of so many layers, with embedding and head, on the ranks of one line along ``tp``."""
    config = {
        "model_type": "gpt2", "vocab_size": vocabulary, "n_positions": sequence, "n_layer": num_layers,
        "n_embd": row.width, "n_head": row.num_heads,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }  # fmt: skip
    model = Transformer(f"gpt-{row.name}", config, Head.CAUSAL)
    mesh = f"tp={row.num_tensor}" if row.num_tensor > 1 else ""
    scenario = Scenario(
        model, machine_of(row), micro_batch, sequence, Recompute.FULL, accumulate=2, mesh=mesh,
        tracks_grad_norm=False, activations="recompute",
    )  # fmt: skip
    with fake_job(row.num_tensor) if mesh else contextlib.nullcontext():
        answer = Scenarios().answer(scenario)
    if answer.plan is None:
        raise ValueError(f"{num_layers} layers of {row.name} do not fit: {answer.shortage}")
    return answer.plan


def machine_of(row: Row) -> Hardware:
    """As many GPUs of a node as a line along ``tp`` has."""
    whole = Hardware.parse(f"{GPUS_PER_NODE}xa100-80g-1024g")
    return replace(whole, gpus_per_node=row.num_tensor, name=f"{row.num_tensor} of {whole}")


def rates_of(hw: Hardware, matmul_efficiency: float) -> CostRates:
    """The rates of ``hw`` with matrix products of another share of the data sheet's."""
    rates = cost_rates(hw)
    if hw.tflops is None or hw.tflops.bf16 is None:
        raise ValueError(f"{hw} has no 16-bit rate in the catalogue")
    matmul = dict.fromkeys(("bfloat16", "float16"), hw.tflops.bf16 * matmul_efficiency)
    return replace(rates, matmul_tflops={**rates.matmul_tflops, **matmul})


def stages_of(row: Row, num_stages: int, shallow: StageTimes, deeper: StageTimes) -> list[StageTimes]:
    """The times of all stages by those of `SHALLOW` and `DEEPER` layers; the last has what is no layer."""

    def of(name: str, num_layers: float, *, has_head: bool) -> float:
        one = (getattr(deeper, name) - getattr(shallow, name)) / (DEEPER - SHALLOW)
        rest = getattr(shallow, name) - SHALLOW * one
        return float(one * num_layers + (rest if has_head else 0.0))

    names, share = ("forward_ms", "backward_ms", "step_ms"), row.num_layers / num_stages
    return [
        StageTimes(*(of(name, share, has_head=stage + 1 == num_stages) for name in names))
        for stage in range(num_stages)
    ]


def exchange_ms(row: Row, vocabulary: int) -> float:
    """Milliseconds in which replicas add up the gradients of the largest stage, which has an embedding."""
    dims = (("dp_replicate", row.num_replicas), ("tp", row.num_tensor))
    layers = 12 * row.width**2 * row.num_layers / row.num_stages
    num_params = (layers + vocabulary * row.width) / row.num_tensor
    return all_reduce_ms(num_params * GRADIENT_NBYTES, spread_of(dims, "dp_replicate", GPUS_PER_NODE), links())


def links() -> Links:
    """Links of nodes of eight A100."""
    found = cost_rates(Hardware.parse(f"2x{GPUS_PER_NODE}xa100-80g-1024g")).links
    if found is None or found.node_gb_per_s is None:
        raise ValueError("the catalogue has no links of an A100's node")
    return found


def network_gb_per_s() -> float:
    """One GPU's share of what a node receives from others."""
    return (links().node_gb_per_s or math.nan) / GPUS_PER_NODE


def predict(data: Mapping[str, Any], row: Row, efficiency: float | None = None) -> Predicted:
    """The best of all micro-batches, with the file's constant unless another is given."""
    efficiency = data["matmul_efficiency"] if efficiency is None else efficiency
    return max(_predictions(data, row, rates_of(machine_of(row), efficiency)), key=lambda p: p.tflops)


def _predictions(data: Mapping[str, Any], row: Row, rates: CostRates) -> Iterator[Predicted]:
    vocabulary, sequence = data["vocabulary"], data["sequence"]
    for micro_batch in data["micro_batches"]:
        num_micro_batches = row.batch // row.num_replicas // micro_batch
        plans = (stage_plan(row, n, micro_batch, vocabulary, sequence) for n in (SHALLOW, DEEPER))
        shallow, deeper = (StageTimes.of(simulate_with(plan, rates)) for plan in plans)
        sent_ms = micro_batch * sequence * row.width * GRADIENT_NBYTES / (network_gb_per_s() * 1e6)
        for num_chunks in chunks_of(data, row, num_micro_batches):
            num_stages = row.num_stages * num_chunks
            schedule = "1f1b" if num_chunks == 1 else "interleaved"
            order = pipeline_order(schedule, row.num_stages, num_micro_batches, num_stages)
            found = simulate_pipeline(stages_of(row, num_stages, shallow, deeper), order, sent_ms)
            step_s = (found.step_ms + exchange_ms(row, vocabulary)) / 1e3
            tflops = row.flops(vocabulary, sequence) / step_s / row.num_gpus / 1e12
            yield Predicted(row, tflops, micro_batch, num_chunks, found.bubble_share)


def chunks_of(data: Mapping[str, Any], row: Row, num_micro_batches: int) -> list[int]:
    """Numbers of stages on a rank: several need a pipeline, and whole rounds of micro-batches."""
    interleaves = row.num_stages > 1 and num_micro_batches % row.num_stages == 0
    num_layers = row.num_layers // row.num_stages
    return [n for n in data["chunks"] if n == 1 or (interleaves and num_layers % n == 0)]


def fit(data: Mapping[str, Any]) -> float:
    """The constant with the least sum of squared log ratios to the rows that are fitted."""
    rows = [row for row in rows_of(data) if row.fitted]
    return min(EFFICIENCIES, key=lambda e: sum(math.log(1 + predict(data, row, e).error) ** 2 for row in rows))


def median_error(predicted: Sequence[Predicted]) -> float:
    """Of the rows that were not fitted."""
    return statistics.median(abs(p.error) for p in predicted if not p.row.fitted)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, or write the page."""
    parser = argparse.ArgumentParser(description="Simulated against published throughput of Megatron-LM.")
    parser.add_argument("--fit", action="store_true", help="print the constant that fits best, and write nothing")
    args = parser.parse_args(argv)
    data = load()
    if args.fit:
        print(fit(data))
        return 0
    PAGE.write_text(page(data, [_told(predict(data, row)) for row in rows_of(data)]))
    return 0


def _told(found: Predicted) -> Predicted:
    print(line_of(found), file=sys.stderr, flush=True)
    return found


def digest() -> str:
    """Of the figures and the constant."""
    return hashlib.sha256(DATA.read_bytes()).hexdigest()[:12]


def page(data: Mapping[str, Any], predicted: Sequence[Predicted]) -> str:
    """docs/megatron.md."""
    error, efficiency = 100 * median_error(predicted), 100 * data["matmul_efficiency"]
    lines = [
        "# Megatron-LM, published and simulated",
        "",
        "Tensor and pipeline parallelism as chunkc simulates it, held against the throughput that the authors of",
        "Megatron-LM published (Narayanan et al., SC 2021, table 1), all rows. Figures are TFLOPS of a GPU as",
        "the paper counts them, with what is computed again; an A100 has 312. Nothing here was run: predicted",
        "means simulated.",
        "",
        f"**Median error of the rows that were not fitted: {error:.1f} %.** One number is fitted, on",
        f"{_listed(data['fitted'])}: matrix products reach {efficiency:.0f} % of the data sheet's rate. The rest",
        "is the catalogue's.",
        "",
        "Regenerate with `python benchmarks/megatron.py`; `--fit` finds the number.",
        "",
        f"| {' | '.join(HEADER)} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
        *(line_of(p) for p in predicted),
        "",
        "A layer's time is what two layers add to a plan of two, over the `tp` ranks of one node, everything resident",
        "and every layer computed again. Stages run as 1F1B. The paper does not say for each row how many sequences a",
        "micro-batch has, and into how many stages a rank's layers are divided for the interleaved schedule: the best",
        f"of {_listed(data['micro_batches'])} and of {_listed(data['chunks'])} count. Replicas add up gradients in two"
        " bytes for each",
        "parameter behind a step's last backward, beside nothing.",
        "",
        "The published figures lie close together, so the median alone says little. With the size of the model",
        "predicted figures rise less than published ones: wide matrix products reach more of the peak than narrow",
        "ones, which one number does not know.",
        "",
        f"<!-- megatron.toml: {digest()} -->",
    ]
    return "\n".join(lines) + "\n"


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def line_of(found: Predicted) -> str:
    """A row of the page."""
    row = found.row
    share = f"{found.tflops / 312:.0%} for {row.tflops / 312:.0%}"
    cells = (
        *(row.name, row.num_tensor, row.num_stages, row.num_gpus, f"{row.tflops:g}", f"{found.tflops:.1f}"),
        *(f"{100 * found.error:+.1f} %", share, f"{100 * found.bubble:.1f} %", found.micro_batch, found.num_chunks),
        "fitted" if row.fitted else "",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
