"""Text that every machine with Python has: the source files of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

VOCABULARY_SIZE = 256
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


def standard_library() -> torch.Tensor:
    """All bytes of the running interpreter's library sources, files in sorted order, as one uint8 tensor."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batches(text: torch.Tensor, batch: int, seq: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of ``batch`` pieces of ``seq`` consecutive bytes, at places that ``seed`` decides."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - seq + 1, (batch, 1), generator=generator)
        yield text[starts + torch.arange(seq)].long()
