"""Tiny models of every kind that the acceptance cases name, with the same values every time; nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

Batch = dict[str, torch.Tensor]
NUM_BATCHES = 4
VOCABULARY = 97


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train: ``build(seed)`` makes it, ``batches`` are keyword inputs of its forward."""

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _tokens(seed: int, *names: str, batch: int = 2, length: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(NUM_BATCHES):
        made = {n: torch.randint(3, VOCABULARY, (batch, length), generator=generator) for n in names}
        found.append({**made, "labels": made.get("labels", made["input_ids"])})
    return found


def _images(seed: int, channels: int, size: int, classes: int, key: str, batch: int = 2) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            key: torch.randn(batch, channels, size, size, generator=generator),
            "labels": torch.randint(0, classes, (batch,), generator=generator),
        }
        for _ in range(NUM_BATCHES)
    ]


def _bfloat16(batch: Batch) -> Batch:
    return {n: v.bfloat16() if v.is_floating_point() else v for n, v in batch.items()}


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return make().train()

    return build


def gpt2(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """Tied embeddings, Conv1D weights, learned positions."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=16, bos_token_id=1, eos_token_id=1,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt2_checkpointed() -> nn.Module:
    """Dropout, and layers whose activations are computed again in backward."""
    model = gpt2(dropout=0.2)
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5.20
    (enable or model.gradient_checkpointing_enable)()
    return model


def llama(layers: int = 2) -> nn.Module:
    """Rotary embeddings, grouped keys, RMS norm, untied head."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    """Token types, and a tied decoder with a bias of its own."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCABULARY,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def albert() -> nn.Module:
    """One layer's weights used twice in forward and in backward."""
    return transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(
            hidden_size=32, embedding_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """Encoder and decoder with one shared embedding; torch 2.11 cannot trace how its cache is made."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4, vocab_size=VOCABULARY,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    """Float inputs, a convolution and learned positions."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8,
            patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            problem_type="single_label_classification",  # else the first call sets it
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    """Experts, of which each token uses two."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY, max_position_embeddings=16,
        )
    )  # fmt: skip


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(functional.relu(self.norm(self.stem(pixels))))
        return functional.cross_entropy(self.head(hidden.mean((2, 3))), labels)


class Odd(nn.Module):
    """Awkward parameters in one forward: odd sizes and none, ties, frozen, unused, read twice, transposed."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor([1.25]))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.embed = nn.Embedding(VOCABULARY, 13)
        self.small = nn.Parameter(torch.randn(13, 7) * 0.3)
        self.frozen = nn.Parameter(torch.randn(7, 7) * 0.4, requires_grad=False)
        self.wide = nn.Linear(7, 53)
        self.large = nn.Parameter(torch.randn(53, 640) * 0.05)
        self.narrow = nn.Parameter((torch.randn(13, 640) * 0.05).t())
        self.twice = nn.Parameter(torch.randn(13, 13) * 0.3)
        self.unused = nn.Linear(5, 3)
        self.unused_frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.head = nn.Linear(13, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = torch.tanh(x @ self.twice) @ self.twice.t() + self.empty.sum()
        x = self.dropout(x @ self.small) * self.scale
        x = functional.gelu(self.wide(x @ self.frozen)) @ self.large
        logits = self.head(torch.tanh(x) @ self.narrow)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _case(name: str, make: Callable[[], nn.Module], batches: Callable[[], list[Batch]]) -> Case:
    return Case(name, _seeded(make), batches)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("gpt2", gpt2, lambda: _tokens(2, "input_ids")),
        _case("gpt2_small", lambda: gpt2(layers=1), lambda: _tokens(2, "input_ids")),
        _case("gpt2_dropout", lambda: gpt2(dropout=0.2), lambda: _tokens(2, "input_ids")),
        _case("gpt2_checkpointed", gpt2_checkpointed, lambda: _tokens(2, "input_ids")),
        _case("odd_dropout", lambda: Odd(dropout=0.3), lambda: _tokens(10, "input_ids", "labels")),
        _case("llama", llama, lambda: _tokens(3, "input_ids")),
        _case("bert", bert, lambda: _tokens(4, "input_ids", "labels")),
        _case("albert", albert, lambda: _tokens(5, "input_ids", "labels")),
        _case("t5", t5, lambda: _tokens(6, "input_ids", "labels", length=8)),
        _case("vit", vit, lambda: _images(7, 3, 8, 5, "pixel_values")),
        _case("mixtral", mixtral, lambda: _tokens(8, "input_ids")),
        _case("resnet", ResNet, lambda: _images(9, 3, 8, 5, "pixels", batch=4)),
        _case("resnet_bf16", lambda: ResNet().bfloat16(), lambda: [_bfloat16(b) for b in CASES["resnet"].batches()]),
        _case("odd", Odd, lambda: _tokens(10, "input_ids", "labels")),
    )
}
