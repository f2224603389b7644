"""Small random models of the architectures that people train, with inputs for one step.

Nothing is downloaded.

Nineteen of transformers and a convolutional network with batch normalisation. Sizes are such that a model's parameters
and optimizer states take several times the memory that its activations do. Dropout is off, so that two runs compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY, HIDDEN, HEADS, LAYERS = 128, 64, 4, 2
NUM_BATCHES, BATCH, NUM_IMAGES, LENGTH, IMAGE, CLASSES = 3, 2, 8, 8, 16, 5
BLOCKS = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
POSITIONS = {"max_position_embeddings": 32}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 2 * HIDDEN}
LLAMA = {**BLOCKS, **TEXT, **POSITIONS, "intermediate_size": 2 * HIDDEN, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model: its classes in transformers, the options of a small one, and what a step takes."""

    name: str
    model_class: str
    config_class: str
    options: dict[str, Any]
    images: bool = False

    def build(self) -> nn.Module:
        """A new model in training mode, with the same values every time."""
        config = getattr(transformers, self.config_class)(**self.options)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model: nn.Module = getattr(transformers, self.model_class)(config)
        return model.train()

    def batches(self) -> list[Batch]:
        """Keyword inputs of forward, for several steps."""
        generator = torch.Generator().manual_seed(2)
        return [self._batch(generator) for _ in range(NUM_BATCHES)]

    def _batch(self, generator: torch.Generator) -> Batch:
        if self.images:
            pixels = torch.randn(NUM_IMAGES, 3, IMAGE, IMAGE, generator=generator)
            return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (NUM_IMAGES,), generator=generator)}
        tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def _causal(name: str, family: str, **options: Any) -> Architecture:
    return Architecture(name, f"{family}ForCausalLM", f"{family}Config", options)


ALL: tuple[Architecture, ...] = (
    _causal("llama", "Llama", **LLAMA),
    _causal("qwen2", "Qwen2", **LLAMA),
    _causal("qwen3", "Qwen3", **LLAMA, head_dim=HIDDEN // HEADS),
    _causal("mistral", "Mistral", **LLAMA, sliding_window=4),
    _causal("gemma2", "Gemma2", **LLAMA, head_dim=HIDDEN // HEADS, sliding_window=4, query_pre_attn_scalar=16),
    _causal("opt", "OPT", **BLOCKS, **TEXT, **POSITIONS, ffn_dim=2 * HIDDEN, word_embed_proj_dim=HIDDEN, dropout=0.0),
    _causal("bloom", "Bloom", hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, **TEXT),
    _causal("gpt_neox", "GPTNeoX", **BLOCKS, **TEXT, **POSITIONS, intermediate_size=2 * HIDDEN),
    _causal("phi", "Phi", **BLOCKS, **TEXT, **POSITIONS, intermediate_size=2 * HIDDEN),
    _causal("falcon", "Falcon", **BLOCKS, **TEXT),
    Architecture("bert", "BertForMaskedLM", "BertConfig", {**BLOCKS, **ENCODER, **POSITIONS, "vocab_size": VOCABULARY}),
    Architecture(
        "roberta", "RobertaForMaskedLM", "RobertaConfig", {**BLOCKS, **ENCODER, **TEXT, **POSITIONS}
    ),
    Architecture(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **BLOCKS, **ENCODER, **POSITIONS, "vocab_size": VOCABULARY, "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "norm_rel_ebd": "layer_norm",
        },
    ),
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN, "num_layers": LAYERS, "num_heads": HEADS,
            "vocab_size": VOCABULARY, "use_cache": False, "dropout_rate": 0.0, "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    Architecture(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **TEXT, **POSITIONS, "d_model": HIDDEN, "use_cache": False, "dropout": 0.0, "decoder_start_token_id": 2,
            **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 2 * HIDDEN for side in ("encoder", "decoder")},
        },
    ),
    _causal("mixtral", "Mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2),
    Architecture(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {**BLOCKS, **ENCODER, "image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES},
        images=True,
    ),
    _causal(
        "mamba", "Mamba", hidden_size=2 * HIDDEN, num_hidden_layers=LAYERS, state_size=4, conv_kernel=4, **TEXT
    ),
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 32, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    Architecture(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "layer_type": "basic",
            "num_labels": CLASSES,
        },
        images=True,
    ),
)  # fmt: skip
