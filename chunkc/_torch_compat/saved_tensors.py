"""Hooks on what autograd saves for backward (seen on torch 2.11 and 2.13)."""

from __future__ import annotations

import torch


def has_saved_tensors_hooks() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` take what this thread saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
