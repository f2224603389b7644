"""ACCEPTANCE 18 and 7: forwards without gradients are those of the plain model, and disturb nothing."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from evaluating import OPTIONS, ROOMY, TIGHT, Tower, Twins, messages, tokens, twins
from models import CASES, loss_of
from operator_hooks import hooked_operators
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Stream
from chunkc.ir.verify import verify, verify_beside
from chunkc.runtime.devices.malloc_meter import NonModelMeter

SLOW = pytest.mark.slow
COUNTS = ("num_compiles", "num_slot_allocations", "num_unasked_syncs")


def executor_of(pair: Twins) -> Any:
    """The executor of the latest evaluation program."""
    return list(pair.compiled.runtime.executors.values())[-1]


# --- equal to the plain model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hw", [TIGHT, ROOMY])
def test_losses_and_logits_are_the_plain_models(hw: str, training: bool) -> None:
    """In train() mode batch norm counts on, and the same seed drops the same elements."""
    pair = twins(hw, dropout=0.3 if training else 0.0, steps=())
    pair.model.train(training), pair.plain.train(training)
    pair.evaluate(tokens(50))
    if not training:
        pair.train(0)
    else:
        for model in (pair.model, pair.plain):
            model.dropout.p = 0.0
        pair.train(0)
        for model in (pair.model, pair.plain):
            model.dropout.p = 0.3
    for seed in (50, 51, 52):
        pair.evaluate(tokens(seed), seed=seed)
    assert (pair.num_programs, pair.num_runs) == (1, 3), "seen before the first step, so planned at once"
    pair.check()


@pytest.mark.long(but="odd")
@pytest.mark.parametrize("name", ["resnet", "odd", *(pytest.param(n, marks=SLOW) for n in ("gpt2", "t5", "mixtral"))])
def test_models_of_all_kinds_evaluate_exactly(name: str) -> None:
    """At the smallest budget that trains: logits or losses of the program equal those of plain PyTorch."""
    case = CASES[name]
    plain = case.build()
    model = chunkc.compile(case.build(), "emulated-1k-1g", dtype=torch.float32, backend="eager")
    batch = case.batches()[0]
    with pytest.raises(chunkc.BudgetError) as caught:
        model(**batch)
    model = chunkc.compile(
        case.build(), f"emulated-{caught.value.min_device_nbytes / 1024}k-1g", dtype=torch.float32, backend="eager"
    )
    loss_of(model(**batch)).backward()
    model.zero_grad()
    loss_of(model(**batch)).backward()
    chunkc.AdamW(model.parameters(), lr=0.0, weight_decay=0.0).step()
    model.zero_grad()
    for buffer, other in zip(plain.buffers(), model.buffers(), strict=True):
        buffer.copy_(other)
    for batch in (case.batches()[0], case.batches()[1], case.batches()[2]):
        with torch.no_grad():
            found, wanted = model(**batch), plain(**batch)
        assert loss_of(found).item() == pytest.approx(loss_of(wanted).item(), rel=1e-5)
        if not isinstance(found, torch.Tensor):
            torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    compiled = compiled_of(model)
    assert (compiled.evaluator.shapes.num_programs, compiled.runtime.accounting.num_evaluations) == (1, 2)
    assert compiled.evaluator.planned[0].plan.moved_nbytes(Stream.H2D) > 0, "the budget is meant to force moves"


@pytest.mark.long
def test_moves_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance (a): freed device memory filled with NaN, streams delayed, against everything resident."""
    found = []
    for hw, emulation in ((ROOMY, ""), (TIGHT, "poison"), (TIGHT, "poison,delay=0.3,seed=3"), (TIGHT, "sync")):
        monkeypatch.setenv("CHUNKC_EMULATED", emulation)
        pair = twins(hw)
        pair.evaluate(tokens(50))
        found.append([pair.evaluate(tokens(seed)) for seed in (50, 51)])
        assert pair.num_runs == 2
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.long
def test_mixed_precision_gives_the_same_bits_on_both_paths() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = chunkc.compile(Tower().eval(), TIGHT, dtype=torch.bfloat16, backend="eager")
    model(tokens(0))[0].backward()
    chunkc.AdamW(model.parameters(), **OPTIONS).step()
    with torch.no_grad():
        gathered, planned = (model(tokens(50))[1] for _ in range(2))
    assert compiled_of(model).runtime.accounting.num_evaluations == 1
    assert gathered.dtype is torch.bfloat16 and torch.equal(gathered, planned)


