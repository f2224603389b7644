"""The ranks that train one model together: their exchanges, and the check that all do the same.

Every model has its own process groups, so that nothing of the script's own exchanges can come between:

    data      collectives of the plan, issued by the device's ``comm`` stream in plan order: payloads and sums of norms,
              among ranks that share groups of chunks, and, with replicas, among those that own the same chunk
    control   the host's work between programs, among all ranks: agreements, whole parameters, checkpoints' decisions

**Agreement.** Before the ranks do anything together (a program, reading a parameter, a checkpoint) each says what it
is about to do: a kind, a digest of it, and a number. All exchange these few bytes, and where they differ every rank
raises `RankError` with what each of them does, so that ``if rank == 0: evaluate(model)`` is an error and no hang. A
rank whose call is refused before it came to an agreement joins with the kind ``refused``: the others need not wait.

**Replicas.** Where model data is divided within nodes only, every node holds a replica of it, and all replicas stay the
same bits: a mean over replicas is made once and sent to all (`data_group`), norms are added up in one order, so that
all clip and skip alike, and updates do the same arithmetic on the same numbers.

**Failure.** When a collective fails or times out, the group cannot be used again: every later one fails at once, with
the first cause, on this rank, and the ranks tell each other through the job's store where they stopped.
`Ranks` is one rank alone, for which all of this is nothing; `JobRanks` are several.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

import torch

from chunkc._torch_compat.distributed import Group, Store, all_gather, broadcast, end_group, new_group, reduce
from chunkc.distributed.data_group import DataGroup
from chunkc.distributed.failure_reports import Stories
from chunkc.distributed.gloo import Allocator
from chunkc.distributed.rank_advice import advice_on_calls, advice_on_programs, is_backward_line
from chunkc.errors import RankError

_SHOWN_RANKS: Final = 4

G = TypeVar("G")
Lines = Callable[[], Sequence[str]]
"""What a digest stands for, line by line; asked for only where digests differ."""


class Kind(StrEnum):
    """A kind of operation that the ranks are about to do together."""

    COMPILE = "compile"
    PLAN = "plan"
    LAYOUT = "layout"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    EVALUATE = "evaluate"
    READ = "read"
    GRADIENTS = "gradients"
    REDUCE = "reduce"
    SAVE = "save"
    LOAD = "load"
    REFUSED = "refused"


_KINDS: Final = tuple(Kind)
_ON_THE_WAY: Final = frozenset({Kind.PLAN, Kind.LAYOUT, Kind.READ, Kind.GRADIENTS, Kind.REDUCE})
"""Agreements that come before the one that a call is about."""


class Ranks:
    """One rank alone. Methods are collective among several ranks: all call them in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, whose values count where all should be equal."""
        return self.rank == 0

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        """All ranks are about to do the same; ``number`` of every rank, in their order.

        Args:
            kind: what.
            lines: all that must be equal; see `digest_lines` for one that is used often.
            what: for messages, what of the kind it is (a parameter's name).

        Raises:
            RankError: on all ranks, when they differ, with the first difference.
        """
        return [number]

    def agree_digest(self, kind: Kind, digest: int, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        """`agree` with the digest of ``lines()`` at hand."""
        return [number]

    @contextmanager
    def agreement_scope(self) -> Iterator[None]:
        """Within the block the ranks come to an agreement; one that raises before joins as ``refused``."""
        yield

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
        """Fill ``whole`` with the ``own`` of all its ranks, in their order; ``own`` stands in it already."""

    def average(self, own: torch.Tensor, whole: torch.Tensor, place: str) -> None:
        """Into ``own``, this rank's part of ``whole``, the mean of that part over all ranks."""

    def add_up(self, own: torch.Tensor, whole: torch.Tensor, place: str) -> None:
        """As `average`, but the sum over the ranks that share ``whole``; the mean of the replicas' sums."""

    def total(self, tensor: torch.Tensor, place: str) -> None:
        """Replace ``tensor`` by the sum over the ranks that share chunks; the same bits in all replicas."""

    @contextmanager
    def collective_section(self, place: str, settle: Callable[[], None]) -> Iterator[None]:
        """End the others as well when the block raises, where after an agreement they count on this rank.

        They hear of it now, and not at their timeout. Before that ``settle()`` waits until nobody is exchanging
        anything on this rank: what has been launched here has been launched everywhere.
        """
        yield

    def concurrent(self) -> Ranks:
        """The same ranks with a control group of its own, for one thread that works beside training.

        It is made by the first call, which all ranks make together, and closed with this object.
        """
        return self

    def close(self) -> None:
        """Nothing is exchanged any more; idempotent."""


def digest_lines(lines: Sequence[str]) -> int:
    """63 bits of ``lines``, the same in every process."""
    text = "\n".join(lines).encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)


