"""Which tensor of the files goes where in the model, and whether it fits; nothing is written here.

Names are matched as transformers does: a checkpoint of a base model fits the model with a head and the other way round
(``base_model_prefix``), tied parameters take the value of any of their names, tensors may have to be put together
(`convert`), and what a class declares ignorable (``_keys_to_ignore_on_load_missing``,
``_keys_to_ignore_on_load_unexpected``) or computes itself is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from chunkc.errors import ChunkcError
from chunkc.weights.convert import Converted, candidates, resolve
from chunkc.weights.files import DTYPES, WeightFiles
from chunkc.weights.tensors import Entry, ModelTensors


@dataclass(slots=True)
class Matched:
    """The tensors of some files against those of a model.

    Attributes:
        sources: stored names of what is taken as it is, by the entry's name.
        converted: what is put together first.
        made: entries that these make, by the names that they give them.
        unexpected: stored names, or names put together, for which the model has nothing.
        faults: what does not fit, in words.
    """

    sources: dict[str, list[str]] = field(default_factory=dict)
    converted: tuple[Converted, ...] = ()
    made: dict[str, Entry] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def has(self, entry: Entry) -> bool:
        """Whether the files have a value for ``entry``."""
        return entry.name in self.sources or any(made is entry for made in self.made.values())


def match(model: nn.Module, tensors: ModelTensors, files: WeightFiles) -> Matched:
    """Compare by names, shapes and dtypes.

    Raises:
        ChunkcError: for tensors that do not fit their place.
    """
    names, converted = resolve(model, list(files.stored), tensors)
    found = Matched(converted=converted)
    for name, renamed in names.items():
        known = next((c for c in candidates(model, renamed) if c in tensors), None)
        if known is None:
            found.unexpected.append(name)
            continue
        entry, stored = tensors.entry(known), files.stored[name]
        found.sources.setdefault(entry.name, []).append(name)
        found.faults += _faults(entry, name, stored.shape, stored.dtype)
    for group in converted:
        _match_converted(found, group, tensors, files)
    found.unexpected = _reported(model, tensors, found.unexpected)
    _check(found, files)
    return found


def _match_converted(found: Matched, group: Converted, tensors: ModelTensors, files: WeightFiles) -> None:
    """Put tensors without memory together, to see what comes out."""
    foreign = [name for name, _ in group.parts if files.stored[name].dtype not in DTYPES]
    if foreign:
        found.faults.append(f"{foreign[0]} is {files.stored[foreign[0]].dtype}")
        return
    try:
        made = group.convert(lambda name: _without_memory(files, name))
    except (RuntimeError, ValueError, LookupError) as error:
        found.faults.append(f"{group.key} cannot be made of {', '.join(n for n, _ in group.parts[:3])}, ...: {error}")
        return
    for name, value in made.items():
        if name not in tensors:
            found.unexpected.append(name)
            continue
        found.made[name] = tensors.entry(name)
        dtype = next(word for word, dtype in DTYPES.items() if dtype is value.dtype)
        found.faults += _faults(found.made[name], f"{name}, made of several,", tuple(value.shape), dtype)


def _without_memory(files: WeightFiles, name: str) -> torch.Tensor:
    stored = files.stored[name]
    return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")


def _faults(entry: Entry, name: str, shape: tuple[int, ...], dtype: str) -> list[str]:
    stored = DTYPES.get(dtype)
    is_rounded = stored is not None and stored.is_floating_point and entry.dtype.is_floating_point
    found = []
    if shape != entry.shape:
        found.append(f"{name} has shape {shape} where the model has {entry.shape}")
    if stored is not entry.dtype and not is_rounded:
        found.append(f"{name} is {dtype}, which does not convert to the model's {entry.dtype}")
    return found


def _check(found: Matched, files: WeightFiles) -> None:
    if found.faults:
        more = f" ({len(found.faults)} such tensors in all)" if len(found.faults) > 1 else ""
        raise ChunkcError(
            f"{files.path} does not fit the model: {'; '.join(found.faults[:5])}{more}. Build the model from the "
            "configuration that stands beside its weights, and use weights that are not quantised"
        )
    for first, *others in found.sources.values():
        for other in others:
            if not torch.equal(files.value(first), files.value(other)):
                raise ChunkcError(
                    f"{first} and {other} are one parameter of the model, but have different values in {files.path}. "
                    "Untie them before chunkc.compile (transformers: `config.tie_word_embeddings = False`)"
                )


def is_optional(model: nn.Module, entry: Entry) -> bool:
    """Whether the class of ``model`` declares that ``entry`` may be missing."""
    patterns: Sequence[str] = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns for name in entry.names)


def _reported(model: nn.Module, tensors: ModelTensors, names: Sequence[str]) -> list[str]:
    """Those of unexpected ``names`` that the model neither ignores nor computes itself."""
    ignored: Sequence[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    computed = {_ending(name) for name, _ in model.named_buffers() if name not in tensors}
    kept = [name for name in names if _ending(name) not in computed]
    return [name for name in kept if not any(re.search(pattern, name) for pattern in ignored)]


def _ending(name: str) -> str:
    """The last two parts of a name.

    Checkpoints from before a buffer was computed have the buffer under this ending, maybe in another place.
    """
    return ".".join(name.split(".")[-2:])


def tied_names(tensors: ModelTensors, loaded: Sequence[str]) -> Mapping[str, str]:
    """The further names of the entries in ``loaded``, with the first."""
    return {alias: name for name in loaded for alias in tensors.entry(name).aliases}
