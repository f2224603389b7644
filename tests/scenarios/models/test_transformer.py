"""Models built from configurations: inputs, checkpoints, and files of Hugging Face."""

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import check_mutations, num_mutations
from torch import nn

from chunkc.errors import ChunkcError
from chunkc.scenarios.models import built_in, checkpoint_layers, from_config_file
from chunkc.scenarios.models.transformer import Head

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def write(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_a_config_file_builds_the_model_it_describes(tmp_path: Path) -> None:
    folder = tmp_path / "small-llama"
    folder.mkdir()
    model = from_config_file(write(folder, LLAMA))
    assert (model.label, model.head, model.num_layers) == ("small-llama", Head.CAUSAL, None)
    assert model.default_sequence == 32
    built = model.build()
    assert type(built).__name__ == "LlamaForCausalLM"
    assert built.training and all(p.is_meta for p in built.parameters())
    assert sum(p.numel() for p in built.parameters()) == 2 * 64 * 32 + 2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32
    with pytest.raises(ValueError, match="layers differ"):
        model.with_depth(3)


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("GPT2LMHeadModel", Head.CAUSAL),
        ("BertForMaskedLM", Head.MASKED),
        ("BertForSequenceClassification", Head.CLASSIFICATION),
    ],
)
def test_the_architecture_says_what_is_trained(architecture: str, head: Head, tmp_path: Path) -> None:
    assert from_config_file(write(tmp_path, {**LLAMA, "architectures": [architecture]})).head is head


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "holds no JSON"),
        ("[]", "has no model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "has no model_type"),
        ({**LLAMA, "architectures": ["LlamaModel"]}, "'LlamaModel'"),
        ({**LLAMA, "architectures": None}, "'none'"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 4096, found 1000000000"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers must be from 1 to 4096, found -1"),
        ({**LLAMA, "max_position_embeddings": 0}, "max_position_embeddings must be 1 or more, found 0"),
    ],
)
def test_a_file_that_is_no_such_configuration_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ChunkcError, match=message):
        from_config_file(write(tmp_path, config))


def test_mutations_are_refused_or_describe_a_model(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    numbers = itertools.count()

    def use(path: Path) -> None:
        model = from_config_file(str(path))
        assert model.num_layers is None or model.num_layers >= 1
        assert 1 <= model.inputs(1, model.default_sequence)["input_ids"].numel() <= 1024
        if next(numbers) % 50 == 0:
            with contextlib.suppress(ChunkcError):
                model.build()

    data, path = Path(write(tmp_path, LLAMA)).read_bytes(), tmp_path / "mutated.json"
    refused, read = check_mutations(data, path, use, range(num_mutations(pytestconfig)), ChunkcError)
    print(f"configurations: {refused} refused, {read} read")
    assert refused > 0 and read > 0


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChunkcError, match="cannot read"):
        from_config_file(str(tmp_path / "config.json"))


def test_a_configuration_that_transformers_refuses(tmp_path: Path) -> None:
    model = from_config_file(write(tmp_path, {**LLAMA, "model_type": "no_such_model_type"}))
    with pytest.raises(ChunkcError, match="transformers cannot build"):
        model.build()


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ChunkcError, match=r"not installed: pip install 'chunkc\[hf\]'"):
        built_in("gpt-1b").build()


def test_inputs_are_tokens_and_labels() -> None:
    tokens = built_in("gpt-1b").inputs(3, 16)
    assert tokens["labels"] is tokens["input_ids"]
    assert (tokens["input_ids"].shape, tokens["input_ids"].dtype) == ((3, 16), torch.long)
    assert built_in("bert-1b").inputs(3, 16)["labels"].shape == (3,)
    with pytest.raises(ChunkcError, match="at most 1024 tokens"):
        built_in("gpt-1b").inputs(1, 1025)


def test_layers_are_checkpointed_on_demand() -> None:
    model = built_in("bert-1b").with_depth(1)
    on = [m for m in model.build(recompute=True).modules() if getattr(m, "gradient_checkpointing", False)]
    off = [m for m in model.build().modules() if getattr(m, "gradient_checkpointing", False)]
    assert on and not off
    with pytest.raises(ChunkcError, match="net has no layers"):
        checkpoint_layers(nn.Linear(2, 2), "net")
