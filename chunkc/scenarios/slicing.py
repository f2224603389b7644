"""Attention of transformers' models over slices of sequences, for ranks along ``cp``.

transformers makes the mask of a causal model from the positions in what it is handed, which is a slice. So attention
goes through an implementation of its own name in transformers' public registry, for which no mask is made: it is causal
by ``is_causal``, which `chunkc.capture.attention.in_slices` understands. Other models call attention themselves, and
stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from chunkc.distributed.mesh import RankMesh
from chunkc.errors import CaptureError, ChunkcError

FAMILIES: Final = ("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Kinds of models (``config.model_type``) whose attention is that of all positions, or causal, and nothing else."""
_NAME: Final = "chunkc_slices"
_CHANGES: Final = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments by which attention is another than that, where they are given."""


@contextmanager
def sliced(model: nn.Module, ranks: RankMesh) -> Iterator[None]:
    """Let a transformers model see slices of all ranks along ``cp``, for good unless the block raises.

    Raises:
        ChunkcError: for an architecture whose attention is not known here.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if ranks.num_context == 1 or kind is None:
        yield
        return
    changeable: Any = model
    if kind not in FAMILIES or not hasattr(model, "set_attn_implementation"):
        raise ChunkcError(
            f"mesh {ranks}: {type(model).__name__} is of the kind {kind!r}, and slices of sequences are known for the "
            f"attention of {', '.join(FAMILIES)}; leave cp out"
        )
    from transformers import AttentionInterface

    before = changeable.config._attn_implementation
    AttentionInterface.register(_NAME, _attention)
    changeable.set_attn_implementation(_NAME)
    hook = model.register_forward_pre_hook(_check_positions, with_kwargs=True)
    try:
        yield
    except BaseException:
        hook.remove()
        changeable.set_attn_implementation(before)
        raise


def _check_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if len(args) > 1 or kwargs.get("position_ids") is None:
        raise CaptureError(
            f"cp divides sequences: hand {name} its inputs by name, and with them the positions that its slice has in "
            "the sequence, as position_ids="
        )
    if kwargs.get("attention_mask") is not None:
        raise CaptureError(
            f"cp divides sequences, and {name} is handed an attention_mask, which is of one slice: leave it out, and "
            "let sequences be of one length, without padding"
        )


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of slices, [batch, length, heads, width] of ``query`` with the heads second, as transformers calls it.

    Raises:
        CaptureError: for a mask, a window or whatever else makes it another attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in _CHANGES:
        if options.get(name) is not None:
            raise CaptureError(f"cp divides sequences, and attention has {name}={options[name]}, not known there")
    found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return found
