"""Plans over a mesh without a job: those that the job's ranks make, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from job import Pool
from models import loss_of
from parallel_models import PARALLEL_CASES, parallelise
from rank_context import SHARD_AND_CP, Sliced, sliced
from rank_context import planned_text as planned_text_of_slices
from rank_stages import stage_text
from rank_tensor import TP, TP_AND_SHARD, Parallel, mesh_of, planned_text
from tiny_transformers import TINY_BERT, TINY_GPT
from torch import nn

import chunkc
from chunkc._torch_compat.fake_job import fake_job
from chunkc.cost.rates import cost_rates
from chunkc.cost.simulate import price
from chunkc.ir.work import Kind
from chunkc.report import Plan
from chunkc.scenarios.models import Stage, Transformer
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

EXAMPLE = PARALLEL_CASES["llama"].batches()[0]


@pytest.fixture
def four() -> Iterator[None]:
    with fake_job(4):
        yield


def parallel(work: Parallel, device: str = "cpu") -> tuple[nn.Module, Any]:
    mesh = mesh_of(work)
    with torch.device(device):
        model = PARALLEL_CASES[work.name].build()
    parallelise(work.name, model, mesh["tp"])
    return model, mesh


def plan(work: Parallel, hw: Any, **options: Any) -> Plan:
    model, mesh = parallel(work, options.pop("device", "cpu"))
    options = {"mesh": mesh, "dtype": torch.float32, "backend": "eager", "accumulate": work.accumulate} | options
    return chunkc.plan(model, hw, example_inputs=PARALLEL_CASES[work.name].batches()[0], **options)


def least(work: Parallel, num_ranks: int) -> chunkc.Hardware:
    """The smallest machine, by the error of a plan for a smaller one."""
    named = chunkc.Hardware.parse(f"{num_ranks}xemulated-1k-4g")
    with pytest.raises(chunkc.BudgetError) as caught:
        plan(work, named)
    nbytes = caught.value.min_device_nbytes
    return replace(named, name=f"{num_ranks}xemulated-{nbytes}-4g", gpu_memory_nbytes=nbytes)


def check(work: Parallel, pool: Pool, num_ranks: int) -> None:
    """Text by text and digest by digest, on the smallest machine, so that chunks move."""
    with fake_job(num_ranks):
        hw = least(work, num_ranks)
        ahead = plan(work, hw)
    texts = pool.run(planned_text, replace(work, hw=hw), timeout_s=400)
    assert texts[0] == (replace(ahead, stages=()).text(), ahead.digest())
    assert len(ahead.segments) > 2 and "fetch" in texts[0][0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama_sequence", "gpt"])
def test_two_tensor_ranks_make_that_plan(name: str, two_ranks: Pool) -> None:
    check(Parallel(name, TP), two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_sequence", "gpt"])
def test_tensor_and_data_ranks_make_that_plan(name: str, four_ranks: Pool) -> None:
    check(Parallel(name, TP_AND_SHARD), four_ranks, 4)


def plan_slices(work: Sliced, hw: Any, device: str = "cpu", **options: Any) -> Plan:
    """Without any job."""
    with torch.device(device):
        model = work.case.build()
    options = {"dtype": torch.float32, "backend": "eager", "accumulate": work.accumulate} | options
    example = sliced(work.case.batches()[0], work.num_slices, 0)
    mesh = ",".join(f"{name}={size}" for name, size in work.mesh)
    return chunkc.plan(model, hw, example_inputs=example, mesh=mesh, **options)


def check_slices(work: Sliced, pool: Pool, num_ranks: int) -> None:
    """Text by text and digest by digest, on the smallest machine, so that chunks move."""
    named = chunkc.Hardware.parse(f"{num_ranks}xemulated-1k-4g")
    with pytest.raises(chunkc.BudgetError) as caught:
        plan_slices(work, named)
    nbytes = caught.value.min_device_nbytes
    hw = replace(named, name=f"{num_ranks}xemulated-{nbytes}-4g", gpu_memory_nbytes=nbytes)
    ahead = plan_slices(work, hw)
    assert plan_slices(work, hw, device="meta").digest() == ahead.digest()
    texts = pool.run(planned_text_of_slices, replace(work, hw=hw), timeout_s=400)
    assert texts[0] == (replace(ahead, stages=()).text(), ahead.digest())
    assert len(ahead.segments) > 2 and "fetch" in texts[0][0]


@pytest.mark.long(but="gpt")
@pytest.mark.parametrize("name", ["gpt", "hf_llama"])
def test_ranks_with_slices_make_that_plan(name: str, two_ranks: Pool) -> None:
    check_slices(Sliced(name), two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "hf_bert", "gpt_wrapped", "hf_t5"])
def test_slices_beside_data_ranks_make_that_plan(name: str, four_ranks: Pool) -> None:
    check_slices(Sliced(name, SHARD_AND_CP, accumulate=2), four_ranks, 4)


def test_a_model_planned_with_slices_sees_whole_sequences_again() -> None:
    model, batch = Sliced("hf_llama").case.build().eval(), Sliced("hf_llama").case.batches()[0]
    with torch.no_grad():
        before = loss_of(model(**batch))
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    options: dict[str, Any] = {"mesh": "cp=2", "backend": "eager"}
    chunkc.plan(model.train(), "2xemulated-2m-1g", example_inputs=sliced(batch, 2, 0), **options)
    with pytest.raises(chunkc.CaptureError, match="hand LlamaForCausalLM its inputs by name"):
        chunkc.plan(model, "2xemulated-2m-1g", example_inputs=(batch["input_ids"],), **options)
    assert hooks == [dict(module._forward_pre_hooks) for module in model.modules()]
    with torch.no_grad():
        assert torch.equal(loss_of(model.eval()(**batch)), before)


@pytest.mark.long
def test_micro_batches_and_parts_of_the_meta_device(four: None) -> None:
    work = Parallel("llama", TP_AND_SHARD, accumulate=2)
    found = plan(work, "4xemulated-2m-1g")
    assert found.mesh == TP_AND_SHARD and found.accumulate == 2
    assert plan(work, "4xemulated-2m-1g", device="meta").digest() == found.digest()
    assert plan(work, "4xemulated-2m-1g", mesh="dp_shard=2,tp=2").digest() == found.digest()


@pytest.mark.long
def test_reports_name_the_mesh_and_what_the_model_exchanges(four: None) -> None:
    """Each all-reduce of hidden states along tp brings what they have: there are four in forward and in backward."""
    found = plan(Parallel("llama", TP_AND_SHARD), "4xemulated-2m-1g")
    works = [work for segment in found.segments for work in segment.work if work.kind is Kind.LINK]
    assert "rank 0 of world size 2, mesh dp_shard=2,tp=2" in found.text()
    assert "rank 0 of 2, mesh dp_shard=2,tp=2" in str(found)
    summary = " ".join(found.summary().split())
    number, nbytes = sum(w.num_kernels for w in works), sum(w.nbytes for w in works)
    assert f"exchanges of the model device {number} {nbytes / 1024:.2f}" in summary and nbytes > 0


@pytest.mark.long
def test_a_plan_prices_what_ranks_along_tp_exchange() -> None:
    """By links a third as fast, computing takes longer by twice the time of its collectives over them."""
    with fake_job(2):
        found = plan(Parallel("llama", TP), "2xa100-40g-1024g")
    nbytes = sum(w.nbytes for segment in found.segments for w in segment.work if w.kind is Kind.LINK)
    rates = cost_rates(chunkc.Hardware.parse("2xa100-40g-1024g"))
    assert nbytes > 0 and rates.links is not None
    links = replace(rates.links, gpu_gb_per_s=rates.links.gpu_gb_per_s / 3)
    slower_ms = price(found, replace(rates, links=links)).compute_ms - price(found, rates).compute_ms
    assert slower_ms == pytest.approx(2 * nbytes / rates.links.gpu_gb_per_s * 1e-6)


@pytest.mark.long
def test_the_model_stays_as_it_is(four: None) -> None:
    model, mesh = parallel(Parallel("llama", TP_AND_SHARD))
    held = {name: (id(param), type(param)) for name, param in model.named_parameters()}
    classes = {name: type(module) for name, module in model.named_modules()}
    chunkc.plan(model, "4xemulated-2m-1g", mesh=mesh, example_inputs=EXAMPLE, backend="eager")
    with pytest.raises(chunkc.BudgetError):
        chunkc.plan(model, "4xemulated-1k-1g", mesh=mesh, example_inputs=EXAMPLE, backend="eager")
    assert held == {name: (id(param), type(param)) for name, param in model.named_parameters()}
    assert classes == {name: type(module) for name, module in model.named_modules()}


@pytest.mark.long
def test_ranks_that_divide_chunks_alone_are_planned_as_ever() -> None:
    plans = [
        chunkc.plan(
            PARALLEL_CASES["llama"].build(), "4xemulated-2m-1g", mesh=mesh, example_inputs=EXAMPLE, backend="eager"
        )
        for mesh in (None, "dp_shard=4")
    ]
    assert plans[0].digest() == plans[1].digest() and plans[1].mesh == ()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no mesh": (
        lambda: plan(Parallel("llama"), "4xemulated-2m-1g", mesh=None),
        "hand the whole mesh to .* chunkc.plan",
    ),
    "not parallel": (
        lambda: chunkc.plan(PARALLEL_CASES["llama"].build(), "4xemulated-2m-1g", mesh="tp=2", example_inputs=EXAMPLE),
        "no parameter of Llama is a DTensor: parallelise it first .* fake process group",
    ),
    "other ranks": (
        lambda: plan(Parallel("llama", TP_AND_SHARD), "8xemulated-2m-1g"),
        "the plan for 8xemulated-2m-1g has ranks 0 to 7: a mesh has each of them once",
    ),
    "other sizes": (
        lambda: plan(Parallel("llama", TP_AND_SHARD), "8xemulated-2m-1g", mesh="dp_shard=2,tp=2"),
        "has 4 ranks, and the plan for 8xemulated-2m-1g has 8",
    ),
    "stages": (
        lambda: plan(Parallel("llama", TP_AND_SHARD), "4xemulated-2m-1g", mesh="pp=2,dp_shard=2"),
        "2 stages of a pipeline .* plan each stage as a model, with world_size=2, accumulate= and in_flight=",
    ),
    "nodes": (
        lambda: plan(Parallel("llama", TP_AND_SHARD), "4xemulated-2m-1g", mesh="tp=2", shard="node"),
        "name the dimensions dp_replicate and dp_shard",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_planned_is_refused(what: str, four: None) -> None:
    call, pattern = REFUSED[what]
    with pytest.raises(chunkc.ChunkcError, match=pattern):
        call()


@pytest.mark.long
@pytest.mark.parametrize("model", [TINY_GPT, TINY_BERT], ids=["gpt", "bert"])
def test_stages_make_the_plans_that_scenarios_have(model: Transformer, two_ranks: Pool) -> None:
    """On a machine where chunks of both move, with what pipelining keeps taken from it."""

    def answers(hw: chunkc.Hardware) -> list[Answer]:
        options: dict[str, Any] = {"mesh": "pp=2", "accumulate": 4, "backend": "eager", "dtype": torch.float32}
        options |= {"recompute": Recompute.NONE, "activations": "keep"}
        stages = [Stage.of(model, number, 2) for number in range(2)]
        return [Scenarios().answer(Scenario(stage, hw, 1, 16, **options)) for stage in stages]

    named = chunkc.Hardware.parse("2xemulated-1k-1g")
    nbytes = max(each.shortage.min_device_nbytes for each in answers(named) if each.shortage is not None)
    hw = replace(named, name=f"2xemulated-{nbytes}-1g", gpu_memory_nbytes=nbytes)
    ahead = [each.plan for each in answers(hw)]
    texts = two_ranks.run(stage_text, model, hw, 4)
    assert texts == [replace(plan, model="", stages=()).text() for plan in ahead if plan is not None]
    assert [plan.in_flight for plan in ahead if plan is not None] == [2, 1] and any("fetch" in text for text in texts)
