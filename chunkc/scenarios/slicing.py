"""Attention of transformers' models over slices of sequences, for ranks along ``cp``.

transformers makes the mask of a causal model from the positions in what it is handed, which is a slice. So attention
goes through an implementation of its own name in transformers' public registry, for which no mask is made: it is causal
by ``is_causal``, which `chunkc.capture.attention.in_slices` understands. T5 adds a bias by the distance of positions to
its scores: it is made of the slice's queries and all keys, and hides the later ones from a decoder. Other models call
attention themselves, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from chunkc.capture.attention.whole import attend_to_whole, relative_positions, see_whole
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import CaptureError, ChunkcError

_T5: Final = "t5"
FAMILIES: Final = ("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3", _T5)
"""Kinds of models (``config.model_type``) whose attention is that of all positions, or causal, and nothing else, or has
a bias by their distance."""
_SHIFTING: Final = ("ForCausalLM", "LMHeadModel")
_HEADS: Final = (*_SHIFTING, "ForMaskedLM", "ForConditionalGeneration")
"""Ends of the names of models whose heads work position by position."""
_NAME: Final = "chunkc_slices"
_MASKS: Final = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask")
_CHANGES: Final = ("sliding_window", "softcap", "s_aux")
"""Arguments by which attention is another than that, where they are given."""


@contextmanager
def sliced(model: nn.Module, ranks: RankMesh) -> Iterator[None]:
    """Let transformers models in ``model`` see slices of all ranks along ``cp``.

    They do for good, unless the block raises.

    Raises:
        ChunkcError: for an architecture whose attention is not known here, or a head that reads one position.
    """
    with _seeing_slices(model, ranks) as undo:
        yield
        undo.pop_all()


@contextmanager
def sliced_ahead(model: nn.Module, ranks: RankMesh) -> Iterator[None]:
    """`sliced` within the block alone, in which the model is planned."""
    with _seeing_slices(model, ranks):
        yield


def _seeing_slices(model: nn.Module, ranks: RankMesh) -> ExitStack:
    """Let transformers models in ``model`` see slices, until what is returned is closed."""
    found = list(_outermost(model)) if ranks.num_context > 1 else []
    for part in found:
        _check(part, ranks)
    models: list[Any] = [m for part in found for m in part.modules() if hasattr(m, "set_attn_implementation")]
    with ExitStack() as undo:
        for each in reversed(models):  # undone first for the outermost, which sets it for those within
            undo.callback(each.set_attn_implementation, each.config._attn_implementation)
        for part in found:
            from transformers import AttentionInterface

            AttentionInterface.register(_NAME, _attention)
            part.set_attn_implementation(_NAME)
            if part.config.model_type == _T5:
                _give_biases(part, ranks.num_context, undo)
            undo.callback(part.register_forward_pre_hook(_check_inputs, with_kwargs=True).remove)
        for each in models:
            undo.callback(each.register_forward_pre_hook(_check_masks, with_kwargs=True).remove)
        return undo.pop_all()


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Models of transformers in ``module`` that are in no other one."""
    if hasattr(getattr(module, "config", None), "model_type"):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _check(model: Any, ranks: RankMesh) -> None:
    name, kind = type(model).__name__, model.config.model_type
    if kind not in FAMILIES or not hasattr(model, "set_attn_implementation"):
        raise ChunkcError(
            f"mesh {ranks}: {name} is of the kind {kind!r}, and slices of sequences are known for the attention of "
            f"{', '.join(FAMILIES)}; leave cp out"
        )
    if not name.endswith(_HEADS):
        raise ChunkcError(
            f"mesh {ranks}: {name} is not known to work position by position, and ranks have slices: models that end "
            f"with {', '.join(_HEADS)} serve"
        )


def _give_biases(model: nn.Module, num_slices: int, undo: ExitStack) -> None:
    """Let attention of a T5 make its biases for the keys of all slices."""
    see_whole()
    for layer in model.modules():
        if hasattr(layer, "compute_bias"):
            undo.callback(_give_back, layer, vars(layer).get("compute_bias"))
            layer.compute_bias = partial(_bias_of_slice, layer, num_slices)  # type: ignore[assignment]


