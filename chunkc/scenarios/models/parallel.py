"""Parallel plans of transformers models: which layers ranks along ``tp`` divide, in torch's styles.

transformers has the plan of an architecture beside its code, by names of modules in which ``*`` is the number of a
layer. It has none for BERT, GPT-2 and T5, whose plans stand here.

GPT-2's attention keeps queries, keys and values side by side in the columns of one matrix, of each of which a rank has
those of its heads.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from chunkc._torch_compat.collectives import is_dtensor
from chunkc.errors import ChunkcError

_BERT_LAYER: Final = "bert.encoder.layer.*."
_GPT_LAYER: Final = "transformer.h.*."
_T5_ATTENTION: Final = (
    "encoder.block.*.layer.0.SelfAttention.",
    "decoder.block.*.layer.0.SelfAttention.",
    "decoder.block.*.layer.1.EncDecAttention.",
)
_T5_BIASES: Final = tuple(
    f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias" for stack in ("encoder", "decoder")
)
_T5_FEED_FORWARD: Final = ("encoder.block.*.layer.1.DenseReluDense.", "decoder.block.*.layer.2.DenseReluDense.")
_OWN: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "bert": {
            **dict.fromkeys((f"{_BERT_LAYER}attention.self.{name}" for name in ("query", "key", "value")), "colwise"),
            f"{_BERT_LAYER}attention.output.dense": "rowwise",
            f"{_BERT_LAYER}intermediate.dense": "colwise",
            f"{_BERT_LAYER}output.dense": "rowwise",
        },
        "gpt2": {
            "transformer.wte": "embedding_rowwise",
            f"{_GPT_LAYER}attn.c_attn": "conv1d_three_blocks",
            f"{_GPT_LAYER}attn.c_proj": "conv1d_rows",
            f"{_GPT_LAYER}mlp.c_fc": "conv1d_columns",
            f"{_GPT_LAYER}mlp.c_proj": "conv1d_rows",
            "lm_head": "colwise_gather_output",
        },
        "t5": {
            **{f"{layer}{name}": "colwise" for layer in _T5_ATTENTION for name in "qkv"},
            **dict.fromkeys(_T5_BIASES, "colwise"),
            **{f"{layer}o": "rowwise" for layer in _T5_ATTENTION},
            **{f"{layer}{name}": "colwise" for layer in _T5_FEED_FORWARD for name in ("wi", "wi_0", "wi_1")},
            **{f"{layer}wo": "rowwise" for layer in _T5_FEED_FORWARD},
        },
    }
)
_ACROSS_VOCABULARY: Final = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")
"""Styles that divide the vocabulary, between whole inputs and outputs: layers may do without."""
_HEADS: Final = ("num_attention_heads", "num_key_value_heads")
_COUNTS_OF_A_RANK: Final[Mapping[str, str]] = MappingProxyType({"gpt2": "split_size", "t5": "n_heads"})
"""The attribute of divided modules that counts what one rank has: GPT-2's attention splits its own columns in three,
and T5's makes a bias of zeros for its own heads."""
_OF_HEADS: Final = "replicated_with_grad_allreduce"
_NORMS_OF_HEADS: Final = frozenset({"qwen3", "gemma3_text"})
"""Architectures that are compared with one process. Others with norms of heads may have more between divided layers:
Apertus trains its activations, and Gemma 3n's take a threshold over all columns."""


