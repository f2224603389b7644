"""Models under context parallelism train as one process does on whole sequences."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from accumulating import train_large, train_plain_16_in_parts
from divided_models import DIVIDED_CASES
from equalities import ERROR_RATIO
from job import Pool, only_call
from models import loss_of
from rank_context import (
    SHARD_AND_CP,
    Sliced,
    compute_size_of_rank,
    count_from_zero,
    evaluate,
    exchanged,
    refusals,
    run_program,
    train,
    train_for_ever,
    train_in_pieces,
    wrong_slices,
)
from rank_tensor import DoneParallel
from rank_training import ROOMY, together
from training import Trained, assert_same_semantics, largest_error, train_measured

pytestmark = pytest.mark.distributed
PAGE = (Path(__file__).parents[2] / "docs/context_parallel.md").read_text(encoding="utf-8")
SLOW_NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("hf_gpt2", "hf_qwen3")]
NAMES = ("llama", "gpt", "hf_llama", "gpt_wrapped", "hf_bert", "hf_t5", "hf_t5_even", *SLOW_NAMES)


def train_clipped(work: Sliced) -> tuple[Trained, list[float]]:
    """One process on whole sequences, clipped to 0.5 by torch; and the norms before that."""
    model, clip, norms = work.case.build(), torch.nn.utils.clip_grad_norm_, list[float]()
    optimizer = work.recipe.plain(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: norms.append(clip(model.parameters(), 0.5).item()))
    batches = [work.case.batches()[step % 4] for step in range(work.recipe.num_steps)]
    return train_measured(model, batches, optimizer, work.recipe), norms


def check(found: list[DoneParallel], work: Sliced, num_lines: int) -> None:
    """Losses are means over slices; all ranks have the same values, those of one process on whole sequences."""
    wanted = train_large(work.case, work.recipe, num_lines * work.accumulate)
    assert_same_semantics(together([done.trained for done in found]), wanted)


@pytest.mark.long(but="llama")
@pytest.mark.parametrize("name", NAMES)
def test_two_slices_train_as_one_process(name: str, two_ranks: Pool) -> None:
    """On the smallest machine that works, so that chunks move."""
    work = Sliced(name, hw=None)
    found = two_ranks.run(train, work)
    check(found, work, 1)
    assert all(done.stats["h2d_nbytes"] > 0 for done in found)


@pytest.mark.long
def test_masks_of_few_queries_hide_the_same_keys(two_ranks: Pool) -> None:
    """Three queries at a time see what all would: the second slice begins at key 8."""
    work = Sliced("gpt_folded")
    check(two_ranks.run(train_in_pieces, work, 3 * 16), work, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "hf_t5"])
def test_slices_beside_data_ranks(name: str, four_ranks: Pool) -> None:
    work = Sliced(name, SHARD_AND_CP, hw=None, accumulate=2)
    check(four_ranks.run(train, work, timeout_s=400), work, 2)


@pytest.mark.slow
def test_replicas_of_ranks_with_slices() -> None:
    """Eight ranks, of which four copy the chunks of the others."""
    pool = Pool(8)
    work = Sliced("hf_llama", (("dp_replicate", 2), *SHARD_AND_CP), hw=None)
    try:
        check(pool.run(train, work, timeout_s=400), work, 4)
    finally:
        pool.discard()


@pytest.mark.long
def test_clipping_takes_the_norm_of_whole_sequences(two_ranks: Pool) -> None:
    work = Sliced("gpt")
    wanted, norms = train_clipped(work)
    found = two_ranks.run(train, work, 0.5)
    assert_same_semantics(together([done.trained for done in found]), wanted)
    for done in found:
        assert done.norms == pytest.approx(norms, rel=1e-5) and min(norms) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "hf_t5"])
def test_16_bits(name: str, two_ranks: Pool) -> None:
    """Acceptance (c): what is trained is as near to fp32 as plain PyTorch in bfloat16 is."""
    work = Sliced(name, hw=None, dtype=torch.bfloat16)
    exact, plain = train_large(work.case, work.recipe, 1), train_plain_16_in_parts(work.case, work.recipe, 1)
    allowed = ERROR_RATIO * largest_error(plain.params, exact.params)
    for done in two_ranks.run(train, work):
        assert 0 < largest_error(done.trained.params, exact.params) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hw"), [("hf_llama", None), ("hf_t5", ROOMY)])
def test_inductor(name: str, hw: object, two_ranks: Pool) -> None:
    """A T5 takes a few bytes more as compiled than at the least budget that is named before."""
    work = Sliced(name, backend="inductor", hw=hw)
    check(two_ranks.run(train, work, timeout_s=400), work, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "hf_bert", "hf_t5"])
def test_the_plan_knows_what_attention_exchanges(name: str, two_ranks: Pool) -> None:
    for planned_nbytes, counted_nbytes in two_ranks.run(exchanged, Sliced(name)):
        assert planned_nbytes == counted_nbytes > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["hf_llama", "hf_t5"])
def test_evaluations_see_whole_sequences(name: str, two_ranks: Pool) -> None:
    """The first operator by operator, the second by a program."""
    work = Sliced(name)
    losses = [sum(of_ranks) / 2 for of_ranks in zip(*two_ranks.run(evaluate, work), strict=True)]
    model, batch = work.case.build(), work.case.batches()[0]
    optimizer = work.recipe.plain(model.parameters())
    for found in losses:
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(loss_of(model(**batch)).item(), rel=1e-5)


@pytest.mark.long
def test_the_page_has_the_loss_of_whole_sequences(two_ranks: Pool) -> None:
    """In bf16, as by default; means over slices, or last tokens that predict the first, are off by more."""
    [program] = re.findall(r"\n\n((?:    .*\n|\n)+)", PAGE.partition("## Use")[2].partition("Each rank")[0])
    losses = two_ranks.run(run_program, textwrap.dedent(program))
    case = DIVIDED_CASES["llama_tied"]
    tokens = case.batches()[0]["input_ids"]
    assert sum(losses) / 2 == pytest.approx(loss_of(case.build()(input_ids=tokens, labels=tokens)).item(), rel=2e-4)


@pytest.mark.long
def test_what_is_not_served_is_refused(two_ranks: Pool) -> None:
    parts = {
        "scores": "forward computes attention by softmax",
        "packed": "position_ids are not",
        "labels": "hand in shift_labels= as well",
        "wrapped": "hand GPT2LMHeadModel its inputs by name",
        "head": "BertForSequenceClassification is not known to work position by position",
        "layers": "cp",
        "evaluated": "train a step before the first evaluation",
        "last logits": "would keep the last logits of its slice",
        "full_params": "within chunkc.full_params a forward sees one slice",
        "mask": "attention is handed a mask",
        "no attention": "calls no scaled_dot_product_attention",
        "counted": "of no tensor that is handed in",
        "positions": "hand LlamaForCausalLM its inputs by name",
        "padding": "LlamaForCausalLM is handed attention_mask=",
        "window": "attention has sliding_window=4",
        "answers": "hand T5ForConditionalGeneration decoder_input_ids=, shifted before",
        "answers by number": "T5ForConditionalGeneration does not divide its loss by num_items_in_batch",
        "kept keys": "T5ForConditionalGeneration is handed keys of earlier calls",
        "encoder alone": "T5Stack is handed attention_mask=",
        "padded answers": "is handed decoder_attention_mask=",
        "architecture": "Gemma3ForCausalLM is of the kind 'gemma3_text'",
    }
    for found in two_ranks.run(refusals):
        assert {name for name, text in found.items() if parts[name] in text} == set(parts), found


def test_positions_of_another_slice_are_refused(two_ranks: Pool) -> None:
    """Where both ranks count from 0, as whoever forgets to slice positions does."""
    first, second = two_ranks.run(count_from_zero)
    assert "position_ids are not 6 to 11, those of slice 2 of 2" in second
    assert "rank 1 had its call refused" in first


@pytest.mark.long
def test_slices_must_have_as_many_labels(two_ranks: Pool) -> None:
    """Where the loss is a mean over those of a slice; on all ranks."""
    for error in two_ranks.run(wrong_slices, "labels"):
        assert "slices have [6, 5] labels" in error, error


def test_answers_that_each_rank_has_shifted_are_refused(two_ranks: Pool) -> None:
    first, second = two_ranks.run(wrong_slices, "answers")
    assert "decoder_input_ids of slice 2 of 2 begin with 0" in second
    assert "rank 1 had its call refused" in first


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(8, 4), (8, 16)])
def test_slices_must_be_of_one_size(sizes: tuple[int, int], two_ranks: Pool) -> None:
    """Before attention exchanges anything, where others would be an error, a hang, or, of as many bytes, nonsense."""
    for error in two_ranks.run(compute_size_of_rank, sizes):
        assert "rank 0: slices of [2, 8], [2, 8]" in error, error


@pytest.mark.slow
def test_a_killed_rank_ends_those_that_have_the_other_slices() -> None:
    with only_call(2, train_for_ever, group_timeout_s=20.0) as job:
        for rank in range(2):
            job.wait_for(rank, "warm", 120.0)
        job.kill(1)
        survivor = job.ends(35.0)[0]
    assert survivor.exit_code == 1 and "RankError: rank 0 of 2 stopped in" in survivor.log, survivor.log
