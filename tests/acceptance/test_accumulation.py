"""Acceptance 4: several micro-batches and one step equal one large batch, wherever gradients and states lie.

(b) in fp32 against eager PyTorch with the large batch, (c) in bf16 against plain bf16, (a) between placements; and the
equalities refuse a runtime that loses one contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import pytest
import torch
from accumulating import (
    PLACEMENTS,
    all_on_device,
    tightest,
    train_in_parts,
    train_large,
    train_plain_16_in_parts,
    train_runner,
)
from equalities import ERROR_RATIO, GRADIENT_TOLERANCE
from plan_runner import GetRunner
from training import (
    PLACEMENT,
    SEMANTICS,
    assert_same_bits,
    assert_same_gradients,
    assert_same_semantics,
    largest_error,
    largest_loss_error,
)

from chunkc.ir.actions import Op
from chunkc.ir.plan import Plan
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.model.memory_accounting import LiveForward
from chunkc.runtime.model.model import ModelRuntime

SLOW = pytest.mark.slow
SHORT = replace(PLACEMENT, num_steps=4)
LARGE = [
    *(("odd", num) for num in (1, 4)),
    *(pytest.param(name, 4, marks=SLOW) for name in ("gpt2", "llama", "bert", "albert", "t5", "vit", "mixtral")),
    *(pytest.param(name, 2, marks=SLOW) for name in ("odd", "gpt2", "llama", "t5", "vit")),
]


@pytest.mark.parametrize(("name", "num"), LARGE)
def test_micro_batches_equal_one_large_batch(name: str, num: int, runner_of: GetRunner) -> None:
    """At the smallest budget, through ``p.grad`` after each micro-batch and after all steps."""
    runner = runner_of(name)
    found, norms = train_runner(runner, tightest(runner, num), SEMANTICS)
    stats = runner.stats()
    assert stats["h2d_nbytes"] == stats["planned_h2d_nbytes"] > 0, "everything fits, nothing is shown"
    assert stats["d2h_nbytes"] == stats["planned_d2h_nbytes"] > 0
    assert_same_semantics(found, train_large(runner.case, SEMANTICS, num))
    plain = runner.case.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **SEMANTICS.options)
    _, wanted = train_in_parts(plain, runner.batches, optimizer, replace(SEMANTICS, num_steps=1), num)
    assert norms == pytest.approx(wanted, rel=1e-5)
    assert len(norms) == num


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", pytest.param("gpt2_dropout", marks=SLOW)])
def test_what_a_large_batch_does_not_equal_equals_plain_micro_batches(name: str, runner_of: GetRunner) -> None:
    """Batch norms look at one micro-batch, buffers change in each, and each has masks of its own."""
    runner = runner_of(name)
    recipe = replace(SEMANTICS, num_steps=3)
    found, _ = train_runner(runner, tightest(runner, 2), recipe)
    plain = runner.case.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **recipe.options)
    wanted, _ = train_in_parts(plain, runner.batches, optimizer, recipe, 2)
    wanted.largest_update = recipe.lr
    assert_same_semantics(found, wanted)


BITS = [
    *(("odd", torch.float32, placement) for placement in PLACEMENTS),
    ("odd", torch.bfloat16, "smallest"),
    ("odd", torch.bfloat16, "some_of_each"),
    *(pytest.param("gpt2", dtype, p, marks=SLOW) for dtype in (torch.float32, torch.bfloat16) for p in PLACEMENTS),
]


@pytest.mark.parametrize(("name", "dtype", "placement"), BITS)
def test_placement_changes_no_bit(name: str, dtype: torch.dtype, placement: str, runner_of: GetRunner) -> None:
    """Three micro-batches a step; freed device memory is NaN."""
    runner = runner_of(name, dtype)
    found, norms = train_runner(runner, PLACEMENTS[placement](runner, 3), SHORT)
    moved = runner.plan
    wanted, their_norms = train_runner(runner, all_on_device(runner, 3), SHORT)
    assert not [a for p in runner.plan.programs for a in p.actions if a.op in (Op.FETCH, Op.EVICT, Op.OPEN)]
    assert [a for a in moved.program("backward").actions if a.op is Op.OPEN]
    assert_same_bits(found, wanted)
    assert norms == their_norms


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in ("odd", "gpt2")])
def test_placement_changes_no_bit_under_inductor(name: str, runner_of: GetRunner) -> None:
    runner = runner_of(name, torch.float32, "inductor")
    found, _ = train_runner(runner, PLACEMENTS["all_on_host"](runner, 2), replace(SHORT, num_steps=3))
    assert [a for a in runner.plan.program("backward", "later").actions if a.op is Op.EVICT]
    wanted, _ = train_runner(runner, all_on_device(runner, 2), replace(SHORT, num_steps=3))
    assert_same_bits(found, wanted)


@pytest.mark.long
def test_sixteen_bits_add_up_as_plain_sixteen_bits(runner_of: GetRunner) -> None:
    runner, recipe = runner_of("gpt2", torch.bfloat16), replace(SEMANTICS, num_steps=6)
    exact, plain = train_large(runner.case, recipe, 4), train_plain_16_in_parts(runner.case, recipe, 4)
    found, _ = train_runner(runner, tightest(runner, 4), recipe)
    assert all(g.dtype is torch.bfloat16 for g in found.gradients.values())
    assert_same_gradients(found.gradients, plain.gradients, GRADIENT_TOLERANCE)
    for error in (largest_gradient_error, largest_param_error, loss_error):
        assert 0 < error(found, exact) <= ERROR_RATIO * error(plain, exact)


def largest_gradient_error(found: Any, exact: Any) -> float:
    return largest_error(found.gradients, exact.gradients)


def largest_param_error(found: Any, exact: Any) -> float:
    return largest_error(found.params, exact.params)


def loss_error(found: Any, exact: Any) -> float:
    return largest_loss_error(found.losses, exact.losses)


class LosesOne(ModelRuntime):
    """Forgets, once, that gradients of the first micro-batch are in their chunks: the second overwrites them."""

    num_backwards = 0

    def _enter_backward(self, executor: Executor, program: str) -> None:
        super()._enter_backward(executor, program)
        self.num_backwards += 1
        if self.num_backwards == 4:
            self.gradients.chunk_grads.clear()


class AddsTwice(ModelRuntime):
    """Adds, once, the contribution of one parameter a second time."""

    num_backwards = 0

    def backward(
        self, executor: Executor, args: list[Any], reached: Set[int], forward: LiveForward | None
    ) -> list[Any]:
        outputs = super().backward(executor, args, reached, forward)
        self.num_backwards += 1
        if self.num_backwards == 1:
            param = max(self.gradients.chunk_grads, key=lambda p: self.infos[p].numel)
            self.parameters.drain()
            values = self.parameters.values
            values.write_gradient(param, 2 * values.read_gradient(param))
        return outputs


@pytest.mark.parametrize("mutant", [LosesOne, AddsTwice])
def test_both_equalities_refuse_a_wrong_sum(mutant: Callable[..., ModelRuntime], runner_of: GetRunner) -> None:
    runner = runner_of("odd")
    wanted = train_large(runner.case, SEMANTICS, 2)
    found, _ = train_runner(runner, replace(tightest(runner, 2), make_runtime=mutant), SEMANTICS)
    found.gradients, found.losses = wanted.gradients, wanted.losses
    with pytest.raises(AssertionError, match=r"parameters: .* is off"):
        assert_same_semantics(found, wanted)
    identity, _ = train_runner(runner, all_on_device(runner, 2), SEMANTICS)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(found, identity)


@pytest.mark.long
def test_gradient_chunks_take_memory_that_the_plan_states(runner_of: GetRunner) -> None:
    """Host bytes, measured device bytes and the budgets of the error count them; one byte less does not do."""
    runner = runner_of("gpt2")
    setups = {num: tightest(runner, num) for num in (1, 2)}
    plans: dict[int, Plan] = {}
    for num, setup in setups.items():
        train_runner(runner, setup, replace(SHORT, num_steps=2))
        plans[num], stats = runner.plan, runner.stats()
        assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"] <= setup.device_nbytes
        assert stats["host_nbytes"] == runner.plan.memory.host_nbytes <= setup.host_nbytes
        assert runner.compiled.runtime.device.free_host_nbytes() <= setup.host_nbytes - stats["host_nbytes"]
    grads = sum(plans[2].layout.chunks[g].nbytes for g in plans[2].layout.grad_chunks().values())
    trained = sum(info.nbytes for info in runner.captured.schedule.params)
    assert not plans[1].layout.grad_chunks()
    assert trained <= grads <= setups[2].host_nbytes - setups[2].host_nbytes // 9
