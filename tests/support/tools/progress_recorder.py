"""An observer of progress that keeps what it is told."""

from __future__ import annotations


class Recorder:
    """All texts in their order, and how often the screen was left to other output."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_ways = 0

    def show(self, text: str) -> None:
        self.texts.append(text)

    def make_way(self) -> None:
        self.num_ways += 1
