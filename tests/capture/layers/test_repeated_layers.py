"""The list of layers that are alike: what makes layers alike, and a model with few of them."""

from collections.abc import Callable

import pytest
import torch
import transformers
from tiny_transformers import TINY_BERT, TINY_GPT
from torch import nn

from chunkc.capture.layers.repeated_layers import RepeatedLayers
from chunkc.scenarios.models import Transformer


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.scale, self.kinds = number, 0.5, ("full", 3)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.mask * self.scale


class Model(nn.Module):
    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(Layer(i) for i in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def with_other_shape(model: Model) -> None:
    model.layers[5].linear = nn.Linear(4, 4, bias=False)


def with_other_attribute(model: Model) -> None:
    model.layers[5].scale = 0.25


def with_every_second_otherwise(model: Model) -> None:
    for number, layer in enumerate(model.layers):
        layer.kinds = ("sliding" if number % 2 else "full", 3)


def with_other_order_of_numbers(model: Model) -> None:
    model.layers[5].number, model.layers[6].number = 6, 5


def with_other_class(model: Model) -> None:
    model.layers[5] = nn.Linear(4, 4)


def with_one_layer_twice(model: Model) -> None:
    model.layers[5] = model.layers[4]


def with_a_shared_weight(model: Model) -> None:
    model.layers[5].linear.weight = model.embedding.weight


def with_a_hook(model: Model) -> None:
    model.layers[5].register_forward_hook(lambda *_: None)


def with_frozen_weights(model: Model) -> None:
    model.layers[5].linear.weight.requires_grad_(False)


def with_another_list(model: Model) -> None:
    model.others = nn.ModuleList(Layer(i) for i in range(8))


def test_layers_that_count_themselves_are_alike() -> None:
    model = Model()
    found = RepeatedLayers.of(model, 8)
    assert found is not None and (found.parent, found.name, found.num_layers) == (model, "layers", 8)
    assert RepeatedLayers.of(model, 9) is None
    model.layers[0].scale = 2.0
    assert RepeatedLayers.of(model, 8) is not None, "the first is in every capture"


@pytest.mark.parametrize(
    "change",
    [
        with_other_shape,
        with_other_attribute,
        with_every_second_otherwise,
        with_other_order_of_numbers,
        with_other_class,
        with_one_layer_twice,
        with_a_shared_weight,
        with_a_hook,
        with_frozen_weights,
        with_another_list,
    ],
)
def test_layers_that_differ_are_not_alike(change: Callable[[Model], None]) -> None:
    model = Model()
    change(model)
    assert RepeatedLayers.of(model, 8) is None


def test_lists_within_layers_are_no_layers_of_the_model() -> None:
    model = Model()
    for layer in model.layers:
        layer.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    found = RepeatedLayers.of(model, 8)
    assert found is not None and found.name == "layers"


@pytest.mark.parametrize("transformer", [TINY_GPT, TINY_BERT], ids=lambda t: t.label)
@pytest.mark.parametrize("recompute", [False, True])
def test_models_of_transformers_have_such_layers(transformer: Transformer, recompute: bool) -> None:
    found = RepeatedLayers.of(transformer.with_depth(9).build(recompute=recompute), 6)
    assert found is not None and found.num_layers == 9


def test_layers_whose_attention_alternates_are_not_alike() -> None:
    config = transformers.Gemma2Config(
        num_hidden_layers=8, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, vocab_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        assert RepeatedLayers.of(transformers.Gemma2ForCausalLM(config), 6) is None


def test_a_model_has_few_layers_in_the_block_and_all_behind_it() -> None:
    model, tokens = Model(), torch.tensor([1, 2])
    found, layers, whole = RepeatedLayers.of(model, 8), model.layers, model(tokens)
    assert found is not None
    with found.shortened(3):
        assert isinstance(model.layers, nn.ModuleList) and list(model.layers) == list(layers)[:3]
        assert len(list(model.parameters())) == 1 + 3 * 2
        assert model(tokens) != whole
    assert model.layers is layers and model(tokens) == whole
    with pytest.raises(RuntimeError, match="wrong"), found.shortened(3):
        raise RuntimeError("wrong")
    assert model.layers is layers
