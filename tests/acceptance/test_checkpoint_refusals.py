"""What a checkpoint does not take is refused by name, and nothing has changed then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc import CheckpointError, ChunkcError
from chunkc.checkpoint import directory as folders


class Net(nn.Module):
    def __init__(self, width: int = 8, *, tied: bool = False, extra: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        if tied:
            self.third.weight = self.second.weight
        if extra:
            self.fourth = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x))).square().mean()


def run_of(model: nn.Module, make: Any = chunkc.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    chunkc.compile(model, "emulated-96k-16m", dtype=torch.float32, backend="eager")
    return model, make(model.parameters(), **options)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = run_of(Net())
    for _ in range(2):
        step(model, optimizer)
        chunkc.save_checkpoint(tmp_path, model, optimizer)
    return tmp_path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Net(width=6), r"model\.first\.weight is \(8, 4\) there and \(6, 4\) here"),
        (lambda: Net(tied=True), r"parameters are tied in another way|are missing here"),
        (
            lambda: Net(extra=True),
            r"parameters none are missing here, and fourth\.bias, fourth\.weight here are",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 1)),
            r"first\.bias, .* and 1 more are missing here, and 0\.bias, 0\.weight",
        ),
        (lambda: nn.Sequential(nn.BatchNorm1d(4)), "does not fit the model"),
    ],
    ids=["shape", "tied", "more", "other", "buffers"],
)
def test_another_architecture(saved: Path, make: Callable[[], nn.Module], said: str) -> None:
    model, optimizer = run_of(make())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=said):
        chunkc.load_checkpoint(saved, model, optimizer)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_another_optimizer_or_scheduler(saved: Path) -> None:
    model, _ = run_of(Net())
    parts = ([model.first], [model.second, model.third])
    groups = [{"params": [p for layer in layers for p in layer.parameters()]} for layers in parts]
    with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters and the one here of \[2, 4\]"):
        chunkc.load_checkpoint(saved, model, chunkc.AdamW(groups))
    with pytest.raises(ChunkcError, match=r"use chunkc\.AdamW"):
        chunkc.load_checkpoint(saved, model, chunkc.Adam(model.parameters()))
    optimizer = chunkc.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(CheckpointError, match="it holds no scheduler and one was given"):
        chunkc.load_checkpoint(saved, model, optimizer, scheduler)
    with pytest.raises(ChunkcError, match="takes chunkc's optimizers, not torch"):
        chunkc.load_checkpoint(saved, model, torch.optim.AdamW(model.parameters()))
    _, stranger = run_of(Net())
    with pytest.raises(ChunkcError, match="the optimizer steps another model"):
        chunkc.load_checkpoint(saved, model, stranger)
    chunkc.save_checkpoint(saved, model, optimizer, scheduler)
    with pytest.raises(CheckpointError, match="it holds a scheduler and none was given"):
        chunkc.load_checkpoint(saved, model, optimizer)


def test_damage_is_named_and_the_checkpoint_before_loads(saved: Path) -> None:
    model, optimizer = run_of(Net())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    newest = max(saved.glob("0*"))
    file = newest / "rank-00000.float32.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"float32\.safetensors is changed since it was written") as error:
        chunkc.load_checkpoint(saved, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert error.value.damaged == (file.name,) and error.value.previous is not None
    assert chunkc.load_checkpoint(error.value.previous, model, optimizer).step == 1
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        chunkc.load_checkpoint(saved / "nothing", model, optimizer)


def test_gradients_that_wait(tmp_path: Path) -> None:
    model, optimizer = run_of(Net())
    step(model, optimizer)
    chunkc.save_checkpoint(tmp_path, model, optimizer)
    model(torch.ones(2, 4)).backward()
    for call in (chunkc.save_checkpoint, chunkc.load_checkpoint):
        with pytest.raises(ChunkcError, match=r"call it after optimizer\.step\(\), or discard them with zero_grad\(\)"):
            call(tmp_path, model, optimizer)
    optimizer.step()
    chunkc.save_checkpoint(tmp_path, model, optimizer)
    with chunkc.full_params(model), pytest.raises(ChunkcError, match="do not stand in one compiled model"):
        chunkc.save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(ChunkcError, match="do not stand in one compiled model"):
        chunkc.save_checkpoint(tmp_path, Net(), optimizer)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model, optimizer = run_of(Net())
    step(model, optimizer)
    with pytest.raises(ChunkcError, match=r"extra\['rows'\] is a builtins\.set"):
        chunkc.save_checkpoint(tmp_path, model, optimizer, extra={"rows": {1}})
    with pytest.raises(
        ChunkcError, match=r"second\.weight \(4 in all\) is a parameter of the compiled model, but not of"
    ):
        chunkc.save_checkpoint(tmp_path, model.first, optimizer)
    with pytest.raises(ChunkcError, match="keep=0: give the number"):
        chunkc.save_checkpoint(tmp_path, model, optimizer, keep=0)
    assert not list(tmp_path.iterdir())
    step(model, optimizer)


def test_a_save_that_fails_is_told_by_its_future_and_by_the_next_call(tmp_path: Path) -> None:
    model, optimizer = run_of(Net())
    step(model, optimizer)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint of step 1 was written into"):
        chunkc.save_checkpoint(blocked, model, optimizer)
    future = chunkc.save_checkpoint(blocked, model, optimizer, asynchronous=True)
    step(model, optimizer)
    assert isinstance(future.exception(), CheckpointError)
    with pytest.raises(CheckpointError, match="no checkpoint of step 1 was written into"):
        chunkc.save_checkpoint(tmp_path / "good", model, optimizer)
    step(model, optimizer)
    good = chunkc.save_checkpoint(tmp_path / "good", model, optimizer).result()
    assert good.name == "00000001-step-3"
    assert chunkc.save_checkpoint(blocked, model, optimizer, asynchronous=True).exception() is not None
    assert chunkc.load_checkpoint(good, model, optimizer).step == 3, "going back is not held up by it"


def test_what_a_killed_save_left_does_not_count_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that has room for a new checkpoint only when that is gone."""
    model, optimizer = run_of(Net())
    step(model, optimizer)
    left = folders.begin(tmp_path, 7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0 if left.exists() else 10**9))
    assert chunkc.save_checkpoint(tmp_path, model, optimizer).result().is_dir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10))
    with pytest.raises(CheckpointError, match="where 10 are free: make room"):
        chunkc.save_checkpoint(tmp_path, model, optimizer)
    assert not list(tmp_path.glob(".saving*"))


