"""The simulator: a plan worked out by hand, and laws on random plans that the verifier accepts."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from costs import RATES, calibration, rates, with_work
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plans import SPECS, distributed, evicting, resident
from plans import chain as slots_in_turn
from schedules import chain as layers
from schedules import gpt_like, planned, planned_somewhere, requests, target

from chunkc.cost import Timeline, simulate, simulate_with
from chunkc.cost.actions import ActionCosts
from chunkc.cost.rates import CostRates
from chunkc.cost.sharing import HOST_DRAM, Alone, Capacities
from chunkc.cost.simulate import Run, script_of
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.ir.actions import Stream, parse
from chunkc.ir.plan import Plan
from chunkc.ir.plan_file import load_plan
from chunkc.ir.verify import verify
from chunkc.ir.work import Kind, Work
from chunkc.passes import PlanOptions, make_evaluation_plan

# --- by hand ----------------------------------------------------------------------------------------------------------

EVICTING = """
f0 0 1    f1 1 4     f2 2 3     f3 4 7     f4 7 7     f5 7 8     f6 8 11
b0 11 14  b1 14 15   b2 15 16   b3 15 18   b4 18 19   b5 19 20   b6 16 17  b7 19 22
b8 22 22.5  b9 22.5 25.5  b10 25.5 26  b11 26 27
s0 27 29  s1 29 31   s2 31 33
"""


def hand() -> Timeline:
    return simulate_with(with_work(evicting().build(), 3), RATES)


def test_every_action_of_the_evicting_plan_is_where_it_was_worked_out() -> None:
    """Segments take 3 ms, copies and landing gradients 1, updates 2. ``f0`` waits for ``s0``, ``f2`` for ``s1``, ``f5``
    for ``s2`` of the step before: updates end behind the forward's begin."""
    words = EVICTING.split()
    expected = {words[i]: (float(words[i + 1]), float(words[i + 2])) for i in range(0, len(words), 3)}
    found = {s.label: (round(s.start_ms, 6), round(s.end_ms, 6)) for s in hand().slices}
    assert found == expected


def test_what_is_read_off_the_evicting_plan() -> None:
    timeline = hand()
    assert timeline.step_ms == pytest.approx(29.0)
    assert timeline.is_steady
    busy = {str(s.stream): s.busy_ms for s in timeline.streams}
    assert busy == pytest.approx({"compute": 24.0, "h2d": 4.0, "d2h": 3.0, "cpu": 6.0})
    critical = {str(s.stream): s.critical_ms for s in timeline.streams}
    assert critical == pytest.approx({"compute": 24.0, "h2d": 2.0, "d2h": 1.0, "cpu": 2.0}, abs=1e-6)
    assert (timeline.bound, timeline.next_bound) == ("compute", "cpu")
    assert timeline.busy_share(Stream.CPU) == pytest.approx(6 / 29)


def test_stalls_name_the_wait_and_what_was_under_way() -> None:
    first, second = hand().stalls
    assert (first.label, first.waited_for) == ("f1", "f0 fetch c0 -> d0 @h2d after s0")
    assert first.stall_ms == pytest.approx(4.0)
    assert dict(first.path_ms) == pytest.approx({"cpu": 2.0, "h2d": 1.0, "d2h": 1.0}, abs=1e-6)
    assert (second.label, second.waited_for) == ("f6", "f5 fetch c2 -> d0 @h2d after f4 s2")
    assert dict(second.path_ms) == pytest.approx({"h2d": 1.0}, abs=1e-6)


def test_peaks_are_those_of_the_plan() -> None:
    peaks = hand().peaks
    assert (peaks.device_nbytes, peaks.host_nbytes) == (512 + 1000, evicting().build().memory.host_nbytes)
    assert (peaks.arena_used_nbytes, peaks.arena_used_segment) == (512, "fwd.1")


def test_a_resident_plan_computes_all_the_time() -> None:
    timeline = simulate_with(with_work(resident().build(), 10), RATES)
    assert timeline.step_ms == pytest.approx(24.0)
    assert timeline.busy_share(Stream.COMPUTE) == pytest.approx(1.0)
    assert (timeline.bound, timeline.next_bound, timeline.stalls) == ("compute", None, ())


