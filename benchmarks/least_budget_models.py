"""Models of which the least device budget is measured: twelve at 1,024 tokens, and a Llama at 8,192.

They are narrow, of eight layers, so that a step takes seconds on two cores. GPT-2 and BERT have their true
vocabularies; that of the others is 1.5 times layers x width, as of Qwen2 7B or Pythia 1B, and of the long one 4 times.
Options that are not named are the defaults of transformers, dropout among them. Values are random; nothing
is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
WIDTH, HEADS, LAYERS, LENGTH, LONG, CLASSES, PATCH = 256, 4, 8, 1024, 8192, 10, 16
VOCABULARY, LARGER_VOCABULARY = 3072, 8192
BLOCKS = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
POSITIONS = {"max_position_embeddings": LENGTH}
LLAMA = {**BLOCKS, **TEXT, "intermediate_size": 704, "use_cache": False}


class Output(NamedTuple):
    loss: torch.Tensor


class NanoGptBlock(nn.Module):
    """Block of nanoGPT: norms in front, fused attention, inside 4 x WIDTH; ``[batch, length, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """nanoGPT with its defaults (no dropout, tied embeddings)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(NanoGptBlock() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> Output:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


@dataclass(frozen=True, slots=True)
class Measured:
    """One model: what ``options`` it has, and ``what``, said in the table.

    ``family``: of transformers, as in ``GPT2`` of ``GPT2Config``; empty for nanoGPT. ``task``: what follows it.
    """

    name: str
    family: str
    task: str
    options: Mapping[str, Any]
    what: str
    length: int = LENGTH
    is_checkpointed: bool = False

    def build(self) -> nn.Module:
        """A new model in training mode, with the same values every time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            if not self.family:
                return NanoGpt().train()
            config = getattr(transformers, f"{self.family}Config")(**self.options)
            model: nn.Module = getattr(transformers, f"{self.family}{self.task}")(config)
        if self.task == "ForCausalLM" or self.family == "GPT2":
            model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        if self.is_checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model.train()

    def batch(self) -> Batch:
        """Keyword inputs of one forward."""
        generator = torch.Generator().manual_seed(2)
        if self.task == "ForImageClassification":
            side = self.options["image_size"]
            labels = torch.randint(0, CLASSES, (1,), generator=generator)
            return {"pixel_values": torch.randn(1, 3, side, side, generator=generator), "labels": labels}
        tokens = torch.randint(3, VOCABULARY, (1, self.length), generator=generator)
        return {"input_ids": tokens, "labels": tokens} if self.family else {"tokens": tokens}


PYTHIA = {**BLOCKS, **TEXT, "intermediate_size": 1024, "use_cache": False}
GPT2 = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "use_cache": False}
T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 1024, "num_heads": HEADS, "num_layers": LAYERS // 2}
VIT = {**BLOCKS, "intermediate_size": 1024, "image_size": 512, "patch_size": PATCH, "num_labels": CLASSES}
ALL: tuple[Measured, ...] = (
    Measured("GPT-2", "GPT2", "LMHeadModel", GPT2, "dropout 0.1, vocabulary of 50,257"),
    Measured("GPT-2, checkpointed", "GPT2", "LMHeadModel", GPT2, "the same, gradient checkpointing", LENGTH, True),
    Measured(
        "BERT", "Bert", "ForMaskedLM", {**BLOCKS, **POSITIONS, "intermediate_size": 1024},
        "dropout 0.1, vocabulary of 30,522",
    ),
    Measured(
        "T5", "T5", "ForConditionalGeneration",
        {**T5, "vocab_size": VOCABULARY, "use_cache": False, "decoder_start_token_id": 0},
        "dropout 0.1, 4 and 4 layers",
    ),
    Measured(
        "OPT", "OPT", "ForCausalLM",
        {**BLOCKS, **TEXT, **POSITIONS, "ffn_dim": 1024, "word_embed_proj_dim": WIDTH, "use_cache": False},
        "dropout 0.1",
    ),
    Measured("Pythia", "GPTNeoX", "ForCausalLM", PYTHIA, "no dropout"),
    Measured("Llama", "Llama", "ForCausalLM", LLAMA, "no dropout"),
    Measured("Mistral", "Mistral", "ForCausalLM", {**LLAMA, "num_key_value_heads": 2}, "2 heads of keys, no dropout"),
    Measured("Qwen2", "Qwen2", "ForCausalLM", {**LLAMA, "num_key_value_heads": 2}, "2 heads of keys, no dropout"),
    Measured(
        "Mixtral", "Mixtral", "ForCausalLM",
        {**LLAMA, "num_key_value_heads": 2, "num_hidden_layers": LAYERS // 2, "num_local_experts": 4},
        "4 experts, 4 layers, no dropout",
    ),
    Measured("ViT", "ViT", "ForImageClassification", VIT, "1,025 patches, no dropout"),
    Measured("nanoGPT", "", "", {}, "no dropout"),
    Measured(
        "Llama at 8,192", "Llama", "ForCausalLM",
        {**LLAMA, "vocab_size": LARGER_VOCABULARY, "max_position_embeddings": LONG}, "no dropout", LONG,
    ),
)  # fmt: skip
