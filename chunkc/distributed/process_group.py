"""The ranks that train one model together: their process groups and exchanges.

Every model has its own process groups, so that nothing of the script's own exchanges can come between:

    control        between programs, all ranks: agreements, whole parameters, decisions of checkpoints
    dp_shard       in programs, the ranks that divide the model data: payloads and sums of norms
    dp_replicate   in programs, the ranks that own the same chunk: means over replicas

The last two are the dimensions of a `DeviceMesh`, without those of size one. The ``comm`` stream of the device issues
their collectives in plan order. All replicas stay the same bits: a mean over replicas is made once and sent to all
(`data_group`), norms are added up in one order, and updates do the same arithmetic on the same numbers.

When a collective fails or times out, every later one of this rank fails at once with the first cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Final, TypeVar

import torch

from chunkc._torch_compat.distributed import (
    Group,
    Store,
    all_gather,
    broadcast,
    end_group,
    new_group,
    new_mesh,
    reduce,
)
from chunkc.distributed.agreement import (
    KINDS,
    PRELIMINARY,
    Kind,
    Lines,
    check_kinds,
    difference_error,
    digest_lines,
    named,
)
from chunkc.distributed.data_group import DataGroup
from chunkc.distributed.failure_reports import FailureReports
from chunkc.distributed.gloo import Allocator
from chunkc.distributed.stages import StageLine
from chunkc.errors import RankError

DP_REPLICATE: Final = "dp_replicate"
DP_SHARD: Final = "dp_shard"

G = TypeVar("G")


class Ranks:
    """One rank alone. Methods are collective among several ranks: all call them in the same order.

    In a pipeline these are the ranks of one stage.

    Attributes:
        shard_rank: its place among the ranks that divide the model data of its ``replica``.
        line: the ranks with this one's place in the other stages; None where there is no pipeline.
        all_stages: all ranks of the job; None where they are one stage.
    """

    rank = 0
    size = 1
    shard_rank = 0
    replica = 0
    line: StageLine | None = None
    all_stages: Ranks | None = None

    @property
    def of_job(self) -> Ranks:
        """All ranks of the job."""
        return self.all_stages or self

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, whose values count where all should be equal."""
        return self.rank == 0

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        """Check that all ranks are about to do the same, and return ``number`` of each, in their order.

        RankError, on all ranks, names the first of ``lines`` that differs. ``what``: of its kind (a parameter's name).
        """
        return [number]

    def agree_digest(self, kind: Kind, digest: int, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        """`agree` with the digest of ``lines()`` at hand."""
        return [number]

    agreement_scope: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Within the block the ranks come to an agreement; one that raises before joins as ``refused``."""

    def announce_failure(self) -> None:
        """This rank's call was refused: the others hear of it at their next agreement."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Give the elements of ``tensor`` (host memory, contiguous) on rank ``source`` to all."""

    def combine(self, tensor: torch.Tensor) -> None:
        """Give all ranks every element of ``tensor`` (host memory, contiguous): one has it, the others 0."""

    def mean(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` (host memory, contiguous, floating) by the mean over all ranks."""

    def collect(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, in their order."""
        return [data]

    def gather(self, whole: torch.Tensor, own: torch.Tensor, place: str) -> None:
        """Fill ``whole`` with the ``own`` of the ranks that divide it; ``own`` stands in it already."""

    def reduce(self, own: torch.Tensor, whole: torch.Tensor, place: str, *, mean: bool) -> None:
        """Into ``own``, this rank's part of ``whole``, the mean of that part over all ranks.

        Without ``mean``: the sum over the ranks that divide ``whole``, of which replicas take the mean.
        """

    def total(self, tensor: torch.Tensor, place: str) -> None:
        """Replace ``tensor`` by the sum over the ranks that share chunks; the same bits in all replicas."""

    @contextmanager
    def collective_section(self, place: str, settle: Callable[[], None]) -> Iterator[None]:
        """End the others as well when the block raises, where after an agreement they count on this rank.

        They hear of it at once, after ``settle()``, which waits for the exchanges that all have launched.
        """
        yield

    def concurrent(self) -> Ranks:
        """The same ranks with an own control group for one thread beside training; all call this together."""
        return self

    def close(self) -> None:
        """Nothing is exchanged any more; idempotent."""
        if self.line is not None:
            self.line.close()
        if self.all_stages is not None:
            self.all_stages.close()


class JobRanks(Ranks):
    """The ranks of a torch.distributed job; ``number`` of this object is the same on all of them.

    All make one at once; no program runs before `connect`. ``timeout`` is that of every exchange. ``stages``: the
    job's ranks of each, where one of them, with ``rank`` as the place of this one, is what this object stands for.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: timedelta,
        store: Store,
        number: int | str,
        stages: Sequence[Sequence[int]] = (),
    ) -> None:
        self.rank, self.size, self._stages = rank, size, stages
        self._timeout, self._store, self._number = timeout, store, number
        self._failures = FailureReports(store, f"chunkc/{number}", rank, size, timeout)
        self._concurrent: JobRanks | None = None
        self._control: Group | None = new_group("gloo", timeout, torch.device("cpu"), stages or [range(size)])
        self._data_groups: dict[str, DataGroup] = {}
        self._num_agreements = 0

    # Between programs, on the control group.

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        return self.agree_digest(kind, digest_lines(lines()), lines, what, number)

    def agree_digest(self, kind: Kind, digest: int, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        self._num_agreements += kind not in PRELIMINARY
        own = torch.tensor([KINDS.index(kind), digest, number], dtype=torch.int64, device="cpu")
        of_ranks = torch.empty(self.size, 3, dtype=torch.int64, device="cpu")
        self._exchange(f"the agreement on {named(kind, what)}", lambda g: all_gather(g, of_ranks.view(-1), own))
        kinds, digests, numbers = of_ranks.t().tolist()
        check_kinds([KINDS[k] for k in kinds], self.rank, what)
        if kind is not Kind.REFUSED and len(set(digests)) > 1:
            descriptions = self.collect("\n".join(lines()).encode())
            raise difference_error(kind, what, [text.decode().split("\n") for text in descriptions])
        return [int(n) for n in numbers]

    @contextmanager
    def agreement_scope(self) -> Iterator[None]:
        before = self._num_agreements
        try:
            yield
        except RankError:
            raise
        except Exception:  # whatever refused the call: the others wait for this rank
            if self._num_agreements == before:
                self.announce_failure()
            raise

    def announce_failure(self) -> None:
        if self._failures.first is None:
            self.agree_digest(Kind.REFUSED, 0, list)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        if tensor.numel():
            self._exchange(f"a broadcast from rank {source}", lambda g: broadcast(g, _bytes(tensor), source))

    def combine(self, tensor: torch.Tensor) -> None:
        if tensor.numel():  # sums of bytes keep the bits of every element
            self._exchange("parts of a tensor", lambda g: reduce(g, _bytes(tensor), mean=False))

    def mean(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._exchange("a mean over the ranks", lambda g: reduce(g, tensor, mean=True))

    def collect(self, data: bytes) -> list[bytes]:
        own = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._exchange("an exchange of descriptions", lambda g: all_gather(g, sizes, own))
        most = max(1, int(sizes.max()))
        padded = torch.zeros(most, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        whole = torch.empty(self.size * most, dtype=torch.uint8, device="cpu")
        self._exchange("an exchange of descriptions", lambda g: all_gather(g, whole, padded))
        rows = whole.view(self.size, most)
        return [bytes(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def _exchange(self, place: str, work: Callable[[Group], None]) -> None:
        self._attempt(self._control, place, work)

    # Within programs, on the groups of the mesh.

    def connect(
        self, backend: str, device: torch.device, num_sharing: int, allocate: Allocator, *, adds_in_float32: bool
    ) -> None:
        """Make the mesh, whose groups exchange payloads on ``device``; all ranks call this together."""
        sizes = {DP_REPLICATE: self.size // num_sharing, DP_SHARD: num_sharing}
        try:
            shape = {dim: n for dim, n in sizes.items() if n > 1}
            mesh = new_mesh(backend, self._timeout, device, shape, self._stages)
            for dim in mesh.mesh_dim_names or ():
                is_direct = backend == "gloo"
                group = DataGroup(mesh[dim], allocate, is_direct=is_direct, adds_in_float32=adds_in_float32)
                group.warm_up(device)
                self._data_groups[dim] = group
        except Exception as error:  # whatever backends raise
            raise RankError(f"rank {self.rank} of {self.size} cannot set up exchanges by {backend}: {error}") from error
        self.shard_rank = mesh.get_local_rank(DP_SHARD)
        self.replica = mesh.get_local_rank(DP_REPLICATE) if DP_REPLICATE in self._data_groups else 0

    def gather(self, whole: torch.Tensor, own: torch.Tensor, place: str) -> None:
        self._attempt(self._data_groups.get(DP_SHARD), place, lambda g: g.gather(whole, own))

    def reduce(self, own: torch.Tensor, whole: torch.Tensor, place: str, *, mean: bool) -> None:
        self._attempt(self._data_groups.get(DP_SHARD), place, lambda g: g.reduce(own, whole, mean=mean))
        if DP_REPLICATE in self._data_groups:
            self._attempt(self._data_groups.get(DP_REPLICATE), place, lambda g: g.mean(own))

    def total(self, tensor: torch.Tensor, place: str) -> None:
        self._attempt(self._data_groups.get(DP_SHARD), place, lambda g: g.total(tensor))

    # Failure.

    def _attempt(self, group: G | None, place: str, work: Callable[[G], None]) -> None:
        if self._failures.first is not None:
            raise RankError(str(self._failures.first)) from self._failures.first
        if group is None:
            raise RankError(f"{place} on rank {self.rank}: the compiled model was deleted and its groups with it")
        begun_s = time.monotonic()
        try:
            work(group)
        except Exception as error:  # whatever backends raise, their group is of no more use
            raise self._failures.exchange_failed(place, time.monotonic() - begun_s, error) from error

    @contextmanager
    def collective_section(self, place: str, settle: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with suppress(Exception):  # what was launched may fail as well, and is not what ended this
                settle()
            if self._failures.first is None and not isinstance(error, RankError):
                self._failures.work_failed(place, error)
                self.close()
            raise

    def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            end_group(control)
        del control  # others wait on it until nobody holds it
        groups, self._data_groups = self._data_groups, {}
        for group in groups.values():
            group.close()
        if self._concurrent is not None:
            self._concurrent.close()
        super().close()

    def concurrent(self) -> Ranks:
        if self._concurrent is None:
            number = f"{self._number}/concurrent"
            self._concurrent = JobRanks(self.rank, self.size, self._timeout, self._store, number, self._stages)
            self._concurrent.shard_rank, self._concurrent.replica = self.shard_rank, self.replica
        return self._concurrent


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
