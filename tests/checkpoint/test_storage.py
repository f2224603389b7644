"""DCP over safetensors and JSON: bits come back, one tensor at a time, whole or in parts, also by DCP's own reader."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from chunkc import ChunkcError
from chunkc.checkpoint.planners import LazySavePlanner, load, save, stand_in
from chunkc.checkpoint.storage import INDEX_NAME, SafetensorsReader, SafetensorsWriter, digest_of

Values = dict[str, torch.Tensor]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool)


def values() -> Values:
    generator = torch.Generator().manual_seed(0)
    found = {
        "weight": torch.randn(13, 7, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "transposed": torch.randn(5, 3, generator=generator).half().t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "strange/name@0,0 é": torch.randn(2, dtype=torch.float64, generator=generator),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }
    return found | {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in INTEGERS}


def stand_ins(tensors: Values) -> Values:
    return {key: stand_in(value.dtype, value.shape) for key, value in tensors.items()}


def bits(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_all(path: Path, tensors: Values) -> Values:
    found: Values = {}
    load(SafetensorsReader(path), stand_ins(tensors), found.__setitem__)
    return found


def check(found: Values, wanted: Values) -> None:
    assert {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in wanted.items()}


def test_bits_come_back_and_every_file_is_what_its_digest_says(tmp_path: Path) -> None:
    wanted, order = values(), list[str]()
    writer = SafetensorsWriter(tmp_path)
    save(writer, stand_ins(wanted), lambda key: order.append(key) or wanted[key])
    assert order == list(wanted), "each value is made once, in order"
    check(read_all(tmp_path, wanted), wanted)
    files = {path.name: digest_of(path) for path in tmp_path.iterdir()}
    assert files == writer.digests and INDEX_NAME in files


def test_only_one_tensor_exists_at_a_time(tmp_path: Path) -> None:
    """A value that is written is gone before the next is made; one that is read, before the next is."""
    wanted = {f"t{i}": stand_in(torch.float32, (8,)) for i in range(6)}
    seen: list[weakref.ref[torch.Tensor]] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(value))
        return value

    save(SafetensorsWriter(tmp_path), wanted, lambda key: note(torch.ones(8)))
    load(SafetensorsReader(tmp_path), wanted, lambda key, value: note(value))
    assert len(seen) == 12


def test_a_part_of_the_tensors_may_be_read(tmp_path: Path) -> None:
    wanted = values()
    save(SafetensorsWriter(tmp_path), stand_ins(wanted), wanted.__getitem__)
    part = {key: wanted[key] for key in ("special", "weight", "empty")}
    check(read_all(tmp_path, part), part)


def test_files_are_plain_safetensors_that_dcp_reads_too(tmp_path: Path) -> None:
    wanted = {k: v for k, v in values().items() if v.dtype in (torch.float32, torch.bfloat16)}
    save(SafetensorsWriter(tmp_path), stand_ins(wanted), wanted.__getitem__)
    plain = load_file(tmp_path / "rank-00000.float32.safetensors")
    check(plain, {k: v for k, v in wanted.items() if v.dtype is torch.float32})
    found: Values = {}
    load(HuggingFaceStorageReader(str(tmp_path)), stand_ins(wanted), found.__setitem__)
    check(found, wanted)


def test_parts_that_several_ranks_wrote_are_put_together(tmp_path: Path) -> None:
    """Two ranks write a half each of two tensors, cut along different dimensions; one reads them whole."""
    wanted = {"rows": torch.randn(6, 4), "columns": torch.randn(3, 8)}
    cuts = {"rows": (0, (2, 4)), "columns": (1, (5, 3))}
    results, metadata = [], None
    for rank in range(2):
        planner = LazySavePlanner(lambda key, rank=rank: wanted[key].split(cuts[key][1], cuts[key][0])[rank])
        planner.set_up_planner(stand_ins(wanted), is_coordinator=True)
        items = []
        for item in planner.create_local_plan().items:
            dim, sizes = cuts[item.index.fqn]
            shape, offsets = list(wanted[item.index.fqn].shape), [0, 0]
            shape[dim], offsets[dim] = sizes[rank], sum(sizes[:rank])
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
            assert item.tensor_data is not None
            index, data = MetadataIndex(item.index.fqn, offsets), replace(item.tensor_data, chunk=chunk)
            items.append(replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
        results.append((rank, planner, SavePlan(items)))
    plans, metadata = results[0][1].create_global_plan([plan for _, _, plan in results])
    writers = [SafetensorsWriter(tmp_path, rank) for rank, _, _ in results]
    written = [w.write_data(plan, r[1]).wait() for w, plan, r in zip(writers, plans, results, strict=True)]
    writers[0].finish(metadata, written)
    assert {path.name for path in tmp_path.glob("rank-*")} == {f"rank-0000{r}.float32.safetensors" for r in range(2)}
    check(read_all(tmp_path, wanted), wanted)


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    wanted = {"fine": torch.ones(2), "wave": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(ChunkcError, match=r"wave is torch\.complex64, which a checkpoint cannot hold"):
        save(SafetensorsWriter(tmp_path), stand_ins(wanted), wanted.__getitem__)
    assert not list(tmp_path.iterdir())


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    wanted = {"weight": torch.ones(2)}
    save(SafetensorsWriter(tmp_path), stand_ins(wanted), wanted.__getitem__)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight"]["parts"][0]["file"] = "../other.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ChunkcError, match="which is no file of the checkpoint"):
        SafetensorsReader(tmp_path).read_metadata()
