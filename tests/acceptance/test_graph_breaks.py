"""Forwards that break into several graphs train exactly, and the breaks are listed; ``fullgraph=True`` refuses them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of


class Breaking(nn.Module):
    """Tokens to a loss through blocks, with breaks between them; the head is tied to the embedding."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.side = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks[:1]:
            hidden = hidden + block(hidden)
        hidden = self.between(hidden)
        for block in self.blocks[1:2]:
            hidden = hidden + block(hidden)
        hidden = self.between(hidden)
        for block in self.blocks[2:]:
            hidden = hidden + block(hidden)
        logits = hidden @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Item(Breaking):
    """Reads a value on the host."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / max(1.0, abs(hidden.mean().item()))


class Broken(Breaking):
    """Breaks, as a print would."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return hidden


class Branch(Breaking):
    """Uses a layer, or not, as the data says."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.flatten()[0] > 0:
            return hidden + self.side(hidden).tanh()
        return hidden * 0.5


class Skipped(Breaking):
    """Runs layers in a frame that Dynamo skips."""

    @torch.compiler.disable
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.side(hidden).tanh() + self.blocks[0](hidden)


class Frozen(Breaking):
    """A graph of its own that trains nothing stands between."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.frozen(hidden.detach())
            torch._dynamo.graph_break()
            gate = gate.sigmoid().mean().item()
        return hidden * gate


MODELS = [Item, Broken, Branch, Skipped, Frozen]


def batch(seed: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 50, (2, 4, length), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]


def pair_of(kind: type[Breaking], hw: str = "emulated-460k-32m", **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(hw, kind(), **options)


def train(pair: Pair, seed: int, length: int = 8) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(*batch(seed, length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    ours, plain = pair.both(step)
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.long(but="Item")
@pytest.mark.parametrize("kind", [*MODELS[:-1], pytest.param(Frozen, marks=pytest.mark.slow)])
def test_training_is_exact_in_a_small_budget(kind: type[Breaking]) -> None:
    pair = pair_of(kind)
    for seed in range(6):
        train(pair, seed)
        pair.check()
    stats = chunkc.stats(pair.model)
    assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"]
    assert stats["h2d_nbytes"] > 0, "the budget is meant to force moves"
    assert stats["budget_nbytes"] < stats["model_data_nbytes"] / 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_of_the_first_and_of_later_steps(backend: str) -> None:
    """The first backward runs without a plan, the second by one; a tied gradient has parts in two graphs.

    The plain model takes over our parameters before each, so that no rounding of earlier updates is in the gradients.
    """
    pair = pair_of(Broken, backend=backend)
    for seed in range(3):
        pair.plain.load_state_dict(pair.model.state_dict())
        pair.both(lambda model, _, seed=seed: model(*batch(seed)).backward())
        largest = max(p.grad.abs().max() for p in pair.plain.parameters() if p.grad is not None)
        for (name, ours), plain in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
            assert (ours.grad is None) == (plain.grad is None), name
            if plain.grad is not None:
                found = ours.grad.clone()
                torch.testing.assert_close(found, plain.grad, rtol=0, atol=1e-6 * largest.item(), msg=name)
        pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))


def test_breaks_are_listed_with_their_source_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "chunkc"):
        pair = pair_of(Broken)
        train(pair, 0)
    found = [r.getMessage() for r in caplog.records if "breaks:" in r.getMessage()]
    assert found
    assert all("test_graph_breaks.py" in text and text.endswith("graph_break()") for text in found)
    assert compiled_of(pair.model).breaks.reasons == [text.split("breaks: ")[1] for text in found]


def test_fullgraph_refuses_a_break_before_anything_changes() -> None:
    pair = pair_of(Broken, fullgraph=True)
    with pytest.raises(chunkc.CaptureError, match=r"(?s)fullgraph=True.*graph_break\(\)"):
        pair.model(*batch(0))
    pair.check()


