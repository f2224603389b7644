"""Pass ``evaluate``: write the only program of a forward without gradients.

The program leads from the cold state to the cold state. The pass takes the place of ``step`` at the end of a pipeline.
Evaluations share the layout of training. All streams are joined before and after, so that whatever ran before is no
hazard and the next program begins as from a cold start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.ir.plan import Program, State
from chunkc.passes.step import static_residents
from chunkc.passes.support.draft import Draft, decided
from chunkc.passes.support.hazards import Analysis


@dataclass(frozen=True, slots=True)
class EvaluatePass:
    """Decides ``programs``: ``evaluate`` with all waits."""

    name: str = "evaluate"
    requires: frozenset[str] = frozenset({"mapping", "os_home", "actions"})
    provides: frozenset[str] = frozenset({"programs"})
    conflicts: frozenset[str] = frozenset()

    def __call__(self, draft: Draft) -> Draft:
        layout, (forward, backward) = decided(draft.layout, "layout"), decided(draft.accesses, "actions")
        static, states = static_residents(layout)
        cold = State("cold", (*((f"c{c}", s) for c, s in sorted(static.items())), *states))
        actions = Analysis().run("evaluate", (*forward, *backward))
        program = Program("evaluate", cold, cold, actions)
        note = f"{len(actions)} actions, {sum(len(a.waits) for a in actions)} waits"
        return replace(draft, programs=(program,), note=note)
