"""Asynchronous checkpoints: of the moment of the call, to the bit, whatever training does while they are written."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pair import MIXED
from resumed import Run, check_equal

import chunkc
from chunkc import ChunkcError
from chunkc.checkpoint import write_checkpoint
from chunkc.checkpoint.contents import gather, runtime_of
from chunkc.runtime.execution.bound_action import AnnouncedUpdate
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.storage.snapshot import SnapshotReader
from chunkc.runtime.update.update_inputs import StepInputs

SETTINGS = ("", "delay=2,seed=3,poison", "sync")
BOUNDS = (60_000, 0, 2**30)
CASES = [
    pytest.param(settings, bound, marks=() if place == other else pytest.mark.slow)
    for place, settings in enumerate(SETTINGS)
    for other, bound in enumerate(BOUNDS)
]


@pytest.mark.long
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


def save_late(directory: Path, change: Callable[[Run], object], **options: Any) -> None:
    """Save a run whose states are in all places, with a disk that begins when ``change`` has been; check what it is."""
    run, loaded = Run(hw="emulated-700k-16m", wishes=MIXED, **options), Run(seed=7, **options)
    run.train(0, 3)
    wanted, runtime = run.bits(), runtime_of(run.model)
    contents = gather(run.model, runtime, run.optimizer, run.scheduler, {"a": 1}, 2**30)
    change(run)
    loaded.load(write_checkpoint(directory, run.model, runtime, contents, None))
    check_equal(loaded.bits(), wanted)


def written(run: Run) -> None:
    """Everything is replaced by hand."""
    run.model.load_state_dict(Run(seed=8).model.state_dict())
    run.optimizer.load_state_dict(run.optimizer.state_dict())


PARTLY = {
    "dtype": torch.bfloat16,
    "keep_fp32": ("layers.*.0.*",),
    "frozen": ("layers.0.1.weight", "layers.0.1.bias", "layers.1.3.bias", "layers.1.0.bias"),
}
"""Chunks of all lists: trained in bf16 and in fp32, and frozen in both."""


@pytest.mark.long(but="steps-fp32")
@pytest.mark.parametrize("options", [{}, PARTLY], ids=["fp32", "partly"])
@pytest.mark.parametrize("change", [lambda run: run.train(3, 8), written], ids=["steps", "writes"])
def test_a_save_that_is_written_late_is_of_the_moment_of_the_call(
    tmp_path: Path, change: Callable[[Run], object], options: dict[str, Any]
) -> None:
    def change_all(run: Run) -> None:
        runtime = runtime_of(run.model)
        snapshot = runtime.parameters.store.snapshot
        change(run)
        indexes = [i for i in range(len(runtime.params)) if change is written or runtime.parameters.is_trained(i)]
        changed = {part.chunk for index in indexes for part in runtime.parameters.store.parts(index)}
        assert snapshot.num_copies == len(changed)

    save_late(tmp_path, change_all, **options)


@pytest.mark.long
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


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves read nothing before it is set."""
    found, read = threading.Event(), SnapshotReader.read

    def read_late(self: SnapshotReader, index: int, position: int = 0) -> torch.Tensor:
        assert found.wait(60)
        return read(self, index, position)

    monkeypatch.setattr(SnapshotReader, "read", read_late)
    return found


@pytest.mark.long
def test_a_model_that_is_let_go_of_is_written_first(tmp_path: Path, disk: threading.Event) -> None:
    run, loaded = Run(), Run(seed=7)
    run.train(0, 2)
    wanted, held = run.bits(), weakref.ref(run.model)
    future = chunkc.save_checkpoint(tmp_path, run.model, run.optimizer, run.scheduler, asynchronous=True)
    del run
    gc.collect()
    assert held() is not None
    disk.set()
    loaded.load(future.result(60))
    check_equal(loaded.bits(), wanted)
    until_s = time.monotonic() + 20
    while held() is not None and time.monotonic() < until_s:
        gc.collect()
    assert held() is None, "and goes then"


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_an_interrupted_wait_for_a_save_forgets_neither_the_save_nor_its_chunks(
    tmp_path: Path, disk: threading.Event
) -> None:
    """Ctrl-C while the next save waits for a slow disk: the first is still that of its call when training goes on."""
    run, loaded = Run(), Run(seed=7)
    run.train(0, 2)
    wanted = run.bits()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    future = chunkc.save_checkpoint(tmp_path, run.model, run.optimizer, run.scheduler, asynchronous=True)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            run.save(tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert runtime_of(run.model).saving is future, "the next save waits for it again"
    run.train(2, 4)
    later = run.bits()
    disk.set()
    second = run.save(tmp_path)
    for path, bits in ((future.result(), wanted), (second, later)):
        loaded.load(path)
        check_equal(loaded.bits(), bits)


def test_a_snapshot_that_nobody_reads_holds_up_nobody(tmp_path: Path) -> None:
    """A save that cannot begin leaves none; where another one begins, the reader before it is told so."""
    run, loaded = Run(), Run(seed=7)
    run.train(0, 2)
    runtime = runtime_of(run.model)
    with pytest.raises(TypeError):
        chunkc.save_checkpoint(None, run.model, run.optimizer, run.scheduler)  # type: ignore[arg-type]
    assert runtime.parameters.store.snapshot is None
    lost = gather(run.model, runtime, run.optimizer, run.scheduler, None, 0)
    wanted = run.bits()
    path = run.save(tmp_path)
    run.train(2, 3)
    with pytest.raises(ChunkcError, match="given up before all of it was read"):
        write_checkpoint(tmp_path, run.model, runtime, lost, None)
    loaded.load(path)
    check_equal(loaded.bits(), wanted)
    assert [p.name for p in tmp_path.glob("*0*")] == [path.name]


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


@pytest.mark.long(but="updates of resident states")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_does_not_announce_itself_is_found_out(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above refuses a checkpoint with one chunk of a later step."""
    place, name, mutant = WRITERS[writer]
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        save_late(tmp_path, lambda run: run.train(3, 8))


@pytest.mark.long
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
