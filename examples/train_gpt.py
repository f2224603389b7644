"""Train a small language model under a device budget several times smaller than its model data.

Without ``--hw`` it runs on the GPU, where there is one, with all of its memory. The model is a Llama from transformers
over bytes, the text is the source of Python's standard library: nothing is downloaded. With ``--compare N`` the first N
steps run in plain PyTorch too, and the script exits with code 1 unless the losses agree, the measured peak is within
the budget, and the last losses are below ``--target``.

    python examples/train_gpt.py --hw emulated-96m-4g --compare 10

Under torchrun every rank takes ``--batch`` pieces of text a step, rank 0 prints, and losses are means over all ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py --hw emulated-96m-4g --batch 2 --compare 10
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import islice

import torch
from corpus import VOCABULARY_SIZE, batches, standard_library
from plain import Reference, agreement, reference, table
from ranks import Ranks, joined
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc

LEARNING_RATE = 5e-4
WARM_UP_STEPS = 10
STEPS_PER_READING = 5  # stats() waits for the updates of a step, which otherwise run beside the next forward
NUM_LAST_LOSSES = 10
MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    args = parse(argv)
    with joined() as ranks:
        return train(args, ranks)


def train(args: argparse.Namespace, ranks: Ranks) -> int:
    """Train as one of ``ranks``, and return the exit code."""
    torch.manual_seed(args.seed)
    model = build(args.layers, args.hidden, args.seq)
    dtype = getattr(torch, args.dtype)
    device = device_of(args.hw)
    whole = list(islice(batches(standard_library(), args.batch * ranks.size, args.seq, args.seed), args.steps))
    inputs = [ranks.part(batch).to(device) for batch in whole]
    plain = None
    if args.compare:
        print(f"plain PyTorch, {args.compare} steps")
        compared = [batch.to(device) for batch in whole[: args.compare]]
        plain = reference(model, compared, dtype, LEARNING_RATE, warm_up)

    model = chunkc.compile(model, hw=args.hw, dtype=dtype, backend=args.backend)
    optimizer = chunkc.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = warm_up(optimizer)
    progress = Progress(args.steps, args.batch * args.seq * ranks.size, is_shown=ranks.is_first)
    losses = []
    for batch in inputs:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(ranks.mean(loss))
        progress.update(model, losses[-1])
    progress.close()

    plan = chunkc.plan_of(model)
    print(f"\n{plan}\n\n{plan.summary()}\n")
    return 0 if plain is None else check(losses, plain, progress.peak_nbytes, chunkc.stats(model), args.target)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level Llama under a device budget.")
    hw = "auto" if torch.cuda.is_available() else "emulated-96m-4g"
    parser.add_argument("--hw", default=hw, help="device budget and host memory (default here: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="width, a multiple of 64")
    parser.add_argument("--batch", type=int, default=4, help="pieces of text in a step, of each rank")
    parser.add_argument("--seq", type=int, default=32, help="bytes in a piece of text")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="compute dtype")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare", type=int, default=0, metavar="N", help="also run N steps of plain PyTorch, and check"
    )
    parser.add_argument(
        "--target", type=float, default=3.0, help="mean of the last losses to stay below, nats per byte"
    )
    return parser.parse_args(argv)


def device_of(hw: str) -> torch.device:
    """Where a model compiled for ``hw`` takes its inputs."""
    return torch.device("cuda" if torch.cuda.is_available() and not hw.startswith("emulated") else "cpu")


def build(layers: int, hidden: int, seq: int) -> LlamaForCausalLM:
    """A Llama with heads of 64 and a feed-forward layer 8/3 as wide as the model, as the paper has it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=seq,
    )
    return LlamaForCausalLM(config)


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The learning rate rises over the first steps, then stays."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))


class Progress:
    """A progress bar; ``peak_nbytes`` is the highest device peak that it has read."""

    def __init__(self, num_steps: int, tokens_per_step: int, *, is_shown: bool = True) -> None:
        self.peak_nbytes = 0
        self._tokens_per_step = tokens_per_step
        self._num_steps = 0  # a bar that is not shown does not count
        self._bar = tqdm(total=num_steps, unit="step", mininterval=1.0, disable=not is_shown)
        self._read_at_s = time.perf_counter()

    def update(self, model: torch.nn.Module, loss: float) -> None:
        """Count one step; every few steps, and at the last, read the device."""
        self._bar.update()
        self._num_steps += 1
        if self._num_steps % STEPS_PER_READING and self._num_steps != self._bar.total:
            return
        stats = chunkc.stats(model)
        self.peak_nbytes = max(self.peak_nbytes, stats["measured_peak_nbytes"])
        now_s = time.perf_counter()
        tokens_per_s = STEPS_PER_READING * self._tokens_per_step / (now_s - self._read_at_s)
        self._read_at_s = now_s
        moved_nbytes = stats["h2d_nbytes"] + stats["d2h_nbytes"]
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, {tokens_per_s:.0f} tokens/s, device peak {self.peak_nbytes / MIB:.0f}/"
            f"{stats['budget_nbytes'] / MIB:.0f} MiB, moved {moved_nbytes / MIB:.0f} MiB/step"
        )

    def close(self) -> None:
        self._bar.close()


def check(losses: list[float], plain: Reference, peak_nbytes: int, stats: dict[str, int], target: float) -> int:
    """Print the comparison and the verdicts; 0 when all hold, else 1."""
    print(table(losses, plain) + "\n")
    budget_nbytes, model_data_nbytes = stats["budget_nbytes"], stats["model_data_nbytes"]
    last = losses[-NUM_LAST_LOSSES:]
    mean = sum(last) / len(last)
    results = [
        agreement(losses, plain),
        (
            peak_nbytes <= budget_nbytes,
            f"measured device peak {peak_nbytes / MIB:.1f} MiB, budget {budget_nbytes / MIB:.1f} MiB: "
            f"model data / budget = {model_data_nbytes / budget_nbytes:.2f}",
        ),
        (mean < target, f"mean of the last {len(last)} losses {mean:.3f} nats per byte, below {target}"),
    ]
    for holds, text in results:
        print(f"{'ok    ' if holds else 'FAILED'}  {text}")
    return 0 if all(holds for holds, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
