"""Clipping by the plan, for libraries that ask for a norm over parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from chunkc.api import clip_grad_norm_
from chunkc.compiler.compiled_model import CompiledModel


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` itself was handed to `chunkc.compile`."""
    return isinstance(getattr(model, "_compiled_call_impl", None), CompiledModel)


def clip_whole_model(
    models: Iterable[nn.Module], parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor | None:
    """Clip by the plan of the compiled model whose trained parameters ``parameters`` are.

    Returns:
        The norm before clipping, float32 []; None, and nothing is clipped, where they are those of no model of
        ``models``: torch's function then gathers every gradient.
    """
    wanted = {id(p) for p in parameters if p.requires_grad}
    for model in models:
        if is_compiled(model) and wanted == {id(p) for p in model.parameters() if p.requires_grad}:
            return clip_grad_norm_(model, max_norm, norm_type)
    return None
