"""Model data divided within nodes: four ranks as two nodes of two train as one process does, and both nodes alike.

Ranks 0 and 1 are the first node; what stands in the chunks of ranks 2 and 3 must be the same bits as in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accumulating import train_large
from job import Pool, only_call
from models import CASES
from rank_checkpoints import session
from rank_failures import train_for_ever
from rank_replicas import NODE, TWO_NODES, compile_apart, mean_of_own, scripts_on_nodes, train_scaled_on_nodes
from rank_steady import received_on_nodes
from rank_training import QUICK, Done, Work, check_semantics, train, train_in_micro_batches
from resumed import check_equal
from scripted_loops import Seen, check_seen, scripts_plainly
from training import SEMANTICS

from .test_checkpoints import POLICIES
from .test_loops import LOOPS
from .test_loss_scaling import check as check_scaled

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
ROOMY = "2x2xemulated-64m-1g"
WISHES = {"chunk_numel": 4096, "num_second_homes": 4}
BACKWARD = "forward backward "
STEPS = [
    "train_clipped read",
    3 * BACKWARD + "grads clip step zero",
    2 * BACKWARD + "read step zero",
    3 * BACKWARD + "step zero evaluate",
    BACKWARD + "grads " + BACKWARD + "clip " + BACKWARD + "clip step zero state",
    "train_clipped " + 2 * BACKWARD + "zero " + 2 * BACKWARD + "step zero state",
]
"""Steps of one, two and three micro-batches, clipped or not, at a plan for three."""

SHORT = ["train_clipped", 2 * BACKWARD + "clip step zero read"]


def check_nodes(found: Sequence[tuple[list[Seen], list[str]]], scripts: Sequence[str]) -> None:
    """What all ranks see is what one process sees; ranks of the two nodes that own the same chunks have the same."""
    for number, wanted in enumerate(scripts_plainly(scripts, len(found))):
        check_seen([seen[number] for seen, _ in found], wanted)
    digests = [of_rank for _, of_rank in found]
    assert digests[:2] == digests[2:], "replicas differ"
    assert digests[0] != digests[1] and len(set(digests[0])) == len(scripts), "nothing was trained"


def check(found: list[Done]) -> None:
    check_semantics([done.trained for done in found], train_large(CASES["odd"], QUICK, 4))


@SLOW
@pytest.mark.parametrize("hw", [None, ROOMY], ids=["smallest", "resident"])
def test_two_nodes_of_two_ranks_train_as_one_process(hw: str | None, four_ranks: Pool) -> None:
    check(four_ranks.run(train, Work("odd", hw=hw, wishes=WISHES, num_nodes=2)))


@SLOW
@pytest.mark.parametrize("hw", [None, ROOMY], ids=["smallest", "resident"])
def test_a_step_exchanges_what_is_planned(hw: str | None, four_ranks: Pool) -> None:
    """Between two nodes, each rank receives as much as its node's reductions bring it: one chunk for each group."""
    for in_node, between, stats in four_ranks.run(received_on_nodes, Work("odd", hw=hw, wishes=WISHES, num_nodes=2)):
        assert in_node + between == stats["comm_nbytes"] == stats["planned_comm_nbytes"]
        assert in_node >= 2 * between > 0, "a group is gathered and reduced within the node"


@SLOW
@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_ends_those_of_both_nodes(rank: int) -> None:
    """Also the one that exchanges nothing with it: the others end, and it misses them."""
    with only_call(4, train_for_ever, "", -1, TWO_NODES, "node", group_timeout_s=20.0) as job:
        for other in range(4):
            job.wait_for(other, "warm", 120.0)
        job.kill(rank)
        ends = job.ends(60.0)
    for other in {0, 1, 2, 3} - {rank}:
        assert ends[other].exit_code == 1 and f"RankError: rank {other} of 4 stopped in" in ends[other].log


@SLOW
@pytest.mark.parametrize("hw", [None, ROOMY], ids=["smallest", "resident"])
def test_micro_batches_on_two_nodes_equal_one_large_batch(hw: str | None, four_ranks: Pool) -> None:
    work = Work("odd", SEMANTICS, hw=hw, wishes=WISHES, num_nodes=2, accumulate=2)
    check_semantics(four_ranks.run(train_in_micro_batches, work), train_large(CASES["odd"], SEMANTICS, 8))


def test_two_nodes_stay_alike(four_ranks: Pool) -> None:
    """In short, since starting four ranks takes a while."""
    check_nodes(four_ranks.run(scripts_on_nodes, SHORT, TWO_NODES, 2), SHORT)


