"""Case 16 over cases 8, 9 and 11: a steady step of every rank is exactly its plan, and exchanges what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accumulating import train_large
from job import Pool
from models import CASES
from rank_steady import Steady, steady, two_models
from rank_training import QUICK, ROOMY, Work
from steady import COUNTS

pytestmark = pytest.mark.distributed


def check_steady(found: list[Steady]) -> None:
    """Order of actions, bytes of all streams and of memory; nothing compiled, allocated or waited for."""
    for rank in found:
        assert rank.trace == rank.planned_trace
        assert rank.settled_at == rank.planned_ends
        assert {count: rank.stats[count] for count in COUNTS} == dict.fromkeys(COUNTS, 0)
        for stream in ("h2d", "d2h", "comm"):
            assert rank.stats[f"{stream}_nbytes"] == rank.stats[f"planned_{stream}_nbytes"], stream
        assert rank.received_nbytes == sum(rank.planned_nbytes.values()) == rank.stats["comm_nbytes"]
        assert rank.stats["measured_peak_nbytes"] <= rank.stats["planned_peak_nbytes"] <= rank.stats["budget_nbytes"]
        assert rank.taken_host_nbytes == rank.stats["host_nbytes"]
    assert len({rank.stats["comm_nbytes"] for rank in found}) == 1


def check_volume(found: list[Steady], num_ranks: int, max_gathers: int = 3) -> None:
    """Each rank receives the others' share of the model once in reducing it, and in gathering it mostly twice.

    That is 6 (p - 1) / p bytes for each parameter in 16 bits, 12 in fp32, on top of padding. What stays on the device
    between forward and backward is gathered once. On the smallest machine some groups leave between two uses in one
    graph, and are gathered three times.
    """
    for rank in found:
        share_nbytes = rank.chunks_nbytes * (num_ranks - 1) / num_ranks
        assert rank.payload_nbytes <= rank.chunks_nbytes < 2 * rank.payload_nbytes, "chunks are mostly padding"
        assert rank.planned_nbytes["reduce"] == share_nbytes
        assert share_nbytes <= rank.planned_nbytes["gather"] <= max_gathers * share_nbytes
        assert rank.received_nbytes <= (1 + max_gathers) * share_nbytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "hw"),
    [pytest.param(torch.float32, None, marks=pytest.mark.slow), (torch.bfloat16, None), (torch.float32, ROOMY)],
    ids=str,
)
def test_a_steady_step_is_the_plan(dtype: torch.dtype, hw: str | None, two_ranks: Pool) -> None:
    """Where chunks move, they are gathered for forward and again for backward; where all is resident, once."""
    found = two_ranks.run(steady, Work("gpt2_small", hw=hw, dtype=dtype))
    check_steady(found)
    check_volume(found, 2)
    is_tight = hw is None
    assert all((rank.stats["h2d_nbytes"] > 0) == is_tight for rank in found)
    gathers = {rank.planned_nbytes["gather"] / rank.planned_nbytes["reduce"] for rank in found}
    assert all(times > 1.5 for times in gathers) if is_tight else gathers == {1.0}


def test_micro_batches_of_a_resident_plan_exchange_once_a_step(two_ranks: Pool) -> None:
    """Parameters before the first, gradients behind the last."""
    found = two_ranks.run(steady, Work("gpt2_small", accumulate=3))
    check_steady(found)
    check_volume(found, 2, max_gathers=1)


@pytest.mark.slow
def test_micro_batches_of_moving_chunks_exchange_each_time(two_ranks: Pool) -> None:
    """A group that leaves within a backward and comes back is reduced both times."""
    found = two_ranks.run(steady, Work("gpt2_small", hw=None, accumulate=3))
    check_steady(found)
    for rank in found:
        assert 3 <= rank.planned_nbytes["reduce"] / (rank.chunks_nbytes / 2) < 3.5
        assert 6 <= rank.planned_nbytes["gather"] / (rank.chunks_nbytes / 2) < 9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert", "odd"])
def test_a_steady_step_of_four_ranks_is_the_plan(name: str, dtype: torch.dtype, four_ranks: Pool) -> None:
    found = four_ranks.run(steady, Work(name, hw=None, dtype=dtype), timeout_s=400)
    check_steady(found)
    check_volume(found, 4)


@pytest.mark.long
def test_two_models_train_in_one_job(two_ranks: Pool) -> None:
    """In turn; when one is deleted its memory returns, and the other goes on."""
    recipe = replace(QUICK, num_steps=5)
    found = two_ranks.run(two_models, Work("odd", recipe, wishes={"os_home": "host"}))
    wanted = train_large(CASES["odd"], recipe, 2)
    for rank in found:
        assert len(rank["losses"][0]) == 3 and len(rank["losses"][1]) == 5
        assert rank["losses"][0] == rank["losses"][1][:3]
        assert rank["taken"] == [2 * rank["host"], rank["host"]] and rank["host"] > 0
        for name, value in wanted.params.items():
            assert torch.allclose(rank["params"][name], value, rtol=0, atol=1e-3 * wanted.largest_update), name
