"""Models of transformers in two parts, each a module: the stages of a pipeline, by family.

The first part takes tokens [batch, LENGTH] and gives hidden states [batch, LENGTH, WIDTH]; the second takes those and
targets, and gives the loss [1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from staged_gpt import LENGTH, NUM_HEADS, VOCABULARY, WIDTH, loss_of, parts_of
from torch import nn

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
_LAYERS: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": NUM_HEADS, "tie_word_embeddings": False}


class _Last(nn.Module):
    """A last part: ``logits_of`` hidden states and targets."""

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(self.logits_of(hidden, targets).float(), targets).view(1)

    def logits_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LlamaFirst(nn.Module):
    """Embedding and a layer, without the norm behind all layers."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.model: Any = transformers.LlamaModel(config)
        self.model.norm = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden


class LlamaLast(_Last):
    """A layer and the head."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.model: Any = transformers.LlamaForCausalLM(config)
        self.model.model.embed_tokens = None

    def logits_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return logits


class BertFirst(nn.Module):
    """Embedding and a layer."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        self.model = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens).last_hidden_state
        return hidden


class BertLast(_Last):
    """A layer and the head, which sees all positions."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        model: Any = transformers.BertForMaskedLM(config)
        self.encoder, self.head = model.bert.encoder, model.cls

    def logits_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(hidden).last_hidden_state)
        return logits


class T5First(nn.Module):
    """The encoder."""

    def __init__(self, config: transformers.T5Config) -> None:
        super().__init__()
        self.model = transformers.T5EncoderModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens).last_hidden_state
        return hidden


class T5Last(_Last):
    """The decoder, with an embedding of its own, and the head."""

    def __init__(self, config: transformers.T5Config) -> None:
        super().__init__()
        model: Any = transformers.T5ForConditionalGeneration(config)
        self.decoder, self.head = model.decoder, model.lm_head

    def logits_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shifted = nn.functional.pad(targets, (1, 0))[:, :-1]
        found = self.decoder(input_ids=shifted, encoder_hidden_states=hidden, use_cache=False)
        logits: torch.Tensor = self.head(found.last_hidden_state)
        return logits


def _llama() -> list[nn.Module]:
    config = transformers.LlamaConfig(**_SIZES, **_LAYERS, num_key_value_heads=2, max_position_embeddings=LENGTH)
    return [LlamaFirst(config), LlamaLast(config)]


def _bert() -> list[nn.Module]:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**_SIZES, **_LAYERS, **dropout, max_position_embeddings=LENGTH)
    return [BertFirst(config), BertLast(config)]


def _t5() -> list[nn.Module]:
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // NUM_HEADS, "d_ff": 2 * WIDTH, "num_heads": NUM_HEADS, "num_layers": 1}
    options = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": False}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, **options)
    return [T5First(config), T5Last(config)]


_FAMILIES: Mapping[str, Callable[[], list[nn.Module]]] = {"llama": _llama, "bert": _bert, "t5": _t5}


def family_parts(family: str, num_parts: int) -> Sequence[nn.Module]:
    """The parts, with the same values at every call; ``gpt``: those of `staged_gpt`, which may be more than two."""
    if family == "gpt":
        return parts_of(num_parts)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [part.train() for part in _FAMILIES[family]()]
