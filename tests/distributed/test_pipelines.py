"""Pipelines of torch.distributed.pipelining over compiled stages train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equalities import ERROR_RATIO
from job import JobError, Pool
from rank_pipeline import OPTIONS, Pipeline, Trained, refusals, train, train_plainly
from rank_stages import Refused, clip_in_other_orders, clip_otherwise, layer, plain_gradients, save_stages
from training import largest_error

import chunkc

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
TIGHT, SMALL = "emulated-330k-64m", "emulated-330k-64m"
"""Chunks of each stage move: of `staged_gpt`, and of models of transformers."""


def check(found: Sequence[Trained], work: Pipeline) -> None:
    """Every element equals plain PyTorch's, within 2e-4 of the learning rate; losses do, where there are any."""
    wanted, seen = train_plainly(work), set[str]()
    for of_rank in found:
        for name, value in of_rank.params.items():
            atol = 2e-4 * OPTIONS["lr"]
            torch.testing.assert_close(value, wanted.params[name], rtol=0, atol=atol, msg=lambda m, n=name: n + m)
        seen |= of_rank.params.keys()
    assert seen == wanted.params.keys()
    losses = [of_rank.losses for of_rank in found if of_rank.losses]
    mean = [sum(of_step) / len(losses) for of_step in zip(*losses, strict=True)]
    assert mean == pytest.approx(wanted.losses, rel=1e-5)


def check_budgets(found: Sequence[Trained], *, moves: bool) -> None:
    for stats in (s for of_rank in found for s in of_rank.stats):
        assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"]
        assert (stats["planned_h2d_nbytes"] > 0) == moves
        for stream in ("h2d", "d2h", "comm"):
            assert stats[f"{stream}_nbytes"] == stats[f"planned_{stream}_nbytes"]


@pytest.mark.long(but="1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_stages_train_as_one_process(schedule: str, two_ranks: Pool) -> None:
    """By 1F1B the stages differ in what is in flight. The loss is taken behind the last stage, or within it."""
    clips, is_inside = ("together", True) if schedule == "gpipe" else ("by the optimizer", False)
    work = Pipeline(schedule, hw=TIGHT, loss_in_stage=is_inside, clips=clips)
    found = two_ranks.run(train, work)
    check(found, work)
    check_budgets(found, moves=True)


@pytest.mark.long(but="t5")
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_stages_of_transformers_train_as_one_process(family: str, two_ranks: Pool) -> None:
    """The stages of a T5 are its encoder and its decoder."""
    work = Pipeline(family=family, hw=SMALL, loss_in_stage=True)
    found = two_ranks.run(train, work)
    check(found, work)
    check_budgets(found, moves=True)


def test_stages_that_cannot_be_trained_are_refused(two_ranks: Pool) -> None:
    parts = {
        "fp16": "stages of a pipeline cannot scale gradients of fp16",
        "data": "the mesh has dimensions 'data'; supported are pp",
        "node": "beside mesh=",
    }
    for found in two_ranks.run(refusals):
        assert {name for name, text in found.items() if parts[name] in text} == set(parts), found


@pytest.mark.long(but="type-parts1")
@pytest.mark.parametrize(
    ("clips", "parts"),
    [
        ("norm", ("rank 0: clipping to 1.0 by the 2.0-norm", "rank 1: clipping to 0.5 by the 2.0-norm")),
        ("type", ("rank 0: clipping to 1.0 by the 2.0-norm", "rank 1: clipping to 1.0 by the 3.0-norm")),
        ("optimizer", ("rank 0: clipping to 1.0 by the 2.0-norm", "rank 1: clipping to 0.5 by the 2.0-norm")),
    ],
)
def test_stages_that_clip_otherwise_are_refused(clips: str, parts: tuple[str, ...], two_ranks: Pool) -> None:
    """On all ranks, before anything is clipped or stepped; then they clip alike as plain PyTorch does."""
    found = two_ranks.run(clip_otherwise, clips)
    for of_rank in found:
        assert of_rank.kind == "RankError" and all(part in of_rank.text for part in parts), of_rank.text
    check_clipped(found)


@pytest.mark.parametrize("clips", ["refused", "optimizer refused"])
def test_other_stages_do_not_wait_for_one_whose_clip_is_refused(clips: str, two_ranks: Pool) -> None:
    found = two_ranks.run(clip_otherwise, clips)
    assert [of_rank.kind for of_rank in found] == ["RankError", "ValueError" if "optimizer" in clips else "ChunkcError"]
    assert "rank 1 had its call refused" in found[0].text
    assert all(of_rank.after_s < 20 for of_rank in found)
    check_clipped(found)


def check_clipped(found: Sequence[Refused]) -> None:
    gradients = plain_gradients(2)
    norm = torch.nn.utils.get_total_norm(gradients)
    for of_rank, gradient in zip(found, gradients, strict=True):
        assert of_rank.kept
        torch.testing.assert_close(of_rank.norm, norm)
        torch.testing.assert_close(of_rank.clipped, gradient * (0.1 / (norm + 1e-6)))


def test_ranks_hand_their_stages_over_in_any_order(two_ranks: Pool) -> None:
    norm = torch.nn.utils.get_total_norm(plain_gradients(4))
    for found in two_ranks.run(clip_in_other_orders):
        torch.testing.assert_close(found, norm)


@pytest.mark.long
def test_stages_go_on_from_their_own_checkpoints_only(tmp_path: Path, two_ranks: Pool) -> None:
    """Of the same names and shapes; where two begin a directory at a time, one at most has it."""
    found = two_ranks.run(save_stages, str(tmp_path))
    for rank, of_rank in enumerate(found):
        own, other = (f"stage {place + 1} of 2 of a pipeline" for place in (rank, 1 - rank))
        assert of_rank["own"] == of_rank["again"] == ""
        assert f"is of {other}, and {own} was to be loaded" in of_rank["of other ranks"]
        assert f"is of {own}, model 2 of its ranks, and {own} was to be loaded" in of_rank["other model"]
        assert f"is of {other}, and {own} was to be saved beside it" in of_rank["into other's"]
    assert any(of_rank["both"] for of_rank in found), "both have saved"
    assert all(of_rank["both"] or not of_rank["then"] for of_rank in found), "who saved, loads"
    assert all(of_rank["then"] for of_rank in found if of_rank["both"])
    model = chunkc.compile(layer(0), "emulated-16m-64m", dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.CheckpointError, match="and a model that is no stage of a pipeline was to be loaded"):
        chunkc.load_checkpoint(tmp_path / "0.0", model)


@SLOW
@pytest.mark.parametrize("clips", ["never", "alone"])
def test_stages_that_do_not_clip_together_are_noticed(clips: str, two_ranks: Pool) -> None:
    """Mutations: without clipping, or by the norm of each stage alone, parameters are others."""
    work = Pipeline(clips=clips)
    found = two_ranks.run(train, work)
    with pytest.raises(AssertionError):
        check(found, work)


@SLOW
def test_two_stages_on_each_rank_interleave(two_ranks: Pool) -> None:
    work = Pipeline("interleaved")
    check(two_ranks.run(train, work), work)


@SLOW
@pytest.mark.parametrize("clips", ["by the optimizer", "one by one"])
def test_a_part_of_a_ranks_stages_is_not_clipped_alone(clips: str, two_ranks: Pool) -> None:
    with pytest.raises(JobError, match="this process has 2 stages over the mesh, and 1 of them"):
        two_ranks.run(train, Pipeline("interleaved", clips=clips))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=SLOW)])
