"""Text and tables within the 80 columns of a screen.

A long line goes on in the next one, behind an indent, broken inside a word only where the word is longer than a line.
Of a table that is too wide, headings get several lines, then texts, the widest first; numbers stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from tabulate import tabulate

SCREEN_COLUMNS: Final = 80
"""Of what commands and reports print."""

_SEPARATORS: Final = "./_-:,="
_LEAST_TEXT: Final = 8  # columns of a text whose words have to be broken
_HEADING_PADDING: Final = 2  # that tabulate adds to a heading
_GAP: Final = 2  # between columns of a table
_ALIGNMENTS: Final = {"l": "left", "r": "right"}


def shorten(text: str, width: int) -> str:
    """``text`` cut to ``width`` columns; three dots say that something is missing."""
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def wrapped(text: str, indent: str = "", width: int = SCREEN_COLUMNS) -> str:
    """``text`` in lines of at most ``width`` columns, all but the first behind ``indent``.

    >>> print(wrapped("a plan of model.layers.0.weight", "  ", 14))
    a plan of
      model.
      layers.0.
      weight
    """
    if len(text) <= width:
        return text
    lines, line, is_begun = [], "", False
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        if is_begun and len(line) + len(gap) + len(word) > width:
            lines.append(line)
            line = indent
        else:
            line += gap
        while word and len(line) + len(word) > width:
            end = _last_break(word, width - len(line))
            lines.append(line + word[:end])
            line, word = indent, word[end:]
        line += word
        is_begun = True
    return "\n".join([*lines, line])


def _last_break(word: str, room: int) -> int:
    """Where to break ``word`` so that its beginning fits ``room`` columns (at least one)."""
    room = max(1, room)
    return max(word.rfind(separator, 0, room) + 1 for separator in _SEPARATORS) or room


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """A table as wide as its cells, but no wider than the screen unless its numbers alone are.

    Args:
        headings: of the columns.
        rows: cells, numbers already formatted.
        align: a letter for each column: ``l`` for text, on the left, which may get several lines; ``r`` for numbers.
    """
    cells = [tuple(row) for row in rows]
    widths = _widths(headings, cells, align)
    heads = [wrapped(head, width=width - _HEADING_PADDING) for head, width in zip(headings, widths, strict=True)]
    body = [
        [wrapped(cell, width=width) if a == "l" else cell for cell, width, a in zip(row, widths, align, strict=True)]
        for row in cells
    ]
    colalign = [_ALIGNMENTS[a] for a in align]
    text = tabulate(body, headers=heads, tablefmt="simple", colalign=colalign, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[int]:
    """Columns of each column: those of its widest cell, or less where the table would not fit the screen."""
    room = SCREEN_COLUMNS - _GAP * (len(headings) - 1)
    columns = [[row[i] for row in rows] for i in range(len(headings))]
    heads = [_HEADING_PADDING + len(heading) for heading in headings]
    words = [_HEADING_PADDING + _longest_word([heading]) for heading in headings]
    cells = [min(room, max(map(len, column), default=0)) for column in columns]
    widths = [max(sizes) for sizes in zip(heads, cells, strict=True)]
    _narrow(widths, [max(sizes) for sizes in zip(words, cells, strict=True)], room)
    for least in (_longest_word, lambda _: _LEAST_TEXT):
        texts = [
            min(whole, least(column)) if a == "l" else whole
            for column, whole, a in zip(columns, cells, align, strict=True)
        ]
        _narrow(widths, [max(sizes) for sizes in zip(words, texts, strict=True)], room)
    return widths


def _narrow(widths: list[int], least: Sequence[int], room: int) -> None:
    """Take columns from the widest until all fit ``room``, or have come down to ``least``."""
    while sum(widths) > room:
        wide = [i for i, width in enumerate(widths) if width > least[i]]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)
