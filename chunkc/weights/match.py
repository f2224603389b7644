"""Which tensor of the files goes where in the model, and whether it fits; nothing is written here.

Names are matched as in transformers: a base model's checkpoint fits the model with a head and the other way round
(``base_model_prefix``), tied parameters take the value of any name, tensors may be put together (`convert`), and names
that a class ignores (``_keys_to_ignore_on_load_missing``, ``_unexpected``) or computes are not reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
        made: entries that ``converted`` makes, by name.
        unexpected: names that the model lacks.
    """

    sources: dict[str, list[str]] = field(default_factory=dict)
    converted: tuple[Converted, ...] = ()
    made: dict[str, Entry] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def has(self, entry: Entry) -> bool:
        return entry.name in self.sources or any(made is entry for made in self.made.values())


def match(model: nn.Module, tensors: ModelTensors, files: WeightFiles) -> Matched:
    """Compare names, shapes and dtypes; ChunkcError for tensors that do not fit their place."""
    names, converted = resolve(model, list(files.stored), tensors)
    matched = Matched(converted=converted)
    for name, renamed in names.items():
        known = next((c for c in candidates(model, renamed) if c in tensors), None)
        if known is None:
            matched.unexpected.append(name)
            continue
        entry, stored = tensors.entry(known), files.stored[name]
        matched.sources.setdefault(entry.name, []).append(name)
        matched.faults += _faults(entry, name, stored.shape, stored.dtype)
    for group in converted:
        _match_converted(matched, group, tensors, files)
    matched.unexpected = _reported(model, tensors, matched.unexpected)
    _check(matched, files)
    return matched


def _match_converted(matched: Matched, group: Converted, tensors: ModelTensors, files: WeightFiles) -> None:
    foreign = [name for name, _ in group.parts if files.stored[name].dtype not in DTYPES]
    if foreign:
        matched.faults.append(f"{foreign[0]} is {files.stored[foreign[0]].dtype}")
        return
    try:
        made = group.convert(lambda name: _without_memory(files, name))
    except (RuntimeError, ValueError, LookupError) as error:
        matched.faults.append(f"{group.key} cannot be made of {', '.join(n for n, _ in group.parts[:3])}, ...: {error}")
        return
    for name, value in made.items():
        if name not in tensors:
            matched.unexpected.append(name)
            continue
        matched.made[name] = tensors.entry(name)
        dtype = next(word for word, dtype in DTYPES.items() if dtype is value.dtype)
        matched.faults += _faults(matched.made[name], f"{name}, made of several,", tuple(value.shape), dtype)


def _without_memory(files: WeightFiles, name: str) -> torch.Tensor:
    stored = files.stored[name]
    return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")


def _faults(entry: Entry, name: str, shape: tuple[int, ...], dtype: str) -> list[str]:
    stored = DTYPES.get(dtype)
    is_rounded = stored is not None and stored.is_floating_point and entry.dtype.is_floating_point
    faults = []
    if shape != entry.shape:
        faults.append(f"{name} has shape {shape} where the model has {entry.shape}")
    if stored is not entry.dtype and not is_rounded:
        faults.append(f"{name} is {dtype}, which does not convert to the model's {entry.dtype}")
    return faults


def _check(matched: Matched, files: WeightFiles) -> None:
    if matched.faults:
        more = f" ({len(matched.faults)} such tensors in all)" if len(matched.faults) > 1 else ""
        raise ChunkcError(
            f"{files.path} does not fit the model: {'; '.join(matched.faults[:5])}{more}. Build the model from the "
            "configuration that stands beside its weights, and use weights that are not quantised"
        )
    for first, *others in matched.sources.values():
        for other in others:
            if not torch.equal(files.value(first), files.value(other)):
                raise ChunkcError(
                    f"{first} and {other} are one parameter of the model, but have different values in {files.path}. "
                    "Untie them before chunkc.compile (transformers: `config.tie_word_embeddings = False`)"
                )


def is_optional(model: nn.Module, entry: Entry) -> bool:
    patterns: Sequence[str] = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns for name in entry.names)


def _reported(model: nn.Module, tensors: ModelTensors, names: Sequence[str]) -> list[str]:
    ignored: Sequence[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    computed = {_ending(name) for name, _ in model.named_buffers() if name not in tensors}
    kept = [name for name in names if _ending(name) not in computed]
    return [name for name in kept if not any(re.search(pattern, name) for pattern in ignored)]


def _ending(name: str) -> str:
    """The last two parts of a name, which a buffer keeps wherever an old checkpoint has it."""
    return ".".join(name.split(".")[-2:])
