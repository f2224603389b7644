"""Lines and tables keep to the columns of a screen, and lose nothing."""

import random
import re

import pytest

from chunkc.report.columns import SCREEN_COLUMNS, shorten, table, wrapped

PATH = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"


def characters(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_what_fits_stays_as_it_is() -> None:
    assert wrapped("  step   1 ms ", "    ") == "  step   1 ms "
    assert wrapped("x" * SCREEN_COLUMNS) == "x" * SCREEN_COLUMNS
    assert (shorten("abcdef", 6), shorten("abcdefg", 6)) == ("abcdef", "abc...")


def test_lines_break_between_words_and_go_on_behind_the_indent() -> None:
    assert wrapped("  step   12 ms, simulated", "     ", 16) == "  step   12 ms,\n     simulated"


def test_a_word_longer_than_a_line_breaks_behind_a_separator_if_it_has_one() -> None:
    assert wrapped(f"0  {PATH}", "  ", 30).splitlines() == [
        "0",
        "  base_model.model.",
        "  transformer.h.0.attn.c_attn.",
        "  lora_A.default.weight",
    ]
    assert wrapped("y" * 25, "  ", 10).splitlines() == ["y" * 10, "  " + "y" * 8, "  " + "y" * 7]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_and_nothing_is_wider(seed: int) -> None:
    draw = random.Random(seed)
    words = ["".join(draw.choices("ab._/-", k=draw.randrange(1, 120))) for _ in range(30)]
    text, width = " " * draw.randrange(9) + (" " * draw.randrange(1, 4)).join(words), draw.randrange(12, 100)
    found = wrapped(text, " " * draw.randrange(10), width)
    assert max(map(len, found.splitlines())) <= width
    assert characters(found) == characters(text)


def test_a_table_that_fits_has_one_line_a_row() -> None:
    assert table(("kind", "MiB"), [("arena", "1.00"), ("live", "12.00")], "lr").splitlines() == [
        "kind      MiB",
        "------  -----",
        "arena    1.00",
        "live    12.00",
    ]


def test_headings_give_way_before_texts_and_texts_before_their_words() -> None:
    numbers = ("123,456,789", "1.00", "1.00")
    headings = ("model data", "elements", "stored by rank 0, padded", "always on the device")
    lines = table(headings, [("gradients that overlay", *numbers)], "lrrr").splitlines()
    assert lines[-1].split("  ")[0] == "gradients that overlay"
    assert len(lines) > 3 and max(map(len, lines)) <= SCREEN_COLUMNS
    lines = table(headings, [("gradients that overlay their parameter in its bytes", *numbers)], "lrrr").splitlines()
    assert max(map(len, lines)) <= SCREEN_COLUMNS and "123,456,789" in "\n".join(lines)
    lines = table(("model", "batch", "step"), [(PATH * 3, "1", "2.000 s"), ("gpt", "1", "1.000 s")], "lrr").splitlines()
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    assert characters(PATH * 3) in "".join(line.split("  ")[0].strip() for line in lines)
