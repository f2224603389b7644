"""``l2l``: one layer at a time on the device, everything else on the host.

L2L (Pudipeddi et al., 2020): a layer's tensors are copied to the device, it runs, and they are dropped; in backward its
gradients go to the host, which updates that layer while the device goes on with the next. Copies are not hidden, and
tensors move one by one. It is a system for one GPU.
"""

from __future__ import annotations

from chunkc.baselines.machine import Machine
from chunkc.baselines.outcome import Outcome, refused, simulated
from chunkc.baselines.stretches import Course
from chunkc.baselines.writer import Writer
from chunkc.baselines.zero3_offload import HOST_NBYTES_PER_PARAM, part_sizes
from chunkc.ir.actions import Stream

NAME = "l2l"


def l2l(course: Course, machine: Machine) -> Outcome:
    device_nbytes = max(s.nonmodel_nbytes + course.nbytes(s.params) for s in course.stretches)
    host_nbytes = HOST_NBYTES_PER_PARAM * course.trained_numel
    if machine.world_size > 1:
        return Outcome(NAME, machine.name, "a system for one GPU", 0, device_nbytes, host_nbytes)
    refusal = refused(NAME, machine, device_nbytes, host_nbytes)
    if refusal is not None:
        return refusal
    writer = Writer(machine, course)
    ready, updated = "", ""
    for stretch in course.stretches:
        sizes = part_sizes(course, stretch.params, 1)
        fetched = writer.copy(f"tensors of {stretch.name} to the device", Stream.H2D, sizes, *filter(None, [ready]))
        ready = writer.run(stretch, fetched)
        if stretch.grads:
            sizes = part_sizes(course, stretch.grads, 1)
            ready = writer.copy(f"gradients of {stretch.name} to the host", Stream.D2H, sizes, ready)
            updated = writer.update(f"update {stretch.name}", course.numel_of(stretch.grads), Stream.CPU, ready)
    writer.wait_at_start(ready, updated)
    return simulated(NAME, writer, device_nbytes, host_nbytes)
