"""Adapters over a frozen base: the base is read and never written, and only adapters have gradients and states.

The adapters of a tiny Llama train as eager PyTorch trains them (acceptance (b)) at the smallest budget, by hand and,
where PEFT is installed, by PEFT. What the base takes and where it moves is read off the plan and the device.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora import BY_HAND, BY_PEFT, CHECKPOINTED, HAS_PEFT
from models import CASES, Case
from placements import smallest
from plan_runner import BIG_NBYTES, PlanRunner
from training import SEMANTICS, assert_same_semantics, train_plain

import chunkc
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan

OS_NBYTES = 12
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="runs where peft is installed, as `make test` does")
BOTH = [pytest.param(BY_HAND, id="by hand"), pytest.param(BY_PEFT, id="by peft", marks=[needs_peft, pytest.mark.slow])]


@functools.cache
def rig_for(name: str) -> PlanRunner:
    return PlanRunner({case.name: case for case in (BY_HAND, BY_PEFT, CHECKPOINTED)}[name])


def check_frozen_base(plan: Plan) -> None:
    """Frozen chunks are fetched and dropped, and nothing else; they have no states and no gradient chunks."""
    chunks = plan.layout.chunks
    frozen = {f"c{c.index}" for c in chunks if c.list is ChunkList.FROZEN}
    assert frozen and all(c.os_home is None for c in chunks if c.list is ChunkList.FROZEN)
    assert not any(c.list is ChunkList.GRAD for c in chunks)
    moved = {a.op for p in plan.programs for a in p.actions if a.target in frozen}
    assert moved and moved <= {Op.FETCH, Op.DROP}


@pytest.mark.long
@pytest.mark.parametrize("case", [*BOTH, pytest.param(CHECKPOINTED, id="checkpointed", marks=pytest.mark.slow)])
def test_adapters_train_as_in_plain_pytorch(case: Case) -> None:
    runner, before = rig_for(case.name), case.build()
    found = runner.train(smallest(runner), SEMANTICS)
    assert runner.stats()["h2d_nbytes"] > 0, "everything fits, nothing is shown"
    assert_same_semantics(found, train_plain(case, SEMANTICS))
    adapters = {n for n, p in before.named_parameters() if p.requires_grad}
    assert adapters and found.gradients.keys() == adapters == found.exp_avg.keys()
    for name, value in before.named_parameters():
        assert torch.equal(found.params[name], value) is (name not in adapters), name


@pytest.mark.parametrize("case", BOTH)
def test_the_base_takes_its_own_bytes_and_adapters_sixteen_for_each_element(case: Case) -> None:
    """Planned and measured, in fp32: parameters once, states of adapters alone, and only adapters go home."""
    runner = rig_for(case.name)
    runner.train(replace(smallest(runner), host_nbytes=BIG_NBYTES), SEMANTICS)
    plan, stats = runner.plan, runner.stats()
    check_frozen_base(plan)
    params = list(case.build().parameters())
    base_nbytes = sum(4 * p.numel() for p in params if not p.requires_grad)
    adapter_numel = sum(p.numel() for p in params if p.requires_grad)
    assert stats["model_data_nbytes"] == base_nbytes + (4 + OS_NBYTES) * adapter_numel
    trained = [c for c in plan.layout.chunks if c.list is ChunkList.TRAINED]
    assert plan.layout.os_nbytes() == sum(map(plan.layout.os_nbytes_of, trained))
    assert 0 < stats["d2h_nbytes"] == plan.moved_nbytes(Stream.D2H) < stats["h2d_nbytes"]
    device = runner.compiled.runtime.device
    assert device.host_budget_nbytes - device.free_host_nbytes() == stats["host_nbytes"]
    padding_nbytes = sum(c.nbytes for c in plan.layout.chunks) - 4 * sum(p.numel() for p in params)
    assert stats["host_nbytes"] <= base_nbytes + (4 + OS_NBYTES) * adapter_numel + 4 * padding_nbytes
    assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.long
def test_in_16_bits_the_base_has_no_master() -> None:
    """Two bytes for each element of the base, against sixteen (two and the fp32 triple) where all of it is trained."""
    batch = BY_HAND.batches()[0]

    options = {"example_inputs": batch, "dtype": torch.bfloat16, "backend": "eager"}
    with pytest.raises(chunkc.BudgetError) as refused:
        chunkc.plan(BY_HAND.build(), "emulated-1k-64m", **options)
    least_kib = -(-refused.value.min_device_nbytes // 1024)
    plan = chunkc.plan(BY_HAND.build(), f"emulated-{least_kib}k-64m", **options)
    check_frozen_base(plan)
    params = list(BY_HAND.build().parameters())
    adapter_numel = sum(p.numel() for p in params if p.requires_grad)
    base_numel = sum(p.numel() for p in params) - adapter_numel
    assert plan.layout.model_data_nbytes() == 2 * base_numel + 14 * adapter_numel
    trained = chunkc.plan(CASES["llama"].build(), "emulated-64m-64m", **options)
    assert trained.layout.model_data_nbytes() == 14 * base_numel


@functools.cache
def losses_and_plan(checkpoints: bool, hook: bool) -> tuple[list[float], Plan]:
    """Of a run whose layers were told to compute activations again after ``compile``; ``hook``: as transformers does
    it for frozen embeddings."""
    model = chunkc.compile(BY_HAND.build(), "emulated-16m-64m", dtype=torch.float32, backend="eager")
    model.config.use_cache = False
    if checkpoints:
        model.activation_checkpointing_enable()
        if not hook:
            model.disable_input_require_grads()
    optimizer = chunkc.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in BY_HAND.batches() * 2:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, chunkc.plan_of(model)


@pytest.mark.long
def test_checkpointing_asked_for_after_compile_is_honoured() -> None:
    """As Trainer asks for it: before the first forward. What is held for backward shrinks, the losses stay."""
    (wanted, kept), (found, again) = losses_and_plan(False, False), losses_and_plan(True, False)
    assert found == pytest.approx(wanted, rel=1e-5)
    lasts = [plan.graph_segments("forward")[-1].live_nbytes for plan in (kept, again)]
    assert "graph" not in again.model and lasts[1] < lasts[0]


@pytest.mark.slow
def test_checkpointing_with_the_hook_for_frozen_embeddings_is_exact_in_two_graphs() -> None:
    """Dynamo refuses to return what ``requires_grad_()`` was called on, so the forward breaks."""
    found, plan = losses_and_plan(True, True)
    assert found == pytest.approx(losses_and_plan(False, False)[0], rel=1e-5)
    assert "of 2" in plan.model


@pytest.mark.long
@needs_peft
def test_adapters_of_peft_are_saved_alone_and_load_into_a_plain_model(tmp_path: Path) -> None:
    import peft

    runner = rig_for(BY_PEFT.name)
    found = runner.train(smallest(runner), SEMANTICS)
    runner.model.save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    adapter_nbytes = sum(v.numel() * 4 for n, v in found.params.items() if "lora_" in n)
    assert adapter_nbytes <= weights.stat().st_size <= adapter_nbytes + 4096
    plain = BY_PEFT.build().unload()
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).state_dict()
    assert all(torch.equal(loaded[name], found.params[name]) for name in found.params)


@pytest.mark.long
@needs_peft
def test_adapters_of_peft_generate_and_evaluate_as_in_the_plain_model() -> None:
    """After a step of both."""
    plain, model, batch = BY_PEFT.build(), BY_PEFT.build(), BY_PEFT.batches()[0]
    chunkc.compile(model, "emulated-1m-64m", dtype=torch.float32, backend="eager")
    prompt = torch.arange(8).view(2, 4)
    tokens, losses = [], []
    for side, make in ((model, chunkc.AdamW), (plain, torch.optim.AdamW)):
        optimizer = make([p for p in side.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
        side(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.eval()
        mask = torch.ones_like(prompt)
        tokens.append(side.generate(input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=6))
        with torch.no_grad():
            losses.append(side(**batch).loss.item())
    assert torch.equal(*tokens) and tokens[0].shape[1] > 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
