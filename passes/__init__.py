"""The planner: a literal, ordered list of passes from a schedule to a plan.

Each pass is one file and one decision over frozen facts; ``pipeline.py`` lists them, and plans by them.
"""

from chunkc.passes.contract import Pass, PassOrderError, check_order, run_passes
from chunkc.passes.pipeline import (
    PIPELINE,
    Planned,
    assemble,
    make_evaluation_plan,
    make_fastest_plan,
    make_fitting_plan,
    make_plan,
    measuring_plan,
)
from chunkc.passes.support.choices import ChoiceStore
from chunkc.passes.support.draft import ACTIVATIONS, Activations, Draft, Packings, PlanOptions, Target, budgets_of

__all__ = [
    "ACTIVATIONS",
    "PIPELINE",
    "Activations",
    "ChoiceStore",
    "Draft",
    "Packings",
    "Pass",
    "PassOrderError",
    "PlanOptions",
    "Planned",
    "Target",
    "assemble",
    "budgets_of",
    "check_order",
    "make_evaluation_plan",
    "make_fastest_plan",
    "make_fitting_plan",
    "make_plan",
    "measuring_plan",
    "run_passes",
]
