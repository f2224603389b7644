"""Choices that are kept: the same plan without a search, from everything that decides it, and from nothing else."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from costs import RATES, UNIT_NBYTES
from schedules import chain, target

from chunkc.files import KeptDocuments
from chunkc.ir.schedule import Schedule
from chunkc.passes import PlanOptions, Target, make_fastest_plan
from chunkc.passes.pipeline import PIPELINE
from chunkc.passes.search import MAX_ACTIONS
from chunkc.passes.support.choices import Choice, find_choice, key_of

NUMEL = 4096
SCHEDULE = chain(12, numel=NUMEL)
TARGET = replace(target(5 * NUMEL * 4), rates=RATES)
OPTIONS = PlanOptions()


class Store(dict[str, Any]):
    """Documents in memory."""

    def find(self, key: str) -> Any:
        return self.get(key)

    def keep(self, key: str, document: Any) -> None:
        self[key] = document


def working(schedule: Schedule) -> Schedule:
    graphs = [replace(g, operators=tuple(replace(o, nbytes=UNIT_NBYTES) for o in g.operators)) for g in schedule.graphs]
    return replace(schedule, forward=graphs[0], backward=graphs[1])


@pytest.mark.long
def test_what_was_chosen_gives_the_same_plan_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHUNKC_CACHE", raising=False)
    store, schedule = KeptDocuments(tmp_path / "kept"), working(SCHEDULE)
    searched = make_fastest_plan(schedule, TARGET)
    first, second = (make_fastest_plan(schedule, TARGET, choices=store) for _ in range(2))
    assert len(searched.candidates) > 1 and first.candidates == searched.candidates and second.candidates == ()
    assert searched.plan == first.plan == second.plan
    assert first.plan.stages[-1].note == second.plan.stages[-1].note
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_search_varies_no_other_options() -> None:
    chosen = {field.name for field in fields(Choice)} - {"note"}
    for candidate in make_fastest_plan(working(SCHEDULE), TARGET).candidates:
        assert Choice.of(candidate.options, "").applied_to(OPTIONS) == candidate.options
    assert chosen < {field.name for field in fields(PlanOptions)}


def test_passes_of_the_caller_are_searched_each_time() -> None:
    store = Store()
    assert make_fastest_plan(working(SCHEDULE), TARGET, passes=PIPELINE, choices=store).candidates
    assert store == {}


CHANGES: dict[str, tuple[Schedule, Target, PlanOptions]] = {
    "schedule": (chain(11, numel=NUMEL), TARGET, OPTIONS),
    "device": (SCHEDULE, target(6 * NUMEL * 4), OPTIONS),
    "rates": (SCHEDULE, replace(TARGET, rates=None), OPTIONS),
    "ranks": (SCHEDULE, replace(TARGET, world_size=2), OPTIONS),
    "inline": (SCHEDULE, replace(TARGET, runs_inline=True), OPTIONS),
    "wish": (SCHEDULE, TARGET, replace(OPTIONS, num_second_homes=1)),
    "moving": (SCHEDULE, TARGET, replace(OPTIONS, moved_share=0.5)),
    "clipping": (SCHEDULE, TARGET, replace(OPTIONS, tracks_grad_norm=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_everything_that_decides_is_in_the_key(name: str) -> None:
    schedule, changed, options = CHANGES[name]
    assert key_of(schedule.digest(), changed, options, MAX_ACTIONS) != key_of(
        SCHEDULE.digest(), TARGET, OPTIONS, MAX_ACTIONS
    )
    assert key_of(SCHEDULE.digest(), TARGET, OPTIONS, 1) != key_of(SCHEDULE.digest(), TARGET, OPTIONS, MAX_ACTIONS)


def test_ranks_have_one_key() -> None:
    first, second = (replace(TARGET, world_size=2, rank=rank) for rank in range(2))
    assert key_of(SCHEDULE.digest(), first, OPTIONS, MAX_ACTIONS) == key_of(
        SCHEDULE.digest(), second, OPTIONS, MAX_ACTIONS
    )


GOOD = asdict(Choice.of(replace(OPTIONS, chunk_numel=1), ""))


@pytest.mark.parametrize("document", [[], {}, "text", GOOD | {"more": 1}, GOOD | {"chunk_numel": "1"}])
def test_a_document_of_another_form_is_no_choice(document: Any) -> None:
    assert find_choice(Store(key=GOOD), "key") is not None
    assert find_choice(Store(key=document), "key") is None
