"""Cases 14 and 15 over ranks: saved by one number of ranks, loaded by another, whole or not at all."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from job import Pool, only_call
from rank_checkpoints import Op, Session, digest_of, save_for_ever, session, sessions
from resumed import Bits, check_equal

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
POLICIES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": "auto", "handed_over": "bfloat16"}}
EIGHT_BITS = {"optimizer": "adamw8bit"}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "8-bit": 1e-2}  # a code may round to the next where gradients differ in a bit


def mean(losses: list[list[float]]) -> list[float]:
    """Of all ranks, step by step."""
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


def check_close(found: list[float], wanted: list[float], tolerance: float) -> None:
    assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(found, wanted, strict=True)), (found, wanted)


@pytest.mark.long(but="fp32")
@pytest.mark.parametrize("policy", ["fp32", "8-bit", pytest.param("bf16", marks=SLOW)])
def test_two_ranks_save_what_one_loads_and_the_other_way_round(policy: str, tmp_path: Path, two_ranks: Pool) -> None:
    """Every element of parameters, masters and moments; before the first step, and after; the next losses agree."""
    options, there, back = (POLICIES | {"8-bit": EIGHT_BITS})[policy], tmp_path / "there", tmp_path / "back"
    saved = two_ranks.run(session, options, [("train", 0, 2), ("save", there), ("bits",), ("train", 2, 4)])
    wanted: Bits = saved[0][2]
    one = session(
        {**options, "seed": 7},
        [("load", there), ("bits",), ("train", 2, 4), ("load", there), ("bits",), ("save", back)],
    )
    assert one[0] == (2, {"rank": 0})
    check_equal(one[1], wanted)
    check_equal(one[4], wanted)
    check_close(one[2], mean([rank[3] for rank in saved]), TOLERANCE[policy])
    loads = [("load", back), ("bits",), ("train", 2, 4), ("load", there), ("bits",)]
    found = two_ranks.run(session, {**options, "seed": 8}, loads)
    check_equal(found[0][1], wanted)
    check_equal(found[0][4], wanted)
    assert [rank[2] for rank in found] == [rank[3] for rank in saved], "the same ranks go on to the bit"
    names = {path.name.split(".")[0] for path in Path(saved[0][1]).glob("rank-*")}
    assert names == {"rank-00000", "rank-00001"}, "each rank wrote files of its own"


def loaded_and_saved(there: Path, here: Path) -> list[Op]:
    return [("load", there), ("bits",), ("save", here), ("train", 2, 4), ("load", there), ("bits",)]


@SLOW
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path, two_ranks: Pool, four_ranks: Pool) -> None:
    """4 -> 3 -> 1 -> 2 -> 4, in fp32 and in bf16 with fp32 masters; also into models that have trained."""
    three_ranks = Pool(3)
    try:
        for policy, options in POLICIES.items():
            paths = [tmp_path / policy / str(number) for number in range(5)]
            first = four_ranks.run(session, options, [("train", 0, 2), ("save", paths[0]), ("bits",), ("train", 2, 4)])
            losses = mean([rank[3] for rank in first])
            found = [three_ranks.run(session, {**options, "seed": 3}, loaded_and_saved(paths[0], paths[1]))]
            found.append([session({**options, "seed": 4}, loaded_and_saved(paths[1], paths[2]))])
            found.append(two_ranks.run(session, {**options, "seed": 5}, loaded_and_saved(paths[2], paths[3])))
            found.append(four_ranks.run(session, {**options, "seed": 6}, loaded_and_saved(paths[3], paths[4])))
            for ranks in found:
                check_equal(ranks[0][1], first[0][2])
                check_equal(ranks[0][5], first[0][2])
                check_close(mean([rank[3] for rank in ranks]), losses, TOLERANCE[policy])
    finally:
        three_ranks.discard()


@pytest.mark.long
@pytest.mark.parametrize("half", [2, pytest.param(50, marks=SLOW)])
def test_a_resumed_job_goes_on_to_the_bit(half: int, tmp_path: Path, two_ranks: Pool) -> None:
    """With dropout, whose masks are each rank's, and a scheduler; the second run began as another one."""
    whole = ({"model": "dropping"}, [("train", 0, half), ("train", half, 2 * half), ("bits",), ("draws",)])
    first = ({"model": "dropping"}, [("train", 0, half), ("save", tmp_path)])
    second = ({"model": "dropping", "seed": 7}, [("load", tmp_path), ("train", half, 2 * half), ("bits",), ("draws",)])
    found = two_ranks.run(sessions, [whole, first, second])
    for rank, (uninterrupted, saved, resumed) in enumerate(found):
        assert saved[0] == uninterrupted[0] and resumed[1:2] == uninterrupted[1:2], f"losses of rank {rank}"
        assert resumed[3] == uninterrupted[3], f"random numbers of rank {rank}"
    assert found[0][0][0] != found[1][0][0] and found[0][0][3] != found[1][0][3], "each rank has its own"
    check_equal(found[0][2][2], found[0][0][2])


