"""Acceptance (b) and case 1: every named model trains as eager PyTorch with torch.optim.AdamW does, in fp32.

Under the smallest budget that works, at eps=1e-4: gradients of the first step through ``p.grad``, and after twenty
steps every element of parameters and moments, and every loss.
"""

from __future__ import annotations

import pytest
import torch
from equalities import check_semantics
from placements import coarse, smallest
from plan_runner import GetRunner
from training import SEMANTICS, GetPlain

SLOW = ("gpt2", "bert", "vit")
"""gpt2 trains as plain PyTorch in test_sixteen_bits, bert's layers in albert; vit's convolution in resnet."""
MODELS = ("llama", "albert", "t5", "mixtral", "resnet", "odd", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW))
INDUCTOR = ("odd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2_small", "gpt2", "llama", "t5", "vit")))


@pytest.mark.long(but="llama")
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_plain_pytorch(name: str, runner_of: GetRunner, plain_of: GetPlain) -> None:
    runner = runner_of(name)
    check_semantics(runner, plain_of(name, SEMANTICS), smallest(runner))


@pytest.mark.long
@pytest.mark.parametrize("name", INDUCTOR)
def test_trains_as_plain_pytorch_under_inductor(name: str, runner_of: GetRunner, plain_of: GetPlain) -> None:
    runner = runner_of(name, torch.float32, "inductor")
    check_semantics(runner, plain_of(name, SEMANTICS), coarse(runner))


def test_what_no_graph_trains_stays_as_it_was(runner_of: GetRunner) -> None:
    """Frozen and unused parameters keep their bits and get neither gradient nor state."""
    runner = runner_of("odd")
    before = runner.case.build().state_dict()
    found = runner.train(smallest(runner), SEMANTICS)
    for name in ("frozen", "unused.weight", "unused.bias", "unused_frozen"):
        assert torch.equal(found.params[name], before[name])
        assert name not in found.gradients and name not in found.exp_avg
    for name in ("scale", "empty", "embed.weight", "small", "large", "narrow", "twice", "head.bias"):
        assert name in found.gradients and name in found.exp_avg
        assert not before[name].numel() or not torch.equal(found.params[name], before[name])


def test_odd_model_has_what_the_case_asks_for(runner_of: GetRunner) -> None:
    """The sizes, and a parameter over several chunks in the very plan that trained."""
    runner = runner_of("odd")
    runner.reset(smallest(runner))
    layout = runner.next_plan.layout
    spanning = {layout.params[p.param].name for p in layout.placements if p.num_chunks > 1}
    assert {"large", "narrow"} <= spanning
    shapes = {info.name: info.shape for info in layout.params}
    assert (shapes["scale"], shapes["empty"], shapes["small"], shapes["wide.bias"]) == ((1,), (0, 4), (13, 7), (53,))
    assert any(info.aliases == ("head.weight",) for info in layout.params)
    assert runner.model.head.weight is runner.model.embed.weight
