"""ACCEPTANCE 18: ``generate()`` of a compiled model gives the plain model's tokens, without a graph for each."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from evaluating import messages
from models import CASES, loss_of
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

VOCABULARY = 97
NUM_TOKENS = 12
HW = "emulated-320k-64m"
STEP = {"lr": 1e-2, "eps": 1e-4}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32,
        )
    )  # fmt: skip


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy without a cache": {"do_sample": False, "use_cache": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "sampled without a cache": {"do_sample": True, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.long
@pytest.mark.parametrize("make", [pytest.param(gpt2, marks=pytest.mark.slow), llama])
def test_tokens_are_the_plain_models(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Before training, after two steps, in every manner, twice each; training goes on exactly."""
    caplog.set_level(logging.INFO, "chunkc")
    torch.manual_seed(0)
    plain = make().eval()
    model = chunkc.compile(copy.deepcopy(plain), HW, dtype=torch.float32, backend="eager")
    optimizers = [
        chunkc.AdamW(model.parameters(), **STEP),
        torch.optim.AdamW(plain.parameters(), **STEP),
    ]
    prompt = torch.randint(2, VOCABULARY, (2, 5))

    def check(how: dict[str, Any]) -> None:
        found = []
        for one in (model, plain):
            torch.manual_seed(7)
            found.append(
                one.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS,
                             min_new_tokens=NUM_TOKENS, pad_token_id=0, **how)
            )  # fmt: skip
        assert found[0].shape == (2, 5 + NUM_TOKENS)
        assert torch.equal(*found)

    check(HOW["greedy"])
    batch = torch.randint(2, VOCABULARY, (2, 10))
    for _ in range(2):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss_of(one(input_ids=batch, labels=batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for _ in range(2):
        for how in HOW.values():
            check(how)
    evaluator = compiled_of(model).evaluator
    assert evaluator.shapes.num_programs <= 2, "at most the prompts, never a graph for each token"
    said = messages(caplog)
    assert len(said) == len(set(said)) and sum("key-value caches" in m for m in said) == 1
    losses = []
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        loss = loss_of(one(input_ids=batch, labels=batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-5)


def test_an_encoder_decoder_generates_the_plain_models_tokens() -> None:
    """Before training, after a step; greedily and by beams, without a cache, as its configuration says."""
    case = CASES["t5"]
    plain, model = case.build(), case.build()
    chunkc.compile(model, "emulated-1m-64m", dtype=torch.float32, backend="eager")
    sides = ((model, chunkc.AdamW(model.parameters(), **STEP)), (plain, torch.optim.AdamW(plain.parameters(), **STEP)))
    batch = case.batches()[0]

    def check() -> None:
        for how in ({"num_beams": 1}, {"num_beams": 2}):
            found = [
                side.eval().generate(batch["input_ids"], do_sample=False, max_new_tokens=5, min_new_tokens=5, **how)
                for side, _ in sides
            ]
            assert found[0].shape == (2, 6) and torch.equal(*found)

    check()
    for side, optimizer in sides:
        loss_of(side.train()(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    check()
