"""States of the random number generators that training draws from: Python's, NumPy's, and torch's of CPU and GPUs.

Every rank has its own.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("chunkc")


def read_generators() -> dict[str, Any]:
    """The global generators as they are now; those of GPUs where CUDA is in use."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def write_generators_of(rank: int, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back the generators of ``rank`` out of those of all ranks that saved.

    A rank that none of them was keeps its own, and a log line says so: states of another rank would draw the same
    numbers twice.
    """
    if str(rank) in states:
        write_generators(states[str(rank)])
        return
    logger.warning(
        "the checkpoint was saved by %d ranks, none of which was rank %d: its random number generators stay as they "
        "are, so what it draws depends on how the script has seeded them",
        len(states),
        rank,
    )


def write_generators(states: Mapping[str, Any]) -> None:
    """Put the generators back. GPUs that the states have none of keep theirs, and a log line says so."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    saved = states.get("cuda", [])
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(saved[:present]):
        torch.cuda.set_rng_state(state, device)
    if len(saved) != present:
        logger.warning(
            "the checkpoint has the random number generators of %d GPUs and this machine has %d: what is drawn on the "
            "others differs from a run that was never interrupted",
            len(saved),
            present,
        )
