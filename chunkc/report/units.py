"""Sizes and ranges as people read them; a whole report has one unit, so that its numbers compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chunkc.ir.plan import Plan
from chunkc.ir.work import Kind

ESTIMATE_NOTE = "activations are estimated, with a margin: compile reads compiled code"

_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


@dataclass(frozen=True, slots=True)
class Unit:
    """A binary unit: its name and its bytes.

    >>> Unit("MiB", 1024**2).of(3 * 1024**2), Unit("MiB", 1024**2).of(1), Unit("MiB", 1024**2).of(0)
    ('3.00', '<0.01', '0.00')
    """

    name: str
    nbytes: int

    def of(self, nbytes: int) -> str:
        """``nbytes`` in this unit with two decimals; what is there but rounds to nothing is ``<0.01``."""
        text = f"{nbytes / self.nbytes:,.2f}"
        return "<0.01" if nbytes > 0 and text == "0.00" else text

    def named(self, nbytes: int) -> str:
        """The same with the unit's name behind it."""
        return f"{self.of(nbytes)} {self.name}"


def unit_for(nbytes: int) -> Unit:
    """The largest of GiB, MiB and KiB of which ``nbytes`` is at least one (KiB when it is less)."""
    for name, unit_nbytes in _UNITS:
        if nbytes >= unit_nbytes:
            return Unit(name, unit_nbytes)
    return Unit(*_UNITS[-1])


def size(nbytes: int) -> str:
    """``nbytes`` in the unit of its own value, for example ``20.00 MiB``, with the sign of a negative."""
    return f"{'-' if nbytes < 0 else ''}{unit_for(abs(nbytes)).named(abs(nbytes))}"


def unit_of(plan: Plan) -> Unit:
    """The unit in which a report of ``plan`` gives sizes: that of its planned device peak."""
    return unit_for(plan.memory.device_peak_nbytes)


def repeated(plan: Plan) -> str:
    """The word for what the programs of ``plan`` repeat: ``step`` or ``evaluation``."""
    return "evaluation" if plan.is_evaluation else "step"


def replicas_of(plan: Plan) -> str:
    """Text behind the ranks of a plan: their mesh, or the replicas that have as many; else empty."""
    if plan.mesh:
        return f", mesh {mesh_text(plan)}"
    return "" if plan.layout.num_replicas == 1 else f" in each of {plan.layout.num_replicas} replicas"


def mesh_text(plan: Plan) -> str:
    """The mesh of a plan's ranks as ``mesh=`` reads it."""
    return ",".join(f"{name}={size}" for name, size in plan.mesh)


def exchanged_by_model(plan: Plan) -> tuple[int, int]:
    """Collectives of the model's own in one iteration, and bytes that the rank receives by them."""
    works = [work for segment in plan.segments for work in segment.work if work.kind is Kind.LINK]
    times = plan.accumulate
    return times * sum(work.num_kernels for work in works), times * sum(work.nbytes for work in works)


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` as a percentage with one decimal; ``-`` of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def plural(count: int, noun: str) -> str:
    """``1 chunk``, ``2 chunks``, ``1,024 chunks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges(prefix: str, numbers: Iterable[int]) -> str:
    """Numbers as ranges, ascending, each once.

    >>> ranges("c", [3, 1, 2, 7])
    'c1-3 c7'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(f"{prefix}{a}" if a == b else f"{prefix}{a}-{b}" for a, b in runs)


def printable(line: str) -> str:
    """``line`` with an escape for every character that is not printed: names from files may hold any.

    >>> printable("a model\\x1b[2J\\n")
    'a model\\\\x1b[2J\\\\n'
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
