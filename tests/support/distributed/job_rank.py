"""One rank of a job that `job` started: joins the process group, then carries out calls that come as plain pickles."""

import faulthandler
import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str
    text: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What a call gave on one rank: ``value``, unless there is an ``error``."""

    value: Any = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """``function(*args)``; where it is the rank's only call, ``function(report, *args)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    is_only: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    size: int
    init_method: str
    group_timeout_s: float
    log: str


def failure_of(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def outcome_of(call: Call) -> RankOutcome:
    """Carry out a call of a pool; whatever a function raises is the test's to judge, not this process's end."""
    import torch

    try:
        found = RankOutcome(call.function(*call.args))
    except Exception as error:
        found = RankOutcome(error=failure_of(error))
    torch._dynamo.reset()
    gc.collect()
    return found


def serve(connection: Connection) -> None:
    while True:
        try:
            call: Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if call.is_only:
            call.function(lambda text: connection.send_bytes(text.encode()), *call.args)
            return
        connection.send_bytes(_pickled(outcome_of(call)))


def _pickled(outcome: RankOutcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return pickle.dumps(RankOutcome(error=failure_of(error)))


def main(connection: Connection, place: Place) -> None:
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the test process asks where this one hangs
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=place.group_timeout_s),
    )
    connection.send_bytes(b"joined")
    serve(connection)
    torch.distributed.destroy_process_group()
