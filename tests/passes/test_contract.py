"""Contracts are checked before anything runs; the runner times, keeps and names every pass."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from schedules import chain, target

from chunkc.errors import PlanError
from chunkc.passes import PIPELINE, Draft, PassOrderError, PlanOptions, check_order, make_plan, run_passes


@dataclass(frozen=True)
class Fake:
    name: str
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    work: Callable[[Draft], Draft] = field(default=lambda draft: draft)

    def __call__(self, draft: Draft) -> Draft:
        return self.work(draft)


def draft() -> Draft:
    return Draft(chain(2), target(), PlanOptions())


def test_the_pipeline_keeps_its_own_contracts() -> None:
    check_order(PIPELINE)
    with pytest.raises(PassOrderError, match=r"'chunk_mapping' requires 'chunk_numel'.*move 'chunk_size' before it"):
        check_order([*PIPELINE[:2], PIPELINE[3], PIPELINE[2], *PIPELINE[4:]])


def test_every_pass_of_the_pipeline_is_needed() -> None:
    for left_out in PIPELINE[:-1]:
        with pytest.raises(PassOrderError, match="no pass of this pipeline provides it"):
            check_order([p for p in PIPELINE if p is not left_out])


def test_a_conflict_names_both_passes() -> None:
    first, second = Fake("a", provides=frozenset({"x"})), Fake("b", conflicts=frozenset({"x"}))
    with pytest.raises(PassOrderError, match="'b' must run before 'x' is decided, but 'a' does"):
        check_order([first, second])
    check_order([second, first])


def test_names_are_unique() -> None:
    with pytest.raises(PassOrderError, match="two passes named 'a'"):
        check_order([Fake("a"), Fake("a")])


def test_nothing_runs_when_a_contract_is_broken() -> None:
    ran: list[str] = []

    def work(found: Draft) -> Draft:
        ran.append("a")
        return found

    with pytest.raises(PassOrderError):
        run_passes(draft(), [Fake("a", work=work), Fake("b", requires=frozenset({"x"}))])
    assert ran == []


def test_stages_are_kept_timed_and_described() -> None:
    passes = [Fake("a", work=lambda d: replace(d, chunk_numel=1, note="one")), Fake("b", work=lambda d: d)]
    last, stages = run_passes(draft(), passes)
    assert [(name, d.chunk_numel) for name, d in stages] == [("a", 1), ("b", 1)]
    assert [(s.name, s.note) for s in last.stages] == [("a", "one"), ("b", "")]
    assert all(s.elapsed_ms >= 0 for s in last.stages)


def test_the_check_is_called_around_every_pass() -> None:
    seen: list[tuple[str, int | None]] = []
    passes = [Fake("a", work=lambda d: replace(d, chunk_numel=1)), Fake("b", work=lambda d: replace(d, chunk_numel=2))]
    run_passes(draft(), passes, lambda name, d: seen.append((name, d.chunk_numel)))
    assert seen == [("start", None), ("a", 1), ("b", 2)]


def test_a_failing_pass_is_named() -> None:
    def fail(_: Draft) -> Draft:
        raise PlanError("broken")

    with pytest.raises(PlanError, match="broken") as caught:
        run_passes(draft(), [Fake("a"), Fake("culprit", work=fail)])
    assert caught.value.__notes__ == ["raised by the pass 'culprit' of chunkc's planner"]


def test_a_pipeline_of_the_caller_replaces_ours() -> None:
    extra = Fake("mine", requires=frozenset({"programs"}), work=lambda d: replace(d, note="mine ran"))
    result = make_plan(chain(2), target(), passes=[*PIPELINE, extra])
    assert result.plan.stages[-1].note == "mine ran"
    assert result.drafts[-1][0] == "mine"
