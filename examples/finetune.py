"""Fine-tune a language model under a device budget, in a run that goes on after a kill.

Without ``--model`` a small Llama over bytes is built from a configuration; the text is the source of Python's standard
library: nothing is downloaded. ``--model`` takes a folder of transformers' format, whose weights are streamed into
chunks. With ``--lora`` low-rank adapters are trained by PEFT and all else is frozen.

Every ``--save-every`` steps, at the end, and on SIGTERM (then it exits with 143) all that the run needs is saved below
``--out``. ``--resume`` goes on from the newest checkpoint there, or from the start if there is none; the losses are
those of a run that was never stopped. At the end the model is evaluated and exported to ``OUT/model``, and the last
line on standard output is ``final_loss=``, the loss of the last step.

    python examples/finetune.py --hw emulated-96m-4g --steps 60 --out run1 --save-every 20 --resume

Under torchrun every rank takes ``--batch`` pieces of text in a micro-batch, rank 0 prints, and the losses are means
over all ranks. ``--out`` stands on a file system that all of them see.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from corpus import batches, standard_library
from ranks import Ranks, joined
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from train_gpt import build, device_of
from transformers import AutoConfig, AutoModelForCausalLM

import chunkc

LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0
NUM_EVALUATION_BATCHES = 4
EVALUATION_SHARE = 0.05
STEPS_PER_READING = 5  # metrics() waits for the updates of a step, which otherwise run beside the next forward
MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, export, and return the exit code."""
    args = parse(argv)
    with joined() as ranks:
        return finetune(args, ranks)


def finetune(args: argparse.Namespace, ranks: Ranks) -> int:
    """The whole run as one of ``ranks``."""
    torch.manual_seed(args.seed)
    text = standard_library()
    held_out = int(len(text) * EVALUATION_SHARE)
    run = Run(args, ranks)
    run.train(text[:-held_out])
    data = batches(text[-held_out:], args.batch * ranks.size, args.seq, args.seed)
    evaluation = [ranks.part(batch).to(run.device) for batch in islice(data, NUM_EVALUATION_BATCHES)]
    print(f"eval_loss={ranks.mean(torch.tensor(evaluate(run.model, evaluation), dtype=torch.float64))!r}")
    export(run.model, args.out / "model", ranks)
    print(f"final_loss={run.loss!r}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a language model under a device budget.")
    hw = "auto" if torch.cuda.is_available() else "emulated-96m-4g"
    parser.add_argument("--hw", default=hw, help="device budget and host memory (default here: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model (default: a small one from scratch)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="folder of checkpoints and of the model")
    parser.add_argument("--save-every", type=positive, default=20, metavar="N", help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--lora", action="store_true", help="train adapters only (needs peft)")
    parser.add_argument("--accumulate", type=positive, default=2, help="micro-batches of a step")
    parser.add_argument("--batch", type=int, default=2, help="pieces of text in a micro-batch, of each rank")
    parser.add_argument("--seq", type=int, default=32, help="bytes in a piece of text")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the small model, a multiple of 64")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="compute dtype")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A number of the command line, 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


class Run:
    """A training run: what is trained, and how far it is. ``loss`` is that of the last step."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args, self.ranks = args, ranks
        self.device = device_of(args.hw)
        self.model = compiled(args)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = chunkc.AdamW(trained, lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0 - step / max(1, args.steps))
        self.checkpoints = args.out / "checkpoints"
        self.loss, self.first_step = float("nan"), 0
        if args.resume and any(self.checkpoints.glob("0*/manifest.json")):
            extra = chunkc.load_checkpoint(self.checkpoints, self.model, self.optimizer, self.scheduler).extra
            self.loss, self.first_step = extra["loss"], extra["next_step"]

    def train(self, text: torch.Tensor) -> None:
        """The steps that are left; saves on the way, and ends the process after a step if SIGTERM came."""
        args, done = self.args, self.first_step
        data = batches(text, args.batch * self.ranks.size, args.seq, args.seed)
        data = islice(map(self.ranks.part, data), done * args.accumulate, None)
        hidden = not self.ranks.is_first
        progress = tqdm(total=args.steps, initial=done, unit="step", mininterval=1.0, disable=hidden)
        with chunkc.graceful_exit() as stop, progress:
            for step in range(done, args.steps):
                self.loss = self.step([batch.to(self.device) for batch in islice(data, args.accumulate)])
                progress.update()
                self.show(progress)
                stops = self.ranks.any(bool(stop))  # asked once: a signal may come at any moment, and to any rank
                ends = stops or step + 1 == args.steps
                if ends or (step + 1) % args.save_every == 0:
                    saving = self.save(step + 1)
                if ends:
                    saving.result()  # raises what went wrong with it
                    if stops and not stop:
                        sys.exit(128 + signal.SIGTERM)  # the signal came to another rank
                    break

    def step(self, micro_batches: Sequence[torch.Tensor]) -> float:
        """One optimizer step; the mean loss of its micro-batches, over all ranks."""
        total = 0.0
        for batch in micro_batches:
            loss = self.model(input_ids=batch, labels=batch).loss / len(micro_batches)
            loss.backward()
            total += self.ranks.mean(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    def save(self, next_step: int) -> Future[Path]:
        """A checkpoint, written while training goes on; the last two are kept."""
        extra = {"next_step": next_step, "loss": self.loss}
        return chunkc.save_checkpoint(
            self.checkpoints, self.model, self.optimizer, self.scheduler, extra, asynchronous=True, keep=2
        )

    def show(self, progress: Any) -> None:
        """Loss, and every few steps what the device did."""
        if progress.disable or (progress.n % STEPS_PER_READING and progress.n != progress.total):
            return
        found = chunkc.metrics(self.model)
        speed = f"{found['tokens_per_s']:.0f} tokens/s, " if "tokens_per_s" in found else ""
        progress.set_postfix_str(
            f"loss {self.loss:.3f}, {speed}device peak {found['measured_peak_nbytes'] / MIB:.0f}/"
            f"{found['budget_nbytes'] / MIB:.0f} MiB, moved {(found['h2d_nbytes'] + found['d2h_nbytes']) / MIB:.0f} MiB"
        )


def compiled(args: argparse.Namespace) -> nn.Module:
    """The model, compiled; pretrained weights go straight into chunks."""
    options: dict[str, Any] = {
        "dtype": getattr(torch, args.dtype), "backend": args.backend, "accumulate": args.accumulate,
    }  # fmt: skip
    if args.model is None:
        return chunkc.compile(adapted(build(args.layers, args.hidden, args.seq), args), args.hw, **options)
    if args.lora:
        return chunkc.compile(adapted(AutoModelForCausalLM.from_pretrained(args.model), args), args.hw, **options)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    model = chunkc.compile(empty.train(), args.hw, **options)
    chunkc.load_pretrained(model, args.model)
    return model


def adapted(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """The model to train: with adapters over a frozen base, if they were asked for."""
    model.train()
    if not args.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Mean loss over ``inputs``."""
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in inputs]
    model.train()
    return sum(losses) / len(losses)


def export(model: nn.Module, directory: Path, ranks: Ranks) -> None:
    """In transformers' format, or in PEFT's with adapters: ``from_pretrained`` loads either."""
    if hasattr(model, "peft_config"):
        model.save_pretrained(directory, is_main_process=ranks.is_first)
        return
    if ranks.is_first:
        model.config.save_pretrained(directory)
    chunkc.save_safetensors(model, directory)


if __name__ == "__main__":
    sys.exit(main())
