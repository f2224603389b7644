"""Case 28: models under tensor and sequence parallelism train as one process does on the batches of all data ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint
from accumulating import large, micro_batches, train_large, train_plain_16_in_parts
from equalities import ERROR_RATIO
from job import Pool, only_call
from parallel_models import PARALLEL_CASES
from rank_tensor import (
    TP_AND_SHARD,
    DoneParallel,
    Parallel,
    compute_length_of_rank,
    drop_out_where_one_draws,
    evaluate_where_one_draws,
    exchanged_by_model,
    load_names_of_rank,
    refusals,
    reload,
    save_by_torch,
    save_weights,
    start_with_other_values,
    train,
    train_for_ever,
    train_with_torch,
)
from rank_training import together
from training import Trained, assert_same_semantics, largest_error, train_measured

pytestmark = pytest.mark.distributed
NAMES = ("llama", "llama_sequence", "gpt")
QUICK_NAMES = [pytest.param("llama", marks=pytest.mark.slow), "llama_sequence", "gpt"]

SLOW_DIVIDED = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama_untied", "t5_gated")]


def check(found: list[DoneParallel], work: Parallel, num_data: int) -> None:
    """Ranks along ``tp`` see one loss; all have the same values, those of one process."""
    num_tensor = len(found) // num_data
    for first in range(0, len(found), num_tensor):
        line = found[first : first + num_tensor]
        assert all(done.trained.losses == line[0].trained.losses for done in line)
    wanted = train_large(work.case, work.recipe, num_data * work.accumulate)
    assert_same_semantics(together([done.trained for done in found[::num_tensor]]), wanted)
    for done in found:
        assert_values(done.trained, found[0].trained)


def assert_values(run: Trained, other: Trained) -> None:
    for kind in ("gradients", "params", "exp_avg", "exp_avg_sq"):
        values, others = getattr(run, kind), getattr(other, kind)
        assert values.keys() == others.keys() and all(torch.equal(values[n], others[n]) for n in values), kind


def train_clipped(work: Parallel, num_data: int) -> tuple[Trained, list[float]]:
    """One process on the batches of ``num_data`` ranks, clipped to 0.5 by torch; and the norms before that."""
    case, norms = work.case, list[float]()
    model, clip = case.build(), torch.nn.utils.clip_grad_norm_
    optimizer = work.recipe.plain(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: norms.append(clip(model.parameters(), 0.5).item()))
    batches = [large(micro_batches(case.batches(), step, num_data)) for step in range(work.recipe.num_steps)]
    return train_measured(model, batches, optimizer, work.recipe), norms


@pytest.mark.long(but="gpt")
@pytest.mark.parametrize("name", QUICK_NAMES)
def test_two_tensor_ranks_train_as_one_process(name: str, two_ranks: Pool) -> None:
    """On the smallest machine that works, so that chunks move."""
    work = Parallel(name, hw=None)
    found = two_ranks.run(train, work)
    check(found, work, 1)
    assert all(done.stats["h2d_nbytes"] > 0 for done in found)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama_tied", "bert", "gpt2", "qwen3", "t5", *SLOW_DIVIDED])
def test_a_model_of_transformers_is_divided_by_its_own_plan(name: str, two_ranks: Pool) -> None:
    """Ties, biases that ranks copy, norms of heads, biases by position, and a vocabulary that is divided or whole."""
    work = Parallel(name, hw=None, is_text=True)
    found = two_ranks.run(train, work)
    check(found, work, 1)
    assert all(done.stats["h2d_nbytes"] > 0 for done in found)


def test_ranks_start_with_the_values_of_the_first(two_ranks: Pool) -> None:
    """Of a model that chunkc divides, where ranks were seeded differently."""
    assert two_ranks.run(start_with_other_values, Parallel("llama_untied")) == [[], []]


@pytest.mark.slow
def test_all_data_ranks_start_with_the_values_of_the_first(four_ranks: Pool) -> None:
    assert four_ranks.run(start_with_other_values, Parallel("llama_untied", TP_AND_SHARD)) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_text", "name"), [(False, "llama_untied"), *((True, name) for name in ("llama_untied", "gpt2", "bert", "t5"))]
)
def test_models_of_transformers_are_divided_beside_data_ranks(is_text: bool, name: str, four_ranks: Pool) -> None:
    """With two micro-batches a step."""
    work = Parallel(name, TP_AND_SHARD, hw=None, is_text=is_text, accumulate=2)
    check(four_ranks.run(train, work, timeout_s=400), work, 2)


@pytest.mark.slow
def test_replicas_of_ranks_that_compute_together() -> None:
    """Eight ranks, of which four copy the chunks of the others."""
    pool = Pool(8)
    work = Parallel("llama_untied", (("dp_replicate", 2), *TP_AND_SHARD), hw=None, is_text=True)
    try:
        check(pool.run(train, work, timeout_s=400), work, 4)
    finally:
        pool.discard()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["llama_sequence", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "t5"))]
)
def test_clipping_takes_the_norm_of_whole_tensors(name: str, two_ranks: Pool) -> None:
    """Parts add up, copies count once: the norm is that of one process, and so is what is trained."""
    work = Parallel(name)
    wanted, norms = train_clipped(work, 1)
    for done in two_ranks.run(train, work, 0.5):
        assert done.norms == pytest.approx(norms, rel=1e-5) and max(norms) > 0.5
        assert_same_semantics(done.trained, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_untied", "gpt2", "bert", "t5"])
def test_16_bits_of_transformers(name: str, two_ranks: Pool) -> None:
    work = Parallel(name, hw=None, dtype=torch.bfloat16)
    exact, plain = train_large(work.case, work.recipe, 1), train_plain_16_in_parts(work.case, work.recipe, 1)
    allowed = ERROR_RATIO * largest_error(plain.params, exact.params)
    for done in two_ranks.run(train, work):
        assert 0 < largest_error(done.trained.params, exact.params) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_16_bits(name: str, two_ranks: Pool) -> None:
    """Acceptance (c): what is trained is as near to fp32 as plain PyTorch in bfloat16 is.

    Gradients are the bits of torch's own DTensors: parts of sums are rounded before they are added up.
    """
    work, case = Parallel(name, hw=None, dtype=torch.bfloat16), PARALLEL_CASES[name]
    for gradients, wanted in two_ranks.run(train_with_torch, work):
        assert gradients.keys() == wanted.keys()
        assert [n for n in wanted if not torch.equal(gradients[n], wanted[n].to(gradients[n].dtype))] == []
    exact, plain = train_large(case, work.recipe, 1), train_plain_16_in_parts(case, work.recipe, 1)
    allowed = ERROR_RATIO * largest_error(plain.params, exact.params)
    for done in two_ranks.run(train, work):
        assert 0 < largest_error(done.trained.params, exact.params) <= allowed


@pytest.mark.long
@pytest.mark.parametrize("name", [*QUICK_NAMES[:2], pytest.param("gpt", marks=pytest.mark.slow)])
def test_the_plan_knows_what_the_model_exchanges(name: str, two_ranks: Pool) -> None:
    """Bytes along tp, counted by torch's profiler from what is handed to each collective."""
    for planned_nbytes, counted_nbytes in two_ranks.run(exchanged_by_model, Parallel(name)):
        assert planned_nbytes == counted_nbytes > 0


