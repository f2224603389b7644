"""Writer of a modelled system's iteration as a script of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chunkc.baselines.machine import Machine
from chunkc.baselines.stretches import Course, Stretch
from chunkc.cost.actions import Cost, memory_ms, stream_use, work_ms
from chunkc.cost.simulate import Script
from chunkc.cost.spread import all_gather_ms, neighbours
from chunkc.errors import HardwareError
from chunkc.ir.actions import Stream
from chunkc.ir.state_spec import ADAM_STATES


@dataclass(slots=True)
class Writer:
    """Actions in the order of launch. Every method adds one and returns its label, for others to wait for.

    ``in_turn``: whether every action waits for the one before it, as in a system without overlap.
    """

    machine: Machine
    course: Course
    in_turn: bool = False
    _names: list[tuple[str, str, str]] = field(default_factory=list)
    _costs: list[Cost] = field(default_factory=list)
    _waits: list[tuple[str, ...]] = field(default_factory=list)

    def run(self, stretch: Stretch, *waits: str) -> str:
        """The operators of ``stretch``."""
        rates = self.machine.rates
        alone_ms = sum(work_ms(work, rates) for work in stretch.work)
        kernels_ms = sum(work.num_kernels for work in stretch.work) * rates.kernel_launch_us * 1e-3
        nbytes = sum(work.nbytes for work in stretch.work)
        return self._add(f"run {stretch.name}", Stream.COMPUTE, alone_ms, nbytes, waits, kernels_ms)

    def land(self, stretch: Stretch, *waits: str) -> str:
        """Copy the gradients of ``stretch`` to where they belong in device memory, like a plan's ``stash``."""
        nbytes = self.course.nbytes(stretch.grads)
        kernels_ms = len(stretch.grads) * self.machine.rates.kernel_launch_us * 1e-3
        alone_ms = memory_ms(2 * nbytes, self.machine.rates)
        return self._add(f"land gradients of {stretch.name}", Stream.COMPUTE, alone_ms, nbytes, waits, kernels_ms)

    def copy(self, text: str, stream: Stream, sizes: Sequence[int], *waits: str) -> str:
        """Copies of so many bytes each, one after another; without any: nothing but a place to wait for."""
        law = self.machine.rates.copies[stream]
        alone_ms = sum(law.time_ms(nbytes) for nbytes in sizes)
        return self._add(text, stream, alone_ms, sum(sizes), waits)

    def exchange(self, text: str, sizes: Sequence[int], *waits: str) -> str:
        """All-gathers, or reduce-scatters, of so many bytes of each rank; HardwareError without links."""
        links, ranks = self.machine.rates.links, self.machine.world_size
        if links is None:
            raise HardwareError(f"{self.machine.name} has {ranks} ranks, but no rates of links between them")
        spread = neighbours(ranks, links.gpus_per_node)
        alone_ms = sum(all_gather_ms(nbytes, spread, links) for nbytes in sizes)
        return self._add(text, Stream.COMM, alone_ms, sum(sizes) * (ranks - 1), waits)

    def update(self, text: str, numel: int, stream: Stream, *waits: str) -> str:
        """Adam on ``numel`` parameters, on the host (`Stream.CPU`) or the device (`Stream.COMPUTE`)."""
        rates, dtype = self.machine.rates, self.course.dtype
        on_cpu = stream is Stream.CPU
        table = rates.cpu_update_gparam_per_s if on_cpu else rates.gpu_update_gparam_per_s
        alone_ms = numel / rates.of_dtype(table, dtype) * 1e-6
        kernels_ms = 0.0 if on_cpu else rates.kernel_launch_us * 1e-3
        return self._add(text, stream, alone_ms, numel * ADAM_STATES.nbytes_per_element, waits, kernels_ms)

    def wait_at_start(self, *waits: str) -> None:
        """The first action of an iteration waits for these of the one before."""
        self._waits[0] = (*self._waits[0], *waits)

    @property
    def last(self) -> str:
        """The label of the latest action."""
        return str(len(self._names) - 1)

    def script(self) -> Script:
        if self.in_turn:
            self.wait_at_start(self.last)
        return Script(tuple(self._names), tuple(self._costs), tuple(self._waits))

    def _add(
        self, text: str, stream: Stream, alone_ms: float, nbytes: int, waits: Sequence[str], kernels_ms: float = 0.0
    ) -> str:
        rates = self.machine.rates
        launch_us = rates.compute_launch_us if stream is Stream.COMPUTE else rates.copy_launch_us
        if rates.runs_inline:
            alone_ms, kernels_ms = alone_ms + kernels_ms, 0.0
        before = (self.last,) if self.in_turn and self._names else ()
        self._names.append((str(len(self._names)), "iteration", text))
        self._costs.append(
            Cost(alone_ms, stream_use(stream, rates, self.course.dtype), launch_us * 1e-3, kernels_ms, nbytes)
        )
        self._waits.append((*before, *waits))
        return self.last
