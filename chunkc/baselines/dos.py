"""``dos``: optimizer states on the host, every k-th part of the update on the device.

Deep Optimizer States (Maurya et al., 2024) on ZeRO-3: param16 and grad16 stay on the devices, each rank its part, and
layers are gathered where they are used. Gradients are copied to the host while backward goes on. Of every k *subgroups*
one is loaded (12 bytes a parameter), updated on the device and stored, while the host updates the others and copies
their parameters over; k >= 1 + 12 U / B, with U the host's rate of updates and B the link's bandwidth per direction.
"""

from __future__ import annotations

import math

from chunkc.baselines.machine import Machine
from chunkc.baselines.outcome import Outcome, refused, simulated
from chunkc.baselines.stretches import Course, Stretch
from chunkc.baselines.writer import Writer
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import DTYPE_NBYTES
from chunkc.ir.state_spec import ADAM_STATES

NAME = "dos"
SUBGROUP_NUMEL = 100_000_000
"""Parameters of a subgroup, as DeepSpeed's examples of that size have it."""
NUM_SUBGROUPS_ON_DEVICE = 2
"""One is updated while the next is loaded."""


def stride(machine: Machine, dtype: str) -> int:
    """The least integer k for which the device's share of updates does not outlast the host's."""
    rates = machine.rates
    update = rates.of_dtype(rates.cpu_update_gparam_per_s, dtype)
    bandwidth = min(law.gb_per_s for law in rates.copies.values())
    return max(2, math.ceil(1 + ADAM_STATES.nbytes_per_element * update / bandwidth))


def dos(course: Course, machine: Machine) -> Outcome:
    ranks, payload = machine.world_size, DTYPE_NBYTES[course.dtype]
    numel = course.trained_numel // ranks
    kept_nbytes = (course.nbytes(range(len(course.schedule.params))) + payload * course.trained_numel) // ranks
    update_nbytes = NUM_SUBGROUPS_ON_DEVICE * ADAM_STATES.nbytes_per_element * min(SUBGROUP_NUMEL, numel)
    device_nbytes = kept_nbytes + max(update_nbytes, _working_nbytes(course, ranks))
    host_nbytes = (ADAM_STATES.nbytes_per_element + payload) * numel
    refusal = refused(NAME, machine, device_nbytes, host_nbytes)
    if refusal is not None:
        return refusal
    writer = Writer(machine, course)
    last_copy = _passes(writer)
    every = stride(machine, course.dtype)
    writer.wait_at_start(*_update(writer, numel, every, last_copy))
    return simulated(NAME, writer, device_nbytes, host_nbytes, (f"one of {every} subgroups on the device",))


def _working_nbytes(course: Course, ranks: int) -> int:
    """Most bytes of activations and gathered layers; one rank has its layers and gradients already."""
    if ranks == 1:
        return max(s.nonmodel_nbytes - course.nbytes(s.grads) for s in course.stretches)
    return course.next_fetched_nbytes


def _passes(writer: Writer) -> str:
    """Forward and backward; the label of the last gradient's copy."""
    course, ranks = writer.course, writer.machine.world_size
    runs: list[str] = []
    last_copy = ""
    for stretch in course.stretches:
        waits = [_gather(writer, stretch, runs)] if ranks > 1 else []
        runs.append(writer.run(stretch, *waits))
        if stretch.grads:
            share_nbytes = course.nbytes(stretch.grads) // ranks
            ready = runs[-1]
            if ranks > 1:
                ready = writer.exchange(f"reduce gradients of {stretch.name}", [share_nbytes], ready)
            last_copy = writer.copy(f"gradients of {stretch.name} to the host", Stream.D2H, [share_nbytes], ready)
    return last_copy


def _gather(writer: Writer, stretch: Stretch, runs: list[str]) -> str:
    share_nbytes = writer.course.nbytes(stretch.params) // writer.machine.world_size
    return writer.exchange(f"gather {stretch.name}", [share_nbytes], *runs[-2:-1])


def _update(writer: Writer, numel: int, every: int, last_copy: str) -> list[str]:
    """All subgroups; what the next forward waits for: not the stores, which run beside it."""
    payload = DTYPE_NBYTES[writer.course.dtype]
    ends = {Stream.H2D: last_copy, Stream.COMPUTE: last_copy}
    for number, first in enumerate(range(0, numel, SUBGROUP_NUMEL)):
        size = min(SUBGROUP_NUMEL, numel - first)
        if number % every == 0:
            nbytes = ADAM_STATES.nbytes_per_element * size
            loaded = writer.copy(f"load subgroup {number}", Stream.H2D, [nbytes], last_copy)
            done = writer.update(f"update subgroup {number}", size, Stream.COMPUTE, loaded)
            ends[Stream.COMPUTE] = done
            writer.copy(f"store subgroup {number}", Stream.D2H, [nbytes], done)
        else:
            done = writer.update(f"update subgroup {number}", size, Stream.CPU, last_copy)
            ends[Stream.H2D] = writer.copy(f"parameters of subgroup {number}", Stream.H2D, [payload * size], done)
    return sorted(set(ends.values()))
