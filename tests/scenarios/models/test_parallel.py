"""Parallel plans of transformers models: what is divided, that it computes as before, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import transformers
from job import Pool
from rank_fixtures import two_ranks
from rank_parallel import differences
from tiny_transformers import TINY_BERT, TINY_GEMMA3, TINY_GPT, TINY_LLAMA, TINY_QWEN3
from torch import nn

from chunkc._torch_compat.fake_job import fake_job, first_line
from chunkc.errors import ChunkcError
from chunkc.scenarios.models import Transformer, parallelise
from chunkc.scenarios.models.transformer import Head

__all__ = ["two_ranks"]

TINY_OPT = Transformer(
    "opt-tiny",
    {"model_type": "opt", "vocab_size": 101, "max_position_embeddings": 16, "num_hidden_layers": 2, "ffn_dim": 64}
    | {"hidden_size": 32, "word_embed_proj_dim": 32, "num_attention_heads": 2},
    Head.CAUSAL,
)
T5_SIZES = {"vocab_size": 104, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}


@pytest.fixture
def pair() -> Iterator[None]:
    with fake_job(2):
        yield


def divided(transformer: Transformer) -> nn.Module:
    model = transformer.build()
    parallelise(model, transformer.label, first_line(2, "tp"))
    return model


def parts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of this rank's parts of the parameters that are divided."""
    params: dict[str, Any] = dict(model.named_parameters())
    return {n: tuple(p.to_local().shape) for n, p in params.items() if hasattr(p, "placements")}


def changed(transformer: Transformer, **config: Any) -> Transformer:
    return replace(transformer, config={**transformer.config, **config})


def test_a_llama_is_divided_as_transformers_has_it(pair: None) -> None:
    found = parts(divided(TINY_LLAMA))
    assert len(found) == 2 * 7 + 1, "the output is tied to the embedding"
    assert found["model.embed_tokens.weight"] == (52, 32)
    layer = {name.removeprefix("model.layers.1."): shape for name, shape in found.items() if "layers.1" in name}
    assert layer["self_attn.q_proj.weight"] == (16, 32) and layer["self_attn.k_proj.weight"] == (8, 32)
    assert layer["self_attn.o_proj.weight"] == (32, 16) and layer["mlp.down_proj.weight"] == (32, 32)


def test_tied_modules_stay_tied(pair: None) -> None:
    model: Any = divided(TINY_LLAMA)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_vocabulary_that_does_not_divide_stays_whole(pair: None) -> None:
    found = parts(divided(changed(TINY_LLAMA, vocab_size=101)))
    assert len(found) == 2 * 7 and not [name for name in found if "embed" in name]


def test_a_bert_is_divided_by_the_plan_here(pair: None) -> None:
    found = parts(divided(TINY_BERT))
    divisible = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    for name in (*divisible, "intermediate.dense", "output.dense"):
        assert f"bert.encoder.layer.0.{name}.weight" in found
    assert found["bert.encoder.layer.1.intermediate.dense.bias"] == (32,)


def test_a_gpt_is_divided_by_the_plan_here(pair: None) -> None:
    found = parts(divided(changed(TINY_GPT, vocab_size=104)))
    assert found["transformer.wte.weight"] == (52, 32) and len(found) == 1 + 2 * 4 * 2
    layer = {name.removeprefix("transformer.h.1."): shape for name, shape in found.items() if ".h.1." in name}
    assert layer["attn.c_attn.weight"] == (32, 48) and layer["attn.c_attn.bias"] == (48,)
    assert layer["attn.c_proj.weight"] == (16, 32) and layer["attn.c_proj.bias"] == (32,)
    assert layer["mlp.c_fc.weight"] == (32, 64) and layer["mlp.c_proj.weight"] == (64, 32)


@pytest.mark.long(but="gemma3-tiny")
@pytest.mark.distributed
@pytest.mark.parametrize(
    "transformer",
    [
        TINY_LLAMA,
        changed(TINY_LLAMA, tie_word_embeddings=False),
        TINY_BERT,
        TINY_GPT,
        changed(TINY_GPT, vocab_size=104),
        TINY_QWEN3,
        TINY_GEMMA3,
    ],
    ids=lambda transformer: transformer.label,
)
def test_a_divided_model_computes_as_the_whole_one(transformer: Transformer, two_ranks: Pool) -> None:
    """Loss and gradients of two ranks, element by element, beside those of the model as transformers builds it."""
    for number, worst in two_ranks.run(differences, transformer):
        assert number > 10 and worst < 1e-5


def test_a_plan_holds_for_models_with_other_heads(pair: None) -> None:
    """Their modules have another prefix, or none."""
    bert_sizes, llama_sizes = ({**t.config} for t in (TINY_BERT, TINY_LLAMA))
    for sizes in (bert_sizes, llama_sizes):
        del sizes["model_type"]
    t5 = transformers.T5ForSequenceClassification(transformers.T5Config(num_layers=2, **T5_SIZES))
    bert = transformers.BertModel(transformers.BertConfig(**bert_sizes))
    llama = transformers.LlamaModel(transformers.LlamaConfig(**llama_sizes))
    projections = (
        (t5, "transformer.encoder.block.1.layer.0.SelfAttention.q.weight"),
        (bert, "encoder.layer.1.attention.self.query.weight"),
        (llama, "layers.1.self_attn.q_proj.weight"),
    )
    for model, name in projections:
        parallelise(model, "other-head", first_line(2, "tp"))
        assert parts(model)[name] == (16, 32)


def test_attention_to_another_model_stays_whole(pair: None) -> None:
    """That of GPT-2 is in no plan; it goes on to split all of its columns."""
    config = {key: value for key, value in TINY_GPT.config.items() if key != "model_type"}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, add_cross_attention=True))
    parallelise(model, "gpt-cross", first_line(2, "tp"))
    layer = model.transformer.h[0]
    assert (layer.attn.split_size, layer.crossattention.split_size) == (16, 32)
    assert parts(model)["transformer.h.0.attn.c_attn.weight"] == (32, 48)
    assert "transformer.h.0.crossattention.c_attn.weight" not in parts(model)


REFUSED: dict[str, tuple[Callable[[], Transformer], str]] = {
    "opt": (
        lambda: TINY_OPT,
        "opt-tiny has no parallel plan .* There is one for bert, gpt2, t5, and where transformers has one",
    ),
    "heads": (
        lambda: changed(TINY_LLAMA, num_key_value_heads=1),
        "tp=2 does not divide the 1 of num_key_value_heads of llama-tiny",
    ),
    "trained activations": (
        lambda: replace(changed(TINY_LLAMA, model_type="apertus", hidden_act="xielu"), label="apertus-tiny"),
        r"of apertus-tiny divides .*q_norm \(replicated_with_grad_allreduce\).* that chunkc has not tried with it",
    ),
    "experts": (
        lambda: replace(
            changed(TINY_LLAMA, model_type="mixtral", num_local_experts=2, num_experts_per_tok=1), label="mixtral-tiny"
        ),
        r"of mixtral-tiny divides .*packed_colwise.* in ways that torch's styles have not, .* are colwise, rowwise",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_divided_is_refused(what: str, pair: None) -> None:
    make, pattern = REFUSED[what]
    with pytest.raises(ChunkcError, match=pattern):
        divided(make())


def test_ranks_are_needed() -> None:
    with pytest.raises(ChunkcError, match="tp=2 needs a process group of as many ranks"):
        first_line(2, "tp")
