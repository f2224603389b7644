"""Weights of compiled models as safetensors: whole, aligned, sharded as Hugging Face has it, never half a save."""

import json
import os
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained import HW, assert_same, from_meta, saved
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from small import PHASES, Small, twins_at
from torch import nn

import chunkc
from chunkc import ChunkcError


class Odd(nn.Module):
    """Every dtype of buffer, a scalar, nothing at all, channels last, ties, and buffers over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.linear = nn.Linear(5, 7)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.linear.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.coarse = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        memory = torch.arange(12.0)
        self.register_buffer("whole", memory)
        self.register_buffer("part", memory[3:9].view(2, 3).t())
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.tied(x)).sum() * self.scalar + self.conv.weight.sum() + self.nothing.sum()


def headers(folder: Path) -> dict[str, Any]:
    return {path.name: set(load_file(path)) for path in sorted(folder.glob("*.safetensors"))}


def odd() -> nn.Module:
    torch.manual_seed(2)
    return chunkc.compile(Odd(), HW, dtype=torch.float32, backend="eager")


def test_all_kinds_of_tensors_are_read_back_by_the_library(tmp_path: Path) -> None:
    model = odd()
    (path,) = chunkc.save_safetensors(model, tmp_path)
    assert path == tmp_path / "model.safetensors"
    wanted, found = model.state_dict(), load_file(path)
    assert set(found) == set(wanted) - {"tied.weight"}
    for name, value in found.items():
        assert value.dtype is wanted[name].dtype and torch.equal(value, wanted[name]), name
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "tied.weight": "linear.weight"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    other = Odd()
    other.load_state_dict({**found, "tied.weight": found["linear.weight"]})
    assert_same(other.state_dict(), wanted)


def test_the_library_loads_a_tied_model_by_what_the_header_says(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        return model

    model, other = chunkc.compile(build(), HW, dtype=torch.float32, backend="eager"), build()
    missing, unexpected = load_model(other, chunkc.save_safetensors(model, tmp_path)[0])
    assert not missing and not unexpected
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("limit", (300, "0.3kb", "1 KB", "2MB"))
def test_shards_keep_their_limit_and_the_index_finds_everything(limit: int | str, tmp_path: Path) -> None:
    limit_nbytes = {300: 300, "0.3kb": 300, "1 KB": 1000, "2MB": 2000000}[limit]
    model = odd()
    paths = chunkc.save_safetensors(model, tmp_path, max_shard_size=limit)
    assert set(paths) == set(tmp_path.iterdir())
    files = [load_file(path) for path in paths if path.suffix == ".safetensors"]
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files]
    assert all(size <= limit_nbytes or len(t) == 1 for size, t in zip(sizes, files, strict=True))
    assert all(a + b > limit_nbytes for a, b in pairwise(sizes))
    if len(files) > 1:
        index = json.loads(paths[-1].read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
        places = {name: path.name for path, tensors in zip(paths, files, strict=False) for name in tensors}
        assert index["weight_map"] == places
        assert paths[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    second = odd()
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    chunkc.load_pretrained(second, tmp_path, strict=True)
    assert_same(second.state_dict(), model.state_dict())


@pytest.mark.long(but="pending")
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_saved_is_the_state_dict_whatever_is_under_way(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKC_EMULATED", "poison,delay=2,seed=5")
    twins = twins_at(phase, torch.bfloat16)
    chunkc.save_safetensors(twins.model, tmp_path)
    wanted = twins.model.state_dict()
    assert_same({name: load_file(tmp_path / "model.safetensors")[name] for name in wanted}, wanted)
    twins.model(twins.x) if phase in ("staged", "settled") else twins.optimizer.step()


def test_a_save_replaces_an_earlier_one_of_another_number_of_files(tmp_path: Path) -> None:
    model = odd()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-notes.safetensors").write_text("mine")
    chunkc.save_safetensors(model, tmp_path, max_shard_size=300)
    chunkc.save_safetensors(model, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model-notes.safetensors", "model.safetensors"}
    chunkc.save_safetensors(model, tmp_path, max_shard_size="0.5KB")
    assert not (tmp_path / "model.safetensors").exists() and (tmp_path / "model.safetensors.index.json").exists()
    chunkc.load_pretrained(model, tmp_path, strict=True)


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    """The last shard cannot be opened: a folder stands where it is to be written."""
    model = odd()
    chunkc.save_safetensors(model, tmp_path, max_shard_size=300)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    (tmp_path / f".{last.name}.partial").mkdir()
    with torch.no_grad():
        model.scalar.fill_(9.0)
    with pytest.raises(OSError):
        chunkc.save_safetensors(model, tmp_path, max_shard_size=300)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


class Killed(BaseException):
    pass


def test_a_save_that_is_killed_among_its_shards_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a file takes its name: what loads is the earlier save or the new one, and what is left over goes."""
    model, other = odd(), odd()
    num_files = len(chunkc.save_safetensors(model, tmp_path / "earlier", max_shard_size=300))
    earlier, found, replace = model.state_dict(), [], os.replace
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for num_replaced in range(num_files + 1):
        folder = shutil.copytree(tmp_path / "earlier", tmp_path / str(num_replaced))
        (folder / ".model-00001-of-00099.safetensors.partial").write_text("of a killed save")
        left = num_replaced

        def replace_some(source: Path, target: Path) -> None:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", replace_some)
        with suppress(Killed):
            chunkc.save_safetensors(model, folder, max_shard_size=300)
        monkeypatch.setattr(os, "replace", replace)
        found.append("refused")
        with suppress(ChunkcError):
            chunkc.load_pretrained(other, folder, strict=True)
            is_earlier = torch.equal(other.state_dict()["scalar"], earlier["scalar"])
            assert_same(other.state_dict(), earlier if is_earlier else model.state_dict())
            found[-1] = "earlier" if is_earlier else "new"
        chunkc.save_safetensors(model, folder, max_shard_size=300)
        assert len(list(folder.iterdir())) == num_files and not list(folder.glob(".*"))
    assert found == ["refused"] * num_files + ["new"]


