"""The cost of a new length: seconds of capture and planning, and memory, as a run goes on.

Each model trains on batches of ever new lengths, twice on each, beside plain PyTorch on the same batches. The second
step on a batch needs no plan, so the difference between the two steps is what the length costs. Segments are
interpreted, so that no compilation is counted. The first length is captured alone, and so is the second; the third is
captured for any length, and later ones are planned from that. The script compares losses with plain PyTorch's, writes a
result under benchmarks/results/, and ends with exit code 1 when a new length costs more than ``--limit`` times the
first.

    OMP_WAIT_POLICY=passive python benchmarks/changing_lengths.py
    OMP_WAIT_POLICY=passive python benchmarks/changing_lengths.py --models llama-small --lengths 200
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import provenance
import psutil
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, T5Config, WhisperConfig

import chunkc

RESULTS = Path(__file__).parent / "results"
VOCABULARY, BATCH, LONGEST, FRAMES = 1000, 2, 256, 400
KEPT_EVERY = 16
LOSS_TOLERANCE = 1e-4
"""Relative. Steps of T5 amplify rounding: after ten, plain PyTorch in fp32 is 5.5e-6 from itself in float64."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's class and configuration, its device budget in MiB, and whether it reads sound."""

    kind: str
    config: Any
    device_mib: int
    hears: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        model: nn.Module = getattr(transformers, self.kind)(self.config)
        return model.train()

    def batch(self, length: int) -> Batch:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)
        if self.hears:
            return {"input_features": torch.randn(BATCH, 80, FRAMES, generator=generator), "labels": tokens}
        return {"input_ids": tokens, "labels": tokens}


def llama(num_layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=LONGEST,
    )


T5 = T5Config(
    vocab_size=VOCABULARY,
    d_model=256,
    d_kv=32,
    d_ff=1024,
    num_layers=6,
    num_heads=8,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
WHISPER = WhisperConfig(
    vocab_size=VOCABULARY,
    d_model=256,
    encoder_layers=4,
    decoder_layers=4,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    max_source_positions=FRAMES // 2,
    max_target_positions=LONGEST,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
MODELS = {
    "t5": Model("T5ForConditionalGeneration", T5, 200),
    "whisper": Model("WhisperForConditionalGeneration", WHISPER, 160, hears=True),
    "llama": Model("LlamaForCausalLM", llama(12, 256), 160),
    "llama-small": Model("LlamaForCausalLM", llama(2, 64), 16),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    args = parse(argv)
    result = {**provenance.describe(), "limit": args.limit, "num_lengths": args.lengths, "models": {}}
    for name in args.models:
        result["models"][name] = measure(MODELS[name], args.lengths)
        print(json.dumps({name: result["models"][name]}, indent=2), flush=True)
    path = args.out or RESULTS / f"changing_lengths-{args.lengths}-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    over = [n for n, row in result["models"].items() if row["median_share_of_first"] > args.limit]
    for name in over:
        print(f"FAILED  a new length of {name} costs more than {args.limit} x of the first", file=sys.stderr)
    return 1 if over else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of each new length of a model's inputs.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["t5", "whisper", "llama"])
    parser.add_argument("--lengths", type=int, default=12)
    parser.add_argument("--limit", type=float, default=1 / 3)
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def measure(which: Model, num_lengths: int) -> dict[str, Any]:
    """Train on ``num_lengths`` lengths; what each costs in seconds, and resident memory as they come."""
    model = which.build()
    plain = training_step(copy.deepcopy(model), torch.optim.AdamW)
    model = chunkc.compile(model, f"emulated-{which.device_mib}m-4g", dtype=torch.float32, backend="eager")
    managed = training_step(model, chunkc.AdamW)
    lengths = random.Random(0).sample(range(8, LONGEST), num_lengths)
    costs_s, rss_mib, worst = list[float](), dict[int, float](), 0.0
    for number, length in enumerate(lengths, start=1):
        batch, times_s = which.batch(length), list[float]()
        for _ in range(2):
            started_s = time.perf_counter()
            loss = managed(batch)
            chunkc.stats(model)  # until nothing is pending
            times_s.append(time.perf_counter() - started_s)
            expected = plain(batch)
            worst = max(worst, abs(loss - expected) / abs(expected))
        costs_s.append(times_s[0] - times_s[1])
        if number % KEPT_EVERY == 0 or number in (4, num_lengths):
            gc.collect()
            rss_mib[number] = round(psutil.Process().memory_info().rss / 2**20, 1)
    if worst > LOSS_TOLERANCE:
        raise SystemExit(f"losses differ from plain PyTorch's by {worst:.1e}, relative")
    new = costs_s[3:]
    return {
        "first_s": round(costs_s[0], 3),
        "second_s": round(costs_s[1], 3),
        "third_for_any_s": round(costs_s[2], 3),
        "new_median_s": round(statistics.median(new), 3),
        "new_max_s": round(max(new), 3),
        "median_share_of_first": round(statistics.median(new) / costs_s[0], 4),
        "max_share_of_first": round(max(new) / costs_s[0], 4),
        "largest_relative_difference_of_losses": worst,
        "rss_mib_after_lengths": rss_mib,
    }


def training_step(model: nn.Module, optimizer_class: Callable[..., torch.optim.Optimizer]) -> Callable[[Batch], float]:
    """One step of training, which returns the loss."""
    optimizer = optimizer_class(model.parameters(), lr=1e-4, eps=1e-4)  # a smaller eps makes steps of noise

    def step(batch: Batch) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    sys.exit(main())
