"""Forwards that take another parameter, or see another attribute of one, from call to call: as in plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import chunkc

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Clamped(nn.Module):
    """Equal blocks that break into the same resume functions, as overflow clamps of transformers' T5 do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = clamped(block, x)
        return x.sin().sum()


def clamped(block: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = block[0](x)
    if hidden.sum().item() > 1e9:
        hidden = hidden * 0
    return block[1](hidden).tanh()


class Chosen(nn.Module):
    """Layers by the order of a plain list, a parameter that is given, a flag on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.choose(0, 1)

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        for module in self.chosen:
            x = module(x).tanh()
        if given is not None:
            x = x @ given
        if getattr(self.head.weight, "is_doubled", False):
            x = x * 2
        return self.head(x).sin().sum()

    def choose(self, *numbers: int) -> None:
        self.chosen = [self.layers[number] for number in numbers]


def both(make: Callable[[], nn.Module]) -> tuple[Any, Any, chunkc.AdamW]:
    torch.manual_seed(0)
    plain = make()
    model = chunkc.compile(copy.deepcopy(plain), "emulated-64m-2g", dtype=torch.float32, backend="eager")
    return plain, model, chunkc.AdamW(model.parameters(), lr=0.0)


def check(plain: Any, model: Any, optimizer: chunkc.AdamW, given: str = "") -> None:
    """Loss and gradients are those of the plain model."""
    losses = []
    for one in (plain, model):
        loss = one(X, one.get_parameter(given)) if given else one(X)
        one.zero_grad()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (wanted.grad is None) == (found.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad + 0, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.long
def test_blocks_that_break_alike_keep_their_own_parameters() -> None:
    plain, model, optimizer = both(Clamped)
    for _ in range(3):
        check(plain, model, optimizer)


def test_layers_in_another_order() -> None:
    plain, model, optimizer = both(Chosen)
    for numbers in ((0, 1, 2), (1, 0, 2), (0, 1, 2), (2, 1, 0)):
        plain.choose(*numbers)
        model.choose(*numbers)
        check(plain, model, optimizer)


def test_a_parameter_that_is_an_argument() -> None:
    plain, model, optimizer = both(Chosen)
    for one in (plain, model):
        one.choose(0, 1, 2)
    for given in ("layers.0.weight", "layers.2.weight") * 2:
        check(plain, model, optimizer, given)


def test_a_flag_on_a_parameter() -> None:
    plain, model, optimizer = both(Chosen)
    for is_doubled in (False, True, False):
        for one in (plain, model):
            one.choose(0, 1)
            one.head.weight.is_doubled = is_doubled
        check(plain, model, optimizer)


def test_a_parameter_that_is_tied_to_another_one() -> None:
    def tied() -> nn.Module:
        made = Chosen()
        made.layers[2].weight = made.layers[1].weight
        return made

    plain, model, optimizer = both(tied)
    for source in (1, 0):
        for one in (plain, model):
            one.layers[2].weight = one.layers[source].weight
            one.choose(0, 1, 2)
        check(plain, model, optimizer)


def test_a_frozen_parameter() -> None:
    plain, model, optimizer = both(Chosen)
    for is_frozen in (False, True, False):
        for one in (plain, model):
            one.choose(0, 1)
            one.head.weight.requires_grad_(not is_frozen)
        check(plain, model, optimizer)


def test_a_gradient_that_the_user_marked_or_keeps_is_no_later_one() -> None:
    _, model, optimizer = both(Chosen)
    model.choose(0, 1)
    weight, kept = model.head.weight, list[torch.Tensor]()
    for change in ("nothing", "attribute", "requires grad", "kept", "nothing"):
        model(X).backward()
        assert not hasattr(weight.grad, "mark") and not weight.grad.requires_grad
        assert not any(weight.grad is grad for grad in kept)
        if change == "attribute":
            weight.grad.mark = 1
        if change == "requires grad":
            weight.grad.requires_grad_(True)
        if change == "kept":
            kept.append(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(chunkc.ChunkcError, match="gradient"):
        _ = kept[0] + 0
