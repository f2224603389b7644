"""Numbers of each step, the names that torch's profiler shows, and planned beside measured times in one trace."""

import json
import logging
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pair import Pair, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Stream

WIDTH, DEPTH, VOCABULARY = 48, 4, 50
NUM_TOKENS = 32  # of a batch of four with eight each
PROFILE_ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def step(pair: Pair, seed: int = 0) -> None:
    pair.model(*batch(seed)).backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained() -> Pair:
    pair = Pair()
    step(pair)
    step(pair)
    return pair


def actions_of(pair: Pair) -> Counter[str]:
    plan = chunkc.plan_of(pair.model)
    return Counter(str(a) for p in plan.programs if p.is_repeated for a in p.actions)


def test_metrics_are_numbers_and_hold_all_of_stats(trained: Pair) -> None:
    stats, found = chunkc.stats(trained.model), chunkc.metrics(trained.model)
    assert {name: found[name] for name in stats} == stats
    assert all(type(value) in (int, float) for value in found.values())
    assert found["num_steps"] >= 2 and found["evaluation_peak_nbytes"] == 0


def test_the_page_on_observing_has_every_key(trained: Pair) -> None:
    page = (Path(__file__).parents[1] / "docs" / "observing.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    assert {key.removeprefix("planned_") for key in chunkc.metrics(trained.model)} - {"peak_nbytes"} <= named
    assert "planned_peak_nbytes" in named and "`planned_...`" in page


def test_speeds_are_those_of_the_clock(trained: Pair) -> None:
    begun_s = time.perf_counter()
    step(trained)
    time.sleep(0.05)
    step(trained)
    limit_ms = (time.perf_counter() - begun_s) * 1e3
    found = chunkc.metrics(trained.model)
    assert 50 <= found["step_ms"] <= limit_ms
    assert found["num_tokens"] == NUM_TOKENS
    assert found["tokens_per_s"] == pytest.approx(NUM_TOKENS / found["step_ms"] * 1e3)
    assert found["samples_per_s"] == pytest.approx(4 / found["step_ms"] * 1e3)
    products = DEPTH * 2 * WIDTH * 4 * WIDTH + WIDTH * VOCABULARY
    flops = 3 * 2 * NUM_TOKENS * products
    assert found["model_tflops"] == pytest.approx(flops / found["step_ms"] * 1e-9, rel=1e-6)


def test_stalls_are_within_the_step_and_add_up(trained: Pair) -> None:
    device = compiled_of(trained.model).runtime.device
    before = device.stalled_s()
    step(trained)
    total_ms = (sum(device.stalled_s().values()) - sum(before.values())) * 1e3
    found = chunkc.metrics(trained.model)
    parts = [found[f"stall_{stream}_ms"] for stream in ("h2d", "d2h", "cpu")]
    assert 0 <= found["stall_ms"] == pytest.approx(sum(parts)) == pytest.approx(total_ms)
    assert found["stall_ms"] <= found["step_ms"]


@pytest.mark.long
def test_the_first_step_has_no_speed() -> None:
    pair = Pair()
    with pytest.raises(chunkc.PlanNotReadyError):
        chunkc.metrics(pair.model)
    step(pair)
    found = chunkc.metrics(pair.model)
    assert found["num_steps"] == 1 and not {"step_ms", "tokens_per_s", "stall_ms"} & found.keys()


@pytest.mark.long
def test_micro_batches_count_in_the_step_that_takes_them() -> None:
    pair = Pair(accumulate=2)
    for num_backwards in (2, 2, 1):
        for seed in range(num_backwards):
            pair.model(*batch(seed)).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        found = chunkc.metrics(pair.model)
    assert found["num_steps"] == 3 and found["num_tokens"] == NUM_TOKENS
    for seed in range(2):
        pair.model(*batch(seed)).backward()
    pair.optimizer.step()
    assert chunkc.metrics(pair.model)["num_tokens"] == 2 * NUM_TOKENS


def test_a_model_without_tokens_has_no_tokens_per_second() -> None:
    model = chunkc.compile(nn.Linear(8, 8), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = chunkc.metrics(model)
    assert "tokens_per_s" not in found and found["samples_per_s"] > 0 < found["model_tflops"]


class Broken(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(16, 32), nn.Linear(32, 16), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden).pow(2).mean()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_broken_forward_has_the_speed_of_a_whole_one_and_none_before_it_has_plans(breaks: bool) -> None:
    """The backward of the first layer needs no gradient of the input; that of the second, a graph of its own, does."""
    model = chunkc.compile(Broken(breaks), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = chunkc.metrics(model)
    assert found["samples_per_s"] == pytest.approx(4 / found["step_ms"] * 1e3)
    flops = found["model_tflops"] * found["step_ms"] * 1e9
    assert flops == pytest.approx((2 + 3) * 2 * 4 * 16 * 32)


def test_the_profiler_shows_every_action_of_the_compute_stream_by_its_text(trained: Pair) -> None:
    found = profiled(trained, None)
    wanted = {text: n for text, n in actions_of(trained).items() if "@compute" in text}
    assert wanted and {text: found[text] for text in wanted} == wanted


def test_the_profiler_shows_the_other_streams_where_it_profiles_all_threads(trained: Pair) -> None:
    found, wanted = profiled(trained, PROFILE_ALL_THREADS), actions_of(trained)
    assert {text: found[text] for text in wanted} == wanted


def profiled(pair: Pair, config: Any) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as seen:
        step(pair)
        compiled_of(pair.model).runtime.parameters.drain()
    return Counter({event.key: event.count for event in seen.key_averages()})


def recorded(pair: Pair, path: Path, num_steps: int, **options: Any) -> list[dict[str, Any]]:
    with chunkc.record_timeline(pair.model, path, **options):
        for _ in range(num_steps):
            step(pair)
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def test_planned_and_measured_times_stand_in_one_trace(trained: Pair, tmp_path: Path) -> None:
    """Every action of the two steps once, by the text that it has in the plan, and never two at a time on a stream."""
    events = recorded(trained, tmp_path / "window.json", 2, hw="v100-240g")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[1].startswith("measured") and names[0].startswith("planned")
    measured, planned = ([e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (1, 0))
    once = actions_of(trained)
    twice = Counter({text: 2 * n for text, n in once.items()})
    assert Counter(e["name"] for e in measured) == twice == Counter(e["name"] for e in planned)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for stream in (Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.CPU):
        bars = sorted((e["ts"], e["ts"] + e["dur"]) for e in measured if tracks[1, e["tid"]] == stream)
        assert bars and bars[0][0] >= 0
        assert all(first[1] <= second[0] + 1 for first, second in pairwise(bars)), stream


def test_without_rates_measured_times_are_written_alone(
    trained: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "chunkc"):
        events = recorded(trained, tmp_path / "window.json", 1)
    assert {e["pid"] for e in events} == {1}
    assert Counter(e["name"] for e in events if e["ph"] == "X") == actions_of(trained)
    assert any("measured times only" in record.message for record in caplog.records)


def test_a_window_that_ends_by_an_exception_is_written_and_closed(trained: Pair, tmp_path: Path) -> None:
    path = tmp_path / "window.json"
    with pytest.raises(ZeroDivisionError), chunkc.record_timeline(trained.model, path):
        step(trained)
        _ = 1 / 0
    assert json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    with chunkc.record_timeline(trained.model, path):
        with (
            pytest.raises(chunkc.ChunkcError, match="already recording"),
            chunkc.record_timeline(trained.model, tmp_path / "other.json"),
        ):
            pass
        step(trained)
    assert not (tmp_path / "other.json").exists()
    step(trained)
    assert compiled_of(trained.model).runtime.device.timekeeper.records is None
