"""``zero3-offload``: parameters live on the host in parts, and come tensor by tensor.

ZeRO-3 with ZeRO-Infinity's host offload (Rajbhandari et al., 2021, section 5): each rank holds its part of every tensor
on the host. Before a layer runs, its tensors are copied to the device and gathered, one by one; the next layer's
come meanwhile. They are dropped when it has run. Gradients are reduced and copied to the host tensor by tensor, and the
host updates when backward is done. The host holds 16 bytes for each parameter; nothing is kept on the device.
"""

from __future__ import annotations

from chunkc.baselines.machine import Machine
from chunkc.baselines.outcome import Outcome, refused, simulated
from chunkc.baselines.stretches import Course, Stretch
from chunkc.baselines.writer import Writer
from chunkc.ir.actions import Stream

NAME = "zero3-offload"
HOST_NBYTES_PER_PARAM = 16


def zero3_offload(course: Course, machine: Machine) -> Outcome:
    """Model ``course`` under ZeRO-3 with offload."""
    device_nbytes = course.next_fetched_nbytes
    host_nbytes = HOST_NBYTES_PER_PARAM * course.trained_numel // machine.world_size
    refusal = refused(NAME, machine, device_nbytes, host_nbytes)
    if refusal is not None:
        return refusal
    writer = Writer(machine, course)
    runs: list[str] = []
    last_copy = ""
    for stretch in course.stretches:
        runs.append(writer.run(stretch, _fetch(writer, stretch, runs)))
        if stretch.grads:
            last_copy = _send(writer, stretch, runs[-1])
    updated = ""
    for stretch in (s for s in course.stretches if s.grads):
        numel = course.numel_of(stretch.grads) // machine.world_size
        updated = writer.update(f"update {stretch.name}", numel, Stream.CPU, last_copy)
    writer.wait_at_start(updated)
    return simulated(NAME, writer, device_nbytes, host_nbytes)


def part_sizes(course: Course, params: tuple[int, ...], ranks: int) -> list[int]:
    """Bytes of one rank's part of each tensor."""
    return [course.schedule.params[p].nbytes // ranks for p in params]


def _fetch(writer: Writer, stretch: Stretch, runs: list[str]) -> str:
    """The tensors of ``stretch``, once the stretch before the last has made room."""
    sizes = part_sizes(writer.course, stretch.params, writer.machine.world_size)
    ready = writer.copy(f"tensors of {stretch.name} to the device", Stream.H2D, sizes, *runs[-2:-1])
    if writer.machine.world_size > 1:
        ready = writer.exchange(f"gather tensors of {stretch.name}", sizes, ready)
    return ready


def _send(writer: Writer, stretch: Stretch, ready: str) -> str:
    """The gradients of ``stretch`` to the host."""
    sizes = part_sizes(writer.course, stretch.grads, writer.machine.world_size)
    if writer.machine.world_size > 1:
        ready = writer.exchange(f"reduce gradients of {stretch.name}", sizes, ready)
    return writer.copy(f"gradients of {stretch.name} to the host", Stream.D2H, sizes, ready)
