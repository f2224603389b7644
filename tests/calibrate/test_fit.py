"""Figures from rounds: what a spread promises, and the copy law."""

import random
from collections.abc import Callable
from itertools import combinations

import pytest

from chunkc.calibrate.fit import MAX_DISJOINT_PROBABILITY, disjoint_probability, figure_of, fit_copies, trim_of

SIZES = tuple(4096 * 4**k for k in range(7))


def test_a_figure_is_the_median_and_twice_the_range() -> None:
    figure = figure_of([3.0, 1.0, 2.0, 9.0, 2.5, 2.0, 2.0])
    assert (figure.median, figure.spread) == (2.0, 16.0)


def test_outlying_rounds_are_left_out_where_there_are_enough() -> None:
    values = [10.0 + 0.1 * k for k in range(11)]
    figure = figure_of([1.0, 2.0, *values, 500.0, 1000.0])
    assert trim_of(15) == 2
    assert (figure.median, figure.spread) == (10.5, pytest.approx(2 * 1.0))


def test_equal_rounds_still_leave_five_percent() -> None:
    assert figure_of([4.0] * 9).spread == pytest.approx(0.2)
    assert figure_of([0.0] * 9).spread == 0.0


@pytest.mark.parametrize(("num_rounds", "trim"), [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (5, 1), (6, 2)])
def test_the_probability_of_disjoint_ranges_is_that_of_all_orders(num_rounds: int, trim: int) -> None:
    num_disjoint = num_orders = 0
    for chosen in combinations(range(2 * num_rounds), num_rounds):
        rest = sorted(set(range(2 * num_rounds)) - set(chosen))
        (a, b), (c, d) = ((side[trim], side[num_rounds - 1 - trim]) for side in (chosen, rest))
        num_disjoint += b < c or d < a
        num_orders += 1
    assert disjoint_probability(num_rounds, trim) == pytest.approx(num_disjoint / num_orders)


def test_no_more_is_left_out_than_the_probability_allows() -> None:
    for num_rounds in range(7, 40):
        assert disjoint_probability(num_rounds, trim_of(num_rounds)) <= MAX_DISJOINT_PROBABILITY
        assert disjoint_probability(num_rounds, trim_of(num_rounds) + 1) > MAX_DISJOINT_PROBABILITY


def bimodal(rng: random.Random) -> float:
    return (1.0 if rng.random() < 0.5 else 2.5) * rng.uniform(0.99, 1.01)


NOISES: dict[str, Callable[[random.Random], float]] = {
    "even": lambda rng: rng.uniform(0.9, 1.1),
    "heavy tail": lambda rng: rng.paretovariate(1.1),
    "rare stops": lambda rng: 1.0 + 30.0 * (rng.random() < 0.05) + rng.uniform(0, 0.01),
    "two states": bimodal,
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("num_rounds", [7, 15])
def test_two_calibrations_differ_by_less_than_the_spread(noise: str, num_rounds: int) -> None:
    rng = random.Random(5)
    num_pairs, num_misses = 4000, 0
    for _ in range(num_pairs):
        first, second = (figure_of([NOISES[noise](rng) for _ in range(num_rounds)]) for _ in range(2))
        num_misses += not first.agrees_with(second)
    assert num_misses <= 3 * MAX_DISJOINT_PROBABILITY * num_pairs


def test_a_machine_of_another_speed_is_told_apart() -> None:
    rng = random.Random(6)
    first, second = (figure_of([speed * rng.uniform(0.95, 1.05) for _ in range(15)]) for speed in (1.0, 1.5))
    assert not first.agrees_with(second)


def test_the_copy_law_is_found_exactly() -> None:
    latency_us, gb_per_s = fit_copies(SIZES, [7.5 + nbytes / 12.5e3 for nbytes in SIZES])
    assert latency_us == pytest.approx(7.5)
    assert gb_per_s == pytest.approx(12.5)


def test_relative_errors_of_all_sizes_weigh_alike() -> None:
    rng = random.Random(7)
    times_us = [(5.0 + nbytes / 20e3) * rng.uniform(0.97, 1.03) for nbytes in SIZES]
    latency_us, gb_per_s = fit_copies(SIZES, times_us)
    assert latency_us == pytest.approx(5.0, rel=0.1)
    assert gb_per_s == pytest.approx(20.0, rel=0.05)


def test_no_latency_is_negative() -> None:
    times_us = [nbytes / 20e3 * (0.5 if nbytes < 10_000 else 1.0) for nbytes in SIZES]
    latency_us, gb_per_s = fit_copies(SIZES, times_us)
    assert latency_us == 0.0
    assert 15.0 < gb_per_s < 41.0


def test_times_that_fall_with_size_still_give_a_bandwidth() -> None:
    latency_us, gb_per_s = fit_copies((4096, 8192), (10.0, 5.0))
    assert latency_us == 0.0
    assert gb_per_s > 0.0


def test_one_size_gives_its_bandwidth() -> None:
    assert fit_copies((4096,), (2.0,)) == (0.0, pytest.approx(2.048))
