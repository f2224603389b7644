"""``zero-offload``: parameters stay on the device, gradients go to the host, which updates them.

ZeRO-Offload (Ren et al., 2021, sections 4 and 5): every rank keeps all of param16. While backward goes on, gradients
are reduced to their owners and copied to the host, each rank its part. When backward is done the host updates, the new
parameters are copied back, and ranks gather them. The host holds 16 bytes for each parameter: states, a gradient and
a copy of the parameter. The delayed update, which trains with old gradients, is left out.
"""

from __future__ import annotations

from chunkc.baselines.machine import Machine
from chunkc.baselines.outcome import Outcome, refused, simulated
from chunkc.baselines.stretches import Course
from chunkc.baselines.writer import Writer
from chunkc.ir.actions import Stream

NAME = "zero-offload"
HOST_NBYTES_PER_PARAM = 16


def zero_offload(course: Course, machine: Machine) -> Outcome:
    """Model ``course`` under ZeRO-Offload."""
    ranks = machine.world_size
    params_nbytes = course.nbytes(range(len(course.schedule.params)))
    device_nbytes = params_nbytes + course.nonmodel_nbytes
    host_nbytes = HOST_NBYTES_PER_PARAM * course.trained_numel // ranks
    refusal = refused(NAME, machine, device_nbytes, host_nbytes)
    if refusal is not None:
        return refusal
    writer = Writer(machine, course)
    last_copy = ""
    for stretch in course.stretches:
        ready = writer.run(stretch)
        if stretch.grads:
            share_nbytes = course.nbytes(stretch.grads) // ranks
            if ranks > 1:
                ready = writer.exchange(f"reduce gradients of {stretch.name}", [share_nbytes], ready)
            last_copy = writer.copy(f"gradients of {stretch.name} to the host", Stream.D2H, [share_nbytes], ready)
    writer.wait_at_start(*_update(writer, last_copy))
    return simulated(NAME, writer, device_nbytes, host_nbytes)


def _update(writer: Writer, last_copy: str) -> list[str]:
    """The host's updates, layer by layer, and the way back; what the next forward waits for."""
    course, ranks = writer.course, writer.machine.world_size
    updated = []
    for stretch in (s for s in course.stretches if s.grads):
        share_nbytes = course.nbytes(stretch.grads) // ranks
        numel = course.numel_of(stretch.grads) // ranks
        ready = writer.update(f"update {stretch.name}", numel, Stream.CPU, last_copy)
        ready = writer.copy(f"parameters of {stretch.name} to the device", Stream.H2D, [share_nbytes], ready)
        if ranks > 1:
            ready = writer.exchange(f"gather parameters of {stretch.name}", [share_nbytes], ready)
        updated.append(ready)
    return updated[-1:]
