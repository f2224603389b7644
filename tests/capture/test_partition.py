"""The cone rule: nothing that aliases or casts a parameter's payload outlives the operator that needs it."""

from collections.abc import Callable

import pytest
import torch
from captures import capture_once
from torch import nn

import chunkc
from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.partition import param_cone


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 4))
        self.b = nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.a.t())
        folded = self.b.view(4, 6)
        hidden = torch.tanh(hidden @ folded.t()) @ folded[:, :4]
        half = self.a.to(torch.bfloat16)
        return (hidden.to(torch.bfloat16) @ half.t()).float().square().sum() + (hidden @ self.a.t()).sum()


def crossing(graph: CapturedGraph) -> list[str]:
    params = [n for n in graph.module.graph.find_nodes(op="placeholder") if n.name in graph.params]
    cone = param_cone(graph.module.graph, params) - set(params)
    bundle_of = {n: i for i, bundle in enumerate(graph.bundles) for n in bundle.nodes}
    return [n.name for n in cone for user in n.users if bundle_of.get(user) != bundle_of[n]]


def test_views_and_casts_stay_in_front_of_their_one_consumer() -> None:
    captured = capture_once(Wide(), torch.randn(3, 4))
    for graph in (captured.forward, captured.backward):
        assert crossing(graph) == []
        views = [n for b in graph.bundles for n in b.nodes if n is not b.main]
        assert views, "the example is meant to have views of parameters"


def test_only_raw_placeholders_are_saved_for_backward() -> None:
    captured = capture_once(Wide(), torch.randn(3, 4))
    forward = captured.forward.module.graph
    params = [n for n in forward.find_nodes(op="placeholder") if n.name in captured.forward.params]
    outputs = forward.find_nodes(op="output")[0].all_input_nodes
    assert set(outputs) & (param_cone(forward, params) - set(params)) == set()
    storages = {p.meta["val"].untyped_storage()._cdata for p in params}
    saved = [n for n in outputs if n not in params and isinstance(n.meta.get("val"), torch.Tensor)]
    assert all(n.meta["val"].untyped_storage()._cdata not in storages for n in saved)
    assert set(captured.backward.params.values()) == {0, 1}


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ self.weight).sum(), self.weight.t()


class MutatesParameter(ReturnsView):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.no_grad():
            self.weight.mul_(0.5)
        return (x @ self.weight).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ReturnsView, "a view or a cast of a parameter"),
        (MutatesParameter, "mutates its own parameters weight"),
    ],
)
def test_a_forward_that_hands_out_or_mutates_a_parameter_is_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(chunkc.CaptureError, match=message):
        capture_once(make(), torch.randn(3, 4))
