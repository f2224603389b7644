"""Layers that are computed again in backward: of all that they compute, only their inputs outlive forward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.schedule import Schedule
from chunkc.scenarios.models.transformer import checkpoint_layers

BATCH, TOKENS, WIDTH = 4, 16, 32
INPUT_NBYTES = 4 * BATCH * TOKENS * WIDTH
STATISTICS_NBYTES = 2 * 4 * BATCH * TOKENS
SHALLOW, DEEP = 2, 4


def schedule_of(model: nn.Module, inputs: Any, keep: float | None = None) -> Schedule:
    choose = None if keep is None else lambda schedule_with: (keep, "as the test says")
    return capture_ahead(model, torch.float32, inputs, "eager", choose).schedule


def growth_nbytes(of_depth: Callable[[int], Schedule]) -> list[float]:
    """Bytes that a layer adds to what forward saves, and to the most that is alive in backward."""
    schedules = [of_depth(num_layers) for num_layers in (SHALLOW, DEEP)]
    saved = [s.forward.operators[-1].live_after_nbytes for s in schedules]
    peaks = [max(op.live_nbytes for op in s.backward.operators) for s in schedules]
    return [(deep - shallow) / (DEEP - SHALLOW) for shallow, deep in (saved, peaks)]


# --- whole models -----------------------------------------------------------------------------------------------------


def gpt2(num_layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=num_layers, n_head=2, vocab_size=64, n_positions=TOKENS, use_cache=False, embd_pdrop=0.0,
        attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(num_layers: int) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=num_layers, num_attention_heads=2,
        vocab_size=64, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "layer_nbytes", "decided_by"),
    [
        pytest.param(gpt2, INPUT_NBYTES, "model", marks=pytest.mark.slow),
        (bert, INPUT_NBYTES + STATISTICS_NBYTES, "chunkc"),
        pytest.param(bert, INPUT_NBYTES + STATISTICS_NBYTES, "model", marks=pytest.mark.slow),
        pytest.param(gpt2, INPUT_NBYTES, "chunkc", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_a_transformer_adds_its_input_to_the_peak_of_backward(
    build: Callable[[int], nn.Module], layer_nbytes: int, decided_by: str
) -> None:
    """And, of BERT, whose layers end in a layer norm, its two statistics."""

    keep = None if decided_by == "model" else 0.0

    def captured(num_layers: int) -> Schedule:
        with torch.device("meta"):
            model = build(num_layers).train()
            tokens = torch.empty(BATCH, TOKENS, dtype=torch.long)
        if keep is None:
            checkpoint_layers(model, "the model")
        return schedule_of(model, {"input_ids": tokens, "labels": tokens}, keep)

    assert growth_nbytes(captured) == [layer_nbytes, layer_nbytes]


# --- what layers end in, and what stands between them -----------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))


class EndsInNorm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + super().forward(x))


class EndsInTranspose(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + super().forward(x)).transpose(0, 1)


class EndsInHalf(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.cat((x, x + super().forward(x)), dim=-1)
        return made.chunk(2, dim=-1)[1]


class Deep(nn.Module):
    def __init__(
        self, layer: type[Layer], num_layers: int, between: Callable[..., torch.Tensor], *, checkpointed: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self._between, self._checkpointed = between, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            made = checkpoint(layer, x, use_reentrant=False) if self._checkpointed else layer(x)
            x = self._between(x, made)
        return x.square().mean()


def nothing(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return made


def residual(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return given + made


def turned(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return (given + made).transpose(0, 1)


CASES: dict[str, tuple[type[Layer], Callable[..., torch.Tensor], int]] = {
    "a matrix product": (Layer, nothing, INPUT_NBYTES),
    "a layer norm": (EndsInNorm, nothing, INPUT_NBYTES + STATISTICS_NBYTES),
    "a transpose": (EndsInTranspose, nothing, INPUT_NBYTES),
    "one of two views": (EndsInHalf, nothing, 2 * INPUT_NBYTES),
    "a sum outside": (Layer, residual, INPUT_NBYTES),
    "a view outside": (Layer, turned, INPUT_NBYTES),
}


@pytest.mark.parametrize(
    "checkpointed", [pytest.param(True, marks=pytest.mark.slow, id="model"), pytest.param(False, id="chunkc")]
)
@pytest.mark.parametrize("case", CASES)
def test_a_layer_adds_its_input_to_the_peak_of_backward_whatever_it_ends_in(case: str, checkpointed: bool) -> None:
    layer, between, layer_nbytes = CASES[case]
    x = torch.randn(BATCH, TOKENS, WIDTH)

    def captured(num_layers: int) -> Schedule:
        model = Deep(layer, num_layers, between, checkpointed=checkpointed)
        return schedule_of(model, (x,), None if checkpointed else 0.0)

    assert growth_nbytes(captured) == [layer_nbytes, layer_nbytes]


@pytest.mark.parametrize("case", CASES)
def test_layers_computed_again_have_the_gradients_of_plain_ones(case: str) -> None:
    layer, between, _ = CASES[case]
    torch.manual_seed(0)
    plain = Deep(layer, 3, between, checkpointed=True)
    model = chunkc.compile(copy.deepcopy(plain), "emulated-64m-1g", backend="eager", dtype=torch.float32)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    losses = [m(x) for m in (plain, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(q.grad.clone(), p.grad, rtol=1e-6, atol=1e-8)


class Tied(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self._num_layers = num_layers

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        for _ in range(self._num_layers):
            x = checkpoint(self._layer, x, use_reentrant=False)
        return x.float().square().mean()


def test_layers_that_share_a_parameter_save_no_copy_of_it() -> None:
    """Equal casts in several layers are one node of the joint graph, which is no layer's input all the same."""
    x = torch.randn(BATCH, TOKENS, WIDTH)
    saved, _ = growth_nbytes(lambda num_layers: schedule_of(Tied(num_layers), (x,)))
    assert saved == INPUT_NBYTES // 2
