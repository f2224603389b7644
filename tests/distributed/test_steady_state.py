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
        assert {count: rank.stats[count] for count in COUNTS} == dict.fromkeys(COUNTS, 0)
        for stream in ("h2d", "d2h", "comm"):
            assert rank.stats[f"{stream}_nbytes"] == rank.stats[f"planned_{stream}_nbytes"], stream
        assert rank.gathered_nbytes == rank.planned_nbytes["gather"]
        assert rank.reduced_nbytes == rank.planned_nbytes["reduce"]
        assert rank.gathered_nbytes + rank.reduced_nbytes == rank.stats["comm_nbytes"]
        assert rank.stats["measured_peak_nbytes"] <= rank.stats["planned_peak_nbytes"] <= rank.stats["budget_nbytes"]
        assert rank.taken_host_nbytes == rank.stats["host_nbytes"]
    assert len({rank.stats["comm_nbytes"] for rank in found}) == 1


def check_volume(found: list[Steady], num_ranks: int) -> None:
    """Each rank receives the others' share of the model at most twice in fetching it and once in reducing it.

    That is 6 (p - 1) / p bytes for each parameter in 16 bits, 12 in fp32, on top of padding.
    """
    for rank in found:
        share = (num_ranks - 1) / num_ranks
        padding_nbytes = rank.chunks_nbytes - rank.payload_nbytes
        assert 0 <= padding_nbytes < rank.payload_nbytes
        assert rank.reduced_nbytes == share * rank.chunks_nbytes
        assert rank.gathered_nbytes <= 2 * share * rank.chunks_nbytes
        assert rank.stats["comm_nbytes"] <= 3 * share * (rank.payload_nbytes + padding_nbytes)


@pytest.mark.parametrize(
    ("dtype", "hw"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, ROOMY)], ids=str
)
def test_a_steady_step_is_the_plan(dtype: torch.dtype, hw: str | None, two_ranks: Pool) -> None:
    """Where chunks move, they are gathered for forward and again for backward; where all is resident, once."""
    found = two_ranks.run(steady, Work("gpt2_small", hw=hw, dtype=dtype))
    check_steady(found)
    check_volume(found, 2)
    is_tight = hw is None
    assert all((rank.stats["h2d_nbytes"] > 0) == is_tight for rank in found)
    gathers = {rank.gathered_nbytes / rank.reduced_nbytes for rank in found}
    assert all(1.5 < times <= 2 for times in gathers) if is_tight else gathers == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert", "odd"])
def test_a_steady_step_of_four_ranks_is_the_plan(name: str, dtype: torch.dtype, four_ranks: Pool) -> None:
    found = four_ranks.run(steady, Work(name, hw=None, dtype=dtype), timeout_s=400)
    check_steady(found)
    check_volume(found, 4)


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
