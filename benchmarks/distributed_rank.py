"""One rank of `distributed.py`: exchanges of a step, and the same training by chunkc and FSDP2.

All sides train the same GPT from the same values on the same batches, in the same processes: a block of steps of one,
then of the next, and round again, so that other load on the machine meets all of them. A block begins and ends with a
barrier, and a block of chunkc also waits for its pending updates.

What is exchanged is counted twice. By call: `Counting` stands between chunkc's runtime and its ranks and adds up what
each collective brings from other ranks. On the wire: what the network interfaces of the machine received, for all
sides alike and for all ranks together; it holds only while nothing else on the machine uses them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import Gpt, Shape, batches, initialise
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Stream

LEARNING_RATE = 1e-4
SIDES = ("chunkc", "fsdp2", "fsdp2_keep", "fsdp2_eager")
"""FSDP2 with its blocks compiled; the same without resharding after forward, so that parameters are gathered once, as
in a resident plan of chunkc; and not compiled."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all ranks are told. ``dtype`` names that of computing and of exchanges."""

    shape: Shape
    hw: str
    dtype: str
    sides: tuple[str, ...]
    rounds: int
    block: int
    warm_up: int
    threads: int


@dataclass(frozen=True, slots=True)
class Side:
    """``step(batch)`` returns the loss, ``finish()`` waits for all work, ``facts()`` adds to the result."""

    step: Callable[[Batch], torch.Tensor]
    finish: Callable[[], object]
    facts: Callable[[], dict[str, Any]] = dict


class Counting:
    """Ranks that count, by call, the bytes which collectives of a plan bring from other ranks."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks
        self.num_calls: Counter[str] = Counter()
        self.received_nbytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def gather(self, whole: torch.Tensor, own: torch.Tensor, place: str) -> None:
        self._count("gather", whole, own)
        self._ranks.gather(whole, own, place)

    def average(self, own: torch.Tensor, whole: torch.Tensor, place: str) -> None:
        self._count("reduce", whole, own)
        self._ranks.average(own, whole, place)

    def add_up(self, own: torch.Tensor, whole: torch.Tensor, place: str) -> None:
        self._count("reduce", whole, own)
        self._ranks.add_up(own, whole, place)

    def agree_digest(self, *args: Any, **options: Any) -> list[int]:
        self.num_calls["agreement"] += 1
        found: list[int] = self._ranks.agree_digest(*args, **options)
        return found

    def agree(self, *args: Any, **options: Any) -> list[int]:
        self.num_calls["agreement"] += 1
        found: list[int] = self._ranks.agree(*args, **options)
        return found

    def _count(self, call: str, whole: torch.Tensor, own: torch.Tensor) -> None:
        self.num_calls[call] += 1
        self.received_nbytes[call] += whole.nbytes - own.nbytes

    def clear(self) -> None:
        """Count from here."""
        self.num_calls.clear()
        self.received_nbytes.clear()


def build(shape: Shape) -> Gpt:
    """The model in host memory, with the same values on every rank."""
    model = shape.build().to_empty(device="cpu")
    model.head.weight = model.embed.weight
    torch.manual_seed(0)
    initialise(model)
    return model


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], torch.Tensor]:
    """The usual step."""

    def step(batch: Batch) -> torch.Tensor:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def chunkc_side(settings: Settings) -> Side:
    """chunkc within ``settings.hw``."""
    model = chunkc.compile(build(settings.shape), settings.hw, dtype=getattr(torch, settings.dtype), fullgraph=True)
    runtime = compiled_of(model).runtime
    counting = runtime.ranks = Counting(runtime.ranks)  # before the first plan, which is bound to it
    optimizer = chunkc.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = training(model, optimizer)

    def finish() -> None:
        chunkc.stats(model)

    def facts() -> dict[str, Any]:
        batch = rank_batches(settings, 1)[0]
        finish()
        counting.clear()
        step(batch)
        finish()
        return {
            "exchanged": exchanged(model, counting),
            "stats": chunkc.stats(model),
            "plan": str(chunkc.plan_of(model)),
        }

    return Side(step, finish, facts)


def exchanged(model: nn.Module, counting: Counting) -> dict[str, Any]:
    """Bytes that one rank received in one step, by call, beside the plan's and beside the known formula.

    ``zero_nbytes``: 6 (p - 1) / p M for p ranks and M parameters in 16 bits, 12 in 32: every parameter gathered twice
    and every gradient reduced once. ``padded_nbytes``: the same for chunks, which have padding.
    """
    layout = chunkc.plan_of(model).layout
    share = 1 - 1 / layout.world_size
    payload = sum(p.numel() * p.element_size() for p in model.parameters())
    padded = layout.world_size * layout.payload_nbytes()
    return {
        "num_calls": dict(counting.num_calls),
        "received_nbytes": dict(counting.received_nbytes),
        "total_nbytes": sum(counting.received_nbytes.values()),
        "planned_nbytes": chunkc.plan_of(model).moved_nbytes(Stream.COMM),
        "zero_nbytes": round(3 * share * payload),
        "padded_nbytes": round(3 * share * padded),
        "chunk_size": max(chunk.numel for chunk in layout.chunks),
    }


def fsdp_side(settings: Settings, *, compiled: bool, reshard: bool) -> Side:
    """FSDP2: every block and the model sharded, torch's fused AdamW."""
    model, dtype = build(settings.shape), getattr(torch, settings.dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    options: dict[str, Any] = {"mesh": dist.init_device_mesh("cpu", (dist.get_world_size(),))}
    options |= {"mp_policy": policy, "reshard_after_forward": reshard}
    for number, block in enumerate(model.blocks):
        if compiled:  # as a module around it, so that the hooks of fully_shard stay outside of the graph
            model.blocks[number] = torch.compile(block, fullgraph=True, dynamic=False)
        fully_shard(model.blocks[number], **options)
    fully_shard(model, **options)
    return Side(training(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)), lambda: None)


