"""Pools of ranks as fixtures: they are shared by all tests of a process, since starting them is what takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from job import Pool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Two processes that have joined a job."""
    pool = Pool(2)
    yield pool
    pool.discard()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    """Four of them."""
    pool = Pool(4)
    yield pool
    pool.discard()