def parallelise(model: nn.Module, label: str, line: Any) -> None:
    """Divide the layers of a transformers model over ``line``, a mesh of one dimension, in place.

    Raises:
        ChunkcError: for a model without a plan, one whose plan has styles that torch has not, and for a line that does
            not divide its heads.
    """
    config: Any = model.config
    size = line.size()
    plan = _plan_of(model, label)
    for name in _HEADS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise ChunkcError(f"tp={size} does not divide the {count} of {name} of {label}: give a divisor of {count}")
    is_divided = getattr(config, "vocab_size", 0) % size == 0
    styles = _styles(label, plan, is_divided=is_divided, norms_heads=config.model_type in _NORMS_OF_HEADS)
    tied = _tied(model)
    parallel = importlib.import_module("torch.distributed.tensor.parallel")
    try:
        parallel.parallelize_module(model, line, styles)
    except NotImplementedError as error:  # a style of torch's meets a layer that it does not know
        raise ChunkcError(
            f"the parallel plan of {label} divides a layer that torch's styles cannot, such as one with adapters or "
            f"packed weights ({error}): parallelise such a model yourself, or use dp_shard"
        ) from error
    _tie(label, tied)
    counted = _COUNTS_OF_A_RANK.get(str(config.model_type))
    for module in model.modules():
        if counted is not None and hasattr(module, counted) and any(map(is_dtensor, module.parameters())):
            setattr(module, counted, getattr(module, counted) // size)


def _plan_of(model: Any, label: str) -> Mapping[str, str]:
    """Styles of transformers by names of modules, under the names that they have in ``model``."""
    kind, prefix = str(model.config.model_type), f"{model.base_model_prefix}."
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    plan = _OWN.get(kind) or getattr(model, "_tp_plan", None) or base
    named = (model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in chain(*named)]
    for renamed in (str, prefix.__add__, lambda name: name.removeprefix(prefix)):  # with another head, or without one
        found = {renamed(n): style for n, style in plan.items() if fnmatch.filter(names, renamed(n))}
        if (base or kind in _OWN) and not set(found.values()) <= set(_ACROSS_VOCABULARY):
            return found
    raise ChunkcError(
        f"{label} has no parallel plan by which ranks along tp could divide it. There is one for {', '.join(_OWN)}, "
        "and where transformers has one of linear layers (llama, mistral, qwen2 and others), or of norms of heads as "
        "well (qwen3, gemma3); parallelise other models yourself (torch.distributed.tensor.parallel.parallelize_module)"
    )


def _styles(label: str, plan: Mapping[str, str], *, is_divided: bool, norms_heads: bool) -> dict[str, Any]:
    """torch's styles by name.

    ``is_divided``: whether ranks can have equal parts of the vocabulary. ``norms_heads``: whether norms of heads are
    known to be exact.
    """
    parallel = importlib.import_module("torch.distributed.tensor.parallel")
    whole = importlib.import_module("torch.distributed.tensor").Replicate()
    makers = {
        "colwise": parallel.ColwiseParallel,
        "rowwise": parallel.RowwiseParallel,
        "embedding_rowwise": lambda: parallel.RowwiseParallel(input_layouts=whole),
        "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=whole),
        "colwise_rep": lambda: parallel.ColwiseParallel(output_layouts=whole),
        "conv1d_columns": lambda: _own_styles().Conv1DColumns(),
        "conv1d_three_blocks": lambda: _own_styles().Conv1DColumns(num_blocks=3),
        "conv1d_rows": lambda: _own_styles().Conv1DRows(),
    }
    if norms_heads:
        makers[_OF_HEADS] = lambda: _own_styles().HeadNorm()
    unknown = [f"{name} ({style})" for name, style in plan.items() if style not in makers]
    if unknown:
        raise ChunkcError(
            f"the parallel plan that transformers has of {label} divides {', '.join(unknown[:3])} in ways that torch's "
            f"styles have not, or that chunkc has not tried with it; known are {', '.join(makers)}"
        )
    kept = {name: style for name, style in plan.items() if is_divided or style not in _ACROSS_VOCABULARY}
    return {name: makers[style]() for name, style in kept.items()}


def _own_styles() -> Any:
    return importlib.import_module("chunkc.scenarios.models.parallel_styles")


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Modules that share a parameter, with its names in them."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append((module, name))
    return [shared for shared in owners.values() if len(shared) > 1]


def _tie(label: str, tied: list[list[tuple[nn.Module, str]]]) -> None:
    """Tie again what was divided module by module; ChunkcError where modules divided it differently."""
    for (first, first_name), *others in tied:
        param: Any = getattr(first, first_name)
        for module, name in others:
            other: Any = getattr(module, name)
            if getattr(param, "placements", None) != getattr(other, "placements", None):
                raise ChunkcError(f"the parallel plan of {label} divides a shared {first_name} in two ways")
            setattr(module, name, param)
