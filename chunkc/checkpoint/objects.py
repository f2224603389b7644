"""The objects of a checkpoint, read from a file of unknown origin and checked part by part.

Users' extras, the scheduler's state and the extra states of modules may be anything that `chunkc.checkpoint.encode`
holds; `read_objects` checks that all else has its fixed form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from chunkc.checkpoint.encode import MAX_DEPTH, decode
from chunkc.checkpoint.generators import check_generators
from chunkc.checkpoint.planners import load_whole
from chunkc.checkpoint.storage import SafetensorsReader
from chunkc.files import Decoder, FormatError, fault_at, read_json, shown

OBJECTS_NAME: Final = "objects.json"
MAX_NBYTES: Final = 2**30
PREFIX: Final = "object"
"""Of the keys of tensors in objects."""
_JSON_DEPTH: Final = 3 * MAX_DEPTH + 16


@dataclass(frozen=True, slots=True)
class _LossScale:
    """A dynamic loss scale, as torch.amp.GradScaler saves it."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


_Names = tuple[str, ...]
_TOP: Final = ("model", "optimizer", "scheduler", "loss_scale", "extra", "generators")
_PARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {"params": tuple[_Names, ...], "buffers": tuple[_Names, ...], "others": dict[str, Any]},
    "optimizer": {"class": str, "groups": tuple[dict[str, Any], ...], "steps": dict[str, int]},
}


def read_objects(folder: Path, reader: SafetensorsReader) -> dict[str, Any]:
    """All objects of the checkpoint in ``folder``, whose tensors ``reader`` reads.

    Raises:
        OSError: the file cannot be read.
        FormatError: it holds no objects of a checkpoint; with the place.
    """
    encoded = read_json(folder / OBJECTS_NAME, max_nbytes=MAX_NBYTES, max_depth=_JSON_DEPTH)
    tensors: dict[str, torch.Tensor] = {}
    load_whole(reader, [key for key in reader.index() if key.startswith(f"{PREFIX}.")], tensors.__setitem__)
    objects = Decoder().decode(dict[str, Any], decode(encoded, tensors))
    check_objects(objects)
    return objects


def check_objects(objects: Mapping[str, Any]) -> None:
    decoder = Decoder()
    _check_names(objects, _TOP)
    for name, parts in _PARTS.items():
        with fault_at(name):
            part = decoder.decode(dict[str, Any], objects[name])
            _check_names(part, parts)
            for inner, annotation in parts.items():
                with fault_at(inner):
                    decoder.decode(annotation, part[inner])
    for kind in ("params", "buffers"):
        if not all(objects["model"][kind]):
            raise FormatError("each has a name or more", f"model.{kind}")
    with fault_at("loss_scale"):
        decoder.decode(cast(Any, _LossScale | None), objects["loss_scale"])
    for position, group in enumerate(objects["optimizer"]["groups"]):
        with fault_at(f"optimizer.groups[{position}].params"):
            decoder.decode(_Names, group.get("params"))
    with fault_at("generators"):
        for rank, states in decoder.decode(dict[str, dict[str, Any]], objects["generators"]).items():
            with fault_at(rank):
                check_generators(states)


def _check_names(part: Mapping[str, Any], names: Collection[str]) -> None:
    if wrong := part.keys() ^ set(names):
        raise FormatError(f"parts missing or unknown: {', '.join(sorted(map(shown, wrong)))}")
