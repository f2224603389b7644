"""Weights over ranks: rank 0 reads and writes the files of the single process, and all ranks see what it sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from job import Pool
from rank_weights import load_part, load_weights, load_weights_refused, save_gpt, save_weights, save_weights_full
from resumed import check_equal
from safetensors.torch import load_file, save_file
from torch import nn

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_two_ranks_write_the_files_of_one_process(tmp_path: Path, two_ranks: Pool) -> None:
    """Before the first step byte by byte; after it what ``state_dict`` gives; in one file and in shards."""
    for num_steps, size in ((0, 20_000), (2, 20_000), (2, 10**9)):
        folder = tmp_path / f"{num_steps}-{size}"
        (paths, state), (others, _) = two_ranks.run(save_weights, folder / "ranks", num_steps, size)
        assert paths == others and (len(paths) > 2) == (size < 10**9)
        found = {
            name: value for path in paths if path.suffix == ".safetensors" for name, value in load_file(path).items()
        }
        check_equal(found, state)
        if num_steps == 0:
            ours, _ = save_weights(folder / "one", num_steps, size)
            assert [path.name for path in ours] == [path.name for path in paths]
            assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, paths, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_two_ranks_load_what_one_process_saved(num_steps: int, tmp_path: Path, two_ranks: Pool) -> None:
    """Before the first step and after it, also where only rank 0 sees the files."""
    _, wanted = save_weights(tmp_path, 1, 20_000)
    (report, state, losses), (other, _, other_losses) = two_ranks.run(load_weights, tmp_path, num_steps)
    assert report == other and not report.missing_keys and not report.unexpected_keys
    check_equal(state, wanted)
    one, _, wanted_losses = load_weights(tmp_path, num_steps)
    assert one == report
    assert (losses[0] + other_losses[0]) / 2 == pytest.approx(wanted_losses[0], rel=1e-5)


@pytest.mark.long
def test_save_pretrained_on_ranks_loads_in_plain_transformers(tmp_path: Path, two_ranks: Pool) -> None:
    transformers = pytest.importorskip("transformers")
    state, _ = two_ranks.run(save_gpt, tmp_path)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert plain.dtype is torch.bfloat16
    check_equal(plain.state_dict(), state)


@pytest.mark.long
def test_errors_of_rank_0_reach_all(tmp_path: Path, two_ranks: Pool) -> None:
    """A full disk, after which training goes on; files that are not the model's, with nothing changed."""
    for rank, (text, losses) in enumerate(two_ranks.run(save_weights_full, tmp_path / "full", 1)):
        assert "too large" in text and ("on rank 0" in text) == (rank == 1), text
        assert len(losses) == 1
    assert not list((tmp_path / "full").iterdir())
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    for rank, (text, other, before, after) in enumerate(two_ranks.run(load_weights_refused, path, True)):
        assert "do not have the same names" in text and ("on rank 0" in text) == (rank == 1), text
        assert other.startswith("RankError") and "are not the same; the first difference: rank 0: " in other, other
        if rank == 0:
            check_equal(after, before)


def test_what_the_files_lack_is_initialised_alike(tmp_path: Path, two_ranks: Pool) -> None:
    """All ranks draw the same numbers, so that generators seeded alike stay alike."""
    torch.manual_seed(2)
    first = nn.Linear(4, 8)
    save_file({"0.weight": first.weight.detach(), "0.bias": first.bias.detach()}, tmp_path / "model.safetensors")
    ranks, one = two_ranks.run(load_part, tmp_path), load_part(tmp_path)
    assert [(names, draws) for names, _, draws in ranks] == [(one[0], one[2])] * 2
    assert set(one[0]) == {"1.weight", "1.bias"}
    check_equal(ranks[0][1], one[1])