def test_transformers_reads_tied_and_sharded_saves(tmp_path: Path) -> None:
    """The names that it expects are kept, and it finds nothing missing."""
    plain = saved("t5", tmp_path / "given")
    model = from_meta("t5")
    chunkc.load_pretrained(model, tmp_path / "given")
    chunkc.save_safetensors(model, tmp_path / "ours", max_shard_size="30KB")
    model.config.save_pretrained(tmp_path / "ours")
    back, info = type(plain).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert_same(back.state_dict(), plain.state_dict())
    names = {name for names in headers(tmp_path / "ours").values() for name in names}
    assert names == {name for names in headers(tmp_path / "given").values() for name in names}


def test_what_cannot_be_saved_is_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    class Extra(Small):
        def get_extra_state(self) -> str:
            return "notes"

    class Complex(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("phases", torch.zeros(3, dtype=torch.complex64))

    def blank() -> nn.Module:
        with torch.device("meta"):
            model = Small()
        model.offset = torch.zeros(4)
        return model

    folder = tmp_path / "folder"
    cases = [(Extra, r"_extra_state .*save_checkpoint"), (Complex, r"phases \(torch\.complex64\)"), (blank, r"scale, ")]
    for build, message in cases:
        with pytest.raises(ChunkcError, match=message):
            chunkc.save_safetensors(chunkc.compile(build(), HW, backend="eager"), folder)
    for size in ("5 parsecs", 0, -3, "GB"):
        with pytest.raises(ChunkcError, match=r"max_shard_size=.*like '5GB'"):
            chunkc.save_safetensors(odd(), folder, max_shard_size=size)
    assert not folder.exists()
