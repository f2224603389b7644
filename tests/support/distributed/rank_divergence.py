"""Ranks of a job that do different things with one model, and what becomes of them.

Each scenario is a function of a `Side` and the rank; the ranks train two steps in step before it and after it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from job_rank import Failure, failure_of
from pair import batch
from scripted_loops import LR, Seen, Side, side_on_rank
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of


@dataclass(slots=True)
class Story:
    """What one rank lived through: the error of the scenario, its seconds, the error of training in step afterwards."""

    diverged: Failure | None = None
    after_s: float = 0.0
    later: Failure | None = None
    seen: Seen = field(default_factory=Seen)


class UserError(Exception):
    """Raised by a script."""


def one_evaluates(side: Side, rank: int) -> None:
    side.run("evaluate" if rank == 0 else "forward")


def one_evaluates_more(side: Side, rank: int) -> None:
    side.run("evaluate forward" if rank == 0 else "forward")


def one_steps(side: Side, rank: int) -> None:
    side.run("forward backward step" if rank == 0 else "forward backward read")


def one_reads(side: Side, rank: int) -> None:
    side.run("read" if rank == 1 else "forward")


def other_rates(side: Side, rank: int) -> None:
    if rank == 1:
        side.optimizer.param_groups[0]["lr"] = 0.5 * LR
    try:
        side.run("train")
    finally:
        side.optimizer.param_groups[0]["lr"] = LR


def other_parameters(side: Side, rank: int) -> None:
    parameter = side.model.head.bias if rank else side.model.embed.weight
    parameter.detach().clone()  # type: ignore[operator, union-attr]


def one_raises(side: Side, rank: int) -> None:
    side.run("forward")
    if rank == 1:
        try:
            raise UserError
        except UserError:
            side.run("forget forward backward step zero")
    else:
        side.run("backward step zero")


def one_is_refused(side: Side, rank: int) -> None:
    """A call that cannot be one of the model, on one rank."""
    if rank == 1:
        side.model(torch.ones(4, 8))
    side.run("train")


def one_fails_midway(side: Side, rank: int) -> None:
    """Inputs at which an operator raises, in a program that has begun."""
    if rank == 1:
        side.model(torch.full((4, 8), 10_000), batch(0)[1])
    side.run("train")


def one_fails_before_its_program(side: Side, rank: int) -> None:
    """In what a backward has to do when all have agreed on it, and before the program begins."""
    side.run("forward")
    if rank == 1:
        compiled_of(side.model).runtime.gradients.begin = _no_more
    side.run("backward step zero")


def _no_more(*args: object, **options: object) -> None:
    raise MemoryError("rank 1 has no more memory")


def other_shapes(side: Side, rank: int) -> None:
    loss = side.model(*batch(0, 8 - rank))
    loss.backward()
    side.run("step zero")


SCENARIOS: dict[str, Callable[[Side, int], None]] = {
    f.__name__: f
    for f in (
        one_evaluates,
        one_evaluates_more,
        one_steps,
        one_reads,
        other_rates,
        other_parameters,
        one_raises,
        one_is_refused,
        other_shapes,
    )
}
"""Those of which all ranks learn before anything runs."""
COSTLY: dict[str, Callable[[Side, int], None]] = {
    f.__name__: f for f in (one_fails_midway, one_fails_before_its_program)
}
"""Those that cost the job."""


def attempt(work: Callable[[], object]) -> Failure | None:
    try:
        work()
    except Exception as error:
        return failure_of(error)
    return None


def diverge(name: str, side: Side) -> Story:
    scenario = (SCENARIOS | COSTLY)[name]
    side.seen = Seen()
    story = Story(seen=side.run("train train state"))
    begun_s = time.monotonic()
    story.diverged = attempt(lambda: scenario(side, torch.distributed.get_rank()))
    story.after_s = time.monotonic() - begun_s
    side.restart_at(10)
    story.later = attempt(lambda: side.run("zero state train train state"))
    return story


def diverge_all(names: list[str]) -> list[Story]:
    """One after another, with a new model where the last one was of no more use."""
    side, stories = side_on_rank(), list[Story]()
    for name in names:
        stories.append(diverge(name, side))
        if stories[-1].later is not None:
            side = side_on_rank()
    return stories


class Branching(nn.Module):
    """A forward in which one of two layers has a part, as its caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x).square().mean()


def other_layers() -> Failure | None:
    torch.manual_seed(0)
    model = chunkc.compile(Branching(), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    return attempt(lambda: model(torch.ones(2, 8), torch.distributed.get_rank()).backward())
