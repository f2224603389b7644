"""The debug ladder ``CHUNKC_DEBUG=1..5``: each rung shows what the one below shows, and more.

    1 summary    2 table    3 stages (what each pass did)    4 plan text    5 generated code

All of it goes through ``logging.getLogger("chunkc")`` at INFO, from rank 0. Whoever sets the variable wants to see it:
where logging is not configured for that, a handler on standard error stands in while the report is written.
See docs/env_vars.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from chunkc.errors import ChunkcError
from chunkc.ir.plan import Plan, StageRecord
from chunkc.report import full_text, render, summarize

VARIABLE = "CHUNKC_DEBUG"
MAX_LEVEL = 5


def debug_level() -> int:
    """The rung of the environment, 0 when unset or empty; ChunkcError for no whole number from 0 to 5."""
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return 0
    if value not in {str(level) for level in range(MAX_LEVEL + 1)}:
        rungs = "0 nothing, 1 summary, 2 table, 3 stages, 4 plan text, 5 generated code"
        raise ChunkcError(f"{VARIABLE}={value!r} is not allowed; it takes one of: {rungs}")
    return int(value)


def explain(plan: Plan, stages: Sequence[StageRecord], code: Mapping[str, str]) -> None:
    """Log what the rung asks for, on rank 0; ``code`` is by segment name. ChunkcError as of `debug_level`."""
    level = debug_level()
    if level == 0 or plan.layout.rank != 0:
        return
    logger = logging.getLogger("chunkc")
    with visible(logger):
        for text in _texts(plan, stages, code, level):
            logger.info("%s", text)


def _texts(plan: Plan, stages: Sequence[StageRecord], code: Mapping[str, str], level: int) -> Iterator[str]:
    yield summarize(plan)
    if level >= 2:
        yield render(plan)
    if level >= 3:
        yield from (f"pass {stage.name} ({stage.elapsed_ms:.1f} ms): {stage.note}" for stage in stages)
    if level >= 4:
        yield full_text(plan)
    if level >= 5:
        yield from (f"code of {name}:\n{source}" for name, source in code.items())


@contextmanager
def visible(logger: logging.Logger) -> Iterator[None]:
    """Make INFO messages of ``logger`` visible within the block: on standard error without a handler."""
    level = logger.level
    handler = None if logger.hasHandlers() else logging.StreamHandler()
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if handler is not None:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)
