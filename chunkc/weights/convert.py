"""Checkpoints whose tensors are not the model's: changed names, experts fused by transformers.

transformers describes how names of a checkpoint become names of the model, and how several tensors become one
(``transformers.conversion_mapping``). Here that is applied to one parameter at a time. Without transformers, or for a
model of another library, names are unchanged. Seen on transformers 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Converted:
    """Tensors of a checkpoint, with the pattern that matched each, that make tensors of the model.

    ``key`` is the first name that they make.
    """

    key: str
    parts: tuple[tuple[str, str], ...]
    converter: Any
    model: nn.Module

    def convert(self, value_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert tensors of the checkpoint, also on the meta device, into tensors of the model, by name."""
        converter = deepcopy(self.converter)
        for name, pattern in self.parts:
            converter.add_tensor(self.key, name, pattern, value_of(name))
        made = converter.convert(self.key, model=self.model, config=getattr(self.model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def resolve(
    model: nn.Module, stored: Sequence[str], known: Container[str]
) -> tuple[dict[str, str], tuple[Converted, ...]]:
    """Map ``stored`` names to names in the model, or to conversions that make ``known`` names."""
    renamings, converters, natural = _transforms(model)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, str] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(stored, key=natural):
        key, pattern = _renamed(name, renamings, converters)
        prefixed = next((c for c in candidates(model, key) if c in known), None)
        if prefixed is None and any(c in known for c in candidates(model, name)):
            renamed[name] = name
        elif pattern is None or prefixed is None:
            renamed[name] = key
        else:
            groups.setdefault(prefixed, []).append((name, pattern))
    conversions = [Converted(key, tuple(parts), by_pattern[parts[0][1]], model) for key, parts in groups.items()]
    return {name: renamed[name] for name in stored if name in renamed}, tuple(conversions)


def candidates(model: nn.Module, name: str) -> list[str]:
    """``name``, and its names in the model with a head or in the base model of ``model``."""
    prefix = getattr(model, "base_model_prefix", "")
    return [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]


def _renamed(name: str, renamings: Sequence[Any], converters: Sequence[Any]) -> tuple[str, str | None]:
    """The name after all renamings and the first converter that applies, and that converter's pattern."""
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    for converter in converters:
        key, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return key, pattern
    return name, None


def _transforms(model: nn.Module) -> tuple[list[Any], list[Any], Callable[[str], Any]]:
    """transformers' renamings, converters and order of names for ``model``."""
    library: Mapping[str, Any] = sys.modules
    modeling = library.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return [], [], str
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key
    except ImportError:  # before transformers 5 names of a checkpoint were those of the model
        return [], [], str
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return renamings, [t for t in transforms if isinstance(t, WeightConverter)], dot_natural_key
