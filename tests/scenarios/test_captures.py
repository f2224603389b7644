"""Captures by the share of layers that keep their activations: equal to captures of the whole model."""

from dataclasses import replace

import pytest
from tiny_transformers import TINY_BERT, TINY_GPT

from chunkc._torch_compat.fake_job import fake_job
from chunkc.hardware import Hardware
from chunkc.passes.rematerialise import KEEP_ALL, RECOMPUTE_ALL
from chunkc.scenarios.captures import Captures, Subject

HW = Hardware.parse("v100-240g")


def subject(num_layers: int) -> Subject:
    return Subject(TINY_GPT.with_depth(num_layers), 2, 16, "auto", "inductor", HW)


@pytest.mark.parametrize(
    ("keep", "num_kept"),
    [(KEEP_ALL, 24), (RECOMPUTE_ALL, 0), (0.5, 12), (1 / 64, 0), (1 / 24, 2), (1 / 16, 2), (23 / 24, 22), (0.99, 24)],
)
def test_layers_that_keep_are_all_or_none_or_two_of_each_kind(keep: float, num_kept: int) -> None:
    """The outer layers of each kind are not those that repeat."""
    assert subject(24).num_kept(keep) == num_kept


@pytest.mark.slow
def test_any_share_of_layers_is_captured_exactly() -> None:
    """Few layers are captured, and what follows is what the partitioner makes of all."""
    captures, whole = Captures(), subject(11)
    shares = [3 / 11, 7 / 11, 9 / 11]
    for share, direct in zip(shares, whole.capture(None, shares), strict=True):
        found = captures.of(whole, share)
        assert "periodic" in [record.name for record in found.stages]
        assert found.schedule.digest() == direct.schedule.digest()
        assert captures.has(whole, share) and not captures.has(replace(whole, batch=3), share)


@pytest.mark.long
def test_a_shallow_model_is_captured_as_it_is() -> None:
    """The last layers keep their activations, so backward begins without computing anything again."""
    captured = Captures().of(subject(3), 1 / 3)
    assert "periodic" not in [record.name for record in captured.stages]
    made = {op.name for op in captured.schedule.forward.operators if op.flops}
    again = [op.layer for op in captured.schedule.backward.operators if op.name in made]
    assert {layer.split(".")[2] for layer in again} == {"0", "1"}


@pytest.mark.long
def test_what_ranks_along_tp_exchange_repeats_layer_by_layer() -> None:
    """A divided model of six layers follows from captures of four and five, its collectives too."""
    whole = replace(subject(1), model=TINY_BERT.with_depth(6), num_tensor=2)
    with fake_job(2):
        found, direct = Captures().of(whole, KEEP_ALL), whole.capture(None, [KEEP_ALL])[0]
    assert "periodic" in [record.name for record in found.stages]
    assert found.schedule.digest() == direct.schedule.digest()
    assert sum("all_reduce" in op.target for op in found.schedule.forward.operators) == 2 * 6
