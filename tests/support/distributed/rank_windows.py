"""Windows of micro-batches in which ranks differ: in the shapes of what they train, or in what they ask for."""

from collections.abc import Sequence
from typing import Any

import torch
from job_rank import Failure
from pair import batch
from rank_divergence import attempt
from scripted_loops import Side, seeded_tower, side_on_rank

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.plan import Program
from chunkc.runtime.execution.executor import Executor

LENGTHS = ((8, 8, 8, 8), (8, 7, 8, 6))
"""Of the micro-batches of each rank."""
NUM = len(LENGTHS[0])
Gradients = dict[str, torch.Tensor]


def inputs(rank: int, number: int) -> tuple[torch.Tensor, ...]:
    return batch(10 * rank + number, LENGTHS[rank][number])


def gradients_of_other_shapes(hw: str) -> tuple[Gradients, list[str]]:
    rank = torch.distributed.get_rank()
    side = side_on_rank(hw, accumulate=NUM)
    model, programs = side.model, list[str]()

    def window() -> None:
        for number in range(NUM):
            model(*inputs(rank, number)).backward()

    window()
    side.run("zero")
    _record_all(side, programs)
    window()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, programs


def _record_all(side: Side, programs: list[str]) -> None:
    for executor in compiled_of(side.model).runtime.executors.values():
        _record(executor, programs)


def _record(executor: Executor, programs: list[str]) -> None:
    launch = executor._launch

    def noted(program: Program, *more: Any) -> None:
        programs.append(program.name)
        launch(program, *more)

    executor._launch = noted  # type: ignore[method-assign]


def plain_gradients() -> Gradients:
    model = seeded_tower()
    for rank, lengths in enumerate(LENGTHS):
        for number in range(NUM):
            (model(*inputs(rank, number)) / len(LENGTHS)).backward()
        assert len(lengths) == NUM
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def windows_of(hw: str, lengths: Sequence[int]) -> list[tuple[list[str], int]]:
    """The programs of one step after another, each of so many micro-batches, and the waits in it that nobody asked for;
    after a first step of as many."""
    side = side_on_rank(hw, accumulate=NUM)
    side.run(f"{'forward backward ' * lengths[0]} step zero")
    programs, found = list[str](), []
    _record_all(side, programs)
    for length in lengths:
        side.run(f"{'forward backward ' * length} step zero")
        found.append((programs.copy(), chunkc.stats(side.model)["num_unasked_syncs"]))
        programs.clear()
    return found


def one_diverges(hw: str, word: str) -> tuple[Failure | None, Failure | None]:
    """Rank 1 does something else between micro-batches; what that raises, and training in step afterwards."""
    side = side_on_rank(hw, accumulate=NUM)
    side.run("forward backward")
    diverged = attempt(lambda: side.run(word if torch.distributed.get_rank() else "forward"))
    return diverged, attempt(lambda: side.run("zero forward backward step zero state"))


def one_gives_up_a_gradient(hw: str) -> Failure | None:
    """Rank 1 alone begins one of its sums anew."""
    side = side_on_rank(hw, accumulate=NUM)
    side.run("forward backward forward")
    if torch.distributed.get_rank():
        side.model.head.weight.grad = None  # type: ignore[union-attr, assignment]
    return attempt(side.backward)


def load_after_a_discarded_window(hw: str, directory: str) -> tuple[Failure | None, Failure | None]:
    """What a load raises in which rank 1 cannot write what it has read, after gradients were discarded before the last
    micro-batch; and then one in which it can."""
    side = side_on_rank(hw, accumulate=NUM)
    side.run("forward backward forward backward step zero")
    chunkc.save_checkpoint(directory, side.model, side.optimizer)
    runtime: Any = compiled_of(side.model).runtime
    found = []
    for is_refused in (torch.distributed.get_rank() == 1, False):
        side.run("forward backward forward backward zero")
        if is_refused:
            runtime.parameters.write_own = _refuse
        found.append(attempt(lambda: chunkc.load_checkpoint(directory, side.model, side.optimizer)))
        vars(runtime.parameters).pop("write_own", None)
    side.run("forward backward forward backward step zero state")
    return found[0], found[1]


def _refuse(*args: object) -> None:
    raise OSError("rank 1 cannot write")
