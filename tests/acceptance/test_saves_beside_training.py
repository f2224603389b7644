"""Asynchronous checkpoints: of the moment of the call, to the bit, whatever training does while they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pair import MIXED
from resumed import Run, check_equal

import chunkc
from chunkc.checkpoint import _save
from chunkc.checkpoint.contents import gather, runtime_of
from chunkc.runtime.bind import AnnouncedUpdate
from chunkc.runtime.step_inputs import StepInputs
from chunkc.runtime.store import ChunkStore

SETTINGS = ("", "delay=2,seed=3,poison", "sync")
BOUNDS = (60_000, 0, 2**30)
CASES = [
    pytest.param(settings, bound, marks=() if place == other else pytest.mark.slow)
    for place, settings in enumerate(SETTINGS)
    for other, bound in enumerate(BOUNDS)
]


@pytest.mark.parametrize(("settings", "max_copied_nbytes"), CASES)
def test_an_asynchronous_save_is_of_the_moment_of_the_call(
    tmp_path: Path, settings: str, max_copied_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run on, with optimizer states in all places, while it is written: nothing of them is in it."""
    monkeypatch.setenv("CHUNKC_EMULATED", settings)
    run, loaded = Run(hw="emulated-700k-16m", wishes=MIXED), Run(seed=7)
    run.train(0, 3)
    for k in range(3):
        wanted = run.bits()
        future = chunkc.save_checkpoint(
            tmp_path / str(k), run.model, run.optimizer, run.scheduler,
            asynchronous=True, max_copied_nbytes=max_copied_nbytes,
        )  # fmt: skip
        generator = torch.get_rng_state()
        run.train(3 + 4 * k, 7 + 4 * k)
        loaded.load(future.result())
        check_equal(loaded.bits(), wanted)
        assert torch.equal(torch.get_rng_state(), generator), "also the generators are of that moment"


def save_late(directory: Path, change: Callable[[Run], object]) -> None:
    """Save a run whose states are in all places, with a disk that begins when ``change`` has been; check what it is."""
    run, loaded = Run(hw="emulated-700k-16m", wishes=MIXED), Run(seed=7)
    run.train(0, 3)
    wanted, runtime = run.bits(), runtime_of(run.model)
    contents = gather(run.model, runtime, run.optimizer, run.scheduler, {"a": 1}, 2**30)
    change(run)
    loaded.load(_save(directory, run.model, runtime, contents, None))
    check_equal(loaded.bits(), wanted)


def written(run: Run) -> None:
    """Everything is replaced by hand."""
    run.model.load_state_dict(Run(seed=8).model.state_dict())
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@pytest.mark.parametrize("change", [lambda run: run.train(3, 8), written], ids=["steps", "writes"])
def test_a_save_that_is_written_late_is_of_the_moment_of_the_call(
    tmp_path: Path, change: Callable[[Run], object]
) -> None:
    def change_all(run: Run) -> None:
        runtime = runtime_of(run.model)
        snapshot = runtime._store.snapshot
        change(run)
        assert snapshot.num_copies == len({place.chunk for place in runtime.layout.placements})

    save_late(tmp_path, change_all)


def test_saving_does_not_change_the_run_and_the_next_save_waits_for_the_last(tmp_path: Path) -> None:
    run, other = Run(), Run()
    losses = other.train(0, 12)
    found = []
    for k in range(6):
        found += run.train(2 * k, 2 * k + 2)
        future = chunkc.save_checkpoint(
            tmp_path, run.model, run.optimizer, run.scheduler, asynchronous=k % 3 > 0, keep=2
        )
    assert found == losses
    last = future.result().name
    assert [p.name for p in sorted(tmp_path.glob("0*"))] == ["00000005-step-10", last] and last == "00000006-step-12"
    check_equal(run.bits(), other.bits())


def after(self: AnnouncedUpdate, inputs: StepInputs) -> None:
    """Announce an update when it is done."""
    self.inner.update(inputs)
    self.store.before_write(self.chunk)


WRITERS: dict[str, tuple[type, str, Callable[..., None]]] = {
    "no writer": (ChunkStore, "before_write", lambda self, chunk: None),
    "first chunk": (ChunkStore, "before_write", lambda self, chunk: before_write(self, chunk) if chunk else None),
    "updates too late": (AnnouncedUpdate, "update", after),
    "updates of resident states": (AnnouncedUpdate, "update", lambda self, inputs: self.inner.update(inputs)),
}
before_write = ChunkStore.before_write


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_does_not_announce_itself_is_found_out(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above refuses a checkpoint with one chunk of a later step."""
    place, name, mutant = WRITERS[writer]
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        save_late(tmp_path, lambda run: run.train(3, 8))


def test_two_models_are_saved_at_once(tmp_path: Path) -> None:
    """On one device, each beside its own training and the other's."""
    hardware = chunkc.Hardware.parse("emulated-2m-32m")
    runs = [Run(hw=hardware), Run(seed=1, hw=hardware, dtype=torch.bfloat16)]
    others = [Run(seed=7), Run(seed=8, dtype=torch.bfloat16)]
    for run in runs:
        run.train(0, 2)
    wanted = [run.bits() for run in runs]
    futures = [
        chunkc.save_checkpoint(
            tmp_path / str(i), run.model, run.optimizer, run.scheduler, asynchronous=True, max_copied_nbytes=2**16
        )
        for i, run in enumerate(runs)
    ]
    for run in runs:
        run.train(2, 5)
    for other, future, bits in zip(others, futures, wanted, strict=True):
        other.load(future.result())
        check_equal(other.bits(), bits)
