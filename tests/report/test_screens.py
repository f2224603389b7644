"""Every report of a plan keeps to the columns of a screen, whatever the model, its names and the machine are."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from plans import distributed
from plans_for_report import gpt_plan

from chunkc.baselines import POLICIES
from chunkc.cli.advice import Advice
from chunkc.cli.compare import render as comparison
from chunkc.cli.screen import render_answer
from chunkc.hardware import Hardware
from chunkc.ir.actions import parse
from chunkc.ir.layout import Group, Slot
from chunkc.ir.plan import Plan
from chunkc.report import Plan as ReportedPlan
from chunkc.report import full_text, render, summarize
from chunkc.report.timeline import Timeline, render_timeline, simulate
from chunkc.scenarios.scenario import Answer

COLUMNS = 80
LONG = "base_model.model.language_model.model.layers.{}.self_attn.q_proj.lora_magnitude_vector.default.weight"


def long_names() -> Plan:
    plan = gpt_plan()
    params = tuple(
        replace(p, name=LONG.format(i), aliases=(LONG.format(-i),)) for i, p in enumerate(plan.layout.params)
    )
    return replace(plan, model="M" * 100, layout=replace(plan.layout, params=params))


def ranks() -> Plan:
    plan = gpt_plan(num_layers=90, device_budget_nbytes=1024**3, hw="2x8xa100pcie-40g-512g")
    chunks = plan.layout.chunks + tuple(
        replace(plan.layout.chunks[1], index=i, used_numel=0) for i in range(len(plan.layout.chunks), 96)
    )
    groups = tuple(Group(i, 8 * i, 8) for i in range(12))
    slots = tuple(Slot(i, 131_072 * i, 131_072) for i in range(11))
    layout = replace(plan.layout, chunks=chunks, groups=groups, slots=slots, world_size=8)
    kept = tuple((f"c{8 * i}", i) for i in range(11))
    programs = tuple(replace(p, entry=replace(p.entry, resident=kept)) for p in plan.programs)
    return replace(plan, layout=layout, programs=programs)


def many_waits() -> Plan:
    plan = gpt_plan()
    action = parse(f"run fwd.0 @compute after {' '.join(f's{i}' for i in range(100, 140))}")
    actions = tuple(action if str(a).startswith("run fwd.0 ") else a for a in plan.programs[0].actions)
    return replace(plan, programs=(replace(plan.programs[0], actions=actions), *plan.programs[1:]))


def large() -> Plan:
    plan = gpt_plan(width=16_384, num_layers=300)
    names = {"bfloat16": "float16", "float32": "float32"}
    params = tuple(replace(p, dtype=names[p.dtype]) for p in plan.layout.params)
    chunks = tuple(replace(c, dtype=names[c.dtype]) for c in plan.layout.chunks)
    return replace(plan, layout=replace(plan.layout, params=params, chunks=chunks))


PLANS: dict[str, Callable[[], Plan]] = {
    "small": gpt_plan,
    "deep": lambda: gpt_plan(num_layers=300, device_budget_nbytes=1024**3),
    "long names": long_names,
    "ranks": ranks,
    "many waits": many_waits,
    "large": large,
    "two ranks": lambda: distributed().build(),
}


@pytest.mark.parametrize("report", [render, summarize, full_text])
@pytest.mark.parametrize("name", PLANS)
def test_reports_of_a_plan(name: str, report: Callable[[Plan], str]) -> None:
    lines = report(PLANS[name]()).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert all(line == line.rstrip() for line in lines)


def test_nothing_of_a_long_name_is_lost() -> None:
    plan = long_names()
    joined = re.sub(r"\s+", "", full_text(plan))
    for info in plan.layout.params:
        assert info.name in joined and info.aliases[0] in joined
    assert all(plan.model in re.sub(r"\s+", "", report(plan)) for report in (render, summarize))


def test_an_action_that_goes_on_in_other_lines_reads_back() -> None:
    plan = many_waits()
    text = full_text(plan)
    (found,) = re.findall(r"^  f3 +(run .*(?:\n {6,}\S.*)+)$", text, re.MULTILINE)
    assert parse(" ".join(found.split())) in plan.programs[0].actions


def slow() -> Timeline:
    timeline = simulate(ReportedPlan.of(gpt_plan()), Hardware.parse("v100-240g"))
    stall = replace(timeline.stalls[0], action="fetch c123456 -> d123456 @h2d", label="b123456", stall_ms=123_456.789)
    path = tuple((name, 123_456.789) for name in ("compute", "h2d", "d2h", "cpu", "comm"))
    stalls = (replace(stall, waited_for=stall.action, path_ms=path),) * 12
    streams = tuple(replace(s, busy_ms=123_456.789, alone_ms=123_456.789) for s in timeline.streams)
    return replace(timeline, stalls=stalls, streams=streams, model="M" * 100, num_tokens=10**9)


def test_a_simulation() -> None:
    text = render_timeline(slow())
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "..." not in text and text.count("b123456") == 8


def test_an_answer_with_its_advice() -> None:
    hw = Hardware.parse("64x8xa100pcie-40g-16384g")
    advice = (
        Advice("1,234.00 GiB of device memory and 56,789.00 GiB of host memory a node", "fits: " + "x " * 60, True),
    )
    answer = Answer(None, ReportedPlan.of(long_names()), timeline=slow())
    text = render_answer(answer, hw, advice, "a model " * 12, f"plan 0: chunkc explain {'folder/' * 20}plan.json")
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "folder/" * 20 in re.sub(r"\s", "", text)


def test_a_comparison() -> None:
    row = {
        "fits": True, "recompute": "full", "step_ms": 123_456.789, "tokens_per_s": 123_456_789.0, "bound": "overhead",
        "model_tflops": 123.4, "patrickstar_tflops": 123.4, "moved_nbytes": 10**15, "device_peak_nbytes": 10**12,
        "host_nbytes": 10**14, "why_not": "",
    }  # fmt: skip
    reason = {"fits": False, "step_ms": None, "why_not": "its chunks of the embedding need more " * 6}
    rows = [{**row, "policy": name} for name in ("chunkc", *POLICIES)]
    text = comparison([*rows, {**row, **reason, "policy": "l2l"}])
    assert max(map(len, text.splitlines())) <= COLUMNS
