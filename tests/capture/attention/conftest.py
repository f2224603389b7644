"""One rank in a job of its own, whose slice of a sequence is the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from chunkc._torch_compat.collectives import ContextLine


@pytest.fixture
def line() -> Iterator[ContextLine]:
    """The rank. A fake group would not copy, in torch 2.11."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield ContextLine(group.group_name, 1, 0)
    finally:
        dist.destroy_process_group()
