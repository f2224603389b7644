"""Transformers models with values, whose batches are cases of training."""

from collections.abc import Mapping

import torch
import transformers
from models import Batch, Case
from tiny_transformers import TINY_BERT, TINY_GPT, TINY_LLAMA, TINY_QWEN3
from torch import nn

from chunkc.scenarios.models import Transformer

LENGTH, NUM_BATCHES = 12, 4


def seeded(transformer: Transformer, **changed: object) -> nn.Module:
    """The model with values, the same every time."""
    config = {key: value for key, value in transformer.config.items() if key != "model_type"} | changed
    torch.manual_seed(3)
    kind = transformers.AutoConfig.for_model(transformer.config["model_type"], **config, use_cache=False)
    model: nn.Module = getattr(transformers, transformer.head).from_config(kind)
    return model.train()


def _batches(*, classifies: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = list[Batch]()
    for _ in range(NUM_BATCHES):
        tokens = torch.randint(3, 101, (2, LENGTH), generator=generator)
        found.append({"input_ids": tokens, "labels": tokens[:, 0] % 2 if classifies else tokens})
    return found


def seeded_t5(feed_forward: str) -> nn.Module:
    """An encoder and a decoder; ``feed_forward``: of two layers, or ``gated-gelu``, of three."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 104, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2}
    config = transformers.T5Config(
        **sizes, feed_forward_proj=feed_forward, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model.train()


DIVIDED_CASES: Mapping[str, Case] = {
    "llama_tied": Case("llama_tied", lambda: seeded(TINY_LLAMA), _batches),
    "llama_untied": Case("llama_untied", lambda: seeded(TINY_LLAMA, tie_word_embeddings=False), _batches),
    "bert": Case("bert", lambda: seeded(TINY_BERT), lambda: _batches(classifies=True)),
    "qwen3": Case("qwen3", lambda: seeded(TINY_QWEN3), _batches),
    "t5": Case("t5", lambda: seeded_t5("relu"), _batches),
    "t5_gated": Case("t5_gated", lambda: seeded_t5("gated-gelu"), _batches),
    "gpt2": Case("gpt2", lambda: seeded(TINY_GPT, n_head=4), _batches),
}
