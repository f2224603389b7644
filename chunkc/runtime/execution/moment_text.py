"""A plan's account of the device before one of its actions, as text for an error."""

from __future__ import annotations

from chunkc.ir.actions import Op
from chunkc.ir.occupancy import occupancy_before
from chunkc.ir.plan import Plan, Program

_MAX_NAMED = 12
_MIB = 2**20


def moment_text(plan: Plan, program: Program, position: int) -> str:
    """Arena, residents and non-model bytes before action ``position`` of ``program``, in a few lines."""
    occupancy = occupancy_before(plan, program, position)
    action, layout, memory = program.actions[position], plan.layout, plan.memory
    named = sorted(occupancy.pairs(), key=lambda pair: layout.slots[pair[1]].offset)
    shown = ", ".join(f"{target} in d{slot} ({layout.slots[slot].nbytes})" for target, slot in named[:_MAX_NAMED])
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    lines = [
        f"planned peak {_mib(memory.device_peak_nbytes)} of budget {_mib(memory.device_budget_nbytes)} MiB",
        f"arena {layout.arena_nbytes} bytes, {occupancy.used_nbytes} of them in use: {shown or 'nothing'}{more}",
    ]
    if action.op is Op.RUN:
        segment = plan.segment(action.target)
        lines.append(
            f"activations planned for {segment.name}: {segment.live_nbytes} bytes alive and "
            f"{segment.workspace_nbytes} of workspace"
        )
    return "\n".join(f"  {line}" for line in lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}"
