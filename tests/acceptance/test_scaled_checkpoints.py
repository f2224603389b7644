"""Cases 6 and 14: loss scales in checkpoints, and what an overflow just before one leaves in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from halves import BAD, built_in, make
from overflows import assert_same_state, grow_soon, scale_of, state_of
from pair import Pair

import chunkc


def save(pair: Pair, directory: Path) -> None:
    chunkc.save_checkpoint(directory, pair.model, pair.optimizer).result()


def load(pair: Pair, directory: Path) -> None:
    chunkc.load_checkpoint(directory, pair.model, pair.optimizer)


def scale_state(pair: Pair) -> dict[str, Any]:
    found: dict[str, Any] = pair.model._compiled_call_impl.runtime.loss_scale.state_dict()
    return found


@pytest.mark.parametrize("last", [3, BAD[1]], ids=["stepped", "skipped"])
def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Path, last: int) -> None:
    """Bit for bit, through growth: rules, scale and the count of steps without overflow; a skipped step is none."""
    first, second = make("moving"), make("resident")
    grow_soon(first.model)
    for step in (0, BAD[0], 2, last):
        built_in(first, step)
    save(first, tmp_path)
    built_in(second, 2)
    load(second, tmp_path)
    assert scale_state(second) == scale_state(first)
    saved = scale_of(first.model)
    for step in (0, 2, 3):
        for pair in (first, second):
            built_in(pair, step)
    assert scale_of(first.model) == 2.0 * saved
    assert scale_state(second) == scale_state(first)
    assert_same_state(state_of(second), state_of(first))


def test_a_static_scale_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """It is an option of the run: a dynamic one begins with its own, and a static one keeps what it was given."""
    static, dynamic = make("resident", loss_scale=8.0), make("resident")
    for pair, other, wanted in ((static, dynamic, 2.0**16), (dynamic, static, 8.0)):
        built_in(pair, 0)
        save(pair, tmp_path)
        load(other, tmp_path)
        assert scale_of(other.model) == wanted
