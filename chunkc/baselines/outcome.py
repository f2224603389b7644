"""Outcome of a modelled system on a machine: why a model does not fit, or the steady iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chunkc.baselines.machine import Machine
from chunkc.baselines.writer import Writer
from chunkc.cost.simulate import Facts, simulate_script
from chunkc.cost.timeline import Flops, Peaks, Timeline
from chunkc.ir.tiers import COPIED_TIERS


@dataclass(frozen=True, slots=True)
class Outcome:
    """One modelled system on one machine.

    ``why_not``: which memory is too small, or what the system cannot do; empty where the model fits.
    ``missing_nbytes``: of that memory, for one rank; else 0. ``device_nbytes``, ``host_nbytes``: most bytes of one
    rank, also where it does not fit. ``timeline``: the steady iteration. ``notes``: decisions worth knowing.
    """

    policy: str
    hw: str
    why_not: str
    missing_nbytes: int
    device_nbytes: int
    host_nbytes: int
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.timeline is not None

    @property
    def moved_nbytes(self) -> int:
        """Bytes that one rank copies between host and device in an iteration; 0 where the model does not fit."""
        if self.timeline is None:
            return 0
        return sum(self.timeline.stream(stream).nbytes for stream in COPIED_TIERS)

    def to_json(self) -> dict[str, Any]:
        figures = ("step_ms", "tokens_per_s", "patrickstar_tflops", "model_tflops", "bound")
        return {
            "policy": self.policy,
            "modelled": True,
            "hw": self.hw,
            "fits": self.fits,
            "why_not": self.why_not,
            "missing_nbytes": self.missing_nbytes,
            "device_peak_nbytes": self.device_nbytes,
            "host_nbytes": self.host_nbytes,
            "moved_nbytes": self.moved_nbytes,
            **{name: getattr(self.timeline, name, None) for name in figures},
            "notes": list(self.notes),
        }


def size(nbytes: int) -> str:
    """``nbytes`` in GiB, or in MiB where it is less than one."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def refused(policy: str, machine: Machine, device_nbytes: int, host_nbytes: int) -> Outcome | None:
    """The outcome where one of both is more than ``machine`` has, the device's named first; else None."""
    for memory, needed, given in (
        ("device", device_nbytes, machine.device_nbytes),
        ("host", host_nbytes, machine.host_nbytes),
    ):
        if needed > given:
            why = f"{memory} memory of a rank: {size(needed)} needed, {size(given)} there"
            return Outcome(policy, machine.name, why, needed - given, device_nbytes, host_nbytes)
    return None


def simulated(
    policy: str, writer: Writer, device_nbytes: int, host_nbytes: int, notes: tuple[str, ...] = ()
) -> Outcome:
    """The outcome where the model fits: the iteration that was written, simulated until it repeats."""
    machine, course = writer.machine, writer.course
    schedule = course.schedule
    facts = Facts(
        plan_digest=f"modelled: {policy}",
        model=course.model,
        num_samples=schedule.num_samples * machine.world_size,
        num_tokens=schedule.num_tokens * machine.world_size,
        world_size=machine.world_size,
        flops=Flops.of(
            *([work for s in course.graph(graph.kind) for work in s.work] for graph in schedule.graphs),
            numel=course.numel,
            num_tokens=schedule.num_tokens,
        ),
        peaks=Peaks(device_nbytes, "", device_nbytes - course.nonmodel_nbytes, "", host_nbytes),
    )
    timeline = simulate_script(writer.script(), facts, machine.rates)
    return Outcome(policy, machine.name, "", 0, device_nbytes, host_nbytes, timeline, notes)