@SLOW
@pytest.mark.parametrize("hw", [TWO_NODES, "2x2xemulated-8m-64m"], ids=["moving", "resident"])
def test_steps_of_any_number_of_micro_batches_keep_both_nodes_alike(hw: str, four_ranks: Pool) -> None:
    """The first clip reads all gradients, later ones measure them as they land."""
    check_nodes(four_ranks.run(scripts_on_nodes, STEPS, hw, 3), STEPS)


@SLOW
def test_loops_on_two_nodes_see_what_one_process_sees(four_ranks: Pool) -> None:
    scripts = [f"{script} train" for script in LOOPS]
    check_nodes(four_ranks.run(scripts_on_nodes, scripts), scripts)


@SLOW
def test_nodes_that_do_not_exchange_are_noticed(four_ranks: Pool) -> None:
    """The mutation: the second step keeps its means within nodes."""
    scripts = ["train", "train"]
    found = four_ranks.run(scripts_on_nodes, scripts, TWO_NODES, 1, 1)
    with pytest.raises(AssertionError, match="replicas differ"):
        check_nodes(found, scripts)
    digests = [of_rank for _, of_rank in found]
    assert [d[0] for d in digests[:2]] == [d[0] for d in digests[2:]], "until then they did"


@SLOW
def test_an_overflow_on_one_rank_is_skipped_on_both_nodes(four_ranks: Pool) -> None:
    check_scaled(four_ranks.run(train_scaled_on_nodes), 4)


@SLOW
def test_ranks_that_divide_model_data_otherwise_are_refused(four_ranks: Pool) -> None:
    for outcome in four_ranks.outcomes(compile_apart):
        assert outcome.error is not None and outcome.error.kind == "RankError"
        assert "rank 0: model data is divided over 2 ranks of 4" in outcome.error.text
        assert "rank 3: model data is divided over 4 ranks of 4" in outcome.error.text


@SLOW
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_two_nodes_save_is_loaded_by_any_ranks_and_back(
    policy: dict[str, Any], tmp_path: Path, four_ranks: Pool
) -> None:
    """Divided within nodes, by one process, and within nodes again; also over all four ranks."""
    nodes = {"hw": TWO_NODES, **NODE, **policy}
    there, back = tmp_path / "there", tmp_path / "back"
    saved = four_ranks.run(session, nodes, [("train", 0, 2), ("save", there), ("bits",), ("train", 2, 4), ("bits",)])
    names = {path.name.split(".")[0] for path in Path(saved[0][1]).glob("rank-*")}
    assert names == {"rank-00000", "rank-00001"}, "the first node writes"
    one = session({**policy, "seed": 7}, [("load", there), ("bits",), ("save", back)])
    check_equal(one[1], saved[0][2])
    for options, path in ((nodes, back), (policy, there)):
        found = four_ranks.run(session, {**options, "seed": 8}, [("load", path), ("bits",), ("train", 2, 4), ("bits",)])
        check_equal(found[0][1], saved[0][2])
        if options is nodes:
            assert [rank[2] for rank in found] == [rank[3] for rank in saved]
            check_equal(found[0][3], saved[0][4])


@SLOW
def test_a_save_beside_training_is_of_the_first_nodes_chunks_then(tmp_path: Path, four_ranks: Pool) -> None:
    """Without any room to copy chunks aside: the second node, which keeps none, does not wait for itself."""
    nodes = {"hw": TWO_NODES, **NODE}
    ops = [("train", 0, 2), ("digest",), ("begin_save", tmp_path), ("train", 2, 5), ("end_save",), ("digest",)]
    found = four_ranks.run(session, nodes, ops)
    loaded = four_ranks.run(
        session, {**nodes, "seed": 7}, [("load", tmp_path), ("digest",), ("train", 2, 5), ("digest",)]
    )
    assert [loaded[0][1], loaded[0][3]] == [found[0][1], found[0][5]]


@SLOW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [3, 10, 4096])
def test_means_over_ranks_are_the_same_bits_on_all(numel: int, dtype: torch.dtype, four_ranks: Pool) -> None:
    """Also where ranks make parts of other sizes, or none."""
    found = four_ranks.run(mean_of_own, numel, dtype)
    exact = torch.stack([own for own, _ in found]).float().mean(0).to(dtype)
    assert all(torch.equal(mean, found[0][1]) for _, mean in found)
    torch.testing.assert_close(found[0][1], exact)
