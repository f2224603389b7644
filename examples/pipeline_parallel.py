"""Train a small language model as stages of a pipeline, each within its own device budget.

Every process trains one stage: some layers, compiled by chunkc with an optimizer of its own, in a schedule of
``torch.distributed.pipelining``. The model is a transformer over bytes, the text is the source of Python's standard
library. The rank of the last stage prints losses; with ``--compare`` it trains the whole model in plain PyTorch, too,
and exits with code 1 unless the losses agree.

    torchrun --nproc-per-node 2 examples/pipeline_parallel.py --hw emulated-8m-1g --compare
    torchrun --nproc-per-node 4 examples/pipeline_parallel.py --hw emulated-8m-1g --mesh pp=2,dp_shard=2
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from corpus import VOCABULARY_SIZE, batches, standard_library
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import chunkc
from chunkc.cost.pipeline import most_in_flight, pipeline_order

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
MAX_NORM, LEARNING_RATE, TOLERANCE = 1.0, 1e-3, 1e-4


class Stage(nn.Module):
    """Some layers; the first stage has the embeddings before them, the last one the head behind them."""

    def __init__(self, args: argparse.Namespace, layers: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY_SIZE, args.hidden) if 0 in layers else None
        self.positions = nn.Embedding(args.seq, args.hidden) if 0 in layers else None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(args.hidden, 4, 4 * args.hidden, 0.0, batch_first=True, norm_first=True)
            for _ in layers
        )
        self.head = nn.Linear(args.hidden, VOCABULARY_SIZE) if args.layers - 1 in layers else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states, or logits behind the last layer, of tokens or hidden states."""
        if self.embed is not None and self.positions is not None:
            hidden = self.embed(hidden) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return hidden if self.head is None else self.head(hidden)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code."""
    args = parse(argv)
    device = torch.device("cuda" if args.hw == "auto" and torch.cuda.is_available() else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        return train(args, device, mesh_of(args.mesh, device))
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> int:
    """Train this rank's stage, and return the exit code."""
    pp, num_stages = mesh["pp"], mesh["pp"].size()
    number, is_last = pp.get_local_rank(), pp.get_local_rank() == num_stages - 1
    num_places = dist.get_world_size() // num_stages
    place = dist.get_rank() % num_places
    stages = build(args, num_stages)
    whole = copy.deepcopy(stages) if args.compare and is_last else []
    order = pipeline_order(args.schedule, num_stages, args.micro_batches)

    module = chunkc.compile(
        stages[number],
        hw=args.hw,
        mesh=mesh,
        dtype=torch.float32,
        backend=args.backend,
        accumulate=args.micro_batches,
        in_flight=most_in_flight(order, number),
    )
    optimizer = chunkc.AdamW(module.parameters(), lr=LEARNING_RATE, max_grad_norm=MAX_NORM)

    hidden = torch.empty(args.batch, args.seq, args.hidden, device=device, requires_grad=True)
    logits = torch.empty(args.batch, args.seq, VOCABULARY_SIZE, device=device, requires_grad=True)
    tokens = torch.empty(args.batch, args.seq, device=device, dtype=torch.int64)
    stage = PipelineStage(
        *(module, number, num_stages, device),
        input_args=(hidden if number else tokens,),
        output_args=(logits if is_last else hidden,),
        group=pp.get_group(),
    )
    schedule = SCHEDULES[args.schedule](
        stage, args.micro_batches, loss_fn=lambda *pair: loss_of(*pair) / args.micro_batches, scale_grads=False
    )

    data = data_of(args, num_places)
    losses = []
    for texts in data:
        text = texts[place].to(device)
        of_step: list[torch.Tensor] = []
        inputs = () if number else (text[:, :-1].contiguous(),)  # torch 2.11 compares strides
        schedule.step(*inputs, **({"target": text[:, 1:], "losses": of_step} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses += [sum(loss.item() for loss in of_step)] if of_step else []
    stats = chunkc.stats(module)
    print(
        f"stage {number}: {stats['planned_peak_nbytes']:,} of {stats['budget_nbytes']:,} bytes of device memory; "
        f"a step copies {stats['h2d_nbytes']:,} to it and {stats['d2h_nbytes']:,} back\n",
        end="",  # one write a line: those of other ranks come between two
        file=sys.stderr,
    )
    if place == 0:
        print("".join(f"step {step} loss {loss:.4f}\n" for step, loss in enumerate(losses)), end="")
    return check(losses, train_plainly(whole, data), place) if whole else 0


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data_of(args: argparse.Namespace, num_places: int) -> list[tuple[torch.Tensor, ...]]:
    """For each step a batch for every rank of a stage."""
    size = args.batch * args.micro_batches * num_places
    steps = islice(batches(standard_library(), size, args.seq + 1, args.seed), args.steps)
    return [step.chunk(num_places) for step in steps]


def build(args: argparse.Namespace, num_stages: int) -> list[Stage]:
    torch.manual_seed(args.seed)
    first = [number * args.layers // num_stages for number in range(num_stages + 1)]
    return [Stage(args, range(*span)) for span in pairwise(first)]


def mesh_of(text: str, device: torch.device) -> DeviceMesh:
    """The mesh of a text such as ``pp=2,dp_shard=2``; without one, a stage for each rank."""
    sizes = dict(part.split("=") for part in (text or f"pp={dist.get_world_size()}").split(","))
    return init_device_mesh(device.type, tuple(map(int, sizes.values())), mesh_dim_names=tuple(sizes))


def train_plainly(stages: Sequence[nn.Module], data: Sequence[tuple[torch.Tensor, ...]]) -> list[list[float]]:
    """The losses of all ranks of the last stage in each step, of the whole model in plain PyTorch."""
    model = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found = []
    for texts in data:
        losses = [loss_of(model(text[:, :-1]), text[:, 1:]) for text in texts]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def check(losses: Sequence[float], plain: Sequence[Sequence[float]], place: int) -> int:
    """Compare the losses of this rank; 1 unless they agree."""
    apart = max(abs(loss - of_all[place]) / of_all[place] for loss, of_all in zip(losses, plain, strict=True))
    print(f"{'ok' if apart <= TOLERANCE else 'FAILED'}: losses are within {apart:.1e} of plain PyTorch's")
    return 0 if apart <= TOLERANCE else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level transformer as stages of a pipeline.")
    parser.add_argument("--hw", default="auto" if torch.cuda.is_available() else "emulated-8m-1g")
    parser.add_argument("--mesh", default="", help="sizes of dimensions, pp first (default: pp=<ranks>)")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="pieces of text in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train in plain PyTorch, too, and compare losses")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