def test_updates_that_are_the_bottleneck_are_the_bound() -> None:
    """Chunks in turn through slots, 12 updates of 2 ms: with segments of nothing the step is little else."""
    timeline = simulate_with(with_work(slots_in_turn(12).build(), 0), RATES)
    assert timeline.bound == "cpu"
    assert 24.0 <= timeline.step_ms < 48.0


def test_shared_host_memory_slows_updates_and_copies() -> None:
    """Updates want 1,024 bytes a millisecond and each copy 256, of 1,100: beside copies, all are slower than alone."""
    plan = with_work(slots_in_turn(12).build(), 1)
    free = simulate_with(plan, RATES)
    shared = simulate_with(plan, rates(sharing=Capacities({HOST_DRAM: 1100e-6})))
    assert shared.step_ms > free.step_ms
    cpu = shared.stream(Stream.CPU)
    assert cpu.busy_ms > cpu.alone_ms == pytest.approx(free.stream(Stream.CPU).busy_ms)


def test_tokens_and_operations_per_second() -> None:
    plan = with_work(evicting().build(), 3)
    forward = (Work(Kind.MATMUL, "float32", 10**9, 0, 1), Work(Kind.MEMORY, "", 0, 512, 1))
    backward = (Work(Kind.ATTENTION, "float32", 3 * 10**9, 0, 1),)
    segments = tuple(replace(s, work=forward if s.graph == "forward" else backward) for s in plan.segments)
    plan = replace(plan, segments=segments, num_tokens=50, num_samples=5)
    timeline = simulate_with(plan, rates(matmul_tflops={"float32": 1.0}, attention_tflops={"float32": 1.0}))
    seconds = timeline.step_ms / 1e3
    assert timeline.tokens_per_s == pytest.approx(50 / seconds)
    assert timeline.samples_per_s == pytest.approx(5 / seconds)
    assert timeline.model_tflops == pytest.approx(3 * 3e9 / seconds / 1e12)  # backward's 12e9 hold a forward again
    assert timeline.hardware_tflops == pytest.approx((3e9 + 12e9) / seconds / 1e12)
    assert timeline.patrickstar_tflops == pytest.approx(192 * 50 * 8 / seconds / 1e12)  # 192 parameters
    assert simulate_with(replace(plan, num_tokens=0), RATES).patrickstar_tflops is None


def test_slices_of_one_sequence_are_one_sample() -> None:
    plan = replace(distributed().build(), num_tokens=50, num_samples=5)
    timelines = [simulate_with(replace(plan, mesh=mesh), RATES) for mesh in ((), (("cp", 2),))]
    assert [timeline.num_samples for timeline in timelines] == [10, 5]
    assert [timeline.num_tokens for timeline in timelines] == [100, 100]


# --- laws on random plans ---------------------------------------------------------------------------------------------

STREAM_RATES = rates(compute_launch_us=20.0, copy_launch_us=10.0, handoff_us=100.0, kernel_launch_us=30.0)


def worked(plan: Plan, seed: int) -> Plan:
    chosen = random.Random(seed)
    return with_work(plan, {s.name: chosen.randrange(40) for s in plan.segments})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    found, where, options = draw(requests())
    return worked(planned_somewhere(found, where, options).plan, draw(st.integers(0, 2**32)))


LAWS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MACHINES = (STREAM_RATES, rates(runs_inline=True), rates(sharing=Capacities({HOST_DRAM: 500e-6, **{
    name: 256e-6 for name in ("host link to the device", "host link from the device")}})))  # fmt: skip


def check_settled(timeline: Timeline, plan: Plan, machine: CostRates) -> None:
    """The iteration repeats, or drifts by 1 % a step at most where two loops take almost equally long."""
    if timeline.is_steady:
        return
    run = Run(script_of(plan, machine), machine)
    while run.num_done < timeline.num_iterations:
        run.iterate()
    before, after = (run.tasks(run.num_done - back) for back in (2, 1))
    shifts = [late.start_ms - early.start_ms for early, late in zip(before, after, strict=True)]
    assert [min(shifts), max(shifts)] == pytest.approx([timeline.step_ms] * 2, rel=0.01)


