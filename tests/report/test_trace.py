"""Counters of memory and arrows between tracks, beside the events of the timeline."""

import json

import pytest
from costs import RATES, with_work
from plans import SPECS, evicting

from chunkc.cost import simulate_with
from chunkc.report.trace import trace


def test_counters_add_up_to_the_peak_and_span_both_iterations() -> None:
    plan = with_work(evicting().build(), 3)
    timeline = simulate_with(plan, RATES)
    counters = [e for e in trace(plan, timeline)["traceEvents"] if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) * 2**20 == pytest.approx(plan.memory.device_peak_nbytes)
    times = [e["ts"] for e in counters]
    first = next(s for s in timeline.slices if s.label == "f1")
    assert times == sorted(times) and times[0] == first.start_ms * 1e3
    assert times[0] + 1e3 * timeline.step_ms in times and times[-1] < times[0] + 2e3 * timeline.step_ms


def test_tracks_have_the_names_of_lanes_in_pictures() -> None:
    plan = with_work(evicting().build(), 3)
    events = trace(plan, simulate_with(plan, RATES))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"device", "host to device", "device to host", "host"}


def is_near(a: float, b: float) -> bool:
    return a == pytest.approx(b)


@pytest.mark.parametrize("name", SPECS)
def test_arrows_lead_from_the_end_of_a_copy_to_the_segment_that_waits_for_it(name: str) -> None:
    plan = with_work(SPECS[name].build(), 3)
    timeline = simulate_with(plan, RATES)
    events = json.loads(json.dumps(trace(plan, timeline)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys()
    for number, start in arrows["s"].items():
        end = arrows["f"][number]
        sources = [s["name"] for s in slices if s["tid"] == start["tid"] and is_near(s["ts"] + s["dur"], start["ts"])]
        targets = [s["name"] for s in slices if s["tid"] == end["tid"] and is_near(s["ts"], end["ts"])]
        assert start["ts"] <= end["ts"] and any(name.startswith("run ") for name in targets)
        assert any(name.startswith(("fetch ", "gather ", "reload ")) for name in sources)
    waits = sum(a.op == "run" and any(w[0] in "fb" for w in a.waits) for p in plan.programs for a in p.actions)
    assert bool(arrows["s"]) == bool(waits)
