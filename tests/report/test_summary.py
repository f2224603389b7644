"""The summary's numbers, worked out here from the widths of the example."""

import re
from dataclasses import replace

import pytest
from plans import distributed
from plans_for_report import gpt_plan

from chunkc.ir.actions import Stream, parse
from chunkc.ir.layout import Chunk, ChunkList, Group
from chunkc.ir.plan import Plan
from chunkc.report.summary import summarize
from chunkc.report.table import render

MIB = 1024**2
LAYERS = 12 * 12 * 64**2
TRAINED = 1000 * 64 + LAYERS + 64
FROZEN, UNUSED = 100 * 64, 64


def table(plan: Plan, first_heading: str) -> dict[str, list[str]]:
    block = next(b for b in summarize(plan).split("\n\n") if b.startswith(first_heading))
    found = {}
    for line in body(block):
        cells = [cell for cell in re.split(r"  +", line.strip()) if cell]
        found[cells[0]] = cells[1:]
    return found


def body(block: str) -> list[str]:
    lines = block.splitlines()
    return lines[1 + next(i for i, line in enumerate(lines) if set(line) == set("- ")) :]


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.2f}"


def test_model_data_by_kind() -> None:
    found = table(gpt_plan(), "model data")
    payload, triple = 128 * 1024, 768 * 1024
    sixteen = TRAINED + FROZEN
    assert found["param16 (bfloat16)"] == [f"{sixteen:,}", mib(2 * sixteen), mib(15 * payload), mib(payload)]
    assert found["param16 (float32)"] == ["64", "<0.01", mib(payload), "0.00"]
    for part in ("param32", "exp_avg", "exp_avg_sq"):
        assert found[f"{part} (float32)"] == [
            f"{TRAINED:,}", mib(4 * TRAINED), mib(14 * triple / 3), mib(triple / 3)
        ]  # fmt: skip
    assert found["gradients (overlay param16)"] == [f"{TRAINED - 64_000:,}", "0.00", "0.00", "0.00"]
    assert found["gradients (own chunks)"] == ["64,000", mib(128_000), mib(payload), "0.00"]
    total = 14 * TRAINED + 2 * FROZEN + 4 * UNUSED + 128_000
    assert found["total"] == [mib(total), mib(17 * payload + 14 * triple), mib(payload + triple)]


def test_the_total_is_the_layouts_model_data_and_the_gradient_chunks() -> None:
    plan = gpt_plan()
    expected = plan.layout.model_data_nbytes() + 2 * 64_000
    assert table(plan, "model data")["total"][0] == mib(expected)


def test_memory_beside_its_budget() -> None:
    found = table(gpt_plan(), "memory")
    arena, live = (5 * 128 + 768) * 1024, 14 * 65_536 + 2 * 8 * 1000 * 64 + 1024
    share = f"{100 * (arena + live) / (4 * MIB):.1f} %"
    assert found["device peak"] == [mib(arena + live), "4.00", share, "at bwd.0"]
    assert found["of it arena"][0] == mib(arena)
    assert found["of it non-model"][0] == mib(live)
    assert found["of it non-model"][2] == "bwd.0, with <0.01 workspace"
    assert found["host"][:2] == [mib((13 * 7 + 3) * 128 * 1024), "64.00"]
    assert f"free under the device budget at its peak: {mib(4 * MIB - arena - live)} MiB" in summarize(gpt_plan())


def test_chunks_and_utilisation() -> None:
    block = next(b for b in summarize(gpt_plan()).split("\n\n") if b.startswith("chunks"))
    rows = [[c for c in re.split(r"  +", line.strip()) if c] for line in body(block)]
    share = 100 * (1000 * 64 + LAYERS) / (13 * 65_536)
    assert rows[0] == ["trained", "bfloat16", "13", "65,536", mib(13 * 131_072), f"{share:.1f} %", "host", "host"]
    assert rows[1][-2:] == ["device", "device"]
    assert [r[0] for r in rows] == ["trained", "trained", "frozen", "unused", "grad", "parameters", "total"]
    assert rows[3][1:4] == ["float32", "1", "32,768"]
    assert rows[4][5] == f"{100 * 64_000 / 65_536:.1f} %"
    overall = (TRAINED + FROZEN + UNUSED) / (15 * 65_536 + 32_768)  # without the gradient chunk
    assert rows[5][1] == f"{100 * overall:.1f} %"
    assert rows[6][1:] == ["17", mib(17 * 131_072)]


def test_bytes_per_step_by_stream() -> None:
    found = table(gpt_plan(), "moved per step")
    h2d, d2h = 2 * (64_000 + FROZEN + 2 * LAYERS + 64_000), 2 * (LAYERS + 64_000)
    assert found["fetch chunks"] == ["host to device", "27", mib(h2d)]
    assert found["evict chunks"] == ["device to host", "13", mib(d2h)]
    assert found["load states"] == ["host to device", "0", "0.00"]
    assert found["total host to device"] == ["host to device", "27", mib(h2d)]
    assert found["total device to host"] == ["device to host", "13", mib(d2h)]


