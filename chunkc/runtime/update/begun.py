"""The step that a backward expects, whose updates begin before it is called (`second_home`).

    backward     expects a step: its hyperparameters and counts, and the factor of gradients that its decision will find
    worker       begin(chunk)    reads gradient and states at home, writes the second home
    step         says whether it is the step that was expected, as far as the host knows
    worker       update(chunk)   nothing, if the decision found the factor too; else the update, home to second home

Both ways write the same values to the second home, and homes change places once the step is launched. Whatever changes
what a begun update has read drops all of them before (`BegunStep.drop`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from chunkc.runtime.update.rules import Hyper

PATIENCE: Final = 3
"""Steps in a row that turned out otherwise than expected after which no updates are begun."""


@dataclass(slots=True)
class BegunCounts:
    """Steps whose updates were begun, committed, and dropped, which are computed again.

    ``surprises``: of the latest steps whether they were otherwise than expected, by what the host knows (``hypers``)
    and by their decision (``factors``).
    """

    num_begun: int = 0
    num_committed: int = 0
    num_dropped: int = 0
    hypers: deque[bool] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    factors: deque[bool] = field(default_factory=lambda: deque(maxlen=PATIENCE))

    @property
    def is_worthwhile(self) -> bool:
        """Whether one of the latest steps was as expected, or there have been few."""
        return not any(len(kept) == PATIENCE and all(kept) for kept in (self.hypers, self.factors))


class BegunStep:
    """The step that one backward expects, with the inputs that its updates begin with.

    ``expected``: float32 [2] in host memory, the factor that the decision will find and whether the latest one found
    what was expected of it; None where nothing is decided and the factor is 1. It is read by the worker, behind the
    decision before. ``is_begun`` False: nothing begins, only what was expected is compared.
    """

    def __init__(
        self,
        hypers: Mapping[int, Hyper],
        steps: Mapping[int, int],
        num_params: int,
        expected: torch.Tensor | None,
        counts: BegunCounts,
        *,
        is_begun: bool,
    ) -> None:
        self.is_begun = is_begun
        self.is_dropped = False
        self.hypers, self.steps, self.num_params = hypers, steps, num_params
        self._expected, self._counts = expected, counts
        self._begun_with: torch.Tensor | None = None
        self._is_settled = self._is_seen = False
        counts.num_begun += is_begun

    def expects(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> bool:
        """Whether a step with these inputs is the one that was expected; what begins later is dropped if not."""
        is_expected = not self.is_dropped and self.hypers == hypers and self.steps == steps
        self._counts.hypers.append(not is_expected)
        if not is_expected:
            self.drop()
        return is_expected

    def drop(self) -> None:
        """Let nothing more begin, and nothing begun be committed."""
        self.is_dropped = True
        self._settle(is_committed=False)

    def expected_decision(self) -> torch.Tensor:
        """The decision that is expected (`StepInputs.seen`). Called by the worker alone."""
        if self._begun_with is None:
            factor = 1.0 if self._expected is None else float(self._expected[0])
            self._begun_with = torch.tensor([factor, 0.0], dtype=torch.float32, device="cpu")
        return self._begun_with

    def commits(self, decided: torch.Tensor | None) -> bool:
        """Whether a decision (`StepInputs.seen`) found the factor of what was begun. Called by the worker."""
        if not self._is_seen:
            self._is_seen = True
            self._counts.factors.append(self._expected is not None and not self._expected[1])
        begun_with = self._begun_with
        found = [1.0, 0.0] if decided is None else decided.tolist()
        is_found = begun_with is not None and not self.is_dropped and begun_with.tolist() == found
        self._settle(is_committed=is_found)
        return is_found

    def _settle(self, *, is_committed: bool) -> None:
        if self.is_begun and not self._is_settled:
            self._is_settled = True
            self._counts.num_committed += is_committed
            self._counts.num_dropped += not is_committed
