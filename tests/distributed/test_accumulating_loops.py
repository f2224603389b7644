"""Case 16 over cases 4, 5, 7 and 18: loops with several micro-batches a step, which exchange nothing until the last one
where memory allows.

Scripts are those of `sides`; ``more`` is one more micro-batch. Whatever comes between micro-batches, all ranks see what
one process would.
"""

from __future__ import annotations

import random

import pytest
import torch
from job import Pool
from rank_training import ROOMY
from rank_windows import gradients_of_other_shapes, one_looks, plain_gradients
from sides import TIGHT, check_seen, scripts_on_ranks, scripts_plainly

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


@pytest.mark.parametrize("hw", [ROOMY, pytest.param(TIGHT, marks=pytest.mark.slow)], ids=["resident", "moving"])
def test_loops_see_what_one_process_sees(hw: str, two_ranks: Pool) -> None:
    check_loops(LOOPS, two_ranks, hw)


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


def test_a_look_at_gradients_on_one_rank_is_an_error_on_all(two_ranks: Pool) -> None:
    """It would have them reduced. Nothing has changed, and the ranks go on."""
    found = two_ranks.run(one_looks, ROOMY)
    assert [failure and failure.kind for failure, _ in found] == ["RankError", "RankError"]
    assert [later for _, later in found] == [None, None]


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
