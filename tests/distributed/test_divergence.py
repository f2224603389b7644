"""Case 16: ranks that do different things with a model learn of it, all of them and at once; none hangs."""

from __future__ import annotations

import pytest
import rank_divergence
import torch
from job import Pool
from rank_divergence import SCENARIOS, Story

pytestmark = pytest.mark.distributed
SOON_S = 20.0
Stories = dict[str, list[Story]]


@pytest.fixture(scope="module")
def stories(two_ranks: Pool) -> Stories:
    """By scenario, of every rank."""
    found = two_ranks.run(rank_divergence.diverge_all, list(SCENARIOS))
    return {name: list(of) for name, of in zip(SCENARIOS, zip(*found, strict=True), strict=True)}


def params_of(story: Story, observation: int) -> dict[str, torch.Tensor]:
    """What a rank saw of its parameters as its n-th look at everything."""
    return [values for kind, values in story.seen.shared if kind == "params"][observation]


@pytest.mark.long(but="one_is_refused")
@pytest.mark.parametrize("name", [n for n in SCENARIOS if n != "other_shapes"])
def test_every_rank_raises(name: str, stories: Stories) -> None:
    """Soon; a rank that its own error ended says that one, the others name it."""
    kinds = [story.diverged.kind if story.diverged else None for story in stories[name]]
    texts = [story.diverged and story.diverged.text for story in stories[name]]
    assert kinds[0] == "RankError" and kinds[1] is not None, texts
    assert (kinds[1] == "RankError") == (name != "one_is_refused"), texts
    assert all(story.after_s < SOON_S for story in stories[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_evaluates", ("rank 0 r", "rank 1 runs a training forward")),
        ("one_raises", ("rank 0 runs a backward", "rank 1 runs a training forward")),
        ("one_reads", ("rank 1 reads",)),
        ("other_rates", ("lr", "0.01", "0.005")),
        ("other_parameters", ("head.bias", "embed.weight")),
    ],
)
def test_errors_say_what_each_rank_does(name: str, words: tuple[str, ...], stories: Stories) -> None:
    for story in stories[name]:
        assert story.diverged is not None
        assert all(word in story.diverged.text for word in words), story.diverged.text


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_in_step_goes_on_or_is_refused_on_all(name: str, stories: Stories) -> None:
    """After a refusal nothing has changed: the same bits on all ranks, and the same as before."""
    later = [story.later.kind if story.later else None for story in stories[name]]
    assert len(set(later)) == 1, [story.later and story.later.text for story in stories[name]]
    if later[0] is not None:
        assert later[0] == "RankError"
        return
    for observation in range(len([kind for kind, _ in stories[name][0].seen.shared if kind == "params"])):
        first, second = (params_of(story, observation) for story in stories[name])
        assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("name", ["one_evaluates", "one_reads", "other_rates", "other_parameters", "one_is_refused"])
def test_a_refusal_changes_nothing(name: str, stories: Stories) -> None:
    """The ranks go on, from the parameters they had."""
    for story in stories[name]:
        assert story.later is None, story.later.text
        before, after = params_of(story, 0), params_of(story, -2)
        assert all(torch.equal(before[n], after[n]) for n in before)
        assert any(not torch.equal(before[n], params_of(story, -1)[n]) for n in before)


def test_other_shapes_work_or_are_refused_on_all(stories: Stories) -> None:
    first, second = (story.diverged for story in stories["other_shapes"])
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.kind == second.kind == "RankError"


def test_a_layer_that_one_rank_uses_is_refused(two_ranks: Pool) -> None:
    found = two_ranks.run(rank_divergence.other_layers)
    assert [failure and failure.kind for failure in found] == ["RankError", "RankError"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("one_fails_before_its_program", "MemoryError"),
        pytest.param("one_fails_midway", "IndexError", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_where_others_count_on_it_ends_the_job(name: str, kind: str, two_ranks: Pool) -> None:
    """It raises its own error, the others theirs, at once; the model is of no use afterwards, on all."""
    found = [stories[0] for stories in two_ranks.run(rank_divergence.diverge_all, [name], timeout_s=400)]
    two_ranks.discard()
    assert [story.diverged and story.diverged.kind for story in found] == ["RankError", kind]
    assert [story.later and story.later.kind for story in found] == ["RankError", "RankError"]
    assert all(story.after_s < SOON_S for story in found)
