"""Case 2: with dropout the masks are those of plain PyTorch under torch.compile with the same partition and seed.

One wrong mask changes a loss by far more than the tolerances of (b). Masks that backward needs again are replayed: with
layers computed again in backward the run is that without.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from equalities import train_same_partition
from models import CASES
from placements import smallest
from plan_runner import GetRunner
from training import SEMANTICS, assert_same_bits, assert_same_gradients, assert_same_semantics

RECIPE = replace(SEMANTICS, num_steps=5, seed=11)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("gpt2_dropout", "eager", marks=pytest.mark.slow),
        ("gpt2_checkpointed", "eager"),
        pytest.param("odd_dropout", "inductor", marks=pytest.mark.slow),
        pytest.param("gpt2_dropout", "inductor", marks=pytest.mark.slow),
        pytest.param("gpt2_checkpointed", "inductor", marks=pytest.mark.slow),
    ],
)
def test_masks_are_those_of_torch_compile(name: str, backend: str, runner_of: GetRunner) -> None:
    runner = runner_of(name, backend=backend)
    found = runner.train(smallest(runner), RECIPE)
    wanted = train_same_partition(CASES[name], backend, RECIPE)
    assert_same_semantics(found, wanted)
    if backend == "eager":
        assert found.losses[0] == wanted.losses[0]


def test_recomputation_replays_masks(runner_of: GetRunner) -> None:
    """The same seed with and without layers that backward computes again."""
    kept, again = runner_of("gpt2_dropout"), runner_of("gpt2_checkpointed")
    found, wanted = again.train(smallest(again), RECIPE), kept.train(smallest(kept), RECIPE)
    assert_same_gradients(found.gradients, wanted.gradients)
    assert max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)) < 1e-5
    targets = [" ".join(o.target for o in r.captured.schedule.backward.operators) for r in (kept, again)]
    assert ["run_with_rng_state" in found for found in targets] == [False, True], "nothing random is computed again"


@pytest.mark.slow
def test_seed_decides_the_masks(runner_of: GetRunner) -> None:
    """The same seed gives the same bits again, another seed or no dropout other losses."""
    runner = runner_of("gpt2_dropout")
    setup, short = smallest(runner), replace(RECIPE, num_steps=2)
    first = runner.train(setup, short)
    assert_same_bits(runner.train(setup, short), first)
    other = runner.train(setup, replace(short, seed=12))
    plain = runner_of("gpt2")
    without = plain.train(smallest(plain), short)
    for losses in (other.losses, without.losses):
        assert abs(losses[0] - first.losses[0]) > 1e-3