@dataclass
class Disk:
    free: int


def places(file: Path) -> list[int]:
    """Both ends of a file, and some bytes in between."""
    last = file.stat().st_size - 1
    return sorted({*range(0, last, last // 25 + 1), 1, last})


def test_one_bit_anywhere_is_found_and_the_file_named(saved: Path) -> None:
    model, optimizer = run_of(Net())
    newest, before = sorted(saved.glob("0*"))[::-1]
    for file in sorted(newest.iterdir()):
        data = file.read_bytes()
        for place in places(file):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises(CheckpointError) as error:
                chunkc.load_checkpoint(saved, model, optimizer)
            assert error.value.damaged == (file.name,) and error.value.previous == before, place
        file.write_bytes(data)
    (newest / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing") as error:
        chunkc.load_checkpoint(newest, model, optimizer)
    assert error.value.previous == before


def make_folder(pointer: Path) -> None:
    pointer.unlink()
    pointer.mkdir()


def make_loop(pointer: Path) -> None:
    pointer.unlink()
    pointer.symlink_to(pointer)


def test_a_pointer_that_is_a_folder_is_refused_and_nothing_is_written(saved: Path) -> None:
    model, optimizer = run_of(Net())
    step(model, optimizer)
    make_folder(saved / folders.LATEST_NAME)
    before = sorted(saved.rglob("*"))
    with pytest.raises(CheckpointError, match="latest is a folder, where a file is to name the newest checkpoint"):
        chunkc.save_checkpoint(saved, model, optimizer)
    assert sorted(saved.rglob("*")) == before
    assert chunkc.load_checkpoint(saved, model, optimizer).step == 2


def test_a_pointer_that_is_a_loop_of_links_is_replaced(saved: Path) -> None:
    model, optimizer = run_of(Net())
    make_loop(saved / folders.LATEST_NAME)
    assert chunkc.load_checkpoint(saved, model, optimizer).step == 2
    step(model, optimizer)
    path = chunkc.save_checkpoint(saved, model, optimizer).result()
    assert (saved / folders.LATEST_NAME).read_text().strip() == path.name
    assert chunkc.load_checkpoint(saved, model, optimizer).step == 3


@pytest.mark.parametrize("make", (Path.touch, make_loop), ids=["file", "loop"])
def test_a_directory_that_is_none_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    model, optimizer = run_of(Net())
    step(model, optimizer)
    root = tmp_path / "root"
    root.touch()
    make(root)
    with pytest.raises(CheckpointError, match="no checkpoint of step 1 was written into"):
        chunkc.save_checkpoint(root, model, optimizer)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        chunkc.load_checkpoint(root, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_an_extra_that_contains_itself_is_refused_and_nothing_is_written(saved: Path) -> None:
    model, optimizer = run_of(Net())
    step(model, optimizer)
    extra: dict[str, Any] = {"position": 3}
    extra["all"] = [extra]
    before = sorted(saved.rglob("*"))
    with pytest.raises(ChunkcError, match=r"extra\['all'\]\[0\] contains itself"):
        chunkc.save_checkpoint(saved, model, optimizer, extra=extra)
    assert sorted(saved.rglob("*")) == before


class Counting(Net):
    """Keeps a number that is neither parameter nor buffer, and takes none that is negative."""

    count = 1

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        if state < 0:
            raise KeyError(state)
        self.count = state


class Scheduler:
    """Takes no state but its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["name"] != self.name:
            raise ValueError(state)


@pytest.mark.parametrize(
    ("count", "name", "said"), [(-1, "a", "a module with an extra state"), (5, "b", "the scheduler")]
)
def test_states_that_are_not_taken_leave_the_model_as_it_was(tmp_path: Path, count: int, name: str, said: str) -> None:
    model, optimizer = run_of(Counting())
    step(model, optimizer)
    model.count = count
    chunkc.save_checkpoint(tmp_path, model, optimizer, Scheduler(name))
    model.count = 3
    step(model, optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(CheckpointError, match=f"{said} does not take its state"):
        chunkc.load_checkpoint(tmp_path, model, optimizer, Scheduler("a"))
    assert model.count == 3
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
