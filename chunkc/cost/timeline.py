"""Results of a simulation: one steady iteration on its streams, and what can be read off it.

step time        the period of the steady iteration
stall            time in which the compute stream has nothing to do before an action
critical path    followed back from the compute stream, from each action to the one whose end let it start: every
                 instant of an iteration belongs to one stream, or to launches and hand-offs (overhead)
bound            the stream with most of the critical path
next bound       the busiest of the others: a step takes as long, even if the bound were gone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from chunkc.ir.actions import Stream
from chunkc.ir.work import Kind, Work

OVERHEAD = "overhead"
PATRICKSTAR_FACTOR = 8
"""Operations for each parameter and token in PatrickStar's throughput: forward, backward, forward again."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One action of the steady iteration, from its first start; ``alone_ms`` with nothing beside it."""

    label: str
    program: str
    action: str
    stream: Stream
    start_ms: float
    end_ms: float
    alone_ms: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Time in which the compute stream waited to start ``action``.

    ``waited_for``: label and text of the action whose end let it start, or let the host launch it; ``host`` where
    launching alone was late. ``path_ms``: what was under way meanwhile: milliseconds by stream or ``overhead``.
    """

    label: str
    action: str
    stall_ms: float
    waited_for: str
    path_ms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class StreamTime:
    """One stream in one iteration.

    ``alone_ms``: actions with nothing beside them. ``nbytes``: copied, exchanged, updated or moved in device memory.
    """

    stream: Stream
    busy_ms: float
    alone_ms: float
    critical_ms: float
    num_actions: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes of one rank, in all and of occupied slots, and the segments that run then."""

    device_nbytes: int
    device_segment: str
    arena_used_nbytes: int
    arena_used_segment: str
    host_nbytes: int


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one iteration on one rank; the masked half of causal attention does not count.

    ``model``: without what backward computes again: three times the forward's, or what is executed if that is less
    (frozen parameters). ``patrickstar``: eight for each parameter and token; None without tokens or training.
    """

    model: int
    hardware: int
    patrickstar: int | None

    @classmethod
    def of(cls, forward: Iterable[Work], backward: Iterable[Work], *, numel: int, num_tokens: int) -> Flops:
        """Of one forward and backward of ``numel`` parameters, all of which see ``num_tokens`` (0: unknown)."""
        first, second = (
            sum(w.flops for w in work if w.kind not in (Kind.MEMORY, Kind.LINK)) for work in (forward, backward)
        )
        patrickstar = PATRICKSTAR_FACTOR * numel * num_tokens if num_tokens else None
        return cls(min(3 * first, first + second), first + second, patrickstar)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One steady iteration of a plan on one rank, simulated.

    ``step_ms``: the period, or the mean of several iterations where these do not repeat exactly (``is_steady``).
    ``num_samples``, ``num_tokens``: of one iteration, all ranks together; 0 where unknown. ``overhead_ms``: launches
    and hand-offs on the critical path. ``stalls``: the longest first. ``slices``: by stream and start.
    """

    plan_digest: str
    model: str
    hw: str
    step_ms: float
    is_steady: bool
    num_iterations: int
    num_samples: int
    num_tokens: int
    world_size: int
    flops: Flops
    streams: tuple[StreamTime, ...]
    overhead_ms: float
    stalls: tuple[Stall, ...]
    peaks: Peaks
    slices: tuple[Slice, ...]
    next_slices: tuple[Slice, ...]

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None where tokens are unknown."""
        return self._per_s(self.num_tokens)

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together; None where samples are unknown."""
        return self._per_s(self.num_samples)

    @property
    def model_tflops(self) -> float:
        """1e12 operations of the model per second, one rank."""
        return self._tflops(self.flops.model)

    @property
    def hardware_tflops(self) -> float:
        """The same with what is computed again."""
        return self._tflops(self.flops.hardware)

    @property
    def patrickstar_tflops(self) -> float | None:
        """Parameters * tokens * 8 / seconds / 1e12, one rank."""
        return None if self.flops.patrickstar is None else self._tflops(self.flops.patrickstar)

    def stream(self, stream: Stream) -> StreamTime:
        """The times of ``stream``; zeros where it has no actions."""
        empty = StreamTime(stream, 0.0, 0.0, 0.0, 0, 0)
        return next((times for times in self.streams if times.stream is stream), empty)

    def busy_share(self, stream: Stream) -> float:
        return self.stream(stream).busy_ms / self.step_ms if self.step_ms else 0.0

    @property
    def bound(self) -> str:
        critical_ms_by_name = {str(s.stream): s.critical_ms for s in self.streams} | {OVERHEAD: self.overhead_ms}
        return max(critical_ms_by_name, key=lambda name: critical_ms_by_name[name])

    @property
    def next_bound(self) -> str | None:
        """The busiest of the other streams; None where no other is busy."""
        others = [s for s in self.streams if str(s.stream) != self.bound and s.busy_ms > 0]
        return str(max(others, key=lambda s: s.busy_ms).stream) if others else None

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``, without the single actions: those are the trace's."""
        data = asdict(self)
        del data["slices"], data["next_slices"]
        data["stalls"] = [{**asdict(stall), "path_ms": dict(stall.path_ms)} for stall in self.stalls]
        data["streams"] = [{**asdict(s), "busy_share": self.busy_share(s.stream)} for s in self.streams]
        derived = ("tokens_per_s", "samples_per_s", "model_tflops", "hardware_tflops", "patrickstar_tflops")
        return data | {name: getattr(self, name) for name in (*derived, "bound", "next_bound")}

    def trace(self) -> dict[str, Any]:
        """Two steady iterations as Chrome trace events (microseconds), for ``json.dumps``; one track a stream."""
        tracks = {stream: number for number, stream in enumerate(Stream, start=1)}
        used = {s.stream for s in self.slices}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"{self.model} on {self.hw}"}}
        ]
        for stream in (s for s in Stream if s in used):
            name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": tracks[stream], "args": {"name": str(stream)}}
            order = {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tracks[stream]}
            events += [name, {**order, "args": {"sort_index": tracks[stream]}}]
        for iteration, slices in enumerate((self.slices, self.next_slices)):
            events += [_event(s, tracks[s.stream], iteration) for s in slices]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _per_s(self, count: int) -> float | None:
        return count / self.step_ms * 1e3 if count and self.step_ms else None

    def _tflops(self, flops: int) -> float:
        return flops / self.step_ms * 1e-9 if self.step_ms else 0.0


def _event(shown: Slice, track: int, iteration: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": shown.action,
        "cat": shown.program,
        "pid": 0,
        "tid": track,
        "ts": shown.start_ms * 1e3,
        "dur": (shown.end_ms - shown.start_ms) * 1e3,
        "args": {
            "label": shown.label,
            "iteration": iteration,
            "alone_us": shown.alone_ms * 1e3,
            "nbytes": shown.nbytes,
        },
    }
