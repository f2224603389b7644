"""Budgets named by a ``BudgetError`` work, and one byte less does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import PLENTY, budgeted, chain, gpt_like, op, param, planned, requests, schedule, target

from chunkc.errors import BudgetError
from chunkc.hardware.usable_memory import Budget, slack_nbytes
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions, Target, make_plan


@given(requests())
def test_named_budgets_work_and_one_byte_less_does_not(request: tuple[Schedule, Target, PlanOptions]) -> None:
    """With that byte less, the error names the device, or more host memory where the device holds every segment."""
    found, where, options = request
    hopeless = budgeted(where, 0)
    try:
        make_plan(found, hopeless, options)
    except BudgetError as error:
        enough = budgeted(where, error.min_device_nbytes, error.min_host_nbytes)
        assert planned(found, enough, options).plan.memory.device_peak_nbytes <= error.min_device_nbytes
        if error.min_device_nbytes:
            less = budgeted(enough, error.min_device_nbytes - 1)
            with pytest.raises(BudgetError) as caught:
                make_plan(found, less, options)
            again = caught.value
            if again.moment == "host":
                assert again.min_device_nbytes <= less.budget_nbytes(Tier.DEVICE)
                assert again.missing_nbytes == again.min_host_nbytes - less.budget_nbytes(Tier.HOST) > 0
                assert planned(found, budgeted(less, host=again.min_host_nbytes), options)
                with pytest.raises(BudgetError):
                    make_plan(found, budgeted(less, host=again.min_host_nbytes - 1), options)
            else:
                assert again.missing_nbytes == 1
                assert again.min_device_nbytes == error.min_device_nbytes


@given(requests())
def test_named_host_budgets_work_and_one_byte_less_does_not(request: tuple[Schedule, Target, PlanOptions]) -> None:
    found, where, options = request
    options = replace(options, os_home="host")
    try:
        make_plan(found, budgeted(where, PLENTY, 0), options)
    except BudgetError as error:
        assert error.moment == "host" and error.missing_nbytes == error.min_host_nbytes
        enough = budgeted(where, PLENTY, error.min_host_nbytes)
        assert planned(found, enough, options).plan.memory.host_nbytes == error.min_host_nbytes
        with pytest.raises(BudgetError):
            make_plan(found, budgeted(enough, host=error.min_host_nbytes - 1), options)


def test_the_error_names_moment_tensors_and_numbers() -> None:
    """The second backward operator needs two chunks of 256 bytes, 1000 live bytes and 200 of workspace."""
    params = [param("small", 64), param("wide.a", 64), param("wide.b", 64)]
    backward = [op([0], [0]), op([1, 2], [], live=1000, workspace=200), op([], [1, 2])]
    found = schedule(params, [op([0]), op([1])], backward)
    with pytest.raises(BudgetError) as caught:
        make_plan(found, target(1000), PlanOptions(chunk_numel=64, os_home="host", cuts=((), (2,))))
    error = caught.value
    assert (error.moment, error.tensors) == ("bwd.1", ("wide.a", "wide.b"))
    assert error.min_device_nbytes == 2 * 256 + 1200 and error.missing_nbytes == 712
    assert error.min_host_nbytes == 3 * (256 + 768)
    message = str(error)
    for part in ("Model cannot be trained", "emulated gives 1000 bytes", "712 too few", "At bwd.1", "wide.a, wide.b"):
        assert part in message
    assert "It works with 1712 bytes of device memory and 3072 bytes of host memory" in message


def test_the_error_names_a_gradient_that_lands_beside_its_parameter() -> None:
    """The operator that makes it reads no parameter."""
    found = schedule([param("wide", 64)], [op([0])], [op([], [0], live=1000)])
    with pytest.raises(BudgetError) as caught:
        make_plan(found, target(1000), PlanOptions(chunk_numel=64, os_home="host", accumulate=2))
    assert (caught.value.moment, caught.value.tensors) == ("bwd.0", ("wide",))


def test_states_asked_onto_the_device_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BudgetError, match="or optimizer states on the host") as caught:
        make_plan(chain(2), target(2000), PlanOptions(chunk_numel=64, os_home="device"))
    assert caught.value.min_device_nbytes == 2 * (256 + 768) + 512
    assert caught.value.tensors == ("layers.0.weight", "layers.1.weight")


def test_a_host_too_small_is_refused_unless_everything_is_resident() -> None:
    with pytest.raises(BudgetError, match=r"too few\. At host") as caught:
        make_plan(chain(4), target(1000, host=100), PlanOptions(chunk_numel=64))
    assert caught.value.min_host_nbytes == 4 * (256 + 768)
    assert planned(chain(4), target(host=0)).plan.memory.host_nbytes == 0


@pytest.mark.parametrize("host", [500, 2000, 3072])
def test_host_memory_is_what_misses_where_the_device_has_room_for_the_segments(host: int) -> None:
    """Four triples of 768 bytes and four payloads of 256: 2000 bytes of device hold two payloads and one triple."""
    options = PlanOptions(chunk_numel=64)
    with pytest.raises(BudgetError, match=r"too few\. At host") as caught:
        make_plan(chain(4), target(2000, host=host), options)
    error = caught.value
    assert error.min_device_nbytes == 2 * 256 + 768 and error.min_host_nbytes == 4 * 256 + 3 * 768
    assert error.missing_nbytes == error.min_host_nbytes - host
    assert planned(chain(4), target(2000, host=error.min_host_nbytes), options)
    with pytest.raises(BudgetError):
        make_plan(chain(4), target(2000, host=error.min_host_nbytes - 1), options)


def test_device_memory_is_what_misses_where_segments_have_no_room() -> None:
    with pytest.raises(BudgetError, match=r"too few\. At bwd") as caught:
        make_plan(chain(4), target(500, host=3072), PlanOptions(chunk_numel=64))
    assert caught.value.min_device_nbytes > 500 and caught.value.min_host_nbytes <= 3072


@given(st.integers(0, 2**40), st.integers(0, 2**30))
def test_the_memory_that_an_error_names_is_the_least_that_leaves_the_budget(budget: int, reserved: int) -> None:
    where = Budget(PLENTY, reserved, leaves_slack=True)
    memory = where.memory_nbytes(budget)
    assert not memory or memory - slack_nbytes(memory) - reserved >= budget
    assert not memory or (memory - 1) - slack_nbytes(memory - 1) - reserved < budget
    assert Budget(PLENTY, 3).less(4).memory_nbytes(budget) == budget + 7


@pytest.mark.long(but="size0")
@pytest.mark.parametrize("size", [(6, 128, 1000), (24, 512, 2000)])
def test_whole_groups_take_hardly_more_than_one_ranks_chunks(size: tuple[int, int, int]) -> None:
    """So there is nothing to be won by exchanging one chunk at a time: chunks of many ranks are smaller instead."""
    found, least = gpt_like(*size, dtype="float32"), {}
    for world_size in (1, 2, 8, 64):
        with pytest.raises(BudgetError) as refused:
            planned(found, target(1 << 10, world_size=world_size))
        least[world_size] = refused.value.min_device_nbytes
    largest = max(param.nbytes for param in found.params)
    assert least[1] >= 2 * largest, "what no plan can do without: the tensor, and its gradient"
    assert max(least.values()) <= 1.08 * least[1], least