def with_step(plan: Plan, *lines: str) -> Plan:
    programs = tuple(
        replace(p, actions=(*p.actions, *map(parse, lines))) if p.name == "step" else p for p in plan.programs
    )
    return replace(plan, programs=programs)


def test_streamed_states_are_counted_in_the_step_and_only_there() -> None:
    plan = with_step(gpt_plan(), "load os1 -> d3 @h2d", "store os1 <- d3 @d2h", "load os0 -> d3 @h2d")
    found = table(plan, "moved per step")
    assert found["load states"] == ["host to device", "2", mib(12 * (LAYERS / 12 + 64_000))]
    assert found["store states"] == ["device to host", "1", mib(12 * LAYERS / 12)]
    abandon = replace(gpt_plan().programs[4], actions=(parse("evict c0 <- d0 @d2h"),))
    plan = replace(gpt_plan(), programs=(*gpt_plan().programs[:4], abandon))
    assert table(plan, "moved per step")["evict chunks"][1] == "13"


def test_residents_are_named() -> None:
    text = summarize(gpt_plan())
    assert "residents (never moved): 1 chunk, 1 state: c13 os13" in text
    assert "also on the device" not in text
    forward = gpt_plan().programs[0]
    entry = replace(forward.entry, resident=(("c3", 2), *forward.entry.resident))
    plan = replace(gpt_plan(), programs=(replace(forward, entry=entry), *gpt_plan().programs[1:]))
    assert "also on the device when a step begins: c3\n" in summarize(plan)


@pytest.mark.parametrize(("nonmodel", "unit", "peak"), [(3 * 1024**3, "GiB", "3.00"), (0, "MiB", "1.38")])
def test_the_unit_follows_the_peak(nonmodel: int, unit: str, peak: str) -> None:
    plan = gpt_plan()
    memory = replace(plan.memory, nonmodel_nbytes=nonmodel, device_budget_nbytes=8 * 1024**3)
    plan = replace(plan, memory=memory)
    assert summarize(plan).splitlines()[0].endswith(f"sizes in {unit}")
    assert table(plan, "memory")["device peak"][:2] == [peak, "8.00" if unit == "GiB" else "8,192.00"]


def test_a_rank_stores_its_own_chunks() -> None:
    plan = gpt_plan()
    padding = Chunk(17, ChunkList.TRAINED, "bfloat16", 65_536, 0)
    groups = tuple(Group(i, 2 * i, 2) for i in range(9))
    layout = replace(plan.layout, chunks=(*plan.layout.chunks, padding), groups=groups, world_size=2, rank=1)
    plan = replace(plan, layout=layout)
    text = summarize(plan)
    assert "(rank 1 of 2)" in text.splitlines()[0]
    headings = next(b for b in text.split("\n\n") if b.startswith("model data")).split("---")[0]
    assert {"stored", "by", "rank", "1,", "padded"} <= set(headings.split())
    # rank 1 owns c1, c3, .. c11, c13 (states resident), the unused c15 and the padding c17
    found = table(plan, "model data")
    assert found["param16 (bfloat16)"][2] == mib(8 * 131_072)
    assert found["param32 (float32)"][2] == mib(7 * 4 * 65_536)
    assert found["gradients (own chunks)"][2] == "0.00"
    chunks = table(plan, "chunks")
    assert chunks["padding"][1:3] == ["1", "65,536"]
    assert chunks["parameters"] == table(gpt_plan(), "chunks")["parameters"]


def test_spanning_parameters_fill_their_chunks() -> None:
    """4,096 elements of the first layer's mlp move into c2, in place of the second layer's."""
    plan = gpt_plan(num_layers=2)
    placements = list(plan.layout.placements)
    placements[2] = replace(placements[2], offset=65_536 - 32_768 + 4_096, num_chunks=2)
    plan = replace(plan, layout=replace(plan.layout, placements=tuple(placements)))
    whole = table(plan, "chunks")["parameters"][0]
    assert whole == table(gpt_plan(num_layers=2), "chunks")["parameters"][0]
    homes = list(plan.layout.chunks)
    homes[2] = replace(homes[2], numel=65_536 * 2)  # a row of its own
    block = summarize(replace(plan, layout=replace(plan.layout, chunks=tuple(homes))))
    assert f"{100 * (49_152 + 4_096) / (2 * 65_536):.1f} %" in block


def test_what_ranks_receive_is_shown_where_there_are_several() -> None:
    """Three gathers and two reductions of 256 bytes of the other rank."""
    plan = distributed().build()
    shown = table(plan, "moved")
    assert shown["gather groups"][1] == "3" and shown["reduce groups"][1] == "2"
    assert shown["total from other ranks"][1] == "5" and plan.moved_nbytes(Stream.COMM) == 5 * 256
    assert "from other ranks" in " ".join(render(plan).split())
    one = gpt_plan()
    assert "total from other ranks" not in table(one, "moved") and "from other ranks" not in render(one)
