"""The full text: its action lines are exactly the plan's, its moments are right, and it holds everything else too."""

import re
from dataclasses import replace

import pytest
from plans_for_report import gpt_plan

from chunkc.ir.actions import Action, parse
from chunkc.ir.plan import Plan
from chunkc.report.text import full_text

ACTION_LINE = re.compile(r"  ([fbst]\d+) +(\S.*)")


def listed(text: str) -> dict[str, list[tuple[str, Action]]]:
    found: dict[str, list[tuple[str, Action]]] = {}
    programs = text[text.index("\nprogram ") + 1 :]
    for line in programs.splitlines():
        if line.startswith("program "):
            name = line.split()[1]
            found[name] = []
        elif line and not line.lstrip().startswith("#"):
            match = ACTION_LINE.fullmatch(line)
            assert match is not None, line
            found[name].append((match[1], parse(match[2])))
    return found


@pytest.mark.parametrize("num_layers", [1, 4, 12])
def test_the_text_lists_exactly_the_plans_actions(num_layers: int) -> None:
    plan = gpt_plan(num_layers=num_layers)
    assert listed(full_text(plan)) == {p.name: list(p.labelled()) for p in plan.programs}


def test_every_action_kind_reads_back() -> None:
    lines = ["fetch c1 -> d2 @h2d after s1 f0", "evict c1 <- d2 @d2h", "open c1 -> d2 @h2d", "drop c1 <- d2 @compute"]
    lines += [
        "gather g1 @comm",
        "release g1 @compute",
        "reduce g1 @comm",
        "stash c1 of bwd.1 @compute",
        "norm c1 @compute",
        "decide @compute",
    ]
    lines += ["update c1 @cpu", "restore c1 @compute", "load os1 -> d5 @h2d", "store os1 <- d5 @d2h"]
    lines += ["run fwd.1 @compute"]
    plan = gpt_plan(num_layers=1)
    program = replace(plan.programs[0], actions=tuple(map(parse, lines)))
    text = full_text(replace(plan, programs=(program,)))
    assert [str(action) for _, action in listed(text)["forward"]] == lines


def moment_of(text: str, name: str) -> list[str]:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"  # moment {name}:"))
    return [line.strip() for line in lines[first : first + 3]]


def test_a_moment_stands_before_each_run() -> None:
    plan = gpt_plan()
    lines = full_text(plan).splitlines()
    runs = [i for i, line in enumerate(lines) if " run " in line and line.startswith("  ")]
    assert len(runs) == 28
    for i in runs:
        first = max(j for j in range(i) if lines[j].startswith("  # moment "))
        assert lines[first].startswith(f"  # moment {lines[i].split()[2]}: resident ")
        assert all(line.startswith("  #  ") for line in lines[first + 1 : i])


def test_the_numbers_of_a_moment() -> None:
    resident, reads, nbytes = moment_of(full_text(gpt_plan()), "bwd.0")
    assert resident == "# moment bwd.0: resident c0 in d0, c12 in d1, c13 in d4, os13 in d5"
    arena, used = (5 * 128 + 768) / 1024, (3 * 128 + 768) / 1024
    live = (14 * 65_536 + 2 * 8 * 1000 * 64) / 1024**2
    assert reads == f"#   operators 0..5 read c0 c13; {used:.2f} MiB of the arena in use"
    total = f"{arena + live + 1 / 1024:.2f} of 4.00 MiB"
    assert nbytes == f"#   {total} = arena {arena:.2f} + live {live:.2f} + workspace <0.01"


def test_neighbours_in_neighbouring_slots_are_one_range() -> None:
    plan = gpt_plan(num_layers=4)
    resident = (("os5", 5), ("c9", 0), ("c10", 1), ("c11", 2), ("c13", 3), ("c14", 4))
    entry = replace(plan.programs[0].entry, resident=resident)
    text = full_text(replace(plan, programs=(replace(plan.programs[0], entry=entry, actions=()),)))
    assert "# entry cold: resident c9-11 in d0-2, c13-14 in d3-4, os5 in d5\n" in text


def test_header_layout_and_slots() -> None:
    plan = gpt_plan()
    text = full_text(plan)
    assert text.startswith(f"plan {plan.digest()}: TinyGPT on emulated-4m-64m, sizes in MiB\n  schedule 0123456789ab,")
    assert "made in 13.8 ms by these passes\n" in text
    assert re.search(r"^  chunk_mapping +12\.5 ms  17 chunks$", text, re.M)
    assert "\n               0  embed.weight  [1000, 64], also head.weight\n" in text
    for layer in range(12):
        assert f"\n          16,384  layers.{layer}.mlp.weight  [512, 64]\n" in text
    assert (
        "  c13: trained, bfloat16, 64 of 65,536 elements used, 0.12 MiB, home device,\n"
        "      os13 0.75 MiB home device\n" in text
    )
    assert re.search(r"^  c16: grad, [^:]*,\s+gradients\s+of\s+c0$", text, re.M)
    assert "arena: 1,441,792 bytes in 6 slots" in text
    assert "  d5: 655,360 .. 1,441,792 (0.75 MiB)" in text
    assert "# entry cold: resident c13 in d4, os13 in d5\n" in text
    assert "# exit saved: resident c0 in d0, c13 in d4, os13 in d5\n" in text


def spanning(plan: Plan) -> Plan:
    placements = (replace(plan.layout.placements[0], num_chunks=2), *plan.layout.placements[1:])
    groups = tuple(replace(g, first_chunk=2 * g.index, num_chunks=2) for g in plan.layout.groups[:9])
    return replace(plan, layout=replace(plan.layout, placements=placements, groups=groups, world_size=2))


def test_spanning_parameters_and_owners() -> None:
    text = full_text(spanning(gpt_plan()))
    assert "  embed.weight  [1000, 64], also head.weight, spans c0-1\n" in text
    assert re.search(r"\n  c1: [^:]*, group\s+g0 owned\s+by rank 1\n +continued  embed\.weight", text)
    assert "rank 0 of world size 2" in text