@LAWS
@given(plans(), st.sampled_from(MACHINES))
def test_a_step_is_no_shorter_than_what_any_stream_has_to_do(plan: Plan, machine: CostRates) -> None:
    timeline = simulate_with(plan, machine)
    check_settled(timeline, plan, machine)
    costs = ActionCosts(plan, machine)
    for stream in Stream:
        actions = [a for p in plan.programs if p.is_repeated for a in p.actions if a.stream is stream]
        alone_ms = sum(costs.of(a).alone_ms for a in actions)
        found = timeline.stream(stream)
        assert (found.num_actions, found.alone_ms) == (len(actions), pytest.approx(alone_ms))
        assert found.busy_ms >= alone_ms - 1e-6
        assert timeline.step_ms >= found.busy_ms - 1e-5 * timeline.step_ms


@LAWS
@given(plans(), st.sampled_from(MACHINES))
def test_the_critical_path_and_the_stalls_account_for_the_whole_step(plan: Plan, machine: CostRates) -> None:
    timeline = simulate_with(plan, machine)
    path_ms = sum(s.critical_ms for s in timeline.streams) + timeline.overhead_ms
    assert path_ms == pytest.approx(timeline.step_ms, rel=1e-5, abs=1e-5)
    stalls_ms = sum(s.stall_ms for s in timeline.stalls)
    assert stalls_ms + timeline.stream(Stream.COMPUTE).busy_ms == pytest.approx(timeline.step_ms, rel=1e-4, abs=1e-3)
    for stall in timeline.stalls:
        assert sum(ms for _, ms in stall.path_ms) == pytest.approx(stall.stall_ms, rel=1e-5, abs=1e-6)


@LAWS
@given(plans(), st.sampled_from(MACHINES))
def test_the_next_iteration_is_the_same_a_step_later(plan: Plan, machine: CostRates) -> None:
    timeline = simulate_with(plan, machine)
    for now, then in zip(timeline.slices, timeline.next_slices, strict=True):
        assert (now.label, now.action, now.stream) == (then.label, then.action, then.stream)
        assert then.start_ms - now.start_ms == pytest.approx(timeline.step_ms, rel=1e-4, abs=1e-4)
        assert then.end_ms - now.end_ms == pytest.approx(timeline.step_ms, rel=1e-4, abs=1e-4)


@pytest.mark.long
@LAWS
@given(plans(), st.sampled_from(MACHINES))
def test_what_repeats_goes_on_repeating(plan: Plan, machine: CostRates) -> None:
    run = Run(script_of(plan, machine), machine)
    while not run.cycle():
        assume(run.num_done < 64)  # see check_settled
        run.iterate()
    length, last = run.cycle(), run.num_done - 1
    period_ms = run.began_ms(last) - run.began_ms(last - length)
    for _ in range(3 * length + 8):
        run.iterate()
        found_ms = run.began_ms(run.num_done - 1) - run.began_ms(run.num_done - 1 - length)
        assert found_ms == pytest.approx(period_ms, rel=1e-5, abs=1e-6)


@LAWS
@given(plans(), st.sampled_from(MACHINES))
def test_waits_hold_in_time(plan: Plan, machine: CostRates) -> None:
    """Within one program run: nothing starts before what it waits for has ended, nor before its stream is free."""
    slices = {s.label: s for s in simulate_with(plan, machine).slices}
    for program in (p for p in plan.programs if p.is_repeated):
        for label, action in program.labelled():
            own = [w for w in action.waits if w[0] == label[0] and int(w[1:]) < int(label[1:])]
            assert all(slices[label].start_ms >= slices[w].end_ms - 1e-6 for w in own)


@LAWS
@given(plans(), st.floats(1.0, 5.0))
def test_a_machine_faster_in_everything_is_faster_by_that(plan: Plan, factor: float) -> None:
    """Exactly, with sharing too; where only some rates are better, only without sharing nothing gets slower."""
    machine = MACHINES[2]
    faster = rates(
        device_memory_gb_per_s=machine.device_memory_gb_per_s * factor,
        copies={stream: replace(law, gb_per_s=law.gb_per_s * factor) for stream, law in machine.copies.items()},
        cpu_update_gparam_per_s={d: r * factor for d, r in machine.cpu_update_gparam_per_s.items()},
        gpu_update_gparam_per_s={d: r * factor for d, r in machine.gpu_update_gparam_per_s.items()},
        links=None if machine.links is None else replace(machine.links, gpu_gb_per_s=256e-6 * factor),
        sharing=Capacities({name: rate * factor for name, rate in machine.sharing.gb_per_s.items()}),  # type: ignore
    )
    before, after = simulate_with(plan, machine).step_ms, simulate_with(plan, faster).step_ms
    assert after == pytest.approx(before / factor, rel=1e-4, abs=1e-6)
    partly = replace(
        RATES,
        copies={**RATES.copies, Stream.H2D: faster.copies[Stream.H2D]},
        cpu_update_gparam_per_s=faster.cpu_update_gparam_per_s,
    )
    assert simulate_with(plan, partly).step_ms <= simulate_with(plan, RATES).step_ms * (1 + 1e-6)


