"""Plans with several micro-batches a step: the verifier accepts all of them, and refuses what loses a contribution."""

from __future__ import annotations

import pytest
from hypothesis import given
from schedules import accumulating, budgeted, planned, planned_somewhere

from chunkc.errors import BudgetError
from chunkc.ir.actions import Op
from chunkc.ir.layout import ChunkList
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions, Target, make_plan

Request = tuple[Schedule, Target, PlanOptions]
PAYLOAD = GRADIENT = 64 * 4
TRIPLE = 64 * 12
TWO = PlanOptions(chunk_numel=64, os_home="host", accumulate=2)


@given(accumulating())
def test_every_plan_is_accepted_by_the_verifier(request: Request) -> None:
    plan = planned_somewhere(*request).plan
    assert plan.memory.device_peak_nbytes <= plan.memory.device_budget_nbytes
    assert plan.memory.host_nbytes == plan.layout.nbytes_in(Tier.HOST) <= plan.memory.host_budget_nbytes
    trained = [c for c in plan.layout.chunks if c.list is ChunkList.TRAINED]
    grads = [c for c in plan.layout.chunks if c.list is ChunkList.GRAD]
    assert [(g.partner, g.dtype, g.numel, g.home) for g in grads] == [
        (c.index, c.dtype, c.numel, c.home) for c in trained
    ]
    for program in plan.programs:
        ops = {a.op for a in program.actions}
        assert program.name.startswith("accumulate") or Op.ADD not in ops
        assert program.begins_step or Op.STASH not in ops


@given(accumulating())
def test_named_budgets_work_and_one_byte_less_does_not(request: Request) -> None:
    found, where, options = request
    try:
        make_plan(found, budgeted(where, 0), options)
    except BudgetError as error:
        enough = budgeted(where, error.min_device_nbytes, error.min_host_nbytes)
        plan = planned(found, enough, options).plan
        assert plan.memory.device_peak_nbytes <= error.min_device_nbytes
        with pytest.raises(BudgetError) as again:
            make_plan(found, budgeted(enough, error.min_device_nbytes - 1), options)
        if again.value.moment == "host":  # which could hold a triple that has no room on the device now
            assert again.value.min_device_nbytes < error.min_device_nbytes
            assert again.value.missing_nbytes == again.value.min_host_nbytes - error.min_host_nbytes > 0
        else:
            assert again.value.missing_nbytes == 1
        if plan.memory.host_nbytes == error.min_host_nbytes:
            with pytest.raises(BudgetError):
                make_plan(found, budgeted(enough, host=error.min_host_nbytes - 1), options)
