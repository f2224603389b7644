"""The contract of a pass, and the runner that keeps it.

A pass is a pure function ``Draft -> Draft`` with a name and three sets of fact names: what it *requires* to be decided
before it, what it *provides*, and with which facts it *conflicts*. The whole order is checked before the first pass
runs; the runner knows no pass by name. Every stage is kept, timed and described in one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from chunkc.errors import BudgetError
from chunkc.ir.plan import StageRecord
from chunkc.passes.support.draft import Draft

Check = Callable[[str, Draft], None]


class Pass(Protocol):
    """One decision of the planner, with a name that is unique in a pipeline.

    It ``requires`` facts that earlier passes provide, ``provides`` others, and ``conflicts`` with decided ones.
    """

    @property
    def name(self) -> str: ...
    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def provides(self) -> frozenset[str]: ...
    @property
    def conflicts(self) -> frozenset[str]: ...

    def __call__(self, draft: Draft) -> Draft:
        """The draft with the facts of this pass added."""
        ...


class PassOrderError(ValueError):
    """A pipeline whose contracts cannot all be kept."""


def check_order(passes: Sequence[Pass]) -> None:
    """Check all contracts of a pipeline without running it.

    Raises:
        PassOrderError: naming the pass, the fact, and which pass would provide it.
    """
    decided: dict[str, str] = {}
    names: set[str] = set()
    for pass_ in passes:
        if pass_.name in names:
            raise PassOrderError(f"the pipeline has two passes named {pass_.name!r}; names must be unique")
        names.add(pass_.name)
        for fact in sorted(pass_.requires - decided.keys()):
            later = [p.name for p in passes if fact in p.provides]
            hint = f"move {later[0]!r} before it" if later else "no pass of this pipeline provides it"
            raise PassOrderError(f"pass {pass_.name!r} requires {fact!r}, which is not decided before it: {hint}")
        for fact in sorted(pass_.conflicts & decided.keys()):
            raise PassOrderError(f"pass {pass_.name!r} must run before {fact!r} is decided, but {decided[fact]!r} does")
        decided.update(dict.fromkeys(sorted(pass_.provides), pass_.name))


def run_passes(
    draft: Draft, passes: Sequence[Pass], check: Check | None = None
) -> tuple[Draft, tuple[tuple[str, Draft], ...]]:
    """Run the passes of a pipeline on ``draft``.

    ``check(name, draft)`` is called before the first pass (as ``"start"``) and after each.

    Returns:
        The last draft and every stage as ``(pass name, draft after it)``.

    Raises:
        PassOrderError: before anything runs.
        BudgetError: as a pass raised it: it addresses the user and is complete.
        Exception: whatever a pass raised, with a note that names the pass.
    """
    check_order(passes)
    if check is not None:
        check("start", draft)
    stages: list[tuple[str, Draft]] = []
    for pass_ in passes:
        draft = _run_one(pass_, draft)
        stages.append((pass_.name, draft))
        if check is not None:
            check(pass_.name, draft)
    return draft, tuple(stages)


def _run_one(pass_: Pass, draft: Draft) -> Draft:
    started = time.perf_counter()
    try:
        result = pass_(draft)
    except BudgetError:
        raise
    except Exception as error:  # whatever a pass raises, users' own too: it goes on with the pass's name
        error.add_note(f"raised by the pass {pass_.name!r} of chunkc's planner")
        raise
    elapsed_ms = (time.perf_counter() - started) * 1e3
    return result.with_stage(StageRecord(name=pass_.name, elapsed_ms=elapsed_ms, note=result.note))
