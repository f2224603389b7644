"""Updates into second homes: the bits of an update in place, and nothing changed where they read."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from chunkc.runtime.update.begun import PATIENCE, BegunCounts, BegunStep
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import ADAM, AdamHyper
from chunkc.runtime.update.second_home import SecondHomeUpdate, host_update
from chunkc.runtime.update.update_inputs import StepInputs

HYPER = AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled=True)
PIECES = [Piece(0, 3, 40), Piece(1, 40, 41), Piece(2, 50, 40_000)]
NUMEL = 40_003
STEPS = {0: 3, 1: 1, 2: 3}
Home = tuple[Tensor, tuple[Tensor, ...]]


def home(seed: int, dtype: torch.dtype = torch.bfloat16) -> Home:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(NUMEL, generator=generator) for _ in range(4)]
    return draws[0].to(dtype), (draws[1], draws[2], draws[3].square())


def copied(of: Home) -> Home:
    return of[0].clone(), tuple(t.clone() for t in of[1])


def equal(left: Home, right: Home, *, inside: bool = True) -> bool:
    """Whether all elements are the same bits, or those of ``PIECES``."""
    ranges = [slice(p.start, p.end) for p in PIECES] if inside else [slice(None)]
    pairs = list(zip((left[0], *left[1]), (right[0], *right[1]), strict=True))
    return all(torch.equal(a[r], b[r]) for r in ranges for a, b in pairs)


def inputs(active: tuple[int, ...] = (0, 1, 2), factor: float = 1.0, skip: float = 0.0) -> StepInputs:
    hypers = dict.fromkeys(active, HYPER)
    return StepInputs(hypers, {i: STEPS[i] for i in active}, 3, seen=torch.tensor([factor, skip]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "given",
    [inputs(), inputs(factor=0.3), inputs(active=(0, 2)), inputs(active=()), inputs(skip=1.0)],
    ids=["all", "clipped", "one inactive", "none active", "skipped"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["overlaid", "gradient chunk"])
def test_a_second_home_gets_the_bits_of_an_update_in_place(dtype: torch.dtype, given: StepInputs, apart: bool) -> None:
    first, second = home(1, dtype), home(2, dtype)
    before, gradient = copied(first), home(3, dtype)[0] if apart else None
    wanted = copied(first)
    ChunkUpdate(ADAM, *wanted, PIECES, gradient=gradient).update(given)
    host_update(ADAM, *first, PIECES, gradient, second).update(given)
    assert equal(second, wanted)
    assert equal(first, before, inside=False), "the home is whole"


def test_gaps_of_the_second_home_stay_as_they_are() -> None:
    second = home(2)
    before = copied(second)
    host_update(ADAM, *home(1), PIECES, None, second).update(inputs())
    for now, then in zip((second[0], *second[1]), (before[0], *before[1]), strict=True):
        assert torch.equal(now[:3], then[:3]) and torch.equal(now[41:50], then[41:50])
        assert torch.equal(now[40_000:], then[40_000:])


def test_restoring_casts_at_home() -> None:
    first, second = home(1), home(2)
    before = copied(second)
    host_update(ADAM, *first, PIECES, None, second).restore()
    assert torch.equal(first[0][50:40_000], first[1][0][50:40_000].bfloat16())
    assert equal(second, before, inside=False)


class Rig:
    """One chunk whose update has begun for `inputs`, and what an update in place would make of it."""

    def __init__(self, expected: Tensor | None = None) -> None:
        self.first, self.second, self.counts = home(1), home(2), BegunCounts()
        self.wanted = copied(self.first)
        self.in_place = ChunkUpdate(ADAM, *self.wanted, PIECES)
        update = host_update(ADAM, *self.first, PIECES, None, self.second)
        assert isinstance(update, SecondHomeUpdate)
        self.update = update
        given = inputs()
        self.step = BegunStep(given.hypers, given.steps, 3, expected, self.counts, is_begun=True)
        self.update.begin(self.step)

    def finish(self, given: StepInputs) -> bool:
        """Whether the step ``given`` computes nothing; what it leaves is right in any case."""
        begun = self.step if self.step.expects(given.hypers, given.steps) else None
        self.first[1][1].add_(1.0)  # what is computed now differs from what was begun
        self.update.update(replace(given, begun=begun))
        self.in_place.update(given)
        is_begun = equal(self.second, self.wanted)
        self.first[1][1].sub_(1.0)
        return is_begun


def test_an_update_that_was_begun_is_committed_without_work() -> None:
    rig = Rig(torch.tensor([1.0, 1.0]))
    assert rig.finish(inputs())
    assert (rig.counts.num_begun, rig.counts.num_committed, rig.counts.num_dropped) == (1, 1, 0)


@pytest.mark.parametrize(
    "given",
    [
        inputs(factor=0.5),
        inputs(skip=1.0),
        inputs(active=(0, 2)),
        replace(inputs(), hypers=dict.fromkeys((0, 1, 2), replace(HYPER, lr=2e-2))),
        replace(inputs(), steps={**STEPS, 1: 2}),
    ],
    ids=["clipped", "overflow", "one without gradient", "another lr", "another count"],
)
def test_a_step_that_turns_out_otherwise_is_computed(given: StepInputs) -> None:
    rig = Rig(torch.tensor([1.0, 1.0]))
    assert not rig.finish(given)
    assert (rig.counts.num_begun, rig.counts.num_committed, rig.counts.num_dropped) == (1, 0, 1)


def test_what_was_dropped_is_computed() -> None:
    rig = Rig()
    rig.step.drop()
    assert not rig.finish(inputs())
    assert rig.counts.num_dropped == 1


def test_a_factor_that_was_foreseen_is_committed() -> None:
    """The inverse of a loss scale, which does not change from step to step."""
    scaled = Rig(torch.tensor([1 / 1024, 1.0]))
    given = inputs(factor=1 / 1024)
    scaled.wanted = copied(scaled.first)
    scaled.in_place = ChunkUpdate(ADAM, *scaled.wanted, PIECES)
    assert scaled.finish(given)


def test_nothing_begins_after_surprises_in_a_row() -> None:
    counts, expected, given = BegunCounts(), torch.tensor([1.0, 0.0]), inputs()
    for _ in range(PATIENCE):
        assert counts.is_worthwhile
        step = BegunStep(given.hypers, given.steps, 3, expected, counts, is_begun=True)
        step.expects(given.hypers, given.steps)
        step.commits(torch.tensor([0.5, 0.0]))
    assert not counts.is_worthwhile
    step = BegunStep(given.hypers, given.steps, 3, torch.tensor([1.0, 1.0]), counts, is_begun=False)
    assert not step.commits(torch.tensor([1.0, 0.0])), "nothing was begun"
    assert counts.is_worthwhile, "the last step was as expected"
    for _ in range(PATIENCE):
        step = BegunStep(given.hypers, given.steps, 3, None, counts, is_begun=True)
        assert not step.expects({}, {})
    assert not counts.is_worthwhile
