"""A run while it goes on: numbers of each step for any logger, and a window of steps for Perfetto."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from chunkc.api import plan_of, stats
from chunkc.compiler.compiled_model import compiled_of
from chunkc.cost import simulate
from chunkc.cost.simulate import flops_of
from chunkc.errors import ChunkcError, HardwareError
from chunkc.files import save_text
from chunkc.hardware import Hardware
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.report.measured import joined_trace, measured_trace
from chunkc.report.trace import trace
from chunkc.runtime.devices.throttle import Span
from chunkc.runtime.model.optimizer_steps import StepWindow
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.update.begun import BegunCounts

logger = logging.getLogger("chunkc")

__all__ = ["metrics", "record_timeline"]


def metrics(model: nn.Module) -> dict[str, float]:
    """Numbers of the latest step, flat, for any logger: those of `stats`, and how fast it went.

    Pending work is finished first; a loop that asks at every step gives up that updates run beside the next forward.
    ``num_begun_steps`` counts the steps whose updates began while backward ran, ``num_committed_steps`` those that
    turned out as expected, ``num_dropped_steps`` those whose updates were computed again. From the second step on there
    are also

        step_ms            from the end of the step before to its own, with whatever the script did in between
        num_tokens         of its forwards: elements of their largest integer inputs; left out where there are none
        tokens_per_s       the same per second
        samples_per_s      of its forwards, by the first dimension of their largest inputs
        model_tflops       operations of the model, without what backward computes again, in 1e12 a second
        stall_ms           the compute stream waited so long for other streams,
        stall_h2d_ms, ...  and so long for each: ``h2d`` and ``d2h`` are copies, ``comm`` exchanges with
                           other ranks, ``cpu`` updates on the host

    On CUDA the host sees only stalls by updates, so that ``stall_ms`` is left out there. Two more say what torch's
    allocator took for the tensors of the whole process, whose own bytes ``measured_peak_nbytes`` counts:

        allocated_peak_nbytes   blocks that hold tensors
        reserved_peak_nbytes    all of the GPU's memory that it held

    Raises:
        PlanNotReadyError: before the first training forward.
        ChunkcError: for a model that was not compiled.
    """
    numbers: dict[str, float] = dict(stats(model))
    runtime = compiled_of(model).runtime
    steps = runtime.steps.log
    numbers["num_steps"] = steps.num_steps
    numbers["evaluation_peak_nbytes"] = runtime.accounting.evaluation_peak_nbytes
    numbers |= _begun(runtime.parameters.store)
    numbers |= runtime.device.allocator_peaks()
    if steps.latest is not None:
        numbers |= _speeds(steps.latest) | _stalls(steps.latest, sees_all=runtime.device.recorder() is not None)
    return numbers


def _begun(store: ChunkStore | None) -> dict[str, float]:
    counts = BegunCounts() if store is None else store.begun_counts
    return {
        "num_begun_steps": counts.num_begun,
        "num_committed_steps": counts.num_committed,
        "num_dropped_steps": counts.num_dropped,
    }


def _speeds(window: StepWindow) -> dict[str, float]:
    """Of a step whose forwards ran by plans, the parts of a broken one together."""
    samples, tokens, flops = 0, 0, 0
    for plans in window.calls:
        samples += max((plan.num_samples for plan in plans), default=0)
        tokens += max((plan.num_tokens for plan in plans), default=0)
        flops += sum(flops_of(plan).model for plan in plans)
    speeds = {"step_ms": window.elapsed_s * 1e3}
    if not window.elapsed_s or not all(window.calls):
        return speeds
    if tokens:
        speeds |= {"num_tokens": tokens, "tokens_per_s": tokens / window.elapsed_s}
    if samples:
        speeds["samples_per_s"] = samples / window.elapsed_s
    return speeds | {"model_tflops": flops / window.elapsed_s * 1e-12}


def _stalls(window: StepWindow, *, sees_all: bool) -> dict[str, float]:
    streams = (Stream.H2D, Stream.D2H, Stream.COMM, Stream.CPU) if sees_all else tuple(window.stalled_s)
    stalls = {f"stall_{stream}_ms": window.stalled_s.get(stream, 0.0) * 1e3 for stream in streams}
    return stalls | ({"stall_ms": sum(stalls.values())} if sees_all else {})


@contextmanager
def record_timeline(
    model: nn.Module, path: str | Path, *, hw: Hardware | str | os.PathLike[str] | None = None
) -> Iterator[None]:
    """Record when every action runs within the block, and write the times as a Perfetto trace.

    Steps are whole when the block begins before a forward and ends after a step. Both ends wait for pending work. The
    file is Chrome trace JSON with two processes, ``measured`` and ``planned`` (two steady iterations of the plan that
    runs when the block ends), with one track for each stream and the action's text for each bar; it is also written
    when the block ends by an exception.

    Args:
        model: compiled, and trained for a step or more, so that there is a plan.
        path: of the file, for example ``timeline.json``; open it at ui.perfetto.dev.
        hw: a machine whose rates the planned times take, for example the path of a profile of ``chunkc calibrate``;
            default: the plan's. Where the rates are not known, only measured times are written, and a log line says so.

    Raises:
        PlanNotReadyError: before the first training forward.
        ChunkcError: on CUDA, where torch's profiler shows each action under its text, inside another such block, and
            when the file cannot be written; what it held, it holds.
    """
    plan_of(model)
    runtime = compiled_of(model).runtime
    recorder = runtime.device.recorder()
    if recorder is None:
        raise ChunkcError(
            f"record_timeline has no clock for the streams of {runtime.device.name}: run the steps under "
            "torch.profiler.profile(), which shows every action under its text, with the kernels and copies it launched"
        )
    if recorder.records is not None:
        raise ChunkcError("record_timeline is already recording on this device; end that block first")
    runtime.parameters.drain()
    recorder.records = spans = list[Span]()
    try:
        yield
    finally:
        try:
            runtime.parameters.drain()
        finally:
            recorder.records = None
        _write(Path(path), plan_of(model), spans, hw)


def _write(path: Path, plan: Plan, spans: list[Span], hw: Hardware | str | os.PathLike[str] | None) -> None:
    measured = measured_trace(spans, f"measured on {plan.hw}")
    try:
        events = joined_trace(measured, trace(plan, simulate(plan, hw)))
    except HardwareError as error:
        logger.info("%s holds measured times only: %s", path, error)
        events = measured
    save_text(path, json.dumps(events))
