"""``patrickstar`` and ``static``: chunks that move between device and host, one move at a time.

PatrickStar (Fang et al., 2021, sections 6 and 7). Model data are 14 bytes a parameter in chunks, each in one place at a
time; gradients are copied over their parameters (section 6.1). In the warm-up iteration a fifth of the device's memory
is for chunks: that and host memory bound what it can hold. From then on chunks have what activations leave at each
moment, and states fill the *margin*: memory less peak activations less parameters. Copies, collectives and updates
take turns with the computation.

``static`` is the same without the tracer: chunks have a fifth of the device's memory at any moment, are evicted in the
order of the list, and all states are on the host (the ablation of the paper's figure 15).
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.baselines.chunk_cache import ChunkCache, Move, NoRoom
from chunkc.baselines.machine import Machine
from chunkc.baselines.outcome import Outcome, refused, simulated, size
from chunkc.baselines.packing import SIZES, Packing, packings
from chunkc.baselines.stretches import Course, Stretch
from chunkc.baselines.writer import Writer
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import DTYPE_NBYTES
from chunkc.ir.state_spec import ADAM_STATES

WARM_UP_PERCENT = 20
"""Share of the device's memory for chunks while nothing is known about activations (section 7.3)."""


@dataclass(frozen=True, slots=True)
class PatrickStar:
    """The policy: ``sizes`` of chunks to search, in elements, and whether states may stand in the margin.

    ``traced``: whether it knows what activations take at each moment; else it is ``static``.
    """

    name: str = "patrickstar"
    sizes: tuple[int, ...] = SIZES
    traced: bool = True
    os_on_device: bool = True

    def __call__(self, course: Course, machine: Machine) -> Outcome:
        """Model ``course`` under PatrickStar, with the least wasteful chunks that fit."""
        outcomes = []
        for packing in self.packings(course, machine):
            outcomes.append(self._with(course, machine, packing))
            if outcomes[-1].fits:
                return outcomes[-1]
        return min(outcomes, key=lambda o: o.missing_nbytes)

    def packings(self, course: Course, machine: Machine) -> list[Packing]:
        return packings(course, self.sizes, machine.world_size)

    def total_nbytes(self, course: Course, packing: Packing) -> int:
        """Bytes of one rank's chunks, payloads and states."""
        element = DTYPE_NBYTES[course.dtype] + ADAM_STATES.nbytes_per_element
        return packing.num_groups * packing.chunk_numel * element

    def warm_up_nbytes(self, machine: Machine) -> int:
        """Bytes of a device for chunks while nothing is known about activations."""
        return machine.device_nbytes * WARM_UP_PERCENT // 100

    def capacity_nbytes(self, machine: Machine) -> int:
        """Bytes of chunks that one rank can hold: those of the warm-up, and its share of the host."""
        return self.warm_up_nbytes(machine) + machine.host_nbytes

    def margin(self, course: Course, machine: Machine, packing: Packing) -> int:
        """Chunks whose states the margin takes (+), or parameters that spill, in such chunks (-); Table 4."""
        chunk_nbytes = packing.chunk_numel * DTYPE_NBYTES[course.dtype]
        left = machine.device_nbytes - course.nonmodel_nbytes - packing.num_groups * chunk_nbytes
        states_nbytes = packing.chunk_numel * ADAM_STATES.nbytes_per_element
        return left // states_nbytes if left >= 0 else -(-left // states_nbytes)

    def _with(self, course: Course, machine: Machine, packing: Packing) -> Outcome:
        warm_up_nbytes, total_nbytes = self.warm_up_nbytes(machine), self.total_nbytes(course, packing)
        device_nbytes = warm_up_nbytes + (0 if self.traced else course.nonmodel_nbytes)
        refusal = refused(self.name, machine, device_nbytes, total_nbytes - warm_up_nbytes)
        if refusal is not None:
            return refusal
        margin = self.margin(course, machine, packing) if self.traced and self.os_on_device else 0
        for num_states in range(max(0, min(margin, packing.num_groups)), -1, -1):
            try:
                return self._steady(course, machine, packing, num_states)
            except NoRoom as error:
                missing_nbytes, stretch = error.missing_nbytes, error.stretch
        why_not = f"device memory of a rank: {stretch} needs {size(missing_nbytes)} more for its chunks"
        device_nbytes = machine.device_nbytes + missing_nbytes
        return Outcome(self.name, machine.name, why_not, missing_nbytes, device_nbytes, total_nbytes - warm_up_nbytes)

    def _steady(self, course: Course, machine: Machine, packing: Packing, num_states: int) -> Outcome:
        """With the states of so many chunks on the device; NoRoom when a stretch does not fit beside them."""
        payload_nbytes = packing.chunk_numel * DTYPE_NBYTES[course.dtype]
        states_nbytes = packing.chunk_numel * ADAM_STATES.nbytes_per_element

        def room_nbytes(stretch: Stretch) -> int:
            if not self.traced:
                return self.warm_up_nbytes(machine)
            return machine.device_nbytes - stretch.nonmodel_nbytes - num_states * states_nbytes

        cache = ChunkCache(course, packing, payload_nbytes, room_nbytes, num_states, by_list_order=not self.traced)
        moves, most_on_host = cache.iteration()
        host_nbytes = (packing.num_groups - num_states) * states_nbytes + most_on_host * payload_nbytes
        refusal = refused(self.name, machine, 0, host_nbytes)
        if refusal is not None:
            return refusal
        writer = Writer(machine, course, in_turn=True)
        for move in moves:
            _write(writer, packing, payload_nbytes, move)
        notes = (
            f"chunks of {packing.chunk_numel / 2**20:g} Mi elements, {100 * packing.utilisation:.1f} % of them in use",
            f"{num_states} of {packing.num_groups} optimizer-state chunks on the device",
        )
        return simulated(self.name, writer, machine.device_nbytes, host_nbytes, notes)


def _write(writer: Writer, packing: Packing, payload_nbytes: int, move: Move) -> None:
    if move.stretch is not None:
        writer.run(move.stretch)
        if move.stretch.grads:
            writer.land(move.stretch)
    elif move.kind == "fetch":
        writer.copy(f"fetch group {move.group}", Stream.H2D, [payload_nbytes])
    elif move.kind == "evict":
        writer.copy(f"evict group {move.group}", Stream.D2H, [payload_nbytes])
    elif move.kind in ("gather", "reduce"):
        writer.exchange(f"{move.kind} group {move.group}", [payload_nbytes])
    elif move.kind in ("update_cpu", "update_gpu"):
        stream = Stream.CPU if move.kind == "update_cpu" else Stream.COMPUTE
        writer.update(f"update group {move.group}", packing.used_by_most(move.group), stream)
