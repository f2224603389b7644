"""The pace of a throttled emulated device: the times of actions on a machine, by the cost model.

The law is that of the simulator (`chunkc.cost.actions`, `chunkc.cost.sharing`), but for launches: what the host takes
to launch an action, and to wake a stream, is its own time, throttled or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from chunkc.cost.actions import ActionCosts
from chunkc.cost.rates import CostRates
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.throttle import Pace, PaceLaw


def pace_law(rates: CostRates) -> PaceLaw:
    """The law of a device that is throttled to the rates of one machine, shared as on that machine."""
    return PaceLaw(partial(_paces, rates), rates.sharing.speeds)


def _paces(rates: CostRates, plan: Plan) -> Mapping[str, Pace]:
    """The pace of every action, by its text; HardwareError for actions that the machine has no rates of."""
    costs = ActionCosts(plan, rates)
    paces = {}
    for action in (action for program in plan.programs for action in program.actions):
        cost = costs.of(action)
        paces[str(action)] = Pace(cost.alone_ms, cost.use)
    return paces
