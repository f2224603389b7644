"""What all tests share: which are skipped here and why, and how many cases hypothesis tries."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("test", deadline=None, max_examples=60)
settings.register_profile("soak", deadline=None, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run full counts: tests marked slow, 2000 hypothesis examples")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    settings.load_profile("soak" if config.getoption("--soak") else "test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason that `make test` prints, what this machine or this run cannot do."""
    absent = {}
    if not config.getoption("--soak"):
        absent["slow"] = "slow: runs with --soak (make soak)"
    if not torch.cuda.is_available():
        absent["gpu"] = "gpu: no CUDA device is available"
    if not torch.distributed.is_available() or os.name != "posix":
        absent["distributed"] = "distributed: torch.distributed is not available"
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
