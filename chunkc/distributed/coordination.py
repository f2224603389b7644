"""Work that ranks do together and that may fail on some of them: then it fails on all, with the cause.

`exchange` is for work of every rank: files that each writes. `run_on_rank0` is for work that rank 0 alone does (it has
the disk, or a library writes the files), while the others take part in what it needs of them: reading parameters, which
all ranks do together, or taking values.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from chunkc.distributed.process_group import Ranks
from chunkc.errors import CheckpointError, ChunkcError, RankError

T = TypeVar("T")


def exchange(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Do ``work`` on every rank and return all results, in the order of the ranks.

    This rank's own result is the object itself.

    Raises:
        Exception: what ``work`` raised here; else, where it failed on another rank, an error that names it.
    """
    if ranks.size == 1:
        return [work()]
    error: Exception | None = None
    try:
        own: Any = work()
        payload = pickle.dumps((True, own))
    except RankError:
        raise  # the ranks have come apart: nobody would hear it
    except Exception as raised:  # whatever failed: the others wait to hear of it, and it is raised below
        error, own, payload = raised, None, pickle.dumps((False, _forwarded_error(raised, ranks.rank)))
    heard = [pickle.loads(data) for data in ranks.collect(payload)]
    if error is not None:
        raise error
    for is_done, value in heard:
        if not is_done:
            raise value
    return [own if rank == ranks.rank else value for rank, (_, value) in enumerate(heard)]


def all_do(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank and return this rank's result, once all ranks have finished.

    Raises:
        Exception: as `exchange`.
    """
    found: list[T] = []
    exchange(ranks, lambda: found.append(work()))
    return found[0]


def of_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 alone and return its result on every rank.

    Raises:
        Exception: what ``work`` raised there, on all ranks.
    """
    found: list[T | None] = exchange(ranks, lambda: work() if ranks.is_first else None)
    return found[0]  # type: ignore[return-value]


def of_first_rank(ranks: Ranks, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as rank 0 has it, in host memory; with one rank, ``value`` itself.

    What is written is then the same, whichever rank keeps it.
    """
    if ranks.size == 1:
        return value
    with torch.inference_mode(False), torch.no_grad():
        found = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        ranks.broadcast(found.view(-1))
        return found


def mean_of_ranks(ranks: Ranks, value: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``value`` over all ranks, in host memory; with one rank, ``value`` itself.

    The values are added up in float32, those of float64 in float64.
    """
    if ranks.size == 1:
        return value
    exact = torch.promote_types(value.dtype, torch.float32)
    found = value.detach().to("cpu", exact, copy=True).contiguous()
    ranks.mean(found)
    return found.to(value.dtype)


def run_on_rank0(ranks: Ranks, lead: Callable[[Callable[[Any], None]], T], follow: Callable[[Any], object]) -> T:
    """Rank 0 does ``lead``, which may ask the others to do ``follow``, and all return what ``lead`` does.

    Args:
        lead: is given a function: when it calls that with a value, the other ranks call ``follow`` with it.

    Raises:
        Exception: what ``lead`` raised, on all ranks.
    """
    if ranks.size == 1:
        return lead(lambda value: None)
    if not ranks.is_first:
        result: T = _follow(ranks, follow)
        return result
    try:
        result = lead(lambda value: _say(ranks, _MORE, value))
    except RankError:
        raise  # the ranks have come apart: nobody would hear it
    except Exception as error:  # whatever failed: the others wait to hear of it
        _say(ranks, _FAILED, _forwarded_error(error, 0))
        raise
    _say(ranks, _DONE, result)
    return result


_MORE, _DONE, _FAILED = "more", "done", "failed"


def _follow(ranks: Ranks, follow: Callable[[Any], object]) -> Any:
    while True:
        what, value = pickle.loads(ranks.collect(b"")[0])
        if what == _FAILED:
            raise value
        if what == _DONE:
            return value
        follow(value)


def _say(ranks: Ranks, what: str, value: object) -> None:
    ranks.collect(pickle.dumps((what, value)))


def _forwarded_error(error: Exception, rank: int) -> Exception:
    """``error`` as the other ranks raise it."""
    text = f"on rank {rank}: {error}"
    if isinstance(error, CheckpointError):
        return CheckpointError(text, path=error.path, damaged=error.damaged, previous=error.previous)
    if isinstance(error, OSError):
        return OSError(error.errno, text)
    if isinstance(error, ChunkcError):
        return ChunkcError(text)
    # never a RankError, after which this rank would wait for the others in vain (`Ranks.agreement_scope`)
    return ChunkcError(f"on rank {rank}: {type(error).__name__}: {error}")
