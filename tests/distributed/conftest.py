"""Ranks are shared by all tests of a process: starting them is what takes time."""

from rank_fixtures import four_ranks, two_ranks

__all__ = ["four_ranks", "two_ranks"]
