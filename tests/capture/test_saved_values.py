"""Values that backward reads are known by the line that made them, their bytes and their readers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captures import capture_once
from schedules import gpt_like
from torch import Tensor, nn

import chunkc
from chunkc.capture.joined import join
from chunkc.ir.schedule import SavedValue, Schedule, largest_saved

FILE = Path(__file__).name


class Net(nn.Module):
    """Saves the outputs of tanh (by one name, and as a view) and of exp; nothing reads what mul and relu_ give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.second(hidden.view(2, 2, 6).view(4, 6))
        return torch.exp(hidden) * 2.0


class Held(nn.Module):
    """Gives out what its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))).view(-1)


class ByMatrices(nn.Module):
    """Backward of addmm takes what is multiplied as a transpose; nothing else takes what gelu gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((4, 4), 0.1 * i)) for i in range(1, 4)])
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = nn.functional.gelu(torch.addmm(self.bias, x, weight))
        return x.sum()


LINES = {text.strip(): number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)}


def line_of(text: str) -> str:
    return f"{FILE}:{LINES[text]}"


def schedule_of(model: nn.Module) -> Schedule:
    return capture_once(model, torch.ones(4, 4, requires_grad=False)).schedule


def test_each_saved_value_has_its_line_bytes_and_readers() -> None:
    schedule = schedule_of(Net())
    saved = {value.source: value for value in schedule.saved_values()}
    tanh, exp = line_of("hidden = torch.tanh(self.first(x))"), line_of("return torch.exp(hidden) * 2.0")
    assert saved.keys() == {tanh, exp}
    assert (saved[tanh].nbytes, saved[exp].nbytes) == (4 * 6 * 4, 4 * 3 * 4)
    made = {source: schedule.forward.operators[value.made_by].target for source, value in saved.items()}
    assert made == {tanh: "aten.tanh.default", exp: "aten.exp.default"}
    readers = {s: {schedule.backward.operators[r].target for r in value.read_by} for s, value in saved.items()}
    assert readers[exp] == {"aten.mul.Tensor"}
    assert readers[tanh] == {"aten.view.default", "aten.tanh_backward.default"}, "the last reads it through views"


def test_digests_depend_on_saved_values_and_not_on_lines() -> None:
    """What moves is planned by values; another version of a library has other lines."""
    schedule = schedule_of(Net())
    unnamed = tuple(replace(op, source="") for op in schedule.forward.operators)
    assert replace(schedule, forward=replace(schedule.forward, operators=unnamed)).digest() == schedule.digest()
    bare = tuple(replace(op, saved_nbytes=0, read_by=()) for op in schedule.forward.operators)
    without = replace(schedule, forward=replace(schedule.forward, operators=bare))
    assert without.saved_values() == () and without.digest() != schedule.digest()


def test_what_others_hold_too_cannot_leave() -> None:
    """The user gets a view of the last value; nobody else holds the first, which the second layer reads last."""
    schedule = schedule_of(Held())
    operators = schedule.forward.operators
    first, last = (v for v in schedule.saved_values() if operators[v.made_by].target == "aten.tanh.default")
    assert first.used_until is not None
    assert operators[first.used_until].target == "aten.addmm.default" and first.used_until > first.made_by
    assert last.used_until is None


def test_a_transpose_for_backward_is_no_late_use() -> None:
    """The partitioner puts it at the end of forward; what it shows is used up by the product behind it."""
    schedule = schedule_of(ByMatrices())
    names = [op.target for op in schedule.forward.operators]
    products = [i for i, name in enumerate(names) if name == "aten.addmm.default"]
    gelus = [v for v in schedule.saved_values() if names[v.made_by] == "aten.gelu.default"]
    assert [v.used_until for v in gelus] == products[1:]
    assert [names[v.made_by + 1] for v in gelus] == ["aten.t.default"] * 2


def test_readers_move_along_where_graphs_are_joined() -> None:
    """Backward runs through the graphs in reverse."""
    schedule = schedule_of(Net())
    num_forward, num_backward = len(schedule.forward.operators), len(schedule.backward.operators)
    joined, _ = join([schedule, schedule], ())
    own, both = schedule.saved_values(), joined.saved_values()
    first, second = both[: len(own)], both[len(own) :]
    assert first == tuple(replace(v, read_by=tuple(num_backward + r for r in v.read_by), used_until=None) for v in own)
    assert second == tuple(replace(v, made_by=num_forward + v.made_by, used_until=None) for v in own)


def test_the_largest_are_those_alive_in_the_segment() -> None:
    a, b = SavedValue("a", "f.py:1", 10, 0, (9,)), SavedValue("b", "f.py:2", 8, 3, (2,))
    c = SavedValue("c", "f.py:2", 8, 4, (1,))
    assert largest_saved((a, b, c), "forward", 0, 4) == [("f.py:1", 1, 10), ("f.py:2", 1, 8)]
    assert largest_saved((a, b, c), "forward", 4, 9) == [("f.py:2", 2, 16), ("f.py:1", 1, 10)]
    assert largest_saved((a, b, c), "backward", 2, 4) == [("f.py:1", 1, 10), ("f.py:2", 1, 8)]
    assert largest_saved((a, b, c), "backward", 3, 4, limit=1) == [("f.py:1", 1, 10)]
    assert largest_saved((), "backward", 0, 9) == []


def test_summaries_and_errors_name_the_largest_by_line(tmp_path: Path) -> None:
    model = chunkc.compile(Net(), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    model(torch.ones(4, 4)).sum().backward()
    plan = chunkc.plan_of(model)
    line = line_of("hidden = torch.tanh(self.first(x))")
    assert f"at {line} (1 value)" in " ".join(plan.summary().split())
    plan.save(tmp_path / "plan.json")
    loaded = chunkc.Plan.load(tmp_path / "plan.json")
    assert loaded.summary() == plan.summary() and loaded.digest() == plan.digest()
    tight = chunkc.compile(Net(), "emulated-1k-16m", dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.BudgetError, match=rf"the largest values that backward reads are 96 bytes at {line}"):
        tight(torch.ones(4, 4))


def test_schedules_without_lines_name_none() -> None:
    assert gpt_like(1, 8, 16).saved_values() == ()
