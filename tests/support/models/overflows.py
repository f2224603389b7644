"""A model whose gradients overflow where they are asked to, and what such a step must leave as it is."""

import copy
from typing import Any

import torch
from pair import Pair, Tower
from torch import nn

from chunkc.compiler.compiled_model import compiled_of

INTERVAL = 3
"""Steps without overflow after which scales grow in tests."""


class Poisoned(Tower):
    """A tower whose backward makes the gradient of one parameter infinite or NaN where it is asked to."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + (self.layers[1][1].bias.float() * bad).sum()


def poisonous(kind: int) -> torch.Tensor:
    """What the gradient of one bias has beside it: infinity or NaN in one element."""
    bad = torch.zeros(192)
    bad[7] = float("inf") if kind else float("nan")
    return bad


def scale_of(model: nn.Module) -> float:
    return float(compiled_of(model).runtime.clipping.loss_scale.scale)


def grow_soon(model: nn.Module) -> None:
    """The default interval of 2000 steps is long for a test."""
    scale = compiled_of(model).runtime.clipping.loss_scale
    assert (scale.growth_interval, scale.growth_factor, scale.backoff_factor) == (2000, 2.0, 0.5)
    scale.growth_interval = INTERVAL


def state_of(pair: Pair) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, torch.Tensor]]]:
    params = {n: p.detach().clone() for n, p in pair.model.named_parameters()}
    return params, copy.deepcopy(pair.optimizer.state_dict()["state"])


def check_stepped(pair: Pair, tolerance: float = 2**-7) -> None:
    """First moments are those of fp32, within the precision of fp16: Adam's step would forgive a wrong scale."""
    ours, plain = (o.state_dict()["state"] for o in (pair.optimizer, pair.plain_optimizer))
    assert ours.keys() == plain.keys()
    largest = max(float(state["exp_avg"].abs().max()) for state in plain.values())
    for key, state in plain.items():
        assert float(ours[key]["step"]) == float(state["step"])
        torch.testing.assert_close(ours[key]["exp_avg"], state["exp_avg"], rtol=0, atol=tolerance * largest)


def assert_same_state(found: Any, wanted: Any) -> None:
    assert found[0].keys() == wanted[0].keys() and found[1].keys() == wanted[1].keys()
    for name, value in wanted[0].items():
        assert torch.equal(found[0][name], value), name
    for key, state in wanted[1].items():
        assert all(torch.equal(found[1][key][k], v) for k, v in state.items()), key
