"""Case 10 over ranks: results do not depend on when anything happens on any of them.

Freed and fresh device memory is filled with NaN, and every stream of every rank pauses at random, on each rank at
other moments; the results are those of the synchronous mode, in which every action runs at its launch, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from job import Pool
from rank_training import Work, together, train_under
from training import PLACEMENT, Trained, assert_same_bits

pytestmark = pytest.mark.distributed
RECIPE = replace(PLACEMENT, num_steps=4)
SYNCHRONOUS, DELAYED = "poison,sync", "poison,delay=0.3"
MOVING = Work("odd", RECIPE, hw=None, wishes={"os_home": "host", "chunk_numel": 4096, "num_second_homes": 100})
WORKS = {
    "moving": MOVING,
    "clipped": replace(MOVING, options={"max_grad_norm": 0.1}),
    "accumulated": replace(MOVING, accumulate=2),
    "accumulated and clipped": replace(MOVING, accumulate=2, options={"max_grad_norm": 0.1}),
    "resident, accumulated": Work("odd", RECIPE, wishes={"os_home": "device", "chunk_numel": 4096}, accumulate=3),
    "resident": Work("odd", RECIPE, wishes={"os_home": "device", "chunk_numel": 4096}),
    "fp16": replace(MOVING, dtype=torch.float16),
}


def delayed(pool: Pool, work: Work, seed: int) -> Trained:
    return together(pool.run(train_under, work, DELAYED, seed, timeout_s=400))


def check(pool: Pool, name: str, seeds: range) -> None:
    work = WORKS[name]
    wanted = together(pool.run(train_under, work, SYNCHRONOUS, timeout_s=400))
    assert all(torch.isfinite(value).all() for value in wanted.params.values())
    for seed in seeds:
        assert_same_bits(delayed(pool, work, seed), wanted)


@pytest.mark.long
@pytest.mark.parametrize("name", ["accumulated and clipped", "resident", "resident, accumulated"])
def test_delays_change_no_bit_on_two_ranks(name: str, two_ranks: Pool) -> None:
    check(two_ranks, name, range(2))


@pytest.mark.parametrize("max_norm", [1e6, 0.1], ids=["committed", "dropped"])
def test_updates_that_begin_before_their_step_change_no_bit(max_norm: float, two_ranks: Pool) -> None:
    begun = replace(MOVING, options={"max_grad_norm": max_norm})
    wanted = together(
        two_ranks.run(train_under, replace(begun, wishes={**MOVING.wishes, "num_second_homes": 0}), "poison")
    )
    assert_same_bits(delayed(two_ranks, begun, 0), wanted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WORKS)
def test_many_delays_change_no_bit_on_two_ranks(name: str, two_ranks: Pool) -> None:
    check(two_ranks, name, range(2, 22))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WORKS)
def test_delays_change_no_bit_on_four_ranks(name: str, four_ranks: Pool) -> None:
    check(four_ranks, name, range(3))