@pytest.mark.long
def test_a_save_beside_training_is_of_the_moment_of_the_call(tmp_path: Path, two_ranks: Pool) -> None:
    """Ranks train, evaluate and read on while both write, without any room to copy chunks aside."""
    ops = [("train", 0, 3), ("digest",)]
    for number in range(3):
        first = 3 + 4 * number
        ops += [
            ("begin_save", tmp_path / str(number)),
            ("train", first, first + 4),
            ("bits",),
            ("end_save",),
            ("digest",),
        ]
    found = two_ranks.run(session, {"model": "dropping"}, ops)
    assert [rank[5] for rank in found] == [tmp_path / "0" / "00000001-step-3"] * 2
    wanted = [found[0][1], found[0][6], found[0][11]]
    loads = [op for number in range(3) for op in (("load", tmp_path / str(number)), ("digest",))]
    loaded = two_ranks.run(session, {"model": "dropping", "seed": 7}, loads)
    assert loaded[0][1::2] == wanted and len(set(wanted)) == 3


@pytest.mark.long
@pytest.mark.parametrize("full_rank", [pytest.param(0, marks=SLOW), 1])
def test_a_rank_whose_disk_is_full_fails_the_save_on_all(full_rank: int, tmp_path: Path, two_ranks: Pool) -> None:
    """The cause is named, the checkpoint before is what is loaded, and the next save works."""
    ops = [
        ("train", 0, 1), ("save", tmp_path), ("digest",), ("train", 1, 2), ("save_full", tmp_path, full_rank),
        ("save_refused", tmp_path, full_rank), ("load", tmp_path), ("digest",), ("train", 1, 3), ("save", tmp_path),
    ]  # fmt: skip
    found = two_ranks.run(session, {}, ops)
    for rank, seen in enumerate(found):
        text = seen[4]
        assert text.startswith("CheckpointError: no checkpoint of step 2 was written") and "too large" in text, text
        assert ("on rank" in text) == (rank != full_rank) and (rank == full_rank or f"on rank {full_rank}" in text), (
            text
        )
        refused = "which a checkpoint does not hold" if rank == full_rank else f"rank {full_rank} had its call refused"
        assert refused in seen[5], seen[5]
        assert seen[6][0] == 1
    assert found[0][7] == found[0][2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001-step-1", "00000002-step-3", "latest"]


@pytest.mark.long
def test_a_damaged_file_is_refused_on_all_ranks(tmp_path: Path, two_ranks: Pool) -> None:
    """Whichever rank reads it; nothing has changed, and the checkpoint before is offered."""
    root = tmp_path / "whole"
    two_ranks.run(session, {}, [("train", 0, 1), ("save", root), ("train", 1, 2), ("save", root)])
    names = sorted(path.name for path in (root / "00000002-step-2").iterdir())
    loads: list[Op] = [("train", 0, 1), ("digest",)]
    for name in names:
        shutil.copytree(root, tmp_path / name)
        path = tmp_path / name / "00000002-step-2" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        loads.append(("load_refused", tmp_path / name))
    found = two_ranks.run(session, {"seed": 7}, [*loads, ("digest",)])
    assert found[0][1] == found[0][-1]
    for rank in found:
        for name, text in zip(names, rank[2:-1], strict=True):
            assert text.startswith("CheckpointError") and f"is damaged: {name} is" in text, text
            assert f"load_checkpoint('{tmp_path / name / '00000001-step-1'}'" in text, text


def test_a_rank_that_was_not_there_keeps_its_generators(tmp_path: Path, two_ranks: Pool) -> None:
    one = session({}, [("train", 0, 1), ("save", tmp_path), ("draws",)])
    found = two_ranks.run(sessions, [({"seed": 7}, [("load", tmp_path), ("draws",)]), ({"seed": 7}, [("draws",)])])
    assert found[0][0][1] == one[2], "rank 0 goes on with what rank 0 had"
    assert found[1][0][1] == found[1][1][0], "rank 1 as the script has seeded it"


def kill_while_saving(directory: Path, generator: random.Random) -> tuple[int, int]:
    """SIGKILL one of two ranks at some moment; how many steps the run began with, and the latest that was saved for
    sure: saves of odd steps are not asynchronous."""
    rank = generator.randrange(2)
    with only_call(2, save_for_ever, directory, group_timeout_s=20.0) as job:
        job.wait_for(rank, "from ", 120)
        begun = int(job.told(rank).split()[1])
        job.wait_for(rank, f"step {begun + generator.randint(1, 3)}.", 120)
        time.sleep(generator.uniform(0, 0.1))
        job.kill(rank)
        ends = job.ends(40)
    assert ends[rank].exit_code == -signal.SIGKILL
    assert ends[1 - rank].exit_code == 1 and "RankError" in ends[1 - rank].log, ends[1 - rank].log
    told = [int(step) for step in re.findall(r"step (\d+)\.", job.told(rank))]
    return begun, max([begun, *(step for step in told if step % 2)])


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [1, pytest.param(25, marks=[SLOW, pytest.mark.timeout(1500)])])
def test_a_rank_killed_while_ranks_save_leaves_the_checkpoint_before(
    num_kills: int, tmp_path: Path, two_ranks: Pool
) -> None:
    """What is loaded after each kill is a step of the uninterrupted run, to the bit; no finished save is lost."""
    directory, generator, latest = tmp_path / "run", random.Random(num_kills), 0
    directory.mkdir()
    steps = 8 * num_kills
    ops = [op for step in range(steps) for op in (("train", step, step + 1), ("digest",))]
    digests = two_ranks.run(session, {"model": "dropping"}, ops, timeout_s=500)[0][1::2]
    for _ in range(num_kills):
        begun, saved = kill_while_saving(directory, generator)
        assert begun == latest
        run = Session(model="dropping", seed=9)
        latest = run.load(directory)[0]
        bits = run.bits()
        assert latest >= saved and bits is not None
        assert digest_of(bits) == digests[latest - 1], f"step {latest}"
    assert latest > num_kills // 2
