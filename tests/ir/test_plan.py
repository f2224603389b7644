"""Plans save, load, and have a digest over everything that decides what happens."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS, distributed, evicting, moving, streaming

from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan, StageRecord
from chunkc.ir.plan_file import load_plan


@pytest.mark.parametrize("name", SPECS)
def test_saved_plan_loads_as_the_same(name: str, tmp_path: Path) -> None:
    plan = SPECS[name].build()
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.stages == plan.stages
    assert loaded.digest() == plan.digest()


def test_a_mesh_is_saved_where_there_is_one(tmp_path: Path) -> None:
    plan = replace(distributed().build(), mesh=(("dp_shard", 2), ("tp", 4)))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert "mesh" not in distributed().build().to_json()


def test_json_is_plain_and_shows_actions_as_text() -> None:
    data = evicting().build().to_json()
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, sort_keys=True))
    assert data["programs"][0]["actions"][0] == "fetch c0 -> d0 @h2d after s0"
    assert data["format_version"] == 9


@pytest.mark.parametrize("version", [0, 2, None, "3"])
def test_another_format_version_is_refused(version: object) -> None:
    data = evicting().build().to_json()
    data["format_version"] = version
    with pytest.raises(
        ValueError, match=f"plan format {version!r} is not supported; this release reads format 9: plan the"
    ):
        Plan.from_json(data)


def test_digest_is_the_same_for_equal_plans() -> None:
    assert evicting().build().digest() == evicting().build().digest()
    assert len(evicting().build().digest()) == 12


def test_digest_leaves_out_how_planning_went() -> None:
    plan = evicting().build()
    other = replace(plan, stages=(StageRecord("residency", 99.0, "slow"),))
    assert other.digest() == plan.digest()
    assert other == plan


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "model": lambda p: replace(p, model="Other"),
    "hw": lambda p: replace(p, hw="emulated-2m-1m"),
    "schedule": lambda p: replace(p, schedule_digest="1" * 12),
    "a wait": lambda p: evicting().without_wait("forward", 5, "f4").build(),
    "mesh": lambda p: replace(p, mesh=(("tp", 2),)),
    "a slot": lambda p: evicting().set("backward", 2, "evict c2 <- d1 @d2h after b1").build(),
    "a segment": lambda p: replace(p, segments=(replace(p.segments[0], live_nbytes=1), *p.segments[1:])),
    "a budget": lambda p: replace(p, memory=replace(p.memory, device_budget_nbytes=1)),
    "a placement": lambda p: replace(
        p, layout=replace(p.layout, placements=(replace(p.layout.placements[0], offset=1), *p.layout.placements[1:]))
    ),
    "a home": lambda p: replace(p, layout=replace(p.layout, arena_nbytes=4096)),
    "the rank": lambda p: replace(p, layout=replace(p.layout, rank=1)),
    "what moves": lambda p: replace(p, moves=moving().build().moves),
    "an exit state": lambda p: evicting().but(saved=()).build(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_digest_differs_when_anything_decisive_differs(what: str) -> None:
    plan = evicting().build()
    assert CHANGES[what](plan).digest() != plan.digest()


def test_lookup_by_name() -> None:
    plan = evicting().build()
    assert plan.program("step").role == "step"
    assert plan.segment("bwd.1").lands == (2,)
    assert [s.name for s in plan.graph_segments("forward")] == ["fwd.0", "fwd.1", "fwd.2"]
    with pytest.raises(KeyError, match="forward, backward, step, restore, abandon, resume"):
        plan.program("eval")
    with pytest.raises(KeyError, match=r"fwd\.9"):
        plan.segment("fwd.9")


def test_labels_are_role_letter_and_position() -> None:
    plan = evicting().build()
    assert [label for label, _ in plan.program("restore").labelled()] == ["s0", "s1", "s2"]
    assert plan.program("abandon").label(1) == "t1"


def test_moved_bytes_count_one_iteration() -> None:
    evict, stream = evicting().build(), streaming().build()
    assert evict.moved_nbytes(Stream.H2D) == 4 * 256  # c0, c1, c2 in forward, c0 again in backward
    assert evict.moved_nbytes(Stream.D2H) == 3 * 256
    assert stream.moved_nbytes(Stream.H2D) == 2 * 256 + 768
    assert stream.moved_nbytes(Stream.D2H) == 2 * 256 + 768


def test_peak_is_arena_and_nonmodel() -> None:
    assert evicting().build().memory.device_peak_nbytes == 512 + 1000