@pytest.mark.long
@LAWS
@given(plans(), st.integers(0, 2**32))
def test_without_sharing_a_plan_without_some_waits_is_no_slower(plan: Plan, seed: int) -> None:
    chosen = random.Random(seed)
    programs = tuple(
        replace(
            p, actions=tuple(replace(a, waits=tuple(w for w in a.waits if chosen.random() < 0.5)) for a in p.actions)
        )
        for p in plan.programs
    )
    machine = replace(STREAM_RATES, sharing=Alone())
    before, after = (simulate_with(found, machine) for found in (plan, replace(plan, programs=programs)))
    assume(after.is_steady)  # streams that nothing holds together may have periods of their own
    assert after.step_ms <= before.step_ms * (1 + 1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_every_way_to_manage_memory_can_be_simulated(name: str) -> None:
    plan = with_work(SPECS[name].build(), 2)
    verify(plan)
    timeline = simulate_with(plan, STREAM_RATES)
    assert timeline.is_steady and timeline.step_ms > 0
    assert timeline.peaks.device_nbytes >= plan.memory.device_peak_nbytes


# --- what runs where --------------------------------------------------------------------------------------------------


def test_an_evaluation_is_joined_at_both_ends() -> None:
    found = layers(4, 64)
    training = planned(found, target(device=600), PlanOptions(chunk_numel=64)).plan
    forward = replace(found, backward=replace(found.backward, operators=()))
    plan = make_evaluation_plan(forward, target(device=600), layout=training.layout).plan
    timeline = simulate_with(with_work(plan, 3), RATES)
    assert timeline.is_steady
    assert all(s.end_ms <= timeline.step_ms + 1e-6 for s in timeline.slices)
    assert timeline.patrickstar_tflops is None and timeline.flops.model == timeline.flops.hardware


def test_a_device_that_computes_on_the_host_prefetches_less() -> None:
    """Its host launches the copies that stand behind a segment when the segment is done."""
    plan = with_work(slots_in_turn(8).build(), 3)
    inline, ahead = simulate_with(plan, rates(runs_inline=True)), simulate_with(plan, RATES)
    assert inline.step_ms > ahead.step_ms


def test_a_loaded_plan_simulates_as_the_one_that_was_saved(tmp_path: Path) -> None:
    plan = replace(with_work(evicting().build(), 3), num_tokens=7)
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan and simulate_with(loaded, STREAM_RATES) == simulate_with(plan, STREAM_RATES)


def test_the_machine_is_the_plans_unless_another_is_named(tmp_path: Path) -> None:
    plan = replace(with_work(evicting().build(), 10**6), hw="v100-240g")
    assert simulate(plan).hw == "v100-32g-240g"
    assert simulate(plan, "a100-40g-512g").step_ms < simulate(plan).step_ms
    calibrated = replace(Hardware.parse("emulated-1m-1m"), name="emulated-1m-1m (calibrated)", rates=calibration({}))
    calibrated.save(tmp_path / "profile.json")
    assert simulate(plan, tmp_path / "profile.json") == simulate(plan, calibrated)
    with pytest.raises(HardwareError, match="its rates stand in the profile, not in the plan"):
        simulate(replace(plan, hw=str(calibrated)))
    with pytest.raises(HardwareError, match="emulated-1m-1m is has to be measured"):
        simulate(evicting().build())


def test_the_trace_is_json_with_one_slice_at_a_time_on_each_track() -> None:
    timeline = simulate_with(with_work(slots_in_turn(6).build(), 2), STREAM_RATES)
    data = json.loads(json.dumps(timeline.trace()))
    tracks = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert set(tracks.values()) == {"compute", "h2d", "d2h", "cpu"}
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 2 * len(timeline.slices)
    for track in tracks:
        own = sorted((e for e in slices if e["tid"] == track), key=lambda e: (e["ts"], e["ts"] + e["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own))
    texts = {str(a) for p in slots_in_turn(6).build().programs for a in p.actions}
    assert {e["name"] for e in slices} <= texts


def test_json_is_plain_and_complete() -> None:
    timeline = hand()
    data = json.loads(json.dumps(timeline.to_json()))
    assert {"step_ms", "tokens_per_s", "model_tflops", "bound", "next_bound", "stalls", "peaks"} <= set(data)
    assert data["streams"][0]["busy_share"] == pytest.approx(24 / 29)
    assert data["stalls"][0]["path_ms"]["cpu"] == pytest.approx(2.0)


@pytest.mark.long
def test_a_deep_model_is_simulated_in_seconds_and_the_same_each_time() -> None:
    """24 layers of 12,288 hidden units, as in GPT-3, on one of 32 GPUs: thousands of actions."""
    found = gpt_like(24, 12288)
    plan = worked(planned(found, target(40 << 30, 128 << 30, world_size=32)).plan, 1)
    assert sum(len(p.actions) for p in plan.programs[:3]) > 1000
    hw = "4x8xa100-40g-1024g"
    first = simulate(plan, hw)
    assert first.is_steady and first.num_iterations < 16
    assert simulate(plan, hw) == first


def test_a_gpu_never_waits_for_updates_on_the_host() -> None:
    """A fetch behind an update is held back on the host, and what runs behind that fetch is launched when the update is
    done, with the launch still to come; the emulated device has launched it long before."""
    launches = rates(compute_launch_us=500.0)
    timeline = simulate_with(with_work(evicting().build(), 3), launches)
    slices = {s.label: s for s in timeline.slices}
    assert slices["f1"].start_ms == pytest.approx(slices["f0"].end_ms)  # launched meanwhile: 0.5 ms of 1 ms
    slow = simulate_with(with_work(evicting().build(), 3), rates(compute_launch_us=1500.0))
    late = {s.label: s for s in slow.slices}
    updated_ms = {s.label: s.end_ms for s in slow.slices}["s0"] - slow.step_ms
    assert late["f1"].start_ms == pytest.approx(updated_ms + 1.5)


def test_a_gpu_stall_names_the_update_that_the_host_waits_for() -> None:
    timeline = simulate_with(with_work(evicting().build(), 3), rates(compute_launch_us=1500.0))
    (stall,) = (s for s in timeline.stalls if s.label == "f1")
    assert stall.waited_for.startswith("s0 update c0 @cpu")
    assert dict(stall.path_ms)["overhead"] == pytest.approx(1.5)


@pytest.mark.parametrize(("waits", "step_ms"), [("s0", 6.0), ("f0", 8.0)])
def test_what_waits_for_a_copy_that_is_held_back_stops_the_host(waits: str, step_ms: float) -> None:
    """Segments of 3 ms, an update of 2 ms that a fetch waits for. A copy back that waits for the update itself is held
    back too, and the host goes on to the next segment. One that waits for the fetch cannot be: the host sleeps."""
    texts = {
        "forward": ("fetch c0 -> d0 @h2d after s0", f"evict c0 <- d0 @d2h after {waits}", "run fwd.0 @compute"),
        "backward": ("run bwd.0 @compute",),
        "step": ("update c0 @cpu after b0",),
    }
    plan = with_work(evicting().build(), 3)
    programs = tuple(replace(p, actions=tuple(map(parse, texts[p.name]))) for p in plan.programs if p.name in texts)
    plan = replace(plan, programs=programs)
    assert simulate_with(plan, RATES).step_ms == pytest.approx(step_ms)
    assert simulate_with(plan, rates(runs_inline=True)).step_ms == pytest.approx(6.0)


def test_the_host_is_at_most_one_iteration_ahead() -> None:
    """A stream that nothing holds back has no period of its own: it waits for its launches."""
    plan = evicting().build()
    programs = tuple(replace(p, actions=tuple(replace(a, waits=()) for a in p.actions)) for p in plan.programs)
    timeline = simulate_with(with_work(replace(plan, programs=programs), 3), RATES)
    assert timeline.is_steady
    assert timeline.step_ms == pytest.approx(24.0)  # compute alone
