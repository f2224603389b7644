"""Windows of micro-batches in which ranks differ: in the shapes of what they train, or in what they ask for."""

from __future__ import annotations

from typing import Any

import torch
from job_rank import Failure
from pair import batch
from rank_divergence import attempt
from sides import seeded_tower, side_on_rank

from chunkc.runtime.executor import Executor

LENGTHS = ((8, 8, 8, 8), (8, 7, 8, 6))
"""Of the micro-batches of each rank."""
NUM = len(LENGTHS[0])
Gradients = dict[str, torch.Tensor]


def inputs(rank: int, number: int) -> tuple[torch.Tensor, ...]:
    return batch(10 * rank + number, LENGTHS[rank][number])


def gradients_of_other_shapes(hw: str) -> tuple[Gradients, list[str]]:
    """Of the second window, and the programs that ran in it on this rank."""
    rank = torch.distributed.get_rank()
    side = side_on_rank(hw, accumulate=NUM)
    model, programs = side.model, list[str]()

    def window() -> None:
        for number in range(NUM):
            model(*inputs(rank, number)).backward()

    window()
    side.run("zero")
    for executor in model._compiled_call_impl.runtime.executors.values():  # type: ignore[union-attr, operator]
        _record(executor, programs)
    window()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, programs


def _record(executor: Executor, programs: list[str]) -> None:
    launch = executor._launch

    def noted(name: str, *more: Any) -> None:
        programs.append(name)
        launch(name, *more)

    executor._launch = noted  # type: ignore[method-assign]


def plain_gradients() -> Gradients:
    """Of all micro-batches in one process, with the means over ranks."""
    model = seeded_tower()
    for rank, lengths in enumerate(LENGTHS):
        for number in range(NUM):
            (model(*inputs(rank, number)) / len(LENGTHS)).backward()
        assert len(lengths) == NUM
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def one_looks(hw: str) -> tuple[Failure | None, Failure | None]:
    """Rank 1 looks at a gradient between micro-batches; what that raises, and training in step afterwards."""
    side = side_on_rank(hw, accumulate=NUM)
    side.run("forward backward")
    diverged = attempt(lambda: side.run("grads" if torch.distributed.get_rank() else "forward"))
    return diverged, attempt(lambda: side.run("zero forward backward step zero state"))
