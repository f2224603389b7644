"""Sizes, shares and ranges as people read them."""

import pytest

from chunkc.report.units import Unit, percent, plural, printable, ranges, unit_for

GIB, MIB, KIB = 1024**3, 1024**2, 1024


@pytest.mark.parametrize(
    ("nbytes", "name"), [(0, "KiB"), (KIB, "KiB"), (MIB - 1, "KiB"), (MIB, "MiB"), (GIB - 1, "MiB"), (GIB, "GiB")]
)
def test_the_unit_is_the_largest_that_is_reached(nbytes: int, name: str) -> None:
    assert unit_for(nbytes).name == name


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.00"), (1, "<0.01"), (MIB // 100, "0.01"), (MIB, "1.00"), (3 * MIB // 2, "1.50"), (2048 * MIB, "2,048.00")],
)
def test_two_decimals_and_never_nothing_for_something(nbytes: int, text: str) -> None:
    assert Unit("MiB", MIB).of(nbytes) == text
    assert Unit("MiB", MIB).named(nbytes) == f"{text} MiB"


@pytest.mark.parametrize("nbytes", [*range(1, 40), 52428, 52429, 104857, 104858])
def test_only_zero_reads_zero(nbytes: int) -> None:
    assert Unit("KiB", KIB).of(nbytes) != "0.00"
    assert Unit("MiB", MIB).of(nbytes) != "0.00"


def test_ranges_join_neighbours() -> None:
    assert ranges("c", []) == ""
    assert ranges("os", [5]) == "os5"
    assert ranges("c", [9, 0, 2, 1, 2, 7, 8]) == "c0-2 c7-9"


def test_small_words() -> None:
    assert (plural(1, "chunk"), plural(0, "chunk"), plural(1024, "chunk")) == ("1 chunk", "0 chunks", "1,024 chunks")
    assert (percent(1, 3), percent(1, 0)) == ("33.3 %", "-")


def test_what_is_not_printed_is_escaped() -> None:
    assert printable("plain, é and 模型") == "plain, é and 模型"
    assert printable("\x1b[2J\t\n\x7f\u202e\udcff\U000e0001") == "\\x1b[2J\\t\\n\\x7f\\u202e\\udcff\\U000e0001"
