"""The pace of a throttled emulated device: what the cost model says that actions take on a machine.

The same law that the simulator follows (`chunkc.cost.actions`, `chunkc.cost.sharing`), handed to a device that takes
these times in earnest. Launches are the exception: what the host takes to launch an action, and to wake a stream, is
its own time, throttled or not.
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
        """The pace of every action of every program, by its text.

        Raises:
            HardwareError: when the plan takes what the machine has no rates of.
        """
        costs = ActionCosts(plan, self._rates)
        found = {}
        for action in (action for program in plan.programs for action in program.actions):
            cost = costs.of(action)
            found[str(action)] = Pace(cost.alone_ms, cost.use)
        return found

    def speeds(self, uses: tuple[Use, ...]) -> tuple[float, ...]:
        """As the machine's sharing law has it."""
        return self._rates.sharing.speeds(uses)