def _give_back(layer: nn.Module, own: Any) -> None:
    """Let a layer make biases by ``own``, or as its class does. It may have seen slices before."""
    del layer.compute_bias
    if own is not None:
        layer.compute_bias = own


def _check_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if len(args) > 1 or kwargs.get("position_ids") is None:
        raise CaptureError(
            f"cp divides sequences: hand {name} its inputs by name, and with them the positions that its slice has in "
            "the sequence, as position_ids="
        )
    if kwargs.get("past_key_values") is not None:
        raise CaptureError(f"cp divides sequences, and {name} is handed keys of earlier calls: no past_key_values")
    if kwargs.get("num_items_in_batch") is not None and not name.endswith(_SHIFTING):
        raise CaptureError(
            f"cp divides sequences, and {name} does not divide its loss by num_items_in_batch: leave labels= away, and "
            "take the loss of its logits"
        )
    is_shifted = kwargs.get("decoder_input_ids") is not None or kwargs.get("decoder_inputs_embeds") is not None
    if module.config.model_type == _T5 and not is_shifted:
        raise CaptureError(
            f"cp divides sequences: hand {name} decoder_input_ids=, shifted before sequences are sliced "
            "(prepare_decoder_input_ids_from_labels). It would shift labels within its slice"
        )
    if kwargs.get("logits_to_keep"):
        raise CaptureError(
            f"cp divides sequences, and {name} would keep the last logits of its slice: no logits_to_keep"
        )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None and name.endswith(_SHIFTING):
        raise CaptureError(
            f"cp divides sequences, and {name} would shift labels within its slice, whose last position then has none: "
            "hand in shift_labels= as well, shifted before sequences are sliced"
        )


def _check_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse masks that are handed to a model, or to one within, which makes none for attention of slices."""
    name = type(module).__name__
    if len(args) > 1:
        raise CaptureError(f"cp divides sequences: hand {name} its inputs by name, of which masks are refused")
    for mask in _MASKS:
        if kwargs.get(mask) is not None:
            raise CaptureError(
                f"cp divides sequences, and {name} is handed {mask}=, which is of one slice: leave it out, and let "
                "sequences be of one length, without padding"
            )


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a slice, which transformers calls.

    Args:
        module: the attention layer, whose ``is_causal`` counts.
        query, key, value: [batch, heads, length, width]; of keys and values the heads may be fewer.

    Returns:
        [batch, length, heads, width], and no weights.

    Raises:
        CaptureError: for a mask, a window or whatever else makes it another attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in _CHANGES:
        if options.get(name) is not None:
            raise CaptureError(f"cp divides sequences, and attention has {name}={options[name]}, not known there")
    if module.config.model_type == _T5:
        if attention_mask is not None:
            raise CaptureError("cp divides sequences, and attention of a T5 is handed a mask, which is of one slice")
        return _biased(module, query, key, value, **options), None
    found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return found


def _biased(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    position_bias: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attention of a T5's layer. Between decoder and encoder nothing is added: the bias is zeros."""
    is_across = module.is_decoder and not module.is_causal
    bias = None if is_across else position_bias
    return attend_to_whole(query, key, value, bias, dropout, scaling).transpose(1, 2).contiguous()


def _bias_of_slice(
    module: Any, num_slices: int, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
) -> torch.Tensor:
    """The bias of a T5's layer for its slice's queries and all keys. A decoder sees no later ones.

    Returns:
        [1, heads, query_length, num_slices x key_length].

    Raises:
        CaptureError: where keys of earlier calls are kept.
    """
    if query_length != key_length or past_seen_tokens:
        raise CaptureError("cp divides sequences, and keys of earlier calls are of one slice: no past_key_values")
    distances = relative_positions(torch.empty(0, device=device), query_length, num_slices)
    buckets = module._relative_position_bucket(
        distances,
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias: torch.Tensor = module.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)
    return bias.masked_fill(distances > 0, -torch.inf) if module.is_decoder else bias
