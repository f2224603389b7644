"""Parameters that the loss does not reach, or that were frozen after the forward, are left alone as in plain PyTorch.

They get no gradient, no update, no decay, and no step is counted. Every element of gradients, parameters and optimizer
states is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from heads import Auxiliary, Broken, Heads, Loss, Views, loss_of, rows
from pair import Pair
from torch import nn
from transformers import BertConfig, BertModel

import chunkc

PLACES = {"resident": "emulated-64m-1g", "moving": "emulated-96k-16m"}
SOME_STEPS = ("ab", "a", "b", "a", "ab", "a")
"""Which heads the loss of a step uses."""


def check_gradients(pair: Pair) -> None:
    """Which parameters have one, and every element of it."""
    ours = dict(pair.model.named_parameters())
    for name, param in pair.plain.named_parameters():
        assert (ours[name].grad is None) == (param.grad is None), name
        if param.grad is not None:
            _assert_close(ours[name].grad.clone(), param.grad, name)


def check_states(pair: Pair) -> None:
    """Every element of parameters, buffers, moments and step counts."""
    pair.check()
    ours, plain = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    assert ours.keys() == plain.keys()
    for key, state in plain.items():
        for kind, value in state.items():
            _assert_close(ours[key][kind], value, f"{kind} of {key}")


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")


def train(pair: Pair, batches: Sequence[torch.Tensor], losses: Sequence[Loss]) -> None:
    """One step over these micro-batches."""
    for model in (pair.model, pair.plain):
        for x, loss in zip(batches, losses, strict=True):
            loss(model(x)).backward()
    check_gradients(pair)
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long(but="Heads-moving")
@pytest.mark.parametrize(
    ("make", "place"), [(Heads, "resident"), (Heads, "moving"), (Views, "moving"), (Broken, "moving")]
)
def test_heads_used_in_some_steps(make: Callable[[], nn.Module], place: str) -> None:
    pair = Pair(PLACES[place], make())
    for step, heads in enumerate(SOME_STEPS):
        train(pair, [rows(step)], [loss_of(heads)])
    check_states(pair)
    stats = chunkc.stats(pair.model)
    assert (stats["h2d_nbytes"] > 0) == (place == "moving")


@pytest.mark.long
def test_auxiliary_head_used_in_every_second_step() -> None:
    pair = Pair("emulated-64m-1g", Auxiliary())
    for step in range(4):
        train(pair, [rows(step, 3, 8, 8)], [loss_of("ab" if step % 2 else "a")])
    check_states(pair)


@pytest.mark.long
def test_pooler_that_nobody_uses() -> None:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    pair = Pair("emulated-64m-1g", BertModel(config))
    for step in range(3):
        tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step))
        train(pair, [tokens], [lambda outputs: outputs.last_hidden_state.pow(2).mean()])
    pooler = {name: value for name, value in pair.initial.items() if name.startswith("pooler")}
    assert pooler
    for name, value in pair.model.state_dict().items():
        assert name not in pooler or torch.equal(value, pooler[name])
    check_states(pair)


@pytest.mark.long(but="Heads")
@pytest.mark.parametrize("make", [Heads, Broken])
def test_micro_batches_that_use_other_heads(make: Callable[[], nn.Module]) -> None:
    """A gradient is the sum over the micro-batches that reach the parameter."""
    pair = Pair(PLACES["moving"], make(), accumulate=2)
    for step, heads in enumerate((("a", "ab"), ("a", "a"), ("ab", "a"), ("b", "a"), ("ab", "b"))):
        train(pair, [rows(2 * step), rows(2 * step + 1)], [loss_of(h) for h in heads])
    check_states(pair)


def test_one_backward_through_forwards_that_use_other_heads() -> None:
    pair = Pair(PLACES["resident"], Heads(), accumulate=2)
    for step, heads in enumerate((("a", "b"), ("a", "a"), ("b", "ab"))):
        for model in (pair.model, pair.plain):
            losses = [loss_of(used)(model(rows(2 * step + part))) for part, used in enumerate(heads)]
            torch.stack(losses).sum().backward()
        check_gradients(pair)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    check_states(pair)


def test_backward_to_all_that_the_loss_reaches() -> None:
    """Naming exactly these leaves nothing out; naming fewer is refused."""
    pair = Pair(PLACES["resident"], Heads())
    for model in (pair.model, pair.plain):
        loss_of("a")(model(rows(0))).backward(inputs=[*model.trunk.parameters(), *model.first.parameters()])
    check_gradients(pair)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    loss = loss_of("a")(pair.model(rows(1)))
    with pytest.raises(chunkc.ChunkcError, match=r"leaves out the gradients of first\.bias"):
        loss.backward(inputs=[*pair.model.trunk.parameters(), pair.model.first.weight])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_measures_what_the_loss_reaches(accumulate: int) -> None:
    """Without waiting for the device; the norm is that of the gradients that there are."""
    pair = Pair(PLACES["moving"], Heads(), accumulate=accumulate)
    pair.optimizer = chunkc.AdamW(pair.model.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=0.05)
    for step, heads in enumerate(SOME_STEPS):
        for model in (pair.model, pair.plain):
            for part in range(accumulate):
                loss_of(heads)(model(rows(2 * step + part))).backward()
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    assert chunkc.stats(pair.model)["num_unasked_syncs"] == 0
    check_states(pair)


def test_what_is_withheld_does_not_overflow() -> None:
    """In fp16 an infinite activation makes NaN of the gradient of an unused head: no step is skipped for it."""
    pair = Pair("emulated-64m-1g", Heads(), dtype=torch.float16)
    optimizer = pair.optimizer
    with torch.no_grad():
        pair.model.second[0].weight.fill_(60000.0)
    before = {name: value.clone() for name, value in pair.model.state_dict().items()}
    for step in range(2):
        loss_of("a")(pair.model(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = pair.model.state_dict()
    for name, value in after.items():
        assert torch.equal(value, before[name]) == name.startswith("second"), name
    counts = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert counts == {2}


@pytest.mark.long(but="Heads-1")
@pytest.mark.parametrize(("make", "accumulate"), [(Heads, 1), (Heads, 2), (Broken, 1)])
def test_frozen_between_forward_and_backward(make: Callable[[], nn.Module], accumulate: int) -> None:
    """Whether a parameter gets a gradient is decided at backward; the norm is that of the gradients that there are."""
    pair = Pair(PLACES["moving"], make(), accumulate=accumulate)
    for step in range(4):
        for model in (pair.model, pair.plain):
            for part in range(accumulate):
                loss = loss_of("ab")(model(rows(2 * step + part)))
                frozen = [model.trunk[0].weight, model.first.bias] if step % 2 and part == 0 else []
                for param in frozen:
                    param.requires_grad_(False)
                loss.backward()
                for param in frozen:
                    param.requires_grad_(True)
        check_gradients(pair)
        norm = chunkc.clip_grad_norm_(pair.model, 0.05)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05), rtol=1e-5, atol=0)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    check_states(pair)


def test_all_frozen_between_forward_and_backward() -> None:
    pair = Pair(PLACES["resident"], Heads())
    train(pair, [rows(0)], [loss_of("ab")])
    for model in (pair.model, pair.plain):
        loss = loss_of("ab")(model(rows(1)))
        model.requires_grad_(False)
        loss.backward()
        model.requires_grad_(True)
    check_gradients(pair)
    train(pair, [rows(2)], [loss_of("ab")])
    check_states(pair)


def test_parameters_are_read_while_their_gradient_is_withheld() -> None:
    """Between backward and step: a parameter, an evaluation, a state dict, a new value."""
    pair = Pair(PLACES["moving"], Heads())
    train(pair, [rows(0)], [loss_of("ab")])
    for model in (pair.model, pair.plain):
        loss_of("a")(model(rows(1))).backward()
    bias = pair.model.second[0].bias
    assert bias.grad is None
    torch.testing.assert_close(bias.detach().clone(), pair.plain.second[0].bias, rtol=0, atol=1e-5)
    torch.testing.assert_close(pair.model.state_dict(), pair.plain.state_dict(), rtol=0, atol=1e-5)
    with torch.no_grad():
        for found, wanted in zip(*(model(rows(2)) for model in (pair.model, pair.plain)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        for model in (pair.model, pair.plain):
            model.second[0].bias.fill_(0.25)
    check_states(pair)


def test_gradient_that_stood_there_stays() -> None:
    """A gradient that the script assigned, or zeroed, is stepped as it is although backward makes none."""
    pair = Pair(PLACES["resident"], Heads())
    train(pair, [rows(0)], [loss_of("ab")])
    for model in (pair.model, pair.plain):
        model.second[2].bias.grad = torch.full((3,), 0.5)
    train(pair, [rows(1)], [loss_of("a")])
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        for heads in ("ab", "a"):
            loss_of(heads)(model(rows(2))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    check_states(pair)


def clip_by_torch(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def add_to_gradients(model: nn.Module) -> None:
    """In a gradient of zeros too."""
    for param in model.second.parameters():
        param.grad.add_(0.25)


@pytest.mark.long(but="Heads-add_to_gradients-1")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("change", [clip_by_torch, add_to_gradients])
@pytest.mark.parametrize("make", [Heads, Broken])
def test_zeroed_gradient_that_no_backward_added_to_is_zeros(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], None], accumulate: int
) -> None:
    """Whether its payload holds the parameter again or zeros of a withheld gradient: it is read, written, stepped."""
    pair = Pair(PLACES["moving"], make(), accumulate=accumulate)
    for step, losses in enumerate((("ab", "ab"), ("a", "a"), ("a", "ab"), ("b", "b"), ("a", "b"))):
        for model in (pair.model, pair.plain):
            for part, heads in enumerate(losses[:accumulate]):
                loss_of(heads)(model(rows(2 * step + part))).backward()
        check_gradients(pair)
        for model in (pair.model, pair.plain):
            change(model)
        check_gradients(pair)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        check_gradients(pair)
    check_states(pair)


def test_stepped_gradient_that_nobody_zeroed_is_refused() -> None:
    """Plain PyTorch would step it once more; it is gone, and zeros in its place would not be it."""
    pair = Pair(PLACES["resident"], Heads())
    loss_of("ab")(pair.model(rows(0))).backward()
    pair.optimizer.step()
    for part in (pair.model.trunk, pair.model.first):
        part.zero_grad()
    loss_of("a")(pair.model(rows(1))).backward()
    with pytest.raises(chunkc.ChunkcError, match=r"second.*an earlier step\(\) consumed"):
        pair.optimizer.step()


def test_inputs_that_the_loss_does_not_reach_get_no_gradient() -> None:
    class Sides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x), self.right(y)

    pair = Pair(PLACES["resident"], Sides())
    for model in (pair.model, pair.plain):
        x, y = (rows(i).requires_grad_() for i in range(2))
        model(x, y)[0].sum().backward()
        assert x.grad is not None and y.grad is None