@pytest.mark.slow
def test_inductor(two_ranks: Pool) -> None:
    work = Parallel("llama_sequence", backend="inductor")
    check(two_ranks.run(train, work), work, 1)


@pytest.mark.slow
def test_micro_batches(two_ranks: Pool) -> None:
    work = Parallel("gpt", accumulate=2)
    check(two_ranks.run(train, work), work, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_state_dicts_hold_dtensors_and_load(name: str, two_ranks: Pool) -> None:
    for found in two_ranks.run(reload, name):
        assert found == dict.fromkeys(("evaluated", "losses", "values", "parameters", "dtensors", "keys"), True)


@pytest.mark.long
def test_state_dicts_that_differ_between_ranks_are_refused(two_ranks: Pool) -> None:
    """Before parts of one value are exchanged for those of another."""
    for error in two_ranks.run(load_names_of_rank):
        assert "a loaded value of transformer.h.0.attn.c_attn.weight" in error, error


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as no_dist asks
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_two_ranks_save_is_loaded_by_one(name: str, tmp_path: Path, two_ranks: Pool) -> None:
    """By torch.distributed.checkpoint, which has whole tensors of any mesh under the model's own names."""
    values = two_ranks.run(save_by_torch, name, str(tmp_path))[0]
    state = Parallel(name).case.build().state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state.keys() == values.keys() and all(torch.equal(state[name], values[name]) for name in state)


@pytest.mark.long
def test_what_is_not_served_is_refused(two_ranks: Pool) -> None:
    parts = {
        "full_params": "not built for tensor parallelism",
        "clip": "chunkc.clip_grad_norm_",
        "plan": "hand the whole mesh to chunkc.compile or chunkc.plan",
        "plan of compiled": "is compiled under tensor parallelism",
        "no mesh": "hand the whole mesh to chunkc.compile",
        "not parallel": "parallelise it first",
        "pipeline": "hand the whole mesh to chunkc.compile",
        "nodes": "name the dimensions dp_replicate and dp_shard",
    }
    for found in two_ranks.run(refusals):
        assert {name for name, text in found.items() if parts[name] in text} == set(parts), found


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "backend"), [(0, "eager"), (2, "eager"), pytest.param(2, "inductor", marks=pytest.mark.slow)]
)
def test_ranks_of_one_batch_must_draw_the_same_numbers(number: int, backend: str, two_ranks: Pool) -> None:
    """Where one draws alone before forward ``number``, none runs it; drawing on both, they train on."""
    found = two_ranks.run(drop_out_where_one_draws, number, backend, timeout_s=400)
    for text, is_kept, _ in found:
        assert "rank 0: draws random numbers from state" in text and "ranks along tp would draw others" in text, text
        assert is_kept
    losses = [of_rank for *_, of_rank in found]
    assert losses[0] == losses[1] and len(set(losses[0])) == len(losses[0]) == 4