@pytest.mark.slow
def test_other_shapes_and_rhythms() -> None:
    """Shapes before and after the plan, evaluations, a skipped step, and two forwards."""
    pair = pair_of(Broken, "emulated-640k-32m")
    for seed, length in enumerate((8, 6, 8, 5, 6)):
        train(pair, seed, length)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        with torch.no_grad():
            found = model(*batch(30)).item()
        loss = model(*batch(31))
        model(*batch(32))
        loss.backward()
        model.zero_grad()
        model(*batch(33)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    ours, plain = pair.both(step)
    assert ours == pytest.approx(plain, rel=1e-5)
    pair.check()
    with pytest.raises(chunkc.AccumulationError):
        (pair.model(*batch(1)) + pair.model(*batch(2))).backward()
    pair.model.zero_grad()
    pair.check()
    train(pair, 40)
    pair.check()


class Lookup(nn.Module):
    """Its backward reads no parameter, so autograd lets it run after the parameters have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(50, 16), nn.Embedding(50, 16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.first(tokens)
        torch._dynamo.graph_break()
        return ((hidden + self.second(targets)) ** 2).mean()


def test_a_backward_after_the_first_step_of_a_forward_before_it() -> None:
    """The forward ran without a plan, its backward runs by one."""
    pair = Pair("emulated-128k-32m", Lookup())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        early = model(*batch(0))
        model(*batch(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        early.backward()
        optimizer.step()
        optimizer.zero_grad()

    pair.both(step)
    pair.check()
    train(pair, 3)
    pair.check()


@pytest.mark.long
def test_before_the_first_step_nothing_is_planned() -> None:
    """A first backward that is not stepped leaves parameters as they are; the plan comes with the first step."""
    pair = pair_of(Broken)
    pair.both(lambda model, _: (model(*batch(0)).backward(), model.zero_grad()))
    pair.check()
    with pytest.raises(chunkc.PlanNotReadyError):
        chunkc.plan_of(pair.model)
    train(pair, 1)
    assert "graph" in chunkc.plan_of(pair.model).summary()
    pair.check()


@pytest.mark.long
def test_a_model_that_does_not_fit_is_refused_at_the_first_step() -> None:
    """The gradients stay, and the model can go on in nothing smaller than what the error names."""
    pair = pair_of(Broken, "emulated-64k-32m")
    pair.both(lambda model, _: model(*batch(0)).backward())
    with pytest.raises(chunkc.BudgetError) as found:
        pair.optimizer.step()
    pair.check()
    assert all(torch.isfinite(p.grad.clone()).all() for p in pair.model.parameters() if p.grad is not None)
    kilobytes = [-(-n // 1024) for n in (found.value.min_device_nbytes, found.value.min_host_nbytes)]
    enough = pair_of(Broken, "emulated-{}k-{}k".format(*kilobytes))
    for seed in range(2):
        train(enough, seed)
    enough.check()


@pytest.mark.long
def test_optimizer_states_survive_the_first_step() -> None:
    """States loaded before there is a plan, and those saved after, are torch's."""
    pair = pair_of(Broken)
    train(pair, 0)
    saved, weights = pair.optimizer.state_dict(), pair.model.state_dict()
    other = pair_of(Broken)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(saved)
    other.plain.load_state_dict(pair.plain.state_dict())
    other.plain_optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    for seed in range(1, 4):
        train(other, seed)
    other.check()


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(Broken, marks=pytest.mark.slow), Skipped])
def test_mixed_precision_has_fp32_masters(kind: type[Breaking]) -> None:
    """Losses in bf16 stay near those of fp32, and an update smaller than bf16 can show is kept."""
    pair = pair_of(kind, dtype=torch.bfloat16)
    before = pair.model.state_dict()
    for seed in range(3):
        ours, plain = pair.both(lambda model, _, seed=seed: model(*batch(seed)))
        assert ours.item() == pytest.approx(plain.item(), rel=2e-2)
        for loss, optimizer in ((ours, pair.optimizer), (plain, pair.plain_optimizer)):
            loss.backward()
            optimizer.param_groups[0]["lr"] = 1e-5
            optimizer.step()
            optimizer.zero_grad()
    after, plain_after = pair.model.state_dict(), pair.plain.state_dict()
    for name in ("blocks.1.1.weight", "embed.weight"):
        moved, wanted = after[name] - before[name], plain_after[name] - before[name]
        assert moved.abs().max() > 0
        # Adam's first steps are lr times the gradient's sign, which bf16 may turn where a gradient is near zero.
        is_near = (moved - wanted).abs() <= 0.1 * wanted.abs().max()
        assert is_near.float().mean() > 0.98, name
