"""Planning ahead: the plan that a run makes, from tensors that take no memory."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models import CASES, Batch, loss_of
from small import Small
from torch import nn
from torch.profiler import ProfilerActivity, profile

import chunkc
from chunkc import CaptureError, ChunkcError
from chunkc.ir.actions import Op, Stream
from chunkc.runtime.devices.emulated import EmulatedDevice

HW = "emulated-400k-1g"
MOVES = (Stream.H2D, Stream.D2H)
MODELS = ("gpt2", "llama", "t5", "vit", "mixtral", "resnet", "odd")
FEW = {("resnet", torch.bfloat16, "eager")}
EVERY = [(name, dtype, "eager") for name in MODELS for dtype in (torch.float32, torch.bfloat16)]
EVERY += [(name, dtype, "inductor") for name in MODELS for dtype in (torch.float32, torch.bfloat16)]


def on_meta(case: str) -> tuple[nn.Module, Batch]:
    """The model built on the meta device, and a batch there; the same tensor given twice stays one."""
    with torch.device("meta"):
        model = CASES[case].build()
    batch = CASES[case].batches()[0]
    moved = {id(v): v.to("meta") for v in batch.values()}
    return model, {n: moved[id(v)] for n, v in batch.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [pytest.param(*e, marks=() if e in FEW else pytest.mark.slow, id="-".join(map(str, e))) for e in EVERY],
)
def test_the_plan_is_the_one_that_a_run_makes(name: str, dtype: torch.dtype, backend: str) -> None:
    """Digest for digest, from a real model, from one on the meta device, and from the compiled one itself."""
    batch = CASES[name].batches()[0]
    options = {"dtype": dtype, "backend": backend}
    hw = least_hw(name, options)
    ahead = chunkc.plan(CASES[name].build(), hw, example_inputs=batch, **options)
    meta, meta_batch = on_meta(name)
    assert chunkc.plan(meta, hw, example_inputs=meta_batch, **options).digest() == ahead.digest()
    model = chunkc.compile(CASES[name].build(), hw, **options)
    loss_of(model(**batch)).backward()
    run = chunkc.plan_of(model)
    assert run.schedule_digest == ahead.schedule_digest
    if backend == "inductor":
        assert ahead.memory.is_estimate and not run.memory.is_estimate
        assert sum(map(run.moved_nbytes, MOVES)) <= sum(map(ahead.moved_nbytes, MOVES))
    else:
        assert run.digest() == ahead.digest()
        assert len(run.segments) > 2 and run.layout.arena_nbytes < run.layout.payload_nbytes(), "everything fits"


def least_hw(name: str, options: dict[str, object]) -> chunkc.Hardware:
    hw = chunkc.Hardware.parse("emulated-1k-1g")
    meta, batch = on_meta(name)
    with pytest.raises(chunkc.BudgetError) as caught:
        chunkc.plan(meta, hw, example_inputs=batch, **options)
    nbytes = caught.value.min_device_nbytes
    return replace(hw, name=f"emulated-{nbytes}-1g", gpu_memory_nbytes=nbytes)


# --- no storage, no device --------------------------------------------------------------------------------------------


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes of everything that torch's CPU allocator handed out meanwhile, whether or not it came back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        work()
    events = measured.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


@pytest.mark.long(but="inductor-resnet")
@pytest.mark.parametrize("name", ("gpt2", "resnet"))
@pytest.mark.parametrize("backend", ("eager", "inductor"))
def test_planning_allocates_no_tensors_and_makes_no_device(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All there is are copies of the random number generator's state, which torch.compile keeps, and scalars."""

    def no_device(*_: object, **__: object) -> None:
        raise AssertionError("planning made a device")

    monkeypatch.setattr(EmulatedDevice, "__init__", no_device)
    model, batch = CASES[name].build(), CASES[name].batches()[0]
    loss_of(model(**batch)).backward()  # what torch and the model cache is there
    model.zero_grad()
    run = allocations(lambda: loss_of(model(**batch)).backward())
    model.zero_grad()
    planned = allocations(lambda: chunkc.plan(model, HW, example_inputs=batch, dtype=torch.float32, backend=backend))
    assert sum(run) > 200_000
    state_nbytes = torch.get_rng_state().nbytes
    assert max(planned) <= state_nbytes and sum(n for n in planned if n != state_nbytes) < 2_000


