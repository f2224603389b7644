"""DCP over safetensors and JSON: bits come back, one tensor at a time, whole or in parts, also by DCP's own reader."""

import json
import math
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from thread_ranks import on_threads
from torch.distributed.checkpoint import HuggingFaceStorageReader

from chunkc import ChunkcError
from chunkc.checkpoint.planners import Kept, Wanted, load, load_whole, save, stand_in
from chunkc.checkpoint.shares import Blocks, Place, Share
from chunkc.checkpoint.storage import INDEX_NAME, SafetensorsReader, SafetensorsWriter, digest_of
from chunkc.distributed.process_group import Ranks

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


def kept(tensors: Values) -> dict[str, Kept]:
    return {key: Kept.whole(value) for key, value in tensors.items()}


def bits(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_all(path: Path, tensors: Values) -> Values:
    found: Values = {}
    load_whole(SafetensorsReader(path), stand_ins(tensors), found.__setitem__)
    return found


def check(found: Values, wanted: Values) -> None:
    assert {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in wanted.items()}


def test_bits_come_back_and_every_file_is_what_its_digest_says(tmp_path: Path) -> None:
    wanted, order = values(), list[str]()
    writer = SafetensorsWriter(tmp_path)

    def made(key: str) -> tuple[torch.Tensor]:
        order.append(key)
        return (wanted[key].contiguous().view(-1),)

    save(writer, {k: Kept(v.dtype, Share.whole(v.shape), partial(made, k)) for k, v in wanted.items()})
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

    lazy = Kept(torch.float32, Share.whole((8,)), lambda: (note(torch.ones(8)),))
    save(SafetensorsWriter(tmp_path), dict.fromkeys(wanted, lazy))
    load_whole(SafetensorsReader(tmp_path), wanted, lambda key, value: note(value))
    assert len(seen) == 12


def test_a_part_of_the_tensors_may_be_read(tmp_path: Path) -> None:
    wanted = values()
    save(SafetensorsWriter(tmp_path), kept(wanted))
    part = {key: wanted[key] for key in ("special", "weight", "empty")}
    check(read_all(tmp_path, part), part)


def test_files_are_plain_safetensors_that_dcp_reads_too(tmp_path: Path) -> None:
    wanted = {k: v for k, v in values().items() if v.dtype in (torch.float32, torch.bfloat16)}
    save(SafetensorsWriter(tmp_path), kept(wanted))
    plain = load_file(tmp_path / "rank-00000.float32.safetensors")
    check(plain, {k: v for k, v in wanted.items() if v.dtype is torch.float32})
    found = {key: torch.empty_like(value) for key, value in wanted.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    check(found, wanted)


def cut(shape: tuple[int, ...], stride: tuple[int, ...], num_ranks: int, seed: int) -> list[Share]:
    """The elements of a tensor over ranks, in ranges that begin anywhere; rank 0 has those of an empty one."""
    numel, generator = math.prod(shape), random.Random(seed)
    places = sorted(generator.choices(range(numel + 1), k=3 * num_ranks - 1))
    ranges = [*pairwise([0, *places, numel])] if numel else [(0, 0), *[(1, 1)] * (3 * num_ranks - 1)]
    of_rank = [[r for r in ranges[rank::num_ranks] if r[0] < r[1] or r == (0, 0)] for rank in range(num_ranks)]
    return [Share(shape, stride, tuple(found)) for found in of_rank]


SHAPES = {"rows": (6, 4), "deep": (3, 5, 2, 4), "flat": (23,), "one": (), "none": (0, 4), "turned": (4, 1, 3)}


@pytest.mark.parametrize(("there", "here"), [(1, 1), (2, 3), (3, 1), (1, 4), (4, 2)])
def test_ranges_that_ranks_wrote_are_read_by_any_number_of_ranks(tmp_path: Path, there: int, here: int) -> None:
    """Each rank has ranges of elements in memory order, cut within rows; strides there and here are others."""
    wanted = {key: torch.randn(shape) for key, shape in SHAPES.items()}
    columns_first = {key: torch.empty(shape[::-1]).stride()[::-1] for key, shape in SHAPES.items()}
    shares = {key: cut(shape, columns_first[key], there, 1) for key, shape in SHAPES.items()}

    def write(ranks: Ranks) -> None:
        own = {key: found[ranks.rank] for key, found in shares.items()}
        parts = {k: Kept(torch.float32, s, partial(s.flats, wanted[k])) for k, s in own.items()}
        save(SafetensorsWriter(tmp_path, ranks.rank), parts, ranks)

    on_threads(there, write)
    assert len(list(tmp_path.glob("rank-*"))) == there
    found = {key: torch.full(shape, torch.nan) for key, shape in SHAPES.items()}
    for rank in range(here):
        own = {key: cut(v.shape, v.stride(), here, 2)[rank] for key, v in found.items()}

        def take(key: str, flats: Sequence[torch.Tensor], own: dict[str, Share] = own) -> None:
            for (first, end), flat in zip(own[key].ranges, flats, strict=True):
                found[key].view(-1)[first:end] = flat

        load(SafetensorsReader(tmp_path), {k: Wanted(torch.float32, s) for k, s in own.items()}, take)
    check(found, wanted)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_parts_of_blocks_are_put_together_in_the_order_of_blocks(data: st.DataObject) -> None:
    """Of any dimension, over any ranks there and here, cut anywhere in memory order, which is any."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim, num_blocks = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    there, here = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape[dim] *= num_blocks * math.lcm(there, here)
    wanted = torch.randn(shape)
    order = data.draw(st.permutations(range(len(shape))))
    with TemporaryDirectory() as folder:
        parts = parts_of_blocks(wanted, dim, num_blocks, there, order)

        def write(ranks: Ranks) -> None:
            share, value = parts[ranks.rank]
            kept = Kept(value.dtype, share, lambda: share.flats(value))
            save(SafetensorsWriter(Path(folder), ranks.rank), {"w": kept}, ranks)

        on_threads(there, write)
        check(read_all(Path(folder), {"w": wanted}), {"w": wanted})
        for share, value in parts_of_blocks(wanted, dim, num_blocks, here, order):
            found = dict[str, Sequence[torch.Tensor]]()
            load(SafetensorsReader(Path(folder)), {"w": Wanted(value.dtype, share)}, found.__setitem__)
            assert all(map(torch.equal, found["w"], share.flats(value)))


def parts_of_blocks(
    whole: torch.Tensor, dim: int, num_blocks: int, num_ranks: int, order: Sequence[int]
) -> list[tuple[Share, torch.Tensor]]:
    """What each rank has: its part of every block, in three ranges; ``order``: of dimensions in memory."""
    found = []
    for rank in range(num_ranks):
        value = torch.cat([block.chunk(num_ranks, dim)[rank] for block in whole.chunk(num_blocks, dim)], dim)
        value = value.permute(*order).contiguous().permute([order.index(d) for d in range(len(order))])
        offsets = [rank * value.shape[dim] if d == dim else 0 for d in range(whole.dim())]
        [share, *_] = cut(tuple(value.shape), value.stride(), 1, rank)
        found.append((replace(share, place=Place(tuple(whole.shape), tuple(offsets), Blocks(dim, num_blocks))), value))
    return found


def test_what_fails_on_one_rank_fails_on_all_and_is_named(tmp_path: Path) -> None:
    share = cut((40,), (1,), 3, 1)

    def write(ranks: Ranks) -> None:
        def read() -> tuple[torch.Tensor, ...]:
            if ranks.rank == 1:
                raise OSError(28, "No space left on device")
            return share[ranks.rank].flats(torch.ones(40))

        with pytest.raises(OSError, match="No space left" if ranks.rank == 1 else "on rank 1: .*No space left"):
            save(SafetensorsWriter(tmp_path, ranks.rank), {"w": Kept(torch.float32, share[ranks.rank], read)}, ranks)

    on_threads(3, write)
    assert not (tmp_path / INDEX_NAME).exists()


def test_an_index_without_a_part_is_refused(tmp_path: Path) -> None:
    wanted = {"weight": torch.ones(4)}
    save(SafetensorsWriter(tmp_path), kept(wanted))
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight"]["parts"][0]["sizes"] = [3]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ChunkcError, match=r"index\.json is .*weight'\.parts: they have 3 elements and the tensor 4"):
        read_all(tmp_path, wanted)


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    wanted = {"fine": torch.ones(2), "wave": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(ChunkcError, match=r"wave is torch\.complex64, which a checkpoint cannot hold"):
        save(SafetensorsWriter(tmp_path), kept(wanted))
    assert not list(tmp_path.iterdir())


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    wanted = {"weight": torch.ones(2)}
    save(SafetensorsWriter(tmp_path), kept(wanted))
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight"]["parts"][0]["file"] = "../other.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ChunkcError, match="is no file of the checkpoint that its manifest knows"):
        SafetensorsReader(tmp_path).read_metadata()