def test_stages_of_two_ranks_each(schedule: str, four_ranks: Pool) -> None:
    work = Pipeline(schedule, {"pp": 2, "dp_shard": 2})
    check(four_ranks.run(train, work), work)


@SLOW
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_stages_of_transformers_of_two_ranks_each(family: str, four_ranks: Pool) -> None:
    work = Pipeline("1f1b", {"pp": 2, "dp_shard": 2}, family=family, hw=SMALL, loss_in_stage=True)
    check(four_ranks.run(train, work), work)


@SLOW
@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5"])
def test_16_bits(family: str, two_ranks: Pool) -> None:
    """Acceptance (c): what is trained is as near to fp32 as plain PyTorch in bfloat16 is."""
    work = Pipeline(family=family, dtype=torch.bfloat16, loss_in_stage=family != "gpt")
    exact, plain = train_plainly(replace(work, dtype=torch.float32)), train_plainly(work)
    allowed = ERROR_RATIO * largest_error(plain.params, exact.params)
    for of_rank in two_ranks.run(train, work):
        wanted = {name: exact.params[name] for name in of_rank.params}
        assert 0 < largest_error(of_rank.params, wanted) <= allowed


@SLOW
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_whose_ranks_compute_together(schedule: str, four_ranks: Pool) -> None:
    """Their feed-forward layers are divided along ``tp``; the norm that clips is that of all parts of all stages."""
    work = Pipeline(schedule, {"pp": 2, "tp": 2}, hw="emulated-400k-64m" if schedule == "1f1b" else "emulated-16m-64m")
    found = four_ranks.run(train, work)
    check(found, work)
    if schedule == "1f1b":
        check_budgets(found, moves=True)


@SLOW
@pytest.mark.parametrize("mesh", [{"pp": 2, "dp_shard": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2, "dp_shard": 2}])
def test_stages_of_four_ranks_each(mesh: dict[str, int]) -> None:
    """That compute together and divide chunks, or copy them and divide them. The optimizers clip."""
    pool = Pool(8)
    work = Pipeline("1f1b", mesh, clips="by the optimizer")
    try:
        check(pool.run(train, work), work)
    finally:
        pool.discard()


@SLOW
def test_stages_of_two_ranks_each_within_a_tight_budget(four_ranks: Pool) -> None:
    work = Pipeline("1f1b", {"pp": 2, "dp_shard": 2}, hw="emulated-400k-64m")
    found = four_ranks.run(train, work)
    check(found, work)
    check_budgets(found, moves=True)