def test_inductor_evaluates() -> None:
    model = chunkc.compile(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), ROOMY, dtype=torch.float32)
    model(torch.randn(4, 16)).sum().backward()
    chunkc.AdamW(model.parameters(), **OPTIONS).step()
    x = torch.randn(4, 16)
    with torch.no_grad():
        gathered, planned = (model(x) for _ in range(2))
    assert compiled_of(model).runtime.accounting.num_evaluations == 1
    torch.testing.assert_close(gathered, planned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs_inside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_inference_mode(inputs_inside: bool) -> None:
    """Outputs are inference tensors, as in plain PyTorch, and the parameters train afterwards."""
    pair = twins()
    outside = tokens(50)
    for _ in range(3):
        with torch.inference_mode():
            inputs = tokens(50) if inputs_inside else outside
            (loss, logits), (plain_loss, plain_logits) = pair.model(inputs), pair.plain(inputs)
            assert logits.is_inference() and loss.is_inference()
            logits.add_(1).sub_(1)
        torch.testing.assert_close(logits.clone(), plain_logits.clone(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss.clone(), plain_loss.clone(), rtol=1e-5, atol=0)
        pair.check_buffers()
    assert (pair.num_programs, pair.num_runs) == (1, 2)
    pair.train(2, 3)
    pair.evaluate(outside)
    pair.check()


def test_autocast_is_part_of_the_signature() -> None:
    pair = twins(ROOMY)
    for _ in range(2):
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
                logits, plain = (model(tokens(50))[1] for model in (pair.model, pair.plain))
            assert logits.dtype is plain.dtype is (torch.bfloat16 if enabled else torch.float32)
            torch.testing.assert_close(logits, plain, rtol=2e-2 if enabled else 1e-5, atol=2e-2 if enabled else 1e-5)
    assert pair.num_programs == pair.num_runs == 2


# --- nothing is disturbed -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_is_bit_equal_to_training_without_evaluations() -> None:
    states = []
    for with_evaluations in (False, True):
        pair = twins(TIGHT, steps=())
        for seed in range(5):
            pair.model.train()
            pair.train(seed)
            if with_evaluations:
                pair.model.eval()
                with torch.no_grad():
                    pair.model(tokens(50)), pair.model(tokens(51, 6))
        assert pair.num_runs == (8 if with_evaluations else 0)
        moments = pair.optimizer.state_dict()["state"]
        states.append((pair.model.state_dict(), {(i, k): v for i, s in moments.items() for k, v in s.items()}))
    for found, wanted in zip(*states, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(torch.as_tensor(found[k]), torch.as_tensor(wanted[k])) for k in wanted)


def test_a_forward_that_waits_for_its_backward_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the evaluation frees is filled with NaN."""
    monkeypatch.setenv("CHUNKC_EMULATED", "poison")
    pair = twins()
    pair.evaluate(tokens(50))
    losses = [model(tokens(2))[0] for model in (pair.model, pair.plain)]
    for seed in (50, 51):
        pair.evaluate(tokens(seed))
    assert pair.num_runs == 2, "programs, after which the backward resumes"
    for loss, optimizer in zip(losses, (pair.optimizer, pair.plain_optimizer), strict=True):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pair.check()
    pair.evaluate(tokens(50))
    pair.train(3)
    pair.check()


def test_gradients_that_wait_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chunkc")
    pair = twins()
    pair.evaluate(tokens(50))
    for model in (pair.model, pair.plain):
        model(tokens(2))[0].backward()
    before = {n: p.grad.clone() for n, p in pair.model.named_parameters()}
    pair.evaluate(tokens(50))
    assert pair.num_runs == 0 and any("wait in the chunks" in m for m in messages(caplog))
    assert all(torch.equal(p.grad, before[n]) for n, p in pair.model.named_parameters())
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()
        optimizer.zero_grad()
    pair.evaluate(tokens(50))
    assert pair.num_runs == 1
    pair.check()


@pytest.mark.long
def test_pending_updates_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are slow, and the evaluation follows the step at once."""
    monkeypatch.setenv("CHUNKC_EMULATED", "delay=3,seed=1")
    pair = twins(steps=(0,))
    pair.evaluate(tokens(50)), pair.evaluate(tokens(50))
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        model(tokens(2))[0].backward()
        optimizer.step()
    with torch.no_grad():
        logits, plain = (model(tokens(50))[1] for model in (pair.model, pair.plain))
    assert pair.num_runs == 2
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_an_interrupted_evaluation_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = twins()
    pair.evaluate(tokens(50)), pair.evaluate(tokens(50))
    device, calls = pair.compiled.runtime.device, [0]
    launch = device.launch

    def failing(stream: Any, label: str, waits: Any, work: Any) -> Any:
        calls[0] += 1
        if calls[0] == len(executor_of(pair).plan.program("evaluate").actions) // 2:
            raise KeyboardInterrupt("in the middle")
        return launch(stream, label, waits, work)

    with monkeypatch.context() as patch:
        patch.setattr(device, "launch", failing)
        with pytest.raises(KeyboardInterrupt, match="in the middle"), torch.no_grad():
            pair.model(tokens(51))
    pair.evaluate(tokens(52))
    pair.train(2)
    pair.check()


# --- what a program is ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_steady_evaluation_is_exactly_its_plan() -> None:
    """Order of actions and bytes moved equal the plan's; nothing is compiled, allocated or waited for unasked."""
    for hw, is_tight in ((TIGHT, True), (ROOMY, False)):
        pair = twins(hw)
        pair.evaluate(tokens(50)), pair.evaluate(tokens(50))
        before = chunkc.stats(pair.model)
        executor = executor_of(pair)
        executor.trace = []
        num_joins = pair.compiled.runtime.device.num_host_syncs()
        for seed in (51, 52, 53):
            pair.evaluate(tokens(seed))
        assert executor.trace == [str(a) for a in executor.plan.program("evaluate").actions] * 3
        assert pair.compiled.runtime.device.num_host_syncs() == num_joins + 6, "joined before and after each"
        assert chunkc.stats(pair.model) == before
        moved = executor.moved_nbytes(Stream.H2D)
        assert moved == executor.plan.moved_nbytes(Stream.H2D) and (moved > 0) == is_tight
        assert executor.moved_nbytes(Stream.D2H) == 0
        pair.train(5, 6)
        assert [chunkc.stats(pair.model)[c] - before[c] for c in COUNTS] == [0, 0, 0]


@pytest.mark.long
def test_its_plan_is_verified_beside_every_shape_of_training() -> None:
    pair = twins()
    pair.train(2, length=6)
    pair.evaluate(tokens(50)), pair.evaluate(tokens(50))
    plan = pair.evaluator.planned[0].plan
    verify(plan)
    trainings = [p.plan for p in pair.compiled.session.planned]
    assert len(trainings) == 2
    for training in trainings:
        verify_beside(plan, training)
    assert chunkc.plan_of(pair.model) == trainings[1], "the plan of the model is that of its training"


@pytest.mark.long
@pytest.mark.skipif(not NonModelMeter().available, reason="no reading of malloc on this system")
def test_the_measured_peak_is_within_the_plan() -> None:
    """Sampled after every operator."""

    @contextmanager
    def sampled(_: str) -> Iterator[None]:
        yield
        compiled_of(model).runtime.device.meter.sample()

    model = chunkc.compile(Tower(), "emulated-40m-64m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters())
    inputs = tokens(1, length=64, batch=128)
    with hooked_operators(sampled):
        model(inputs)[0].backward()
        optimizer.step(), optimizer.zero_grad()
        accounting = compiled_of(model).runtime.accounting
        for _ in range(3):
            with torch.no_grad():
                model(inputs)
            gc.collect()
    plan = compiled_of(model).evaluator.planned[0].plan
    measured, planned = accounting.evaluation_peak_nbytes, plan.memory.device_peak_nbytes
    assert 0.7 * planned < measured <= planned + (128 << 10)
    assert planned <= plan.memory.device_budget_nbytes
    assert planned < chunkc.plan_of(model).memory.device_peak_nbytes, "nothing is saved for a backward"


def test_a_deleted_model_returns_what_its_evaluations_took() -> None:
    hw = chunkc.Hardware.parse(TIGHT)
    model = chunkc.compile(Tower(), hw, dtype=torch.float32, backend="eager")
    model(tokens(0))[0].backward()
    chunkc.AdamW(model.parameters()).step()
    device = compiled_of(model).runtime.device
    with torch.no_grad():
        for _ in range(3):
            model(tokens(50))
    assert compiled_of(model).runtime.accounting.num_evaluations == 2
    del model
    gc.collect()
    assert device.free_device_nbytes() == device.device_budget_nbytes
    assert device.free_host_nbytes() == device.host_budget_nbytes


def test_nothing_to_train_is_still_refused_under_gradients() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = chunkc.compile(Frozen(), ROOMY, dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.CaptureError, match="nothing to train"):
        model(torch.ones(1, 3))
    with torch.no_grad():
        assert model(torch.ones(1, 3)).shape == (1, 3)