@pytest.mark.long
def test_an_evaluation_that_drops_out_must_draw_the_same_numbers(two_ranks: Pool) -> None:
    for texts in two_ranks.run(evaluate_where_one_draws, timeout_s=400):
        assert texts[:3] == [""] * 3 and "ranks along tp would draw others" in texts[3], texts


@pytest.mark.long
def test_ranks_of_one_batch_may_draw_alone_without_dropout(two_ranks: Pool) -> None:
    for text, is_kept, losses in two_ranks.run(drop_out_where_one_draws, 2, "eager", "gpt"):
        assert text == "" and not is_kept and len(losses) == 5


@pytest.mark.long
def test_ranks_of_one_batch_must_have_it_in_one_length(two_ranks: Pool) -> None:
    """Before the model exchanges anything, where sizes that differ would be an error of gloo's or a hang."""
    for error in two_ranks.run(compute_length_of_rank):
        assert "the ranks' forward are not the same; the first difference: rank 0: segment" in error, error


@pytest.mark.long
def test_dropout_is_that_of_one_process(two_ranks: Pool) -> None:
    """With its seed, where values that are dropped are whole on both ranks."""
    work = Parallel("gpt_dropout")
    wanted, norms = train_clipped(work, 1)
    for done in two_ranks.run(train, work, 0.5):
        assert_same_semantics(done.trained, wanted)
        assert done.norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
def test_a_killed_rank_ends_those_that_compute_with_it() -> None:
    """Also where one of the model's own collectives fails."""
    with only_call(2, train_for_ever, group_timeout_s=20.0) as job:
        for rank in range(2):
            job.wait_for(rank, "warm", 120.0)
        job.kill(1)
        survivor = job.ends(35.0)[0]
    assert survivor.exit_code == 1 and "RankError: rank 0 of 2 stopped in" in survivor.log, survivor.log


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tensor_and_data_ranks_train_as_one_process(name: str, four_ranks: Pool) -> None:
    work = Parallel(name, TP_AND_SHARD, hw=None)
    found = four_ranks.run(train, work, timeout_s=400)
    check(found, work, 2)
    assert all(done.stats["h2d_nbytes"] > 0 and done.stats["comm_nbytes"] > 0 for done in found)


@pytest.mark.slow
def test_tensor_and_data_ranks_clip_as_one_process(four_ranks: Pool) -> None:
    """By what was measured as gradients landed, from the second step on."""
    work = Parallel("llama_sequence", TP_AND_SHARD, options={"max_grad_norm": 0.5})
    wanted, norms = train_clipped(work, 2)
    assert min(norms) > 0.5, "every step is clipped"
    for done in four_ranks.run(train, work, timeout_s=400):
        assert_same_semantics(replace(done.trained, losses=wanted.losses), wanted)


def check_weights(found: list[dict[str, torch.Tensor]], folder: Path, name: str) -> None:
    """One process loads the files as they are: they have whole tensors, tied ones once."""
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved |= safetensors.torch.load_file(file)
    assert saved and all(torch.equal(value, found[0][key]) for key, value in saved.items())
    plain = Parallel(name).case.build()
    missing, unexpected = plain.load_state_dict(saved, strict=False)
    assert not unexpected and (name == "llama_tied") == bool(missing)
    plain.tie_weights() if hasattr(plain, "tie_weights") else None
    for key, value in plain.state_dict().items():
        assert all(torch.equal(value, state[key]) for state in found), key


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama_tied", "llama_sequence"])
def test_weights_are_saved_whole(name: str, two_ranks: Pool, tmp_path: Path) -> None:
    found = two_ranks.run(save_weights, Parallel(name, is_text=name == "llama_tied"), str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_weights(found, tmp_path, name)


@pytest.mark.slow
def test_weights_are_saved_whole_beside_data_ranks(four_ranks: Pool, tmp_path: Path) -> None:
    work = Parallel("llama_untied", TP_AND_SHARD, is_text=True)
    check_weights(four_ranks.run(save_weights, work, str(tmp_path)), tmp_path, "llama_untied")
