"""Stages of transformers models: one after another they compute what the whole model does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny_transformers import TINY_BERT, TINY_GPT, TINY_LLAMA, TINY_QWEN3

from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.scenarios.models import Stage, Transformer
from chunkc.scenarios.models.stages import StageModule
from chunkc.scenarios.models.transformer import Head
from chunkc.scenarios.scenario import Recompute, Scenario, Scenarios

HW = Hardware.parse("8xa100-40g-1024g")
LAYERS = {"gpt2": "transformer.h.", "bert": "bert.encoder.layer."}


def deep(model: Transformer, num_layers: int, **config: Any) -> Transformer:
    key = "n_layer" if model.config["model_type"] == "gpt2" else "num_hidden_layers"
    return replace(model, config={**model.config, key: num_layers, **config})


MODELS = {
    "gpt2": deep(TINY_GPT, 5),
    "llama": deep(TINY_LLAMA, 5, tie_word_embeddings=False),
    "qwen3": deep(TINY_QWEN3, 5),
    "bert": deep(TINY_BERT, 5),
    "masked bert": replace(deep(TINY_BERT, 5), head=Head.MASKED),
}


def built(model: Transformer) -> Any:
    """On the CPU, with values."""
    return getattr(transformers, model.head).from_config(model.configuration()).train()


def layers_of(model: Transformer) -> str:
    """Name of a layer without its number."""
    return LAYERS.get(str(model.config["model_type"]), "model.layers.")


def moved_by(name: str, prefix: str, num_layers: int) -> str:
    """``name`` in a model with so many layers before its own."""
    number, _, rest = name.partition(prefix)[2].partition(".")
    return f"{prefix}{int(number) + num_layers}.{rest}" if rest else name


def stage_of(whole: Any, model: Transformer, number: int, num_stages: int, first: int) -> tuple[Stage, StageModule]:
    """A stage with the values that ``whole`` has of its layers, the first of which is its layer ``first``."""
    stage, prefix = Stage.of(model, number, num_stages), layers_of(model)
    part, values = built(stage), whole.state_dict()
    with torch.no_grad():
        for name, value in part.state_dict().items():
            value.copy_(values[moved_by(name, prefix, first)])
    return stage, StageModule(part, is_first=stage.is_first, is_last=stage.is_last)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_does(name: str, num_stages: int) -> None:
    """The loss, and the gradient of every layer's weight, element by element."""
    torch.manual_seed(0)
    model = MODELS[name]
    whole = built(model)
    tokens = torch.randint(3, 100, (2, 16))
    labels = torch.randint(2, (2,)) if model.head is Head.CLASSIFICATION else torch.randint(3, 100, (2, 16))
    loss = whole(input_ids=tokens, labels=labels).loss
    loss.backward()

    first, hidden, found = 0, tokens, dict[str, Any]()
    prefix = layers_of(model)
    for number in range(num_stages):
        stage, module = stage_of(whole, model, number, num_stages, first)
        handed: dict[str, Any] = {"labels": labels} if stage.is_last else {}
        hidden = module(**{"input_ids" if stage.is_first else "hidden": hidden}, **handed)
        named = module.model.named_parameters(prefix="" if stage.is_last else whole.base_model_prefix)
        found |= {moved_by(name, prefix, first): param for name, param in named if name.startswith(prefix)}
        first += stage.num_own_layers
    torch.testing.assert_close(hidden, loss, rtol=1e-6, atol=1e-6)
    hidden.backward()
    wanted = {name: param.grad for name, param in whole.named_parameters() if name.startswith(prefix)}
    assert found.keys() == wanted.keys()
    for layer_name, param in found.items():
        torch.testing.assert_close(param.grad, wanted[layer_name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_a_stage_that_trains_it(name: str) -> None:
    model, numel = MODELS[name], 0
    for number in range(3):
        stage = Stage.of(model, number, 3)
        planned = stage.build()
        assert planned.training and all(param.is_meta for param in planned.parameters())
        module = StageModule(built(stage), is_first=stage.is_first, is_last=stage.is_last)
        module(
            **{key: torch.ones_like(value, device="cpu") for key, value in stage.inputs(1, 16).items()}
        ).sum().backward()
        assert all(param.grad is not None for param in module.parameters())
        shapes = [{name: param.shape for name, param in each.named_parameters()} for each in (planned, module)]
        assert shapes[0] == shapes[1]
        numel += sum(param.numel() for param in module.parameters())
    whole = model.build()
    tied = whole.get_input_embeddings().weight.numel() if is_tied(whole) else 0
    assert numel == sum(param.numel() for param in whole.parameters()) + tied


def is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_as_many_operations_as_the_model(name: str) -> None:
    """By the same kernels: attention with a mask, and without one that is causal, differ by the masked half."""
    model, two = MODELS[name], Hardware.parse("2xa100-40g-1024g")

    def flops(part: Transformer, mesh: str) -> int:
        scenario = Scenario(part, two, 1, 16, Recompute.NONE, mesh=mesh, activations="keep")
        timeline = Scenarios().answer(scenario).timeline
        return 0 if timeline is None else timeline.flops.model

    parts = [Stage.of(model, number, 2) for number in range(2)]
    assert sum(flops(part, "pp=2") for part in parts) == flops(model, "dp_shard=2") > 0


def test_layers_are_divided_evenly_and_micro_batches_wait_as_by_1f1b() -> None:
    stages = [Stage.of(MODELS["gpt2"], number, 3) for number in range(3)]
    assert [stage.num_own_layers for stage in stages] == [1, 2, 2]
    assert [stage.in_flight(8) for stage in stages] == [3, 2, 1] and stages[0].in_flight(2) == 2
    assert [stage.title for stage in stages] == [f"gpt-tiny, stage {number} of 3" for number in (1, 2, 3)]
    between = [replace(stages[1], number=number, num_stages=8) for number in (1, 5)]
    assert between[0].capture_key == between[1].capture_key != stages[0].capture_key
    assert len({stage.capture_key for stage in stages}) == 3


def test_buffers_are_those_that_no_plan_counts() -> None:
    """Of 8 micro-batches each keeps 16 tokens x 32 elements of 2 bytes: what came in, and the gradient of what goes."""
    found = [Stage.of(MODELS["gpt2"], number, 3).buffers_nbytes(1, 16, 8, "auto", HW) for number in range(3)]
    assert found == [n * 16 * 32 * 2 for n in (8, 8 - 2 + 8, 8 - 1)]
    assert MODELS["gpt2"].buffers_nbytes(1, 16, 8, "auto", HW) == 0


def test_layers_of_several_kinds_stay_what_they_are() -> None:
    """Qwen 2 looks back over a window from some layer on."""
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    model = deep(replace(TINY_LLAMA, config={**TINY_LLAMA.config, **config}), 6)
    kinds = [Stage.of(model, number, 2).configuration().layer_types for number in range(2)]
    assert kinds[0] + kinds[1] == model.configuration().layer_types and kinds[0] != kinds[1]


def test_a_number_of_layers_under_two_names_is_one() -> None:
    """Of both names of GPT-2 transformers takes ``num_hidden_layers``."""
    model = replace(TINY_GPT, config={**TINY_GPT.config, "n_layer": 4, "num_hidden_layers": 6})
    assert model.num_layers == model.configuration().num_hidden_layers == 6
    assert model.with_depth(3).configuration().num_hidden_layers == 3
    assert [Stage.of(model, number, 2).num_own_layers for number in range(2)] == [3, 3]
    unsaid = replace(TINY_BERT, config={k: v for k, v in TINY_BERT.config.items() if k != "num_hidden_layers"})
    assert [Stage.of(unsaid, number, 2).num_own_layers for number in range(2)] == [6, 6]


def test_refusals() -> None:
    with pytest.raises(ChunkcError, match=r"pp=6: gpt-tiny has 5 layers"):
        Stage.of(MODELS["gpt2"], 0, 6)
    unknown = replace(TINY_LLAMA, config={**TINY_LLAMA.config, "model_type": "gemma3_text"})
    with pytest.raises(ChunkcError, match="is not divided into stages of a pipeline"):
        Stage.of(unknown, 0, 2)
    with pytest.raises(ChunkcError, match=r"bert, AutoModelForCausalLM\) is not divided"):
        Stage.of(replace(TINY_BERT, head=Head.CAUSAL), 0, 2)
    with pytest.raises(ChunkcError, match=r"bert-tiny is a decoder \(is_decoder\)"):
        Stage.of(deep(MODELS["masked bert"], 5, is_decoder=True), 0, 2)
