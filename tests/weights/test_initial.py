"""Values that stand in no file: buffers of models from the meta device, given by the modules' own initialisation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import CASES
from pretrained import HW
from torch import nn

import chunkc
from chunkc import ChunkcError
from chunkc.weights.initial import initial_values, moved_buffers

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
}


def roped(kind: str) -> nn.Module:
    rope = {"rope_type": kind, "rope_theta": 5000.0, **ROPES[kind]}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, max_position_embeddings=32, rope_parameters=rope)
    )


def gemma() -> nn.Module:
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**LLAMA, head_dim=8, num_key_value_heads=2, max_position_embeddings=32)
    )


class Rotary(nn.Module):
    """Torch's convention: what the constructor computes, ``reset_parameters`` computes again."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("table", torch.empty(8, 4), persistent=False)
        self.register_buffer("order", torch.empty(8, dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        torch.arange(8, out=self.order)
        if self.broken:
            self.order[0] = int(self.weight[0])
        self.frequencies.copy_(1e4 ** -(torch.arange(4) / 4))
        self.table[: 7 if self.broken else 8] = torch.outer(torch.arange(8), self.frequencies)[
            : 7 if self.broken else 8
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table[self.order] * self.weight * x).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: case.build for name, case in CASES.items()},
    **{f"rope {kind}": (lambda kind=kind: roped(kind)) for kind in ROPES},
    "gemma": gemma,
    "rotary": Rotary,
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_buffers_from_meta_are_those_of_the_model_built_on_the_cpu(name: str) -> None:
    plain = MODELS[name]()
    with torch.device("meta"):
        model = MODELS[name]()
    seed = torch.get_rng_state()
    chunkc.compile(model, HW, backend="eager")
    assert torch.equal(torch.get_rng_state(), seed), "no random numbers are used up"
    wanted, found = dict(plain.named_buffers()), dict(model.named_buffers())
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype and torch.equal(found[key], value), key


def test_what_an_initialisation_leaves_out_is_refused_by_name_and_the_model_stays_as_it_was() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"good": Rotary(), "bad": Rotary.__new__(Rotary)})
        nn.Module.__init__(model["bad"])
        model["bad"].__dict__.update(Rotary().__dict__ | {"broken": True})
    with pytest.raises(ChunkcError, match=r"buffers bad\.frequencies .*bad\.table .*bad\.order .*Assign real tensors"):
        chunkc.compile(model, HW, backend="eager")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model["bad"].broken = False
    chunkc.compile(model, HW, backend="eager")
    assert torch.equal(model["bad"].table, model["good"].table)


def test_a_buffer_written_in_part_is_not_known() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.ones(3))

        def reset_parameters(self) -> None:
            self.table[:2] = 1.0

    with torch.device("meta"):
        model = nn.Sequential(Part())
    with pytest.raises(ChunkcError, match=r"buffers 0\.table \(torch\.float32, \(3,\)\) are on the meta device"):
        chunkc.compile(model, HW, backend="eager")


def test_parameters_are_drawn_as_the_module_draws_them_and_known_ones_stay_out() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    plain, wanted = nn.Linear(5, 4), {"1.weight": torch.float32, "1.bias": torch.float32}
    torch.manual_seed(4)
    plain.reset_parameters()
    torch.manual_seed(4)
    found = initial_values(model, wanted)
    assert set(found) == set(wanted)
    assert torch.equal(found["1.weight"], plain.weight) and torch.equal(found["1.bias"], plain.bias)
    assert all(p.is_meta for p in model.parameters())


def test_a_tied_parameter_and_a_model_without_initialisation() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), Own()])
        model[1].weight = model[0].weight
    found = initial_values(model, {"0.weight": torch.bfloat16, "2.scale": torch.float32})
    assert set(found) == {"0.weight"} and found["0.weight"].dtype is torch.bfloat16


def test_buffers_move_to_the_device_and_stay_shared() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean
    before = dict(model.named_buffers(remove_duplicate=False))
    moved = moved_buffers(model, torch.device("meta"))
    assert all(before[name] is value for name, value in model.named_buffers(remove_duplicate=False)), "nothing yet"
    assert {b.device.type for _, _, b in moved} == {"meta"} and len(moved) == len(before)
    shared = [b for _, name, b in moved if name == "running_mean"]
    assert shared[0] is shared[1]
    assert moved_buffers(model, torch.device("cpu")) == []
