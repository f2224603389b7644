"""Reports of a plan: table, full text, summary, and the public ``chunkc.Plan`` that offers them.

The representation (``chunkc.ir``) knows nothing of reports; `Plan` adds them to it and changes nothing else.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from chunkc.ir import plan as ir
from chunkc.ir.plan_file import load_plan
from chunkc.report import html, plot
from chunkc.report.cell import plan_cell
from chunkc.report.summary import summarize
from chunkc.report.table import render
from chunkc.report.text import full_text
from chunkc.report.units import printable

__all__ = ["Plan", "full_text", "html", "plot", "render", "summarize"]


class Plan(ir.Plan):
    """One training iteration, decided, and readable: ``print(plan)``, ``plan.summary()``, ``plan.text()``.

    It equals, hashes and digests as the `chunkc.ir.plan.Plan` with the same content.
    """

    __slots__ = ()

    @classmethod
    def of(cls, plan: ir.Plan) -> Plan:
        """The same plan with its reports; ``plan`` itself when it has them."""
        if isinstance(plan, cls):
            return plan
        return cls(**{field.name: getattr(plan, field.name) for field in fields(ir.Plan)})

    def __str__(self) -> str:
        return render(self)

    def __repr__(self) -> str:
        return printable(f"<chunkc.Plan {self.digest()} of {self.model} on {self.hw}: {len(self.segments)} segments>")

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of memory, and what moves."""
        return plan_cell(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ir.Plan):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(ir.Plan) if f.compare)

    __hash__ = ir.Plan.__hash__

    def text(self) -> str:
        """Everything, readable as a program: provenance, layout, slots, every action and moment."""
        return full_text(self)

    def summary(self) -> str:
        """Tables of model data, chunks, memory against its budget, and bytes moved per step."""
        return summarize(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The plan that ``to_json`` described; ValueError on another format version."""
        return cls.of(ir.Plan.from_json(data))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote, and prove it safe as planning does.

        Raises OSError, and PlanError, with file and place, for another format and for a plan that is not safe.
        """
        return cls.of(load_plan(path))
