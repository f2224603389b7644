"""Folding: runs cover everything in order, repeat what they say, and find the layers of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.report.fold import MAX_PERIOD, Run, fold, merge


@given(st.text(alphabet="abc", max_size=60))
def test_runs_cover_the_items_and_repeat_them(items: str) -> None:
    runs = fold(items)
    assert "".join(items[r.first : r.first + r.period] * r.num_repeats for r in runs) == items
    assert [r.first for r in runs] == [0, *(r.end for r in runs)][: len(runs)]


@given(st.text(alphabet="abc", min_size=1, max_size=4), st.integers(2, 9))
def test_pure_repetition_is_one_run(part: str, num_repeats: int) -> None:
    assert len(fold(part * num_repeats)) == 1


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("", ()),
        ("a", (Run(0, 1, 1),)),
        ("aaaa", (Run(0, 1, 4),)),  # not two times "aa"
        ("xabcabcabcy", (Run(0, 1, 1), Run(1, 3, 3), Run(10, 1, 1))),
        ("aab", (Run(0, 1, 2), Run(2, 1, 1))),
        ("abab" * 2, (Run(0, 2, 4),)),
    ],
)
def test_expected_runs(items: str, expected: tuple[Run, ...]) -> None:
    assert fold(items) == expected


def test_the_longest_period_is_found_and_no_longer_one() -> None:
    part = list(range(MAX_PERIOD))
    assert fold(part * 2) == (Run(0, MAX_PERIOD, 2),)
    assert all(run.num_repeats == 1 for run in fold([*part, -1] * 2))


@given(st.text(alphabet="abcd", min_size=1, max_size=60), st.integers(2, 9))
def test_merged_runs_still_cover_the_items_and_fit(items: str, max_runs: int) -> None:
    runs = fold(items)
    merged = merge(runs, max_runs)
    assert len(merged) == min(len(runs), max_runs)
    assert [r.first for r in merged] == [0, *(r.end for r in merged[:-1])] and merged[-1].end == len(items)
    assert {r for r in merged if r.num_repeats > 1} <= set(runs)


def test_folded_runs_and_both_ends_outlive_merging() -> None:
    runs = fold("xyz" + "abc" * 6 + "uvw")
    assert merge(runs, 5) == (Run(0, 1, 1), Run(1, 2, 1), Run(3, 3, 6), Run(21, 2, 1), Run(23, 1, 1))
    assert merge(runs, 3) == (Run(0, 3, 1), Run(3, 3, 6), Run(21, 3, 1))
    assert merge(runs, len(runs)) == runs
