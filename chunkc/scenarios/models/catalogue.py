"""The built-in models, with depths and widths of PatrickStar's and its successors' measurements.

``gpt-10b`` is GPT-2-like (causal language model, tied embeddings, 50,257 tokens), ``bert-10b`` BERT-like (encoder with
a pooler that classifies a sequence into two classes, 30,522 tokens). Positions are 1,024. The number in a name is
nominal. 33b is ours, the largest that eight GPUs of 32 GiB train beside 240 GiB of host memory: narrower and deeper
than its neighbours, which leaves more room, since the least arena and gradients under way grow with single matrices.
Dropout is off, as in large pre-training: with it the attention of a CPU tensor, which capture traces, is no fused one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from chunkc.errors import ChunkcError
from chunkc.scenarios.models.transformer import Head, Transformer

SEQUENCE: Final = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """One row of the catalogue; ``name`` is the nominal number of parameters."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int = 16


SIZES: Final = (
    Size("0.7b", 24, 1536),
    Size("1b", 20, 2048),
    Size("2b", 40, 2048),
    Size("4b", 64, 2304),
    Size("6b", 53, 3072),
    Size("8b", 72, 3072),
    Size("10b", 50, 4096),
    Size("12b", 60, 4096),
    Size("15b", 78, 4096),
    Size("18b", 90, 4096),
    Size("20b", 25, 8192),
    Size("30b", 37, 8192),
    Size("33b", 73, 6144, num_heads=48),
    Size("40b", 50, 8192),
    Size("50b", 62, 8192),
    Size("60b", 75, 8192),
    Size("68b", 66, 9216),
    Size("175b", 96, 12288, num_heads=96),
)


def _gpt(size: Size) -> Transformer:
    config = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": SEQUENCE,
        "n_layer": size.num_layers,
        "n_embd": size.hidden,
        "n_head": size.num_heads,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }
    return Transformer(f"gpt-{size.name}", config, Head.CAUSAL)


def _bert(size: Size) -> Transformer:
    config = {
        "model_type": "bert",
        "vocab_size": 30522,
        "max_position_embeddings": SEQUENCE,
        "num_hidden_layers": size.num_layers,
        "hidden_size": size.hidden,
        "intermediate_size": 4 * size.hidden,
        "num_attention_heads": size.num_heads,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    }
    return Transformer(f"bert-{size.name}", config, Head.CLASSIFICATION)


_MAKERS: Final[Mapping[str, Callable[[Size], Transformer]]] = MappingProxyType({"gpt": _gpt, "bert": _bert})
FAMILIES: Final = tuple(_MAKERS)
NAMES: Final = tuple(f"{family}-{size.name}" for family in FAMILIES for size in SIZES)


def built_in(name: str) -> Transformer:
    """The model called ``name``, in any case.

    Raises:
        ChunkcError: when there is none; the message lists them.
    """
    family, _, number = name.lower().partition("-")
    size = next((size for size in SIZES if size.name == number), None)
    if size is None or family not in _MAKERS:
        sizes = ", ".join(size.name for size in SIZES)
        raise ChunkcError(f"no built-in model {name!r}: there are {' and '.join(FAMILIES)}, each with -{sizes}")
    return _MAKERS[family](size)


def family(name: str) -> tuple[Transformer, ...]:
    """All models of the family ``name``, the smallest first; KeyError where there is none."""
    return tuple(_MAKERS[name](size) for size in SIZES)
