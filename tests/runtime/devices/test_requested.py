"""What a backward is asked for on one rank, and on any."""

import logging

import pytest
import torch
from thread_ranks import on_threads
from torch import nn

from chunkc.distributed.process_group import Ranks
from chunkc.runtime.devices.requested import RequestedGradients

PARAMS = [nn.Parameter(torch.ones(1)) for _ in range(4)]
GRADED = (0, 1, 2)


def made(ranks: Ranks) -> RequestedGradients:
    return RequestedGradients(ranks, PARAMS, lambda index: f"p{index}")


def test_reached_and_not_frozen() -> None:
    params = [nn.Parameter(torch.ones(1), requires_grad=i != 1) for i in range(4)]
    requested = RequestedGradients(Ranks(), params, lambda index: f"p{index}")
    assert requested.of_rank(GRADED, {1, 2, 3}) == {2}
    assert requested.frozen(GRADED) == ["p1 is frozen"]


def test_ranks_that_ask_for_the_same_exchange_nothing_more() -> None:
    class NoExchange(Ranks):
        size = job_size = 2

        def collect_from_job(self, data: bytes) -> list[bytes]:
            raise AssertionError

    requested, own = made(NoExchange()), frozenset({0, 2})
    number = requested.number(own)
    assert number == requested.number({2, 0}) != requested.number({2})
    assert requested.of_any(own, [number, number]) == own


def test_union_of_the_ranks_said_once(caplog: pytest.LogCaptureFixture) -> None:
    own = [frozenset({0}), frozenset({0, 2}), frozenset[int]()]

    def work(ranks: Ranks) -> list[frozenset[int]]:
        requested = made(ranks)
        numbers = [requested.number(one) for one in own]
        return [requested.of_any(own[ranks.rank], numbers) for _ in range(2)]

    with caplog.at_level(logging.WARNING, "chunkc"):
        assert on_threads(3, work) == [[frozenset({0, 2})] * 2] * 3
    assert len(caplog.records) == 1
    assert "do not reach p0, p2 (p0 is reached on rank 0, 1 of 3)" in caplog.text
