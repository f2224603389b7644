"""The session behind a compiled model: a planner of one's own, later plans, and entries that outlive the model."""

import gc

import pytest
import torch
from progress_recorder import Recorder
from torch import nn

import chunkc
from chunkc.compiler.capture_session import CaptureSession, Planner
from chunkc.compiler.compiled_model import CompiledModel, compiled_of
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.graph_set import RecordedGraph
from chunkc.errors import ChunkcError
from chunkc.progress import observed_by

HW = "emulated-64m-64m"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y.square().mean()


class Later:
    def __init__(self) -> None:
        self.captures: list[tuple[CaptureSession, RecordedGraph, GraphEntry]] = []

    def __call__(self, session: CaptureSession, recorded: RecordedGraph, entry: GraphEntry) -> None:
        self.captures.append((session, recorded, entry))


def compiled_with(planner: Planner) -> nn.Module:
    torch.manual_seed(0)
    model = chunkc.compile(Layers(), HW, dtype=torch.float32, backend="eager")
    made = compiled_of(model)
    CompiledModel(model, made.runtime, made.settings, planner).enter()
    return model


def losses(model: nn.Module) -> list[float]:
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = model(torch.ones(2, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_what_was_captured_may_be_planned_later() -> None:
    planner = Later()
    model = compiled_with(planner)
    for _ in range(2):
        with pytest.raises(ChunkcError, match="before it had one"):
            model(torch.ones(2, 8))
    ((session, recorded, entry),) = planner.captures
    assert session is compiled_of(model).session and session.planned == []
    session.plan(recorded, entry)
    torch.manual_seed(0)
    assert losses(model) == losses(chunkc.compile(Layers(), HW, dtype=torch.float32, backend="eager"))
    assert len(planner.captures) == 1 and len(session.planned) == 1


def test_an_entry_does_not_keep_its_model() -> None:
    entries: list[GraphEntry] = []

    def plan(session: CaptureSession, recorded: RecordedGraph, entry: GraphEntry) -> None:
        entries.append(entry)
        session.plan(recorded, entry)

    losses(compiled_with(plan))
    for _ in range(3):
        gc.collect()
    with pytest.raises(ChunkcError, match="deleted before its forward or backward ran"):
        entries[0].forward([])


def test_the_first_forward_tells_what_it_does_and_later_ones_do_nothing() -> None:
    recorder = Recorder()
    with observed_by(recorder):
        losses(chunkc.compile(Layers(), HW, dtype=torch.float32, backend="eager"))
    texts = list(recorder.texts)
    steps = [
        "capturing the forward",
        "tracing forward and backward",
        "planning",
        "verifying the plan",
        "compiling 0/2 different segments",
        "putting the segments together",
        "moving the parameters into chunks",
    ]
    assert [text for text in texts if text in steps] == steps
    assert set(texts) - set(steps) <= {"compiling 1/2 different segments", "compiling the update of optimizer states"}


def test_graphs_of_a_forward_that_breaks_are_counted() -> None:
    class Breaks(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return self.second(torch.tanh(hidden)).square().mean()

    recorder = Recorder()
    with observed_by(recorder):
        losses(chunkc.compile(Breaks(), HW, dtype=torch.float32, backend="eager"))
    planned = [text for text in recorder.texts if text.endswith("verifying the plan")]
    assert planned == ["graph 1 of 2: verifying the plan", "graph 2 of 2: verifying the plan"]
