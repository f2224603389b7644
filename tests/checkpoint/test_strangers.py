"""Checkpoints from strangers, with checksums that fit: refused whole, or loaded whole, whatever their documents say."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutations import check_mutations, num_mutations
from torch import nn
from torch.optim.lr_scheduler import StepLR

import chunkc
from chunkc import CheckpointError, ChunkcError
from chunkc.checkpoint import directory as folders
from chunkc.checkpoint.generators import read_generators, write_generators
from chunkc.checkpoint.index import INDEX_NAME
from chunkc.checkpoint.objects import OBJECTS_NAME
from chunkc.checkpoint.storage import digest_of

Change = Callable[[Any], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


class Run:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = chunkc.compile(Net(), "emulated-96k-16m", dtype=torch.float32, backend="eager")
        self.optimizer = chunkc.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = StepLR(self.optimizer, 1)
        for _ in range(2):
            self.step()
            self.scheduler.step()

    def step(self) -> None:
        self.model(torch.randn(2, 4)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, root: Path) -> Path:
        extra = {"at": (1, [2, "three"]), 4: torch.arange(3), "array": np.arange(2)}
        return chunkc.save_checkpoint(root, self.model, self.optimizer, self.scheduler, extra).result()

    def load(self, path: Path) -> chunkc.checkpoint.Checkpoint:
        return chunkc.load_checkpoint(path, self.model, self.optimizer, self.scheduler)

    def state(self) -> dict[str, Any]:
        states = self.optimizer.state_dict()
        tensors = {f"{i}.{name}": value for i, found in states["state"].items() for name, value in found.items()}
        drawn = read_generators()
        _, keys, *position = drawn["numpy"]
        rest = (states["param_groups"], self.scheduler.state_dict(), drawn["python"], position)
        generators = {"torch": drawn["torch"], "numpy": torch.from_numpy(keys.copy())}
        return {"tensors": {**self.model.state_dict(), **tensors, **generators}, "rest": repr(rest)}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["rest"] == wanted["rest"]
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name, value in wanted["tensors"].items():
        assert found["tensors"][name].numpy().tobytes() == value.numpy().tobytes(), name


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


@pytest.fixture
def path(run: Run, tmp_path: Path) -> Path:
    return run.save(tmp_path / "saved")


def sign(path: Path) -> None:
    try:
        body = json.loads((path / folders.MANIFEST_NAME).read_text())["manifest"]
        for name in body["files"]:
            if (path / name).is_file():
                body["files"][name] = asdict(digest_of(path / name))
        text = json.dumps(folders.sign(body))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        return  # no manifest whose checksums anybody could make fit
    (path / folders.MANIFEST_NAME).write_text(text)


def change(path: Path, name: str, made: Change) -> None:
    data = json.loads((path / name).read_text())
    made(data)
    (path / name).write_text(json.dumps(data))
    sign(path)


def first(index: dict[str, Any]) -> dict[str, Any]:
    return index["model.first.weight"]["parts"][0]


def numpy_position(objects: dict[str, Any], position: int) -> None:
    objects["generators"]["0"]["numpy"]["items"][2] = position


FAULTS: dict[str, tuple[str, Change, str]] = {
    "no index": (folders.MANIFEST_NAME, lambda d: d["manifest"]["files"].pop(INDEX_NAME),
     r"manifest\.json is without index"),
    "no objects": (folders.MANIFEST_NAME, lambda d: d["manifest"]["files"].pop(OBJECTS_NAME), "is without objects"),
    "no tensors": (folders.MANIFEST_NAME, lambda d: d["manifest"]["files"].pop("rank-00000.float32.safetensors"),
     "'rank-00000.float32.safetensors' is no file of the checkpoint that its manifest knows"),
    "outside": (folders.MANIFEST_NAME, lambda d: d["manifest"]["files"].update({"../x": {"nbytes": 1, "sha256": ""}}),
     r"manifest\.files: '\.\./x' is no name of another file"),
    "another step": (folders.MANIFEST_NAME, lambda d: d["manifest"].update(step=10**6),
     "was renamed: .* of step 1000000"),
    "no number": (folders.MANIFEST_NAME, lambda d: d["manifest"].update(step="2"), "step: must be a whole number"),
    "huge": (INDEX_NAME, lambda d: d["model.first.weight"].update(shape=[10**6, 10**6]),
     "first.weight'.parts: they have 32"),
    "a hole": (INDEX_NAME, lambda d: first(d).update(sizes=[7, 4]), "parts: they have 28 elements and the tensor 32"),
    "beside": (INDEX_NAME, lambda d: first(d).update(offsets=[1, 0]),
     r"parts\[0\]: it reaches to 9 of 8 in dimension 0"),
    "twice": (INDEX_NAME, lambda d: d["model.first.weight"]["parts"].append(dict(first(d))),
     r"parts\[1\]: 'model.first.weight' of 'rank-00000.float32.safetensors' is a part already"),
    "not as stored": (INDEX_NAME, lambda d: first(d).update(name="model.first.bias"),
     "is a part already|not .'F32', .8, 4"),
    "another dtype": (INDEX_NAME, lambda d: d["model.first.weight"].update(dtype="int32"),
     "has .'F32', .8, 4.. of the name"),
    "no dtype": (INDEX_NAME, lambda d: d["model.first.weight"].update(dtype="load"), "dtype: must be one of float64, "),
    "less": (INDEX_NAME, lambda d: d.pop("model.first.weight"), "it has no model.first.weight"),
    "no moment": (INDEX_NAME, lambda d: d.pop("optimizer.state.first.weight.exp_avg"),
     "it has no optimizer.state.first.weight.exp_avg"),
    "no name": (OBJECTS_NAME, lambda d: d["model"].update(buffers=[[]]), "model.buffers: each has a name or more"),
    "another part": (OBJECTS_NAME, lambda d: d.update(more=1), "parts missing or unknown: 'more'"),
    "no groups": (OBJECTS_NAME, lambda d: d["optimizer"].update(groups=3), "optimizer.groups: must be a list, found 3"),
    "no names": (OBJECTS_NAME, lambda d: d["optimizer"]["groups"][0].update(params=[1]),
     r"groups\[0\].params\[0\]: must be a text"),
    "no rate": (OBJECTS_NAME, lambda d: d["optimizer"]["groups"][0].update(lr="fast"),
     "a group without usable options"),
    "unknown steps": (OBJECTS_NAME, lambda d: d["optimizer"]["steps"].update(x=1),
     "counts steps of x, which are none of"),
    "half steps": (OBJECTS_NAME, lambda d: d["optimizer"]["steps"].update({"first.weight": 1.5}),
     "steps.'first.weight': must be a"),
    "deep": (OBJECTS_NAME, lambda d: d.update(extra=json.loads("[" * 400 + "]" * 400)), "nested more than 208 deep"),
    "python": (OBJECTS_NAME, lambda d: d["generators"]["0"]["python"].update(items=[1]),
     "generators.0.python: is no state"),
    "numpy": (OBJECTS_NAME, lambda d: numpy_position(d, 10**9),
     "generators.0.numpy: is no state .*position 1000000000"),
    "no generator": (OBJECTS_NAME, lambda d: d["generators"]["0"].pop("torch"),
     "generators.0: generators missing or unknown"),
    "a scheduler": (OBJECTS_NAME, lambda d: d.update(scheduler=[1]), "the scheduler does not take its state"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named_and_nothing_changes(what: str, run: Run, path: Path) -> None:
    name, made, said = FAULTS[what]
    change(path, name, made)
    run.step()
    before = run.state()
    with pytest.raises(CheckpointError, match=said) as error:
        run.load(path)
    assert path.name in str(error.value)
    assert_same(run.state(), before)


def test_a_state_that_torch_does_not_take_is_refused(run: Run, path: Path) -> None:
    """The bytes of a tensor: the checksum of its file is made to fit too."""
    index = json.loads((path / INDEX_NAME).read_text())
    key = json.loads((path / OBJECTS_NAME).read_text())["generators"]["0"]["torch"]["key"]
    file = path / index[key]["parts"][0]["file"]
    data = bytearray(file.read_bytes())
    state = torch.get_rng_state().numpy().tobytes()
    at = bytes(data).rfind(state[:8])
    data[at : at + 5000] = random.Random(1).randbytes(5000)
    file.write_bytes(data)
    sign(path)
    before = run.state()
    with pytest.raises(CheckpointError, match=r"generators\.0\.torch: is no state of the generator"):
        run.load(path)
    assert_same(run.state(), before)


def test_a_folder_under_another_name_is_named(run: Run, path: Path) -> None:
    step, best = int(path.name.split("-")[-1]), path.rename(path.with_name("best"))
    with pytest.raises(CheckpointError, match=f"no complete checkpoint; these were renamed, .*: {best}"):
        run.load(best.parent)
    assert run.load(best).step == step
    with pytest.raises(CheckpointError, match=f"was renamed: its manifest says that it is of step {step}"):
        run.load(best.rename(path.with_name(f"00000001-step-{step + 1}")))


@pytest.mark.parametrize("name", (folders.MANIFEST_NAME, INDEX_NAME, OBJECTS_NAME))
def test_mutations_are_refused_whole_or_loaded_whole(
    name: str, run: Run, path: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Whatever is loaded can be trained with; what a scheduler of torch takes for its state is its own business."""
    data = (path / name).read_bytes()
    manifest = (path / folders.MANIFEST_NAME).read_bytes()
    generators = read_generators()
    before = run.state()

    def use(mutated: Path) -> None:
        (path / folders.MANIFEST_NAME).write_bytes(manifest)
        (path / name).write_bytes(mutated.read_bytes())
        sign(path)
        try:
            run.load(path)
        except ChunkcError as error:
            assert_same(run.state(), before)
            raise CheckpointError(f"{mutated.name}: {error}", path=path) from error
        np.random.random(2000)
        torch.rand(2000)
        run.step()
        sign_again()

    def sign_again() -> None:
        (path / folders.MANIFEST_NAME).write_bytes(manifest)
        (path / name).write_bytes(data)
        sign(path)
        run.load(path)
        write_generators(generators)
        before.update(run.state())

    sign_again()
    count = -(-num_mutations(pytestconfig) // 3)
    refused, loaded = check_mutations(data, tmp_path / "mutated.json", use, range(count), CheckpointError)
    print(f"checkpoints, {name}: {refused} refused, {loaded} loaded")
    assert refused > 0
    shutil.rmtree(path)
