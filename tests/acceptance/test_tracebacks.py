"""What shows the variables of a traceback (pytest, rich, IPython, error reporters) prints those of torch's frames."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import pytest
import torch
from torch import nn

import chunkc
from chunkc.runtime.execution.executor import Executor


def texts(traceback: TracebackType | None) -> Iterator[str]:
    """The variables of every frame as text."""
    while traceback is not None:
        for value in list(traceback.tb_frame.f_locals.values()):
            yield repr(value)
            if isinstance(value, (list, tuple)):
                yield from map(str, value)
        traceback = traceback.tb_next


def fail(*_: object) -> None:
    raise RuntimeError("this program failed")


@pytest.mark.parametrize("program", ["forward", "backward", "step"])
def test_variables_of_a_traceback_can_be_printed(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chunkc.compile(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "emulated-64m-1g", backend="eager"
    )
    optimizer = chunkc.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    monkeypatch.setattr(Executor, program, fail)
    with pytest.raises(RuntimeError, match="this program failed") as caught:
        step()
    found = list(texts(caught.tb))
    assert (program == "step") or any(
        "Shell(shape=(8, 8), dtype=torch.bfloat16, device='cpu')" in text for text in found
    )
