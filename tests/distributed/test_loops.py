"""Case 16 over cases 3, 5, 7 and 18: whatever a loop does between steps, all ranks see what one process would.

Scripts are those of `scripted_loops`, one after another with one model; each ends in a look at all parameters and
states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from job import Pool
from scripted_loops import MAX_NORM, check_seen, scripts_on_ranks, scripts_plainly

pytestmark = pytest.mark.distributed

SCRIPTS = {
    "evaluation between steps": "evaluate train evaluate train infer evaluate forward backward evaluate step zero",
    "a backward without a step": "train forward backward grads zero grads train forward backward model_zero train",
    "a step is skipped": "train forward backward zero evaluate train",
    "two forwards, one backward": "train forward forward backward_latest step zero forget train",
    "a forward without a backward": "train forward forget train infer forward backward step zero",
    "every value between steps": "read state train read state forward backward grads read step read zero state",
    "writing and other rates": "write train slower train write evaluate train",
    "zeroed at odd times": "zero model_zero train forward zero backward model_zero forward backward step zero",
    "clipped where gradients are read": "train forward backward grads clip grads step zero train_clipped",
    "clipped where they are measured": "train_clipped train_clipped forward backward clip grads step zero",
}
LOOPS = [f"{script} train state" for script in SCRIPTS.values()]


def check_scripts(scripts: Sequence[str], pool: Pool) -> None:
    """Every script on every rank."""
    found = pool.run(scripts_on_ranks, scripts, timeout_s=400)
    for number, wanted in enumerate(scripts_plainly(scripts, pool.num_ranks)):
        check_seen([seen[number] for seen in found], wanted)


@pytest.mark.long
def test_scripts_see_what_one_process_sees(two_ranks: Pool) -> None:
    """The first clip reads all gradients; from then on they are measured as they land."""
    check_scripts(LOOPS, two_ranks)


def test_clipping_clips_some_of_the_steps() -> None:
    """The threshold lies between the norms of the scripts: below some, above others."""
    shared = [pair for seen in scripts_plainly(LOOPS, 2) for pair in seen.shared]
    norms = [float(values["all"]) for kind, values in shared if kind == "norm"]
    assert min(norms) < MAX_NORM < max(norms), norms


def random_script(generator: random.Random, num_words: int = 14) -> str:
    """One that plain PyTorch can carry out, and that accumulates nothing."""
    words, waiting = list[str](), 0
    free = ["train", "evaluate", "infer", "read", "state", "zero", "slower", "write", "train_clipped"]
    for _ in range(num_words):
        if waiting:
            words += generator.choice([["backward", "step", "zero"], ["backward", "grads", "zero"], ["forget"]])
            waiting = 0
        elif generator.random() < 0.4:
            words += ["forward", *generator.sample(["evaluate", "read", "infer", "state"], generator.randint(0, 2))]
            waiting = 1
        else:
            words.append(generator.choice(free))
    return " ".join([*words, *["forget"] * waiting, "zero", "train", "state"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_scripts(seed: int, two_ranks: Pool) -> None:
    generator = random.Random(seed)
    check_scripts([random_script(generator) for _ in range(8)], two_ranks)


@pytest.mark.slow
def test_scripts_on_four_ranks(four_ranks: Pool) -> None:
    check_scripts(LOOPS, four_ranks)
