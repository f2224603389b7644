"""Ranks are shared by all tests of a process: starting them is what takes time."""

from rank_fixtures import two_ranks

__all__ = ["two_ranks"]
