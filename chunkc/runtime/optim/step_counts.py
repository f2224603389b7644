"""The step counts of one optimizer's parameters, and whose their states are.

States belong to the optimizer that began last to step a parameter. A step that may be skipped counts until its outcome
is asked for, as torch's scaler would not have stepped either. Counts and that outcome change in one assignment, so that
an exception leaves the counts before it or those after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from chunkc.errors import ChunkcError
from chunkc.runtime.execution.grad_norm import StepDecision
from chunkc.runtime.model.optimizer_steps import OptimizerSteps
from chunkc.runtime.optim.state_dict import managed
from chunkc.runtime.update.rules import UpdateRule

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Taken:
    """Steps taken, by index; one fewer for ``latest`` where ``outcome`` says that the step was skipped."""

    counts: Mapping[int, int] = field(default_factory=dict)
    outcome: StepDecision | None = None
    latest: tuple[int, ...] = ()

    def settled(self) -> _Taken:
        counts = dict(self.counts)
        if self.outcome is not None and self.outcome.is_skipped():
            counts |= {index: counts[index] - 1 for index in self.latest}
        return _Taken({index: count for index, count in counts.items() if count})


class StepCounts:
    """How often each parameter was stepped, by its index; parameters without an entry were never stepped.

    ``num_writes``: how often the state of each was replaced, or written to, otherwise than by a step.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        self.runtime: OptimizerSteps | None = None
        self.params: dict[int, nn.Parameter] = {}
        self.num_writes: Counter[int] = Counter()
        self._token = object()
        self._taken = _Taken()

    def hold(self, runtime: OptimizerSteps | None, params: Iterable[nn.Parameter]) -> None:
        """Take in the parameters of one more group, all of ``runtime``."""
        self.runtime = runtime
        if runtime is not None:
            runtime.parameters.has_optimizer = True
        self.params.update({managed(param)[1]: param for param in params})

    def current(self) -> Mapping[int, int]:
        """The counts, in the order of first steps; ChunkcError when another optimizer took one over."""
        self.settle()
        self.check_owned(self._taken.counts)
        return dict(self._taken.counts)

    def following(self, indexes: Iterable[int]) -> dict[int, int]:
        """The counts that the next step of ``indexes`` brings."""
        return {index: self._taken.counts.get(index, 0) + 1 for index in indexes}

    def advance(self, counts: Mapping[int, int], outcome: StepDecision | None) -> None:
        """A step was launched that brings ``counts``, unless ``outcome`` says that it was skipped."""
        self._taken = _Taken({**self._taken.counts, **counts}, outcome, tuple(counts))
        self._take_over(counts)

    def replace(self, counts: Mapping[int, int], owned: Iterable[int] = ()) -> None:
        """Start from given states: ``counts``, 1 or more, and no others; ``owned`` have zeros."""
        self._taken = _Taken(dict(counts))
        self.num_writes.update({*counts, *owned})
        self._take_over((*counts, *owned))

    def put(self, index: int, count: int) -> None:
        """One parameter goes on from ``count``, 1 or more."""
        self.settle()
        self._taken = _Taken({**self._taken.counts, index: count})
        self.note_write(index)
        self._take_over([index])

    def note_write(self, index: int) -> None:
        """The states of a parameter are about to be replaced: what was gathered of its state before is old."""
        self.num_writes[index] += 1

    def forget(self, indexes: Iterable[int]) -> None:
        """These parameters count as never stepped: their next step starts from states of zero."""
        self.settle()
        gone = frozenset(indexes)
        self._taken = _Taken({index: count for index, count in self._taken.counts.items() if index not in gone})

    def settle(self) -> None:
        """Take back the counts of the latest step where it was skipped; waits for its outcome."""
        if self.runtime is not None:
            self.runtime.settle()
        if self._taken.outcome is not None:
            self._taken = self._taken.settled()

    def check_owned(self, indexes: Iterable[int]) -> None:
        """Refuse, by ChunkcError, parameters stepped here that another optimizer steps since."""
        if self.runtime is None:
            return
        owners = self.runtime.owners
        foreign = sorted(i for i in indexes if i in self._taken.counts and owners.get(i) is not self._token)
        if foreign:
            raise ChunkcError(
                "a parameter's moments exist once and belong to the optimizer that began last to step it; another one "
                f"has begun since to step {names_of(self.runtime, foreign)}: go on with that one"
            )

    def _take_over(self, indexes: Iterable[int]) -> None:
        if self.runtime is not None:
            self.runtime.owners.update(dict.fromkeys(indexes, self._token))


def names_of(runtime: OptimizerSteps, indexes: list[int]) -> str:
    names = ", ".join(repr(runtime.parameters.name_of(index)) for index in indexes[:_MAX_NAMED])
    return names + (f" and {len(indexes) - _MAX_NAMED} more" if len(indexes) > _MAX_NAMED else "")
