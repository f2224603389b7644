"""The ranks that train one model together: their process groups and exchanges.

Every model has its own process groups, so that nothing of the script's own exchanges can come between:

    agreement      between programs, all ranks of the job: agreements, decisions of checkpoints, weights that are loaded
    control        between programs, the ranks of a column: whole parameters
    dp_shard       in programs, the ranks that divide the model data: payloads and sums of norms
    dp_replicate   in programs, the ranks that own the same chunk: means over replicas
    tp             behind programs, the ranks that compute one forward together: sums of norms

Without tensor parallelism all ranks are one column, and the first two are one group; `mesh` has the words. The last
three are dimensions of a `DeviceMesh`, without those of size one. The ``comm`` stream of the device issues collectives
in programs in plan order. All replicas stay the same bits: a mean over replicas is made once and sent to all
(`data_group`), norms are added up in one order, and updates do the same arithmetic on the same numbers.

When a collective fails or times out, every later one of this rank fails at once with the first cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TypeVar

import torch

from chunkc._torch_compat.collectives import ContextLine
from chunkc._torch_compat.distributed import (
    Group,
    Store,
    all_gather,
    broadcast,
    end_group,
    is_exchange_error,
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
from chunkc.distributed.mesh import DP_REPLICATE, DP_SHARD, SUPPORTED, TP, RankMesh
from chunkc.distributed.stages import StageLine, StagePlace
from chunkc.errors import RankError

G = TypeVar("G")


class Ranks:
    """One rank alone. Methods are collective among several ranks: all call them in the same order.

    In a pipeline these are the ranks of one stage, for which the job is no more than that.

    Attributes:
        rank: its place among the ``size`` ranks of its column.
        shard_rank: its place among the ranks that divide the model data of its ``replica``.
        job_rank: its place among the ``job_size`` ranks of the job.
        tensor_rank: its place among the ``tensor_size`` ranks that compute one forward together.
        context: those that have slices of the same sequences; None where none do.
        uncounted: parameters that another of these has just the same, whose gradients norms count there.
        line: the ranks with this one's place in the other stages; None where there is no pipeline.
        all_stages: all ranks of the job; None where they are one stage.
    """

    rank = 0
    size = 1
    shard_rank = 0
    replica = 0
    job_rank = 0
    job_size = 1
    tensor_rank = 0
    tensor_size = 1
    context: ContextLine | None = None
    uncounted: frozenset[int] = frozenset()
    line: StageLine | None = None
    all_stages: Ranks | None = None

    @property
    def of_job(self) -> Ranks:
        """The ranks of all stages."""
        return self.all_stages or self

    @property
    def stage(self) -> StagePlace | None:
        """The stage that these ranks train; None where there is no pipeline."""
        return None if self.line is None else self.line.stage

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its column, whose values count where all should be equal."""
        return self.rank == 0

    @property
    def is_first_of_job(self) -> bool:
        return self.job_rank == 0

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        """Check that all ranks of the job are about to do the same, and return each ``number`` in order.

        RankError, on all ranks, names the first of ``lines`` that differs. ``what``: of its kind (a parameter's name).
        """
        return [number]

    def agree_digest(
        self, kind: Kind, digest: int, lines: Lines, what: str = "", number: int = 0, of_tensor_ranks: int = 0
    ) -> list[int]:
        """`agree` with the digest of ``lines()`` at hand.

        Its last lines, of digest ``of_tensor_ranks``, need be alike only where one forward is computed together.
        """
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
        """``data`` of every rank of the column, in their order."""
        return [data]

    def collect_from_job(self, data: bytes) -> list[bytes]:
        """``data`` of every rank of the job, in their order."""
        return [data]

    def of_tensor_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` of the ranks that compute one forward together: [tensor_size, *value.shape], where it is."""
        return value.unsqueeze(0)

    def broadcast_in_job(self, tensor: torch.Tensor) -> None:
        """Give the elements of ``tensor`` (host memory, contiguous) on the first rank of the job to all."""

    def gather(self, whole: torch.Tensor, own: torch.Tensor, place: str) -> None:
        """Fill ``whole`` with the ``own`` of the ranks that divide it; ``own`` stands in it already."""

    def reduce(self, own: torch.Tensor, whole: torch.Tensor, place: str, *, mean: bool) -> None:
        """Into ``own``, this rank's part of ``whole``, the mean of that part over all ranks.

        Without ``mean``: the sum over the ranks that divide ``whole``, of which replicas take the mean.
        """

    def total(self, tensor: torch.Tensor, place: str) -> None:
        """Replace ``tensor`` by the sum over the ranks of one replica; the same bits on all ranks."""

    @contextmanager
    def collective_section(self, place: str, settle: Callable[[], None]) -> Iterator[None]:
        """End the others as well when the block raises, where after an agreement they count on this rank.

        They hear of it at once, after ``settle()``, which waits for the exchanges that all have launched.
        """
        yield

    def concurrent(self) -> Ranks:
        """The same ranks with a group of their own for one thread beside training; all call this together."""
        return self

    def close(self) -> None:
        """Nothing is exchanged any more; idempotent."""
        if self.line is not None:
            self.line.close()
        if self.all_stages is not None:
            self.all_stages.close()


class JobRanks(Ranks):
    """The ranks of a torch.distributed job; ``number`` of this object is the same on all of them.

    All make one at once; no program runs before `connect`. ``timeout`` is that of every exchange. ``rank``: this one's
    of the job, which is in the stage of ``mesh``.
    """

    def __init__(self, rank: int, mesh: RankMesh, timeout: timedelta, store: Store, number: int | str) -> None:
        self.mesh, self._rank_of_all, self.job_size = mesh, rank, len(mesh.ranks)
        self.job_rank = sorted(mesh.ranks).index(rank)
        self.rank, self.tensor_rank = mesh.place_of(rank)
        self.size, self.tensor_size = self.job_size // mesh.num_tensor, mesh.num_tensor
        self.replica, self.shard_rank = divmod(self.rank, mesh.num_sharing)
        self._timeout, self._store, self._number = timeout, store, number
        self._failures = FailureReports(store, f"chunkc/{number}", self.job_rank, self.job_size, timeout)
        self._concurrent: JobRanks | None = None
        self._agreement: Group | None = new_group("gloo", timeout, torch.device("cpu"), mesh.stages)
        self._control: Group | None = self._agreement
        self._context: Group | None = None
        self._data_groups: dict[str, DataGroup] = {}
        self._num_agreements = 0

    # Between programs, on the groups of the job and of the column.

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        return self.agree_digest(kind, digest_lines(lines()), lines, what, number)

    def agree_digest(
        self, kind: Kind, digest: int, lines: Lines, what: str = "", number: int = 0, of_tensor_ranks: int = 0
    ) -> list[int]:
        self._num_agreements += kind not in PRELIMINARY
        own = torch.tensor([KINDS.index(kind), digest, number, of_tensor_ranks], dtype=torch.int64, device="cpu")
        of_ranks = torch.empty(self.job_size, 4, dtype=torch.int64, device="cpu")
        place = f"the agreement on {named(kind, what)}"
        self._attempt(self._agreement, place, lambda g: all_gather(g, of_ranks.view(-1), own))
        kinds, digests, numbers, of_models = of_ranks.t().tolist()
        check_kinds([KINDS[k] for k in kinds], self.job_rank, what)
        differing = self._differing(digests, of_models)
        if kind is not Kind.REFUSED and differing:
            descriptions = self.collect_from_job("\n".join(lines()).encode())
            texts = {rank: descriptions[rank].decode().split("\n") for rank in differing}
            raise difference_error(kind, what, texts)
        return [int(n) for n in numbers]

    def _differing(self, digests: Sequence[int], of_models: Sequence[int]) -> list[int]:
        """Ranks that differ: all by ``digests``, or by ``of_models`` the first that compute together."""
        if len(set(digests)) > 1:
            return list(range(self.job_size))
        places = {rank: place for place, rank in enumerate(sorted(self.mesh.ranks))}
        for line in (*self.mesh.tensor_lines, *self.mesh.context_lines):  # those of other stages, too
            ranks = [places[rank] for rank in line if rank in places]
            if len({of_models[rank] for rank in ranks}) > 1:
                return ranks
        return []

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
        return self._collect(self._control, self.size, data)

    def collect_from_job(self, data: bytes) -> list[bytes]:
        return self._collect(self._agreement, self.job_size, data)

    def _collect(self, group: Group | None, size: int, data: bytes) -> list[bytes]:
        own = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = torch.empty(size, dtype=torch.int64, device="cpu")
        place = "an exchange of descriptions"
        self._attempt(group, place, lambda g: all_gather(g, sizes, own))
        most = max(1, int(sizes.max()))
        padded = torch.zeros(most, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        whole = torch.empty(size * most, dtype=torch.uint8, device="cpu")
        self._attempt(group, place, lambda g: all_gather(g, whole, padded))
        rows = whole.view(size, most)
        return [bytes(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def of_tensor_ranks(self, value: torch.Tensor) -> torch.Tensor:
        if self.tensor_size == 1:
            return value.unsqueeze(0)
        rows = torch.empty(self.tensor_size, *value.shape, dtype=value.dtype, device=value.device)
        place = "an exchange between the ranks of one forward"
        self._attempt(self._data_groups.get(TP), place, lambda g: g.collect(rows, value.contiguous()))
        return rows

    def broadcast_in_job(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            place = "a broadcast from the first rank"
            self._attempt(self._agreement, place, lambda g: broadcast(g, _bytes(tensor), 0))

    def _exchange(self, place: str, work: Callable[[Group], None]) -> None:
        self._attempt(self._control, place, work)

    # Within programs, on the groups of the mesh.

    def connect(self, backend: str, device: torch.device, allocate: Allocator, *, adds_in_float32: bool) -> None:
        """Make the mesh, whose groups exchange payloads on ``device``; all ranks call this together."""
        sizes = {dim: size for dim, size in zip(SUPPORTED, self.mesh.shape, strict=True) if size > 1}
        try:
            self._divide_control()
            if self.mesh.num_context > 1:
                self._connect_context(backend, device)
            mesh = new_mesh(backend, self._timeout, device, sizes, self.mesh.stages)
            for dim in sizes:
                is_direct = backend == "gloo"
                group = DataGroup(mesh[dim], allocate, is_direct=is_direct, adds_in_float32=adds_in_float32)
                group.warm_up(device)
                self._data_groups[dim] = group
        except Exception as error:  # whatever backends raise
            place = f"rank {self.job_rank} of {self.job_size}"
            raise RankError(f"{place} cannot set up exchanges by {backend}: {error}") from error

    def _connect_context(self, backend: str, device: torch.device) -> None:
        group = self._context = new_group(backend, self._timeout, device, self.mesh.context_lines)
        place = self.rank % self.mesh.num_context
        self.context = ContextLine(str(group.group_name), self.mesh.num_context, place)
        rows = torch.zeros(self.mesh.num_context, 64, device=device)
        all_gather(group, rows.view(-1), rows[0].clone())  # NCCL takes memory for the first exchange

    def _divide_control(self) -> None:
        """Give columns control groups of their own where there are several."""
        if self.mesh.num_tensor > 1:
            self._control = new_group("gloo", self._timeout, torch.device("cpu"), self.mesh.columns_of_stages)

    def gather(self, whole: torch.Tensor, own: torch.Tensor, place: str) -> None:
        self._attempt(self._data_groups.get(DP_SHARD), place, lambda g: g.gather(whole, own))

    def reduce(self, own: torch.Tensor, whole: torch.Tensor, place: str, *, mean: bool) -> None:
        self._attempt(self._data_groups.get(DP_SHARD), place, lambda g: g.reduce(own, whole, mean=mean))
        if DP_REPLICATE in self._data_groups:
            self._attempt(self._data_groups.get(DP_REPLICATE), place, lambda g: g.mean(own))

    def total(self, tensor: torch.Tensor, place: str) -> None:
        dims = [dim for dim in (DP_SHARD, TP) if dim in self._data_groups] or [DP_SHARD]
        for dim in dims:
            self._attempt(self._data_groups.get(dim), place, lambda g: g.total(tensor))

    # Failure.

    def _attempt(self, group: G | None, place: str, work: Callable[[G], None]) -> None:
        if self._failures.first is not None:
            raise RankError(str(self._failures.first)) from self._failures.first
        if group is None:
            raise RankError(f"{place} on rank {self.job_rank}: the compiled model was deleted and its groups with it")
        begun_s = time.monotonic()
        try:
            work(group)
        except Exception as error:  # whatever backends raise, their group is of no more use
            raise self._failures.exchange_failed(place, time.monotonic() - begun_s, error) from error

    @contextmanager
    def collective_section(self, place: str, settle: Callable[[], None]) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            with suppress(Exception):  # what was launched may fail as well, and is not what ended this
                settle()
            has_own = self.tensor_size > 1 or self.context is not None
            if has_own and is_exchange_error(error):  # of the model's own collectives
                failure = self._failures.exchange_failed(place, time.monotonic() - begun_s, error)
                self.close()
                raise failure from error
            if self._failures.first is None and not isinstance(error, RankError):
                self._failures.work_failed(place, error)
                self.close()
            raise

    def close(self) -> None:
        between = {group for group in (self._control, self._agreement, self._context) if group is not None}
        self._control, self._agreement, self._context = None, None, None
        while between:  # others wait on one until nobody holds it
            end_group(between.pop())
        groups, self._data_groups = self._data_groups, {}
        for group in groups.values():
            group.close()
        if self._concurrent is not None:
            self._concurrent.close()
        super().close()

    def concurrent(self) -> Ranks:
        if self._concurrent is None:
            number = f"{self._number}/concurrent"
            self._concurrent = JobRanks(self._rank_of_all, self.mesh, self._timeout, self._store, number)
        return self._concurrent


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
