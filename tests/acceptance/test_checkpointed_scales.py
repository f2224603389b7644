"""Loss scales in checkpoints: a run in fp16 goes on to the bit, and each side keeps what was asked of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_training import BAD, inputs
from overflows import Poisoned, grow_soon
from pair import SMALL
from resumed import check_equal

import chunkc
from chunkc.checkpoint.contents import runtime_of

NUM_STEPS = 11
SAVED_AFTER = (2, 6, 8)
"""Right behind a step that overflowed, behind two of them, and one step before the scale grows."""


class Half:
    """A run whose gradients overflow in some steps."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        options = {**SMALL, "dtype": torch.float16, **options}
        self.model = chunkc.compile(Poisoned(), "emulated-640k-16m", **options)
        self.optimizer = chunkc.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def scale(self) -> tuple[float, int] | None:
        """The loss scale and the steps since it last changed."""
        found = runtime_of(self.model).clipping.loss_scale
        return None if found is None else (float(found.scale), int(found.growth_tracker))

    def step(self, number: int) -> tuple[str, tuple[float, int] | None]:
        """The loss to the last digit, which may be NaN, and the scale after it."""
        loss = self.model(*inputs(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item().hex(), self.scale

    def save(self, directory: Path, *, asynchronous: bool = False) -> Any:
        return chunkc.save_checkpoint(directory, self.model, self.optimizer, asynchronous=asynchronous)

    def load(self, directory: Path) -> chunkc.Checkpoint:
        return chunkc.load_checkpoint(directory, self.model, self.optimizer)

    def bits(self) -> dict[str, torch.Tensor]:
        """Parameters and states."""
        states = self.optimizer.state_dict()["state"]
        named = {f"{key} {name}": value for key, state in states.items() for name, value in state.items()}
        return {n: v.clone() for n, v in self.model.state_dict().items()} | named


@pytest.mark.long
def test_a_run_that_overflows_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Losses, scales and step counts, through the growth and the overflows to come; saved beside training or not."""
    first, second = Half(), Half(seed=7)
    grow_soon(first.model)
    told, saves = [], {}
    for number in range(NUM_STEPS):
        if number in SAVED_AFTER:
            saves[number] = first.save(tmp_path, asynchronous=number != SAVED_AFTER[-1])
        told.append(first.step(number))
    scales = [scale for _, scale in told]
    grown = [k for k in range(1, NUM_STEPS) if scales[k][0] > scales[k - 1][0]]
    assert grown == [8] and scales[7][1] == 2, "it grows by what was counted before the last save"
    for after, save in saves.items():
        counted = after - len([k for k in BAD if k < after])
        loaded = second.load(save.result())
        assert loaded.step == counted == int(loaded.path.name.rsplit("-", 1)[1]), "steps that were skipped do not count"
        assert set(second.optimizer.step_counts.values()) == {counted}
        assert second.scale == scales[after - 1]
        assert [second.step(number) for number in range(after, NUM_STEPS)] == told[after:]
        check_equal(second.bits(), first.bits())


KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"loss_scale": 1024.0},
    "fp32": {"dtype": torch.float32},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Half]:
    """By kind, each compiled once, two steps on, the second of which overflows."""
    found = {kind: Half(seed, **options) for seed, (kind, options) in enumerate(KINDS.items())}
    for run in found.values():
        run.step(0)
    found["dynamic"].step(1)
    return found


@pytest.mark.long(but="fp32-fp32")
@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_a_scale_is_taken_over_where_it_is_dynamic_on_both_sides(
    there: str, here: str, runs: dict[str, Half], tmp_path: Path
) -> None:
    """Elsewhere each side has the scale that it was compiled with; masters and moments are the same in any case."""
    assert runs["dynamic"].scale[0] not in (65536.0, 1024.0) and runs["static"].scale == (1024.0, 0)
    source, target = runs[there], runs[here]
    path = source.save(tmp_path).result()
    wanted = source.scale if there == here == "dynamic" else target.scale
    if there != here:
        target.step(0)
        wanted = target.scale
    assert target.load(path).step == max(source.optimizer.step_counts.values())
    assert target.scale == wanted
    both = [runtime_of(run.model) for run in (source, target)]
    for index in range(len(both[0].params)):
        states = [runtime.parameters.read_state(index) for runtime in both]
        assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    counts = dict(target.optimizer.step_counts)
    assert math.isfinite(float.fromhex(target.step(0)[0]))
    assert target.optimizer.step_counts == {index: count + 1 for index, count in counts.items()}


def test_the_scale_comes_back_where_training_went_on(runs: dict[str, Half], tmp_path: Path) -> None:
    run = runs["dynamic"]
    path, before = run.save(tmp_path).result(), run.scale
    run.step(1)
    assert run.scale != before
    run.load(path)
    assert run.scale == before
