"""Case 28, checkpoints: saved over one mesh, loaded over another, whole and to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from divided_models import DIVIDED_CASES
from job import Pool
from models import loss_of
from rank_parallel_checkpoints import (
    ALONE,
    Resumed,
    Run,
    load_and_train,
    load_other_model,
    load_part_of_weights,
    load_weights,
    save_for_transformers,
    save_while_training,
    train_and_save,
)
from rank_tensor import TP, TP_AND_SHARD
from training import Trained

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
SHARD, FOUR, TENSOR_FOUR = (("dp_shard", 2),), (("dp_shard", 4),), (("tp", 4),)
NAMES = ["llama_sequence", "gpt2", pytest.param("gpt", marks=SLOW)]
TOLERANCE = 1e-4


def check_values(found: list[Resumed], saved: Trained) -> None:
    """Every rank has every element of parameters and moments as they were saved."""
    for rank in found:
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            values, wanted = getattr(rank.before, kind), getattr(saved, kind)
            assert values.keys() == wanted.keys() and wanted, kind
            for name, value in values.items():
                assert value.dtype == wanted[name].dtype and value.equal(wanted[name]), (kind, name)


def check_losses(found: list[Resumed], wanted: list[Resumed]) -> None:
    """The next steps are of the same batches, whatever ranks take them."""
    ours, theirs = (sorted({loss for rank in ranks for loss in rank.losses}) for ranks in (found, wanted))
    assert len(ours) == len(theirs) > 4
    assert all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_two_tensor_ranks_save_what_one_process_loads_and_the_other_way_round(
    name: str, tmp_path: Path, two_ranks: Pool
) -> None:
    """Before the first step, and after one; what is divided, and what ranks copy."""
    there, back = tmp_path / "there", tmp_path / "back"
    saved = two_ranks.run(train_and_save, Run(name, TP), there)
    alone = [load_and_train(Run(name), there, is_stepped) for is_stepped in (False, True)]
    check_values(alone, saved[0][0].before)
    check_losses(alone[:1], [rank[1] for rank in saved])
    one = train_and_save(Run(name), back)
    for is_stepped in (False, True):
        found = two_ranks.run(load_and_train, Run(name, TP), back, is_stepped)
        check_values(found, one[0].before)
        check_losses(found, [one[1]])


@pytest.mark.long
def test_tensor_ranks_and_data_ranks_load_from_each_other(tmp_path: Path, two_ranks: Pool) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    saved = two_ranks.run(train_and_save, Run("gpt", TP), there)
    found = two_ranks.run(load_and_train, Run("gpt", SHARD), there)
    check_values(found, saved[0][0].before)
    check_losses(found, [rank[1] for rank in saved])
    saved = two_ranks.run(train_and_save, Run("gpt", SHARD), back)
    found = two_ranks.run(load_and_train, Run("gpt", TP), back)
    check_values(found, saved[0][0].before)
    check_losses(found, [rank[1] for rank in saved])


@pytest.mark.long
def test_a_run_that_drops_out_goes_on_to_the_bit(tmp_path: Path, two_ranks: Pool) -> None:
    """Each rank of the mesh that saved has its generators again; ranks of another one draw alike along ``tp``."""
    saved = two_ranks.run(train_and_save, Run("gpt_dropout", TP), tmp_path)
    found = two_ranks.run(load_and_train, Run("gpt_dropout", TP), tmp_path)
    check_values(found, saved[0][0].before)
    for rank, (_, gone_on) in zip(found, saved, strict=True):
        assert (rank.losses, rank.draws) == (gone_on.losses, gone_on.draws)
    alone = load_and_train(Run("gpt_dropout"), tmp_path)
    assert alone.draws == found[0].draws


@pytest.mark.long
def test_training_goes_on_while_tensor_ranks_save(tmp_path: Path, two_ranks: Pool) -> None:
    saved = two_ranks.run(save_while_training, Run("gpt", TP), tmp_path)
    check_values([load_and_train(Run("gpt"), tmp_path)], saved[0].before)


@pytest.mark.long
def test_masters_and_8_bit_states_of_parts(tmp_path: Path, two_ranks: Pool) -> None:
    """In 16 bits the fp32 masters are saved, of which parameters are the rounded ones."""
    run = Run("gpt", TP, dtype="bfloat16", optimizer="AdamW8bit")
    saved = two_ranks.run(train_and_save, run, tmp_path)
    found = two_ranks.run(load_and_train, run, tmp_path)
    check_values(found, saved[0][0].before)
    assert [rank.losses for rank in found] == [gone_on.losses for _, gone_on in saved]


@pytest.mark.long
def test_a_model_of_another_shape_is_refused_by_whole_shapes(tmp_path: Path, two_ranks: Pool) -> None:
    two_ranks.run(train_and_save, Run("llama", TP), tmp_path)
    for text in two_ranks.run(load_other_model, Run("gpt", TP), tmp_path):
        assert "does not fit the model" in text
    assert "does not fit the model" in load_other_model(Run("gpt"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", [pytest.param("llama_tied", marks=SLOW), "llama_untied", "bert", "gpt2"])
def test_tensor_ranks_load_the_weights_of_a_whole_model(
    name: str, on_meta: bool, tmp_path: Path, two_ranks: Pool
) -> None:
    """From one process's files, into parts that never stood whole in any rank's memory, or replace older ones."""
    plain = DIVIDED_CASES[name].build()
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(0.01 * torch.randn(param.shape))
    plain.save_pretrained(tmp_path)
    loss = loss_of(plain(**DIVIDED_CASES[name].batches()[0])).item()
    for found in two_ranks.run(load_weights, name, TP, tmp_path, on_meta):
        assert not found["report"].missing_keys and not found["report"].unexpected_keys
        for key, value in plain.state_dict().items():
            assert found["values"][key].equal(value), key
        assert abs(found["loss"] - loss) <= TOLERANCE * abs(loss)


def test_weights_that_files_lack_are_not_drawn_by_tensor_ranks(tmp_path: Path, two_ranks: Pool) -> None:
    plain = DIVIDED_CASES["llama_untied"].build()
    state = {name: value for name, value in plain.state_dict().items() if name != "lm_head.weight"}
    plain.save_pretrained(tmp_path, state_dict=state)
    for missing, text in two_ranks.run(load_part_of_weights, tmp_path):
        assert missing == ("lm_head.weight",) and "lm_head.weight" in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", pytest.param("bert", marks=SLOW)])
def test_transformers_load_what_tensor_ranks_save(name: str, tmp_path: Path, two_ranks: Pool) -> None:
    found = two_ranks.run(save_for_transformers, name, tmp_path)
    plain = type(DIVIDED_CASES[name].build()).from_pretrained(tmp_path)
    assert isinstance(plain, transformers.PreTrainedModel)
    for key, value in plain.state_dict().items():
        assert all(values[key].equal(value) for values, _ in found), key
    assert all("chunkc.save_safetensors(model, folder)" in text for _, text in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt", "gpt2"])
@pytest.mark.parametrize("mesh", [FOUR, TENSOR_FOUR, ALONE], ids=["dp_shard=4", "tp=4", "alone"])
def test_four_ranks_save_what_any_mesh_loads(
    name: str, mesh: tuple[tuple[str, int], ...], tmp_path: Path, four_ranks: Pool
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    saved = four_ranks.run(train_and_save, Run(name, TP_AND_SHARD), there, timeout_s=400)
    found = [load_and_train(Run(name), there)]
    if mesh:
        found = four_ranks.run(load_and_train, Run(name, mesh), there, timeout_s=400)
    check_values(found, saved[0][0].before)
    check_losses(found, [rank[1] for rank in saved])
    one = [train_and_save(Run(name), back)]
    if mesh:
        one = four_ranks.run(train_and_save, Run(name, mesh), back, timeout_s=400)
    found = four_ranks.run(load_and_train, Run(name, TP_AND_SHARD), back, True, timeout_s=400)
    check_values(found, one[0][0].before)
    check_losses(found, [rank[1] for rank in one])