class JobRanks(Ranks):
    """The ranks of a torch.distributed job. All make one at once; no program runs before `connect`.

    Args:
        timeout: of every exchange.
        store: of the job, through which ranks say where they stopped.
        number: of this object, the same on all ranks.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, store: Store, number: int | str) -> None:
        self.rank, self.size = rank, size
        self._timeout, self._store, self._number = timeout, store, number
        self._stories = Stories(store, f"chunkc/{number}", rank, size)
        self._concurrent: JobRanks | None = None
        self._data: DataGroup | None = None
        self._replicas: DataGroup | None = None
        self._control: Group | None = new_group("gloo", timeout, torch.device("cpu"), [range(size)])
        self._stopped: RankError | None = None
        self._lock, self._num_agreements = threading.Lock(), 0

    # Between programs, on the control group.

    def agree(self, kind: Kind, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        return self.agree_digest(kind, digest_lines(lines()), lines, what, number)

    def agree_digest(self, kind: Kind, digest: int, lines: Lines, what: str = "", number: int = 0) -> list[int]:
        self._num_agreements += kind not in _ON_THE_WAY
        word = torch.tensor([_KINDS.index(kind), digest, number], dtype=torch.int64, device="cpu")
        words = torch.empty(self.size, 3, dtype=torch.int64, device="cpu")
        self._exchange(f"the agreement on {_named(kind, what)}", lambda g: all_gather(g, words.view(-1), word))
        kinds, digests, numbers = words.t().tolist()
        if len(set(kinds)) > 1:
            self._refuse_kinds([_KINDS[k] for k in kinds], kind, what)
        if kind is not Kind.REFUSED and len(set(digests)) > 1:
            self._refuse_lines(kind, what, lines())
        return [int(n) for n in numbers]

    def _refuse_kinds(self, kinds: Sequence[Kind], own: Kind, what: str) -> None:
        """Every rank raises; one that was refused already raises what refused it."""
        if own is Kind.REFUSED:
            return
        raise RankError(
            "all ranks must do the same with a compiled model, in the same order, but "
            + ", ".join(f"rank {rank} {_DOES[kind]}" for rank, kind in enumerate(kinds))
            + f" (this is rank {self.rank}, in {_named(own, what)}). {advice_on_calls(Kind.BACKWARD in kinds)}"
        )

    def _refuse_lines(self, kind: Kind, what: str, lines: Sequence[str]) -> NoReturn:
        """Every rank raises with the first line in which one differs from rank 0."""
        found = [text.decode().split("\n") for text in self.collect("\n".join(lines).encode())]
        for position in range(max(len(lines) for lines in found)):
            at = [lines[position] if position < len(lines) else "(nothing more)" for lines in found]
            if len(set(at)) > 1:
                shown = "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(at[:_SHOWN_RANKS]))
                break
        else:
            at, shown = [], "their descriptions agree, their numbers do not"
        raise RankError(
            f"the ranks' {_named(kind, what)} are not the same; the first difference: {shown}. "
            f"{advice_on_programs(any(map(is_backward_line, at)))}"
        )

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
        if self._stopped is None:
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

    # Within programs, on the data groups.

    def connect(
        self, backend: str, device: torch.device, num_sharing: int, allocate: Allocator, *, adds_in_float32: bool
    ) -> None:
        """Make the data groups for payloads on ``device``; all ranks call this together.

        Every ``num_sharing`` ranks that follow each other are a group. Where there are several such sets, the ranks
        that have the same place in each set are a group too.
        """
        sets = [range(first, first + num_sharing) for first in range(0, self.size, num_sharing)]

        def made(of: Sequence[Sequence[int]]) -> DataGroup:
            own = next(ranks for ranks in of if self.rank in ranks)
            group, is_direct = new_group(backend, self._timeout, device, of), backend == "gloo"
            place = own.index(self.rank), len(own)
            data = DataGroup(group, *place, allocate, is_direct=is_direct, adds_in_float32=adds_in_float32)
            data.warm_up(device)
            return data

        try:
            self._data = made(sets)
            if len(sets) > 1:
                self._replicas = made([list(ranks) for ranks in zip(*sets, strict=True)])
        except Exception as error:  # whatever backends raise
            raise RankError(f"rank {self.rank} of {self.size} cannot set up exchanges by {backend}: {error}") from error

    def gather(self, whole: torch.Tensor, own: torch.Tensor, place: str) -> None:
        self._attempt(self._data, place, lambda g: g.gather(whole, own))

    def average(self, own: torch.Tensor, whole: torch.Tensor, place: str) -> None:
        self._reduce(own, whole, place, mean=True)

    def add_up(self, own: torch.Tensor, whole: torch.Tensor, place: str) -> None:
        self._reduce(own, whole, place, mean=False)

    def _reduce(self, own: torch.Tensor, whole: torch.Tensor, place: str, *, mean: bool) -> None:
        self._attempt(self._data, place, lambda g: g.reduce(own, whole, mean=mean))
        if self._replicas is not None:
            self._attempt(self._replicas, place, lambda g: g.mean(own))

    def total(self, tensor: torch.Tensor, place: str) -> None:
        self._attempt(self._data, place, lambda g: g.total(tensor))

    # Failure.

    def _attempt(self, group: G | None, place: str, work: Callable[[G], None]) -> None:
        if self._stopped is not None:
            raise RankError(str(self._stopped)) from self._stopped
        if group is None:
            raise RankError(f"{place} on rank {self.rank}: the compiled model was deleted and its groups with it")
        begun_s = time.monotonic()
        try:
            work(group)
        except Exception as error:  # whatever backends raise, their group is of no more use
            raise self._stop(place, time.monotonic() - begun_s, error) from error

    def _stop(self, place: str, after_s: float, error: BaseException) -> RankError:
        """Remember the first failure, say it to the others, and hear from them."""
        with self._lock:
            if self._stopped is None:
                self._stories.tell(place)
                cause = [*str(error).strip().splitlines(), type(error).__name__][0]
                self._stopped = RankError(
                    f"rank {self.rank} of {self.size} stopped in {place} after {after_s:.1f} s: another rank has "
                    f"ended, failed, or did not come within the timeout of {self._timeout.total_seconds():g} s, or "
                    f"this one cannot exchange. {self._stories.hear()} Start the job again from its last checkpoint. "
                    f"torch says: {cause}"
                )
            return self._stopped

    @contextmanager
    def collective_section(self, place: str, settle: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with suppress(Exception):  # what was launched may fail as well, and is not what ended this
                settle()
            self._end_others(place, error)
            raise

    def _end_others(self, place: str, error: BaseException) -> None:
        if self._stopped is None and not isinstance(error, RankError):
            self._stories.tell(f"{place}: {type(error).__name__}: {error}")
            self._stopped = RankError(
                f"rank {self.rank} of {self.size} failed in {place}, where the other ranks count on it, so that they "
                f"have ended too ({type(error).__name__}: {error}). Start the job again from its last checkpoint"
            )
            self.close()

    def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            end_group(control)
        del control  # others wait on it until nobody holds it
        groups, self._data, self._replicas = (self._data, self._replicas), None, None
        for group in groups:
            if group is not None:
                group.close()
        if self._concurrent is not None:
            self._concurrent.close()

    def concurrent(self) -> Ranks:
        if self._concurrent is None:
            self._concurrent = JobRanks(self.rank, self.size, self._timeout, self._store, f"{self._number}/concurrent")
        return self._concurrent


_DOES: Final[dict[Kind, str]] = {
    Kind.COMPILE: "compiles a model",
    Kind.PLAN: "makes the first plan",
    Kind.LAYOUT: "lays out chunks",
    Kind.FORWARD: "runs a training forward",
    Kind.BACKWARD: "runs a backward",
    Kind.STEP: "steps",
    Kind.EVALUATE: "runs a forward without gradients",
    Kind.READ: "reads or writes a parameter, gradient or state",
    Kind.GRADIENTS: "clips or unscales gradients",
    Kind.REDUCE: "reduces the gradients of its micro-batches",
    Kind.SAVE: "saves",
    Kind.LOAD: "loads",
    Kind.REFUSED: "had its call refused",
}


def _named(kind: Kind, what: str) -> str:
    return f"{kind} of {what}" if what else str(kind)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
