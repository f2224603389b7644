"""What hides a difference between versions of torch behaves alike on all of them."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc._torch_compat import capture_settings
from chunkc.runtime.executor import Executor

logger = logging.getLogger("talkative")


class Talkative(nn.Linear):
    """Logs in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logger.info("called with %s", x.shape)
        return super().forward(x).sum()


def test_logging_in_a_forward_breaks_no_graph_and_torch_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = chunkc.compile(Talkative(4, 4), "emulated-1m-1m", backend="eager")
    model(torch.ones(2, 4)).backward()
    assert model.weight.grad is not None, "no compiled forward ran"
    elsewhere = "torch.utils.cpp_extension"  # once a process, on machines with CUDA's tools and no GPU
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name != elsewhere]
    assert told == []


def test_functions_to_ignore_can_be_copied_into_json() -> None:
    """As torch 2.11 does for its metrics; outside of a capture the setting is as it was."""
    assert not torch._dynamo.config.ignore_logging_functions
    with capture_settings():
        assert logging.Logger.warning in torch._dynamo.config.ignore_logging_functions
        names = copy.deepcopy(torch._dynamo.config.ignore_logging_functions)
        assert "Logger.warning" in json.loads(json.dumps(names))
    assert not torch._dynamo.config.ignore_logging_functions


def test_no_dispatch_mode_looks_at_what_a_plan_is_bound_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of operators; compiled code is first called under a mode of torch's."""
    seen: list[int] = []
    bind = Executor.__init__

    def looking(executor: Executor, *args: Any) -> None:
        seen.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        bind(executor, *args)

    monkeypatch.setattr(Executor, "__init__", looking)
    model = chunkc.compile(nn.Linear(4, 4), "emulated-1m-1m", backend="eager")
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [0]
