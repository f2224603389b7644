"""Check ``trainer_state.json`` of Trainer's checkpoints before Trainer reads it.

Trainer fails later, or trains from another step, where a value is not what it wrote. A checkpoint may come from a
stranger, or from a run that was killed meanwhile.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from transformers.trainer_callback import TrainerState

from chunkc.errors import CheckpointError
from chunkc.files import Decoder, FormatError, fault_at, read_json

STATE_NAME: Final = "trainer_state.json"

_MAX_NBYTES: Final = 2**28
_FOLDER: Final = re.compile(r"checkpoint-(\d+)", re.ASCII)
_KINDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "global_step": int,
        "max_steps": int,
        "num_train_epochs": int,
        "num_input_tokens_seen": int,
        "train_batch_size": int | None,
        "best_global_step": int | None,
        "epoch": float | None,
        "total_flos": float,
        "best_model_checkpoint": str | None,
        "trial_name": str | None,
        "log_history": tuple[dict[str, Any], ...],
        "stateful_callbacks": dict[str, Any] | None,
        "trial_params": dict[str, Any] | None,
    }
)
"""What the fields hold that Trainer goes on from; it writes the others anew, and metrics may be NaN."""


def check_trainer_state(folder: Path) -> None:
    """Refuse a checkpoint whose ``trainer_state.json`` is not one that Trainer goes on from.

    Raises:
        CheckpointError: naming the file, the place in it, and what was found there.
    """
    path = folder / STATE_NAME
    try:
        _check(read_json(path, max_nbytes=_MAX_NBYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", path=folder) from error
    except FormatError as error:
        raise CheckpointError(
            f"{path} is no state of Trainer: {error}; resume from another checkpoint", path=folder
        ) from error


def newest_complete(directory: Path) -> str | None:
    """The last of Trainer's checkpoints whose state is whole; the log names the later ones."""
    folders = {int(m[1]): p for p in directory.glob("checkpoint-*") if (m := _FOLDER.fullmatch(p.name))}
    for step in sorted(folders, reverse=True):
        try:
            check_trainer_state(folders[step])
        except CheckpointError as error:
            logging.getLogger("chunkc").warning("%s is passed over: %s", folders[step].name, error)
        else:
            return str(folders[step])
    return None


def _check(state: Any) -> None:
    values = Decoder().decode(dict[str, Any], state)
    if unknown := values.keys() - {field.name for field in fields(TrainerState)}:
        raise FormatError(f"this version of transformers has no fields {', '.join(sorted(unknown)):.200}")
    if "global_step" not in values:
        raise FormatError("the field global_step is missing")
    for name, value in values.items():
        with fault_at(name):
            Decoder().decode(_KINDS.get(name, Any), value)
