"""Read a plan from a file of unknown origin: bounded, strict, and verified before use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from chunkc.errors import PlanError
from chunkc.files import FormatError, read_json
from chunkc.ir.plan import Plan
from chunkc.ir.references import check_references
from chunkc.ir.verify import verify

MAX_NBYTES: Final = 2**30
"""Of a file: ten times the plan of a model with 1,000 layers."""


def load_plan(path: str | Path) -> Plan:
    """The plan that ``Plan.save`` wrote to ``path``, verified.

    Raises OSError, and PlanError, with file and place, for another format and for a plan that the verifier refuses.
    """
    try:
        data = read_json(path, max_nbytes=MAX_NBYTES)
        if not isinstance(data, dict) or "format_version" not in data:
            raise FormatError("a plan is a JSON object with a format_version")
        plan = Plan.from_json(data)
        check_references(plan)
    except FormatError as error:
        raise PlanError(f"{path} holds no plan that this release reads: {error}") from error
    try:
        verify(plan)
    except PlanError as error:
        raise PlanError(f"{path} holds a plan that the verifier refuses: {error}") from error
    return plan