def make_side(name: str, settings: Settings) -> Side:
    """The side of that name."""
    if name == "chunkc":
        return chunkc_side(settings)
    return fsdp_side(settings, compiled=name != "fsdp2_eager", reshard=name != "fsdp2_keep")


def rank_batches(settings: Settings, num: int) -> list[Batch]:
    """This rank's part of the global batches."""
    shape, rank, size = settings.shape, dist.get_rank(), dist.get_world_size()
    own = batches(shape, num * size, torch.device("cpu"))[rank::size]
    return [(tokens.clone(), labels.clone()) for tokens, labels in own]


def measure(settings: Settings) -> dict[str, Any]:
    """Times, bytes and losses of this rank; every rank of a job calls it."""
    torch.set_num_threads(settings.threads)
    data = rank_batches(settings, settings.warm_up + settings.block)
    sides, warm_s, losses = {}, {}, {}
    for name in settings.sides:
        begun_s = time.perf_counter()
        side = sides[name] = make_side(name, settings)
        losses[name] = [float(mean(side.step(batch))) for batch in data[: settings.warm_up]]
        side.finish()
        warm_s[name] = round(time.perf_counter() - begun_s, 1)
        if dist.get_rank() == 0:
            print(f"{name} is warm after {warm_s[name]} s", flush=True)
    facts = {name: side.facts() for name, side in sides.items()}
    rows = [timed_round(sides, data[settings.warm_up :], first) for first in range(settings.rounds)]
    return {
        "num_params": settings.shape.num_params(),
        "warm_up_s": warm_s,
        "losses": losses,
        **{key: value for key, value in facts.get("chunkc", {}).items()},
        "step_s": {name: [round(row[name][0], 4) for row in rows] for name in sides},
        "wire_nbytes": {name: round(statistics.median(row[name][1] for row in rows)) for name in sides},
    }


def timed_round(sides: dict[str, Side], data: Sequence[Batch], first: int) -> dict[str, tuple[float, float]]:
    """Seconds and bytes on the wire of a step of each side; another one begins in each round."""
    names, found = list(sides), {}
    for position in range(len(names)):
        name = names[(first + position) % len(names)]
        side = sides[name]
        dist.barrier()
        begun_s, begun_nbytes = time.perf_counter(), wire_nbytes()
        for batch in data:
            side.step(batch)
        side.finish()
        dist.barrier()
        found[name] = (
            (time.perf_counter() - begun_s) / len(data),
            (wire_nbytes() - begun_nbytes) / len(data),
        )
    return found


def mean(loss: torch.Tensor) -> torch.Tensor:
    """Over all ranks."""
    total = loss.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def wire_nbytes() -> int:
    """Bytes that all network interfaces of this machine have received."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":", 1)[1].split()[0]) for line in lines)
