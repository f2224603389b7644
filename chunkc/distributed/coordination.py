"""Work that ranks do together and that may fail on some of them: then it fails on all, with the cause.

`exchange` is for work of every rank (files that each writes), `run_on_rank0` for work of rank 0 alone (it has the disk,
or a library writes the files), in which the others take part where it reads parameters or takes values.
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
    """Do ``work`` on every rank of the job and return all results by rank.

    This rank's own is the object itself. Raises what ``work`` raised here; else, where it failed on another rank, an
    error that names it.
    """
    if ranks.job_size == 1:
        return [work()]
    error: Exception | None = None
    try:
        own: Any = work()
        payload = pickle.dumps((True, own))
    except RankError:
        raise  # the ranks have come apart: no rank would receive it
    except Exception as raised:  # whatever failed: the others wait for it, and it is raised below
        error, own, payload = raised, None, pickle.dumps((False, _forwarded_error(raised, ranks.job_rank)))
    results = [pickle.loads(data) for data in ranks.collect_from_job(payload)]
    if error is not None:
        raise error
    for is_done, value in results:
        if not is_done:
            raise value
    return [own if rank == ranks.job_rank else value for rank, (_, value) in enumerate(results)]


def all_do(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank and return this rank's result once all are done; raises as `exchange`."""
    own: list[T] = []
    exchange(ranks, lambda: own.append(work()))
    return own[0]


def of_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 alone and return its result on every rank; raises there on all ranks."""
    results: list[T | None] = exchange(ranks, lambda: work() if ranks.is_first_of_job else None)
    return results[0]  # type: ignore[return-value]


def of_first_rank(ranks: Ranks, value: torch.Tensor) -> torch.Tensor:
    """``value`` as rank 0 has it, in host memory, whoever keeps it; with one rank, ``value`` itself."""
    if ranks.size == 1:
        return value
    with torch.inference_mode(False), torch.no_grad():
        rank0_value = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)
        ranks.broadcast(rank0_value.view(-1))
        return rank0_value


def mean_of_ranks(ranks: Ranks, value: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, added up in float32 (float64: float64), in host memory; alone ``value`` itself."""
    if ranks.size == 1:
        return value
    exact = torch.promote_types(value.dtype, torch.float32)
    mean = value.detach().to("cpu", exact, copy=True).contiguous()
    ranks.mean(mean)
    return mean.to(value.dtype)


def run_on_rank0(ranks: Ranks, lead: Callable[[Callable[[Any], None]], T], follow: Callable[[Any], object]) -> T:
    """The job's rank 0 does ``lead``, and others ``follow`` where asked; all end as ``lead`` does.

    ``lead`` is given a function: when it calls that with a value, the other ranks call ``follow`` with it.
    """
    if ranks.job_size == 1:
        return lead(lambda value: None)
    if not ranks.is_first_of_job:
        result: T = _follow(ranks, follow)
        return result
    try:
        result = lead(lambda value: _announce(ranks, _MORE, value))
    except RankError:
        raise  # the ranks have come apart: no rank would receive it
    except Exception as error:  # whatever failed: the others wait for it
        _announce(ranks, _FAILED, _forwarded_error(error, 0))
        raise
    _announce(ranks, _DONE, result)
    return result


_MORE, _DONE, _FAILED = "more", "done", "failed"


def _follow(ranks: Ranks, follow: Callable[[Any], object]) -> Any:
    while True:
        what, value = pickle.loads(ranks.collect_from_job(b"")[0])
        if what == _FAILED:
            raise value
        if what == _DONE:
            return value
        follow(value)


def _announce(ranks: Ranks, what: str, value: object) -> None:
    ranks.collect_from_job(pickle.dumps((what, value)))


def _forwarded_error(error: Exception, rank: int) -> Exception:
    text = f"on rank {rank}: {error}"
    if isinstance(error, CheckpointError):
        return CheckpointError(text, path=error.path, damaged=error.damaged, previous=error.previous)
    if isinstance(error, OSError):
        return OSError(error.errno, text)
    if isinstance(error, ChunkcError):
        return ChunkcError(text)
    # never a RankError, after which this rank would wait for the others in vain (`Ranks.agreement_scope`)
    return ChunkcError(f"on rank {rank}: {type(error).__name__}: {error}")
