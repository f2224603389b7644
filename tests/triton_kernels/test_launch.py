"""Tiles cover every element of every piece once, and launches refuse what kernels could not do right."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.triton_kernels.cast import restore_launch
from chunkc.triton_kernels.chunk_update import chunk_update_launch
from chunkc.triton_kernels.grad_norm import grad_norm_launches
from chunkc.triton_kernels.launch import BLOCK, MAX_NUMEL, make_tiles

LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1]), st.integers(0, 5 * BLOCK))


@given(st.lists(st.tuples(st.integers(0, 40), LENGTHS), max_size=8))
def test_tiles_cover_pieces_once(gaps_and_lengths: list[tuple[int, int]]) -> None:
    pieces, at = [], 0
    for param, (gap, length) in enumerate(gaps_and_lengths):
        pieces.append((at + gap, at + gap + length, param))
        at += gap + length
    tiles = make_tiles(list(reversed(pieces)), "cpu")
    assert tiles.dtype is torch.int32 and tiles.shape[1:] == (3,)
    owner = torch.full((at,), -1)
    covered = torch.zeros(at, dtype=torch.int64)
    for start, end, param in tiles.tolist():
        assert 0 < end - start <= BLOCK
        owner[start:end] = param
        covered[start:end] += 1
    for start, end, param in pieces:
        assert bool((owner[start:end] == param).all())
        inner = [tile for tile in tiles.tolist() if tile[2] == param][:-1]
        assert all(tile[1] % 16 == 0 for tile in inner)
    assert covered.tolist() == (owner >= 0).long().tolist()
    assert int(covered.sum()) == sum(end - start for start, end, _ in pieces)


def test_a_large_piece_is_cut_within_its_ends() -> None:
    tiles = make_tiles([(MAX_NUMEL - 2 * BLOCK, MAX_NUMEL, 3)], "cpu").tolist()
    first = MAX_NUMEL - 2 * BLOCK
    cuts = [first // 16 * 16 + BLOCK, first // 16 * 16 + 2 * BLOCK]
    assert tiles == [[first, cuts[0], 3], [cuts[0], cuts[1], 3], [cuts[1], MAX_NUMEL, 3]]


@pytest.mark.parametrize(
    "pieces", [[(0, MAX_NUMEL + 1, 0)], [(-1, 4, 0)], [(5, 4, 0)], [(0, 10, 0), (9, 12, 1)], [(0, 10, 0), (0, 10, 0)]]
)
def test_bad_pieces_are_refused(pieces: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match=r"disjoint ranges within 2147483647 elements; found \["):
        make_tiles(pieces, "cpu")


def update(**changes: torch.Tensor) -> None:
    lists = dict.fromkeys(("param32", "exp_avg", "exp_avg_sq"), torch.zeros(8))
    lists |= {name: changes.pop(name) for name in tuple(changes) if name in lists}
    arguments = {
        "grad": torch.zeros(8, dtype=torch.float16),
        "payload": torch.zeros(8, dtype=torch.float16),
        "tiles": make_tiles([(0, 8, 0)], "cpu"),
        "row_of_param": torch.zeros(1, dtype=torch.int32),
        "rows": torch.zeros(1, 9),
        "control": torch.zeros(2),
    }
    chunk_update_launch("adam", tuple(lists.values()), **(arguments | changes))


REFUSED = {
    "another size": ({"exp_avg": torch.zeros(9)}, "share size and device; found a state of shape"),
    "two dimensions": ({"grad": torch.zeros(4, 2)}, "one dimension"),
    "strides": ({"payload": torch.zeros(16)[::2]}, "contiguous"),
    "another device": ({"grad": torch.zeros(8, device="meta")}, "on meta"),
    "moments in 16 bits": ({"exp_avg_sq": torch.zeros(8, dtype=torch.float16)}, "optimizer states are float32"),
    "gradient in 64 bits": ({"grad": torch.zeros(8, dtype=torch.float64)}, "kernels take float32, float16"),
    "tiles in 64 bits": ({"tiles": torch.zeros(1, 3, dtype=torch.int64)}, "tiles is a contiguous"),
    "tiles transposed": ({"tiles": torch.zeros(3, 3, dtype=torch.int32).t()}, "tiles is a contiguous"),
    "short rows": ({"rows": torch.zeros(1, 8)}, "rows is a contiguous torch.float32 table"),
    "rows in 64 bits": ({"rows": torch.zeros(1, 9, dtype=torch.float64)}, "rows is a contiguous"),
    "row numbers in 64 bits": ({"row_of_param": torch.zeros(1, dtype=torch.int64)}, "row_of_param is"),
    "short control": ({"control": torch.zeros(1)}, "control is a contiguous"),
    "table elsewhere": ({"control": torch.zeros(2, device="meta")}, "control is a contiguous .* on cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_update_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    update()
    with pytest.raises(ValueError, match=message):
        update(**changes)


def test_one_memory_for_everything_is_refused() -> None:
    data = torch.zeros(8)
    update(param32=data, payload=data)
    with pytest.raises(ValueError, match="memory of its own"):
        update(param32=data, payload=data, grad=data)


def test_another_number_of_states_is_refused() -> None:
    tables = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, 9), torch.zeros(2))
    data, tiles = [torch.zeros(8) for _ in range(4)], make_tiles([(0, 8, 0)], "cpu")
    with pytest.raises(ValueError, match="lion updates param32 and 1 states, found 3 lists"):
        chunk_update_launch("lion", data[:3], data[3], data[3], tiles, *tables)


def test_bad_casts_and_norms_are_refused() -> None:
    tiles = make_tiles([(0, 8, 0)], "cpu")
    with pytest.raises(ValueError, match="share size"):
        restore_launch(torch.zeros(8), torch.zeros(9), tiles)
    with pytest.raises(ValueError, match=r"float32, float16 and bfloat16; param32 is torch\.int32"):
        restore_launch(torch.zeros(8, dtype=torch.int32), torch.zeros(8), tiles)
    with pytest.raises(ValueError, match="param32 is float32"):
        restore_launch(torch.zeros(8, dtype=torch.float16), torch.zeros(8), tiles)
    with pytest.raises(ValueError, match="out is a contiguous"):
        grad_norm_launches(torch.zeros(8), tiles, torch.zeros(3))
    with pytest.raises(ValueError, match="partial is a contiguous"):
        grad_norm_launches(torch.zeros(8), tiles, torch.zeros(2), partial=torch.zeros(2, 2))
