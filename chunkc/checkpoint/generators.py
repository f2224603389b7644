"""States of the random number generators: Python's, NumPy's, torch's of CPU and GPUs, by rank."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from chunkc.distributed.process_group import Ranks
from chunkc.files import FormatError, shown

_NUMPY_NUM_KEYS: Final = 624
logger = logging.getLogger("chunkc")


def read_generators() -> dict[str, Any]:
    """States of the global generators; those of GPUs where CUDA is in use."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def check_generators(states: Mapping[str, Any]) -> None:
    """Refuse states that the generators here would not take, or that would read outside of memory.

    Every state is tried on a generator of its own; the global ones stay.

    Raises:
        FormatError: for the first of them.
    """
    unknown = states.keys() ^ {"python", "numpy", "torch"} ^ ({"cuda"} & states.keys())
    if unknown:
        raise FormatError(f"generators missing or unknown: {', '.join(sorted(map(shown, unknown)))}")
    for name, check in (("python", random.Random().setstate), ("numpy", _check_numpy), ("torch", _check_torch)):
        _try(name, check, states[name])
    saved = states.get("cuda", [])
    if not isinstance(saved, list):
        raise FormatError(f"must be a list, found {shown(saved)}", "cuda")
    for index, state in enumerate(saved):
        device = f"cuda:{index}" if index < _num_gpus() else None
        _try(f"cuda[{index}]", partial(_check_torch, device=device), state)


def _try(name: str, check: Callable[[Any], object], state: Any) -> None:
    try:
        check(state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise FormatError(f"is no state of the generator ({error!s:.200})", name) from error


def _check_numpy(state: Any) -> None:
    """NumPy reads at the position of a state, whatever it is."""
    name, keys, position, *_ = state
    if name != "MT19937" or len(keys) != _NUMPY_NUM_KEYS or not 0 <= position <= _NUMPY_NUM_KEYS:
        raise ValueError(f"{shown(name)} with {len(keys)} keys, at position {position}")
    np.random.RandomState().set_state(state)


def _check_torch(state: Any, device: str | None = "cpu") -> None:
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.dim() != 1:
        raise TypeError(f"a {type(state).__name__} is no 1-D tensor of bytes")
    if device is not None:
        torch.Generator(device).set_state(state)


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def place_of(ranks: Ranks) -> str:
    """Name this rank in a checkpoint: ``2``, or ``2.1`` for the second of those that compute its forward."""
    return str(ranks.rank) if ranks.tensor_size == 1 else f"{ranks.rank}.{ranks.tensor_rank}"


def write_generators_of(ranks: Ranks, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back the generators of this rank out of those of all ranks that saved.

    Where ranks along ``tp`` are more or fewer than those that saved, they take the states of the first with their
    batches, since they draw alike. A rank whose batches nobody took keeps its own, with a log line: another rank's
    states would draw the same numbers twice.
    """
    rank = ranks.rank
    for place in (place_of(ranks), f"{rank}.0", str(rank)):
        if place in states:
            write_generators(states[place])
            return
    saved = {place.partition(".")[0] for place in states}
    logger.warning(
        "the checkpoint was saved by %d ranks with batches of their own, none of which was number %d: its random "
        "number generators stay as they are, so what it draws depends on how the script has seeded them",
        len(saved),
        rank,
    )


def write_generators(states: Mapping[str, Any]) -> None:
    """Put the generators back; GPUs that the states have none of keep theirs, with a log line."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    saved = states.get("cuda", [])
    present = _num_gpus()
    for device, state in enumerate(saved[:present]):
        torch.cuda.set_rng_state(state, device)
    if len(saved) != present:
        logger.warning(
            "the checkpoint has the random number generators of %d GPUs and this machine has %d: what is drawn on the "
            "others differs from a run that was never interrupted",
            len(saved),
            present,
        )