def test_the_model_stays_as_it_is() -> None:
    model, batch = on_meta("gpt2")
    held = {n: (id(t), t.device) for n, t in (*model.named_parameters(), *model.named_buffers())}
    chunkc.plan(model, "emulated-64m-1g", example_inputs=batch, backend="eager")
    assert held == {n: (id(t), t.device) for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert all(p.grad is None and not hasattr(p, "chunkc_store") for p in model.parameters())


# --- inputs -----------------------------------------------------------------------------------------------------------


def spread() -> torch.Tensor:
    return torch.randn(64, 4, 8)[:, 1]


INPUTS = {
    "a view of a larger tensor": spread,
    "transposed": lambda: torch.randn(8, 64).t(),
    "expanded": lambda: torch.randn(1, 8).expand(64, 8),
    "with a gradient of its own": lambda: torch.randn(64, 8).requires_grad_(),
    "in another dtype": lambda: torch.randn(64, 8).bfloat16(),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch looks at that of an input that was cast
@pytest.mark.parametrize("what", INPUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_inputs_count_as_they_do_in_a_run(what: str, dtype: torch.dtype) -> None:
    """Strides, the storage behind a view, casts to compute dtype: all of it is in the bytes of the schedule."""
    x = INPUTS[what]()
    if x.dtype is not torch.float32 and dtype is torch.float32:
        dtype = torch.bfloat16
    ahead = chunkc.plan(Small(), "emulated-1m-64m", example_inputs=(x,), dtype=dtype, backend="eager")
    model = chunkc.compile(Small(), "emulated-1m-64m", dtype=dtype, backend="eager")
    model(x).backward()
    assert chunkc.plan_of(model).digest() == ahead.digest()


def test_a_compiled_model_can_be_planned_for_another_machine() -> None:
    x = torch.randn(4, 8)
    wanted = chunkc.plan(Small(), "emulated-2m-64m", example_inputs=(x,), dtype=torch.float32, backend="eager")
    model = chunkc.compile(Small(), "emulated-1m-64m", dtype=torch.float32, backend="eager")
    model(x).backward()
    gradient = model.first.weight.grad.clone()
    found = chunkc.plan(model, "emulated-2m-64m", example_inputs=(x,), dtype=torch.float32, backend="eager")
    assert found.digest() == wanted.digest() != chunkc.plan_of(model).digest()
    assert torch.equal(model.first.weight.grad.clone(), gradient)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plans_with_a_loss_scale_measure_gradients_over_any_number_of_ranks(num_ranks: int) -> None:
    hw = f"{num_ranks}xemulated-1m-64m"
    plan = chunkc.plan(Small(), hw, example_inputs=(torch.randn(4, 8),), dtype=torch.float16, backend="eager")
    sums = [a for a in plan.program("backward").actions if a.op is Op.SUM]
    assert plan.tracks_grad_norm and len(sums) == num_ranks - 1


# --- refusals ---------------------------------------------------------------------------------------------------------


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        if hidden.sum().item() > 0:
            hidden = hidden * 2
        return hidden.sum()


class Frozen(Prints):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).detach().sum()


REFUSED: list[tuple[Callable[[], nn.Module], type[Exception], str]] = [
    (Prints, CaptureError, "breaks into several graphs"),
    (Frozen, CaptureError, "nothing to train"),
    (nn.ReLU, ChunkcError, "has no parameters"),
    (lambda: nn.Linear(8, 8).double(), ChunkcError, "are not float32"),
    (lambda: "model", TypeError, "takes an nn.Module"),
]


@pytest.mark.parametrize(("make", "kind", "match"), REFUSED)
def test_what_compile_refuses_is_not_planned(make: Callable[[], nn.Module], kind: type[Exception], match: str) -> None:
    for entry in (
        lambda: chunkc.plan(make(), "emulated-1m-1m", example_inputs=(torch.randn(4, 8),), backend="eager"),
        lambda: chunkc.compile(make(), "emulated-1m-1m", backend="eager", fullgraph=True)(torch.randn(4, 8)),
    ):
        with pytest.raises(kind, match=match):
            entry()


def test_the_log_says_what_was_captured_and_planned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "chunkc"):
        plan = chunkc.plan(Small(), "emulated-1m-1m", example_inputs=(torch.randn(4, 8),), backend="eager")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("captured ") and second.startswith(f"planned {plan.digest()} in ")
    names = [stage.name for stage in plan.stages]
    assert names[:5] == ["dynamo", "aot_autograd", "partition", "schedule", "offload"] and names[-1] == "verify"
    assert all(stage.elapsed_ms >= 0 for stage in plan.stages)
