"""``chunkc.full_params``: real tensors inside, kept afterwards; what cannot be kept is said by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import Twins, twins_at
from torch import nn

import chunkc
from chunkc import ChunkcError


@pytest.mark.parametrize("phase", ["staged", "graded", "pending", "settled"])
def test_full_params_reads_and_writes(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tensors inside, also nested and in a forward; what was written is kept, by an exception too."""
    monkeypatch.setenv("CHUNKC_EMULATED", "poison,delay=2,seed=9")
    twins = twins_at(phase)
    managed = list(twins.model.parameters())
    with chunkc.full_params(twins.model) as full:
        assert full is twins.model
        assert all(type(p) is nn.Parameter and (p.data_ptr() or not p.numel()) for p in full.parameters())
        twins.check_params()
        torch.testing.assert_close(full(twins.x), twins.plain(twins.x), atol=1e-6, rtol=0)
    assert all(p is q for p, q in zip(twins.model.parameters(), managed, strict=True))
    twins.check_params()
    with pytest.raises(KeyError, match="stop"), chunkc.full_params(twins.model) as full, torch.no_grad():
        for side in (full, twins.plain):
            side.second.weight[3].mul_(2)
            side.scale.view(-1)[0] = 7
        raise KeyError("stop")
    twins.check_params()
    twins.check_training()


def test_full_params_nests() -> None:
    twins = twins_at("settled")
    with chunkc.full_params(twins.model), torch.no_grad():
        for side in (twins.model, twins.plain):
            side.first.weight.add_(1)
        with chunkc.full_params(twins.model):
            for side in (twins.model, twins.plain):
                side.second.weight.add_(1)
                assert side.first.weight.min() > 0
    twins.check_params()
    twins.check_training()


LOST: dict[str, tuple[Callable[[Twins], Any], str]] = {
    "replaced": (lambda t: setattr(t.model.second, "weight", nn.Parameter(torch.zeros(16, 16))), "replaced"),
    "converted": (lambda t: t.model.half(), r"converted to \(16, 16\) torch.float16"),
    "gradient": (lambda t: t.model(t.x).backward(), "given a gradient"),
    "stepped": (lambda t: t.optimizer.step(), "changed by the compiled model"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_full_params_cannot_keep_is_said(what: str) -> None:
    """Not silently dropped; the compiled model is whole again afterwards."""
    do, match = LOST[what]
    twins = twins_at("graded")
    with pytest.raises(ChunkcError, match=r"second\.weight was " + match):
        with chunkc.full_params(twins.model):
            do(twins)
    if what == "stepped":
        twins.plain_optimizer.step()
        for _, optimizer in twins.sides():
            optimizer.zero_grad()
    twins.check_params()
    twins.check_training()


def test_full_params_of_a_sixteen_bit_model_shows_the_masters() -> None:
    """In the dtype that was handed over; a write reaches the master copy with all its bits."""
    twins = twins_at("settled", dtype=torch.bfloat16)
    master = twins.model.state_dict()["second.weight"]
    with chunkc.full_params(twins.model) as full, torch.no_grad():
        assert torch.equal(full.second.weight, master)
        full.second.weight.add_(1e-5)
    assert torch.equal(twins.model.state_dict()["second.weight"], master + 1e-5)
