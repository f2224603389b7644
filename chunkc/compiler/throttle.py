"""The pace of a throttled emulated device: the times of actions on a machine, by the cost model.

The law is that of the simulator (`chunkc.cost.actions`, `chunkc.cost.sharing`), but for launches: what the host takes
to launch an action, and to wake a stream, is its own time, throttled or not.
"""

from __future__ import annotations

from collections.abc import Mapping

from chunkc.cost.actions import ActionCosts
from chunkc.cost.rates import CostRates
from chunkc.cost.sharing import Use
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.throttle import Pace


class Throttle:
    """The rates of one machine as a `chunkc.runtime.devices.throttle.PaceLaw`."""

    def __init__(self, rates: CostRates) -> None:
        self._rates = rates

    def paces(self, plan: Plan) -> Mapping[str, Pace]:
        """The pace of every action, by its text; HardwareError for actions that the machine has no rates of."""
        costs = ActionCosts(plan, self._rates)
        paces = {}
        for action in (action for program in plan.programs for action in program.actions):
            cost = costs.of(action)
            paces[str(action)] = Pace(cost.alone_ms, cost.use)
        return paces

    def speeds(self, uses: tuple[Use, ...]) -> tuple[float, ...]:
        """As the machine's sharing law has it."""
        return self._rates.sharing.speeds(uses)
