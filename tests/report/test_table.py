"""The one-screen table: it fits, folds what is equal and nothing else, and its numbers are right."""

import random
from dataclasses import replace

import pytest
from plans_for_report import gpt_plan

from chunkc.ir.actions import Op
from chunkc.ir.plan import Plan, Program
from chunkc.report.table import render


def rows(plan: Plan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = ""
    for line in render(plan).splitlines():
        if line.startswith(("  fwd.", "  bwd.", "  [")):
            name, *cells = [cell for cell in line.strip().split("  ") if cell]
            found[name] = [cell.strip() for cell in cells]
        elif line.startswith(" " * 8) and name:
            found[name][-1] += line[7:]
        elif line.startswith(" " * 6) and name:
            found[name].append(line.strip())
        else:
            name = ""
    return found


def uneven(plan: Plan) -> Plan:
    segments = tuple(replace(s, end_op=s.first_op + i + 1) for i, s in enumerate(plan.segments))
    return replace(plan, segments=segments)


@pytest.mark.parametrize("num_layers", [1, 12, 96, 300])
@pytest.mark.parametrize("even", [True, False])
def test_it_keeps_to_the_columns_of_a_screen_in_few_lines(num_layers: int, even: bool) -> None:
    plan = gpt_plan(num_layers=num_layers, device_budget_nbytes=1024**3)
    lines = render(plan if even else uneven(plan)).splitlines()
    assert len(lines) <= 66
    assert max(len(line) for line in lines) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_header_says_what_and_how_much() -> None:
    plan = gpt_plan()
    head = render(plan).splitlines()[:6]
    assert head[0] == (f"plan {plan.digest()}: TinyGPT on emulated-4m-64m, sizes in MiB")
    arena = 5 * 128 / 1024 + 768 / 1024  # slots of 128 KiB, one of 768 KiB
    live = (14 * 65_536 + 2 * 8 * 1000 * 64 + 1024) / 1024**2  # saved activations, two logits, workspace
    assert f"planned peak {arena + live:.2f} of budget 4.00 ({(arena + live) / 4:.1%}".replace("%", " %") in head[1]
    assert head[2].strip() == f"arena {arena:.2f} + live {live:.2f} at bwd.0"
    host = (13 * 128 + 13 * 768 + 3 * 128) / 1024  # layers and embedding with states; frozen, unused, gradients
    assert f"host    {host:.2f} of budget 64.00" in head[3]
    trained = 1000 * 64 + 12 * 12 * 64**2 + 64
    model = (14 * trained + 2 * 100 * 64 + 4 * 64) / 1024**2
    assert f"model   {model:.2f} of" in head[4]
    assert "28 parameters in 17 chunks of 65,536 elements" in head[5]


def test_equal_layers_are_one_line() -> None:
    found = rows(gpt_plan())
    assert list(found) == ["fwd.0", "[fwd.1-12] x12", "fwd.13", "bwd.0", "[bwd.1-12] x12", "bwd.13"]
    ops, chunks, size, live, total, actions = found["[fwd.1-12] x12"]
    assert (ops, chunks, size) == ("5", "c1-12", f"{12 * 128 / 1024:.2f}")
    nonmodel = 13 * 65_536 + 512  # of the last of them
    assert live == f"{nonmodel / 1024**2:.2f}"
    assert total == f"{(nonmodel + 5 * 128 * 1024 + 768 * 1024) / 1024**2:.2f}"
    assert actions == "fetch c2-12, drop c1-12"
    assert found["[bwd.1-12] x12"][-1] == "fetch c1-11, stash c1-12, evict c1-12"
    assert found["fwd.0"] == ["3", "c0 c14", "0.25", "0.06", "1.44", "fetch c0-1 c14, drop c14"]
    assert found["bwd.13"][1] == "none"


def test_a_different_layer_stands_apart() -> None:
    plan = gpt_plan()
    segments = tuple(replace(s, end_op=s.end_op + 1) if s.name == "fwd.5" else s for s in plan.segments)
    found = list(rows(replace(plan, segments=segments)))
    assert found[:5] == ["fwd.0", "[fwd.1-4] x4", "fwd.5", "[fwd.6-12] x7", "fwd.13"]


def without_drop(program: Program, target: str) -> Program:
    return replace(program, actions=tuple(a for a in program.actions if (a.op, a.target) != (Op.DROP, target)))


def test_a_layer_that_stays_stands_apart() -> None:
    plan = gpt_plan()
    programs = (without_drop(plan.programs[0], "c12"), *plan.programs[1:])
    found = rows(replace(plan, programs=programs))
    assert "[fwd.1-11] x11" in found
    assert found["fwd.12"][-1] == "none"


def test_layers_of_several_segments_fold_as_a_pattern() -> None:
    plan = gpt_plan()
    segments = tuple(
        replace(s, end_op=s.end_op + 2 * (s.index % 2)) if s.graph == "forward" and 0 < s.index < 13 else s
        for s in plan.segments
    )
    found = rows(replace(plan, segments=segments))
    assert found["[fwd.1-12] x6 of 2"][0] == str(7 + 5)


def test_irregular_actions_fold_by_structure_when_lines_run_out() -> None:
    plan = gpt_plan(num_layers=60, device_budget_nbytes=1024**3)
    irregular = plan.programs[0]
    for layer in random.Random(0).sample(range(1, 61), 25):
        irregular = without_drop(irregular, f"c{layer}")
    found = rows(replace(plan, programs=(irregular, *plan.programs[1:])))
    assert "[fwd.1-60] x60" in found


def test_what_cannot_be_folded_shares_lines_that_say_so() -> None:
    found = rows(uneven(gpt_plan()))
    forward = [name for name in found if "fwd" in name]
    pairs = [f"[fwd.{i}-{i + 1}] mixed" for i in (1, 3, 5, 7, 9)]
    assert forward == ["fwd.0", *pairs, "fwd.11", "fwd.12", "fwd.13"]
    assert found["[fwd.3-4] mixed"][:2] == [str(4 + 5), "c3-4"]


def test_programs_and_totals() -> None:
    text = render(gpt_plan())
    assert "forward (41 actions)" in text
    assert "step (14 actions)\n  update @cpu c0-12, update @compute c13\n" in text
    assert "abandon (1 action), in place of backward: a forward that no backward follows\n  drop c0\n" in text
    layers = 12 * 12 * 64**2
    h2d = 2 * (1000 * 64 + 100 * 64 + layers + layers + 1000 * 64)  # c0, positions, layers twice, gradient chunk
    d2h = 2 * (layers + 1000 * 64)
    expected = f"moved per step: {h2d / 1024**2:.2f} MiB host to device, {d2h / 1024**2:.2f} MiB device to host"
    assert expected in text
    assert "always on the device: 1 chunk (0.12 MiB), 1 optimizer state (0.75 MiB)" in text
