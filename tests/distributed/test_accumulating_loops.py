"""Case 16 over cases 4, 5, 7 and 18: loops with several micro-batches a step, which exchange nothing until the last one
where memory allows.

Scripts are those of `scripted_loops`; ``more`` is one more micro-batch. Whatever comes between micro-batches, all ranks
see what one process would.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from job import Pool
from rank_training import ROOMY
from rank_windows import (
    gradients_of_other_shapes,
    load_after_a_discarded_window,
    one_diverges,
    one_gives_up_a_gradient,
    plain_gradients,
    windows_of,
)
from scripted_loops import TIGHT, check_seen, scripts_on_ranks, scripts_plainly

pytestmark = pytest.mark.distributed

NUM = 4
SCRIPTS = {
    "whole windows": "more more more more step zero more more more more step zero",
    "short windows": "more step zero more more step zero more more more step zero",
    "gradients after each": "more grads more grads more more grads step zero",
    "evaluation between": "more evaluate more infer more more step zero",
    "reads between": "more read more state more more step zero",
    "a write between": "more write more more more step zero",
    "zeroed between": "more more zero more more more more step zero more model_zero more step zero",
    "forwards ahead": "forward forward backward backward forward more backward step zero",
    "the latest first": "more forward forward backward_latest backward more step zero",
    "forwards without a backward": "more forward forget more forward forget evaluate more more step zero",
    "gradients of a forward before": "more forward grads backward more more step zero",
    "clipped behind the last": "more more more more clip step zero more more clip step zero",
    "clipped after each": "more clip more clip grads more more step zero",
    "no step": "more more zero more more more zero more step zero",
}
LOOPS = [
    f"{script} more more more more step zero state".replace("more", "forward backward") for script in SCRIPTS.values()
]


def check_loops(scripts: list[str], pool: Pool, hw: str) -> None:
    found = pool.run(scripts_on_ranks, scripts, hw, NUM, timeout_s=400)
    for number, wanted in enumerate(scripts_plainly(scripts, pool.num_ranks)):
        check_seen([seen[number] for seen in found], wanted)


@pytest.mark.long
@pytest.mark.parametrize("hw", [ROOMY, pytest.param(TIGHT, marks=pytest.mark.slow)], ids=["resident", "moving"])
def test_loops_see_what_one_process_sees(hw: str, two_ranks: Pool) -> None:
    check_loops(LOOPS, two_ranks, hw)


@pytest.mark.long
def test_ranks_whose_micro_batches_have_other_shapes_defer_alike(two_ranks: Pool) -> None:
    """Each shape has a program of its own; they find the groups gathered and the gradients that others left."""
    found, wanted = two_ranks.run(gradients_of_other_shapes, ROOMY), plain_gradients()
    window = ["forward", "backward_unreduced", *("forward_again", "accumulate_unreduced") * 2]
    assert [programs for _, programs in found] == [[*window, "forward_again", "accumulate_last"]] * 2
    scale = max(float(value.abs().max()) for value in wanted.values())
    for gradients, _ in found:
        assert gradients.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(gradients[name], found[0][0][name])
            torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-5 * scale)


@pytest.mark.long
def test_windows_as_long_as_the_one_before_end_with_exchanges_beside_computing(two_ranks: Pool) -> None:
    """Nobody says which micro-batch is the last. After a window of another length than expected, all is right and later
    ones are as expected; in a steady one nothing waits."""
    lengths = [2, 2, 4, 4, 1, 1]
    programs = {
        "2 of 2": ["forward", "backward_unreduced", "forward_again", "accumulate_last", "step"],
        "4, not 2": [
            *("forward", "backward_unreduced", "forward_again", "accumulate_last"),
            *("forward", "accumulate", "forward", "accumulate", "step"),
        ],
        "4 of 4": [
            *("forward", "backward_unreduced", *("forward_again", "accumulate_unreduced") * 2),
            *("forward_again", "accumulate_last", "step"),
        ],
        "1, not 4": ["forward", "backward_unreduced", "reduce_all", "step"],
        "1 of 1": ["forward", "backward", "step"],
    }
    wanted = [programs[name] for name in ("2 of 2", "2 of 2", "4, not 2", "4 of 4", "1, not 4", "1 of 1")]
    for found in two_ranks.run(windows_of, ROOMY, lengths):
        assert [ran for ran, _ in found] == wanted
        waits = [num_waits for _, num_waits in found]
        assert [after - before for before, after in pairwise(waits)] == [0, 0, 0, 2, 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "does"),
    [
        ("grads", "rank 1 reads or writes a parameter, gradient or state"),
        ("step", "rank 1 steps"),
        ("clip", "rank 1 clips"),
    ],
)
def test_what_one_rank_does_between_micro_batches_is_an_error_on_all(word: str, does: str, two_ranks: Pool) -> None:
    """It would have gradients reduced. Nothing has changed, and the ranks go on."""
    found = two_ranks.run(one_diverges, ROOMY, word)
    for diverged, later in found:
        assert diverged is not None and diverged.kind == "RankError" and does in diverged.text, diverged
        assert later is None


@pytest.mark.parametrize("hw", [ROOMY, TIGHT], ids=["resident", "moving"])
def test_a_sum_that_one_rank_begins_anew_is_an_error_on_all(hw: str, two_ranks: Pool) -> None:
    for failure in two_ranks.run(one_gives_up_a_gradient, hw):
        assert failure is not None and failure.kind == "RankError"
        assert "the gradient of head.weight begins anew" in failure.text


@pytest.mark.long
def test_a_load_after_a_discarded_window_fails_and_goes_on_alike(tmp_path: Path, two_ranks: Pool) -> None:
    first, second = two_ranks.run(load_after_a_discarded_window, ROOMY, str(tmp_path))
    assert [failure and failure.kind for failure, _ in (first, second)] == ["OSError", "OSError"], first
    assert [again for _, again in (first, second)] == [None, None]


def random_loop(generator: random.Random, num_words: int = 16) -> str:
    """One that plain PyTorch can carry out, and that adds up no more than is declared."""
    words, waiting, done = list[str](), 0, 0
    free = ["evaluate", "infer", "read", "state", "slower", "grads", "clip"]
    for _ in range(num_words):
        if waiting and (generator.random() < 0.6 or waiting == 2):
            if done < NUM and generator.random() < 0.9:
                words.append(generator.choice(["backward", "backward_latest"]))
                done += 1
            else:
                words.append("forget")
            waiting -= 1
        elif done and generator.random() < 0.2 + 0.2 * (done == NUM):
            words += ["forget"] * waiting + generator.choice([["step", "zero"], ["zero"], ["clip", "step", "zero"]])
            waiting = done = 0
        elif generator.random() < 0.25:
            words.append(generator.choice(free if done else free[:-2]))
        else:
            words.append("forward")
            waiting += 1
    return " ".join([*words, *["forget"] * waiting, "zero train state"])


@pytest.mark.slow
@pytest.mark.parametrize("hw", [ROOMY, TIGHT], ids=["resident", "moving"])
@pytest.mark.parametrize("seed", range(4))
def test_random_loops(seed: int, hw: str, two_ranks: Pool) -> None:
    generator = random.Random(seed)
    check_loops([random_loop(generator) for _ in range(8)], two_ranks, hw)


@pytest.mark.slow
def test_loops_on_four_ranks(four_ranks: Pool) -> None:
    check_loops(LOOPS, four_ranks, ROOMY)
