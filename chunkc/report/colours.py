"""Colours of pictures: those of Okabe and Ito, which any colour vision tells apart, a few paler.

One colour means one thing: parameters are orange where they stand in memory and where they are copied.
"""

from __future__ import annotations

from typing import Final

from chunkc.report.frame import Work
from chunkc.report.memory_curve import Kind

KIND_COLOURS: Final = {
    Kind.STATES: "#CC79A7",
    Kind.PARAMETERS: "#E69F00",
    Kind.GRADIENTS: "#D55E00",
    Kind.GROUPS: "#EBDC62",
    Kind.UNUSED: "#F2F2F2",
    Kind.NONMODEL: "#8FA3B3",
}
WORK_COLOURS: Final = {
    Work.FORWARD: "#0072B2",
    Work.BACKWARD: "#56B4E9",
    Work.PARAMETERS: KIND_COLOURS[Kind.PARAMETERS],
    Work.GRADIENTS: KIND_COLOURS[Kind.GRADIENTS],
    Work.STATES: KIND_COLOURS[Kind.STATES],
    Work.ACTIVATIONS: KIND_COLOURS[Kind.NONMODEL],
    Work.GATHER: KIND_COLOURS[Kind.GROUPS],
    Work.REDUCE: "#7A3500",
    Work.UPDATE: "#009E73",
    Work.OTHER: "#777777",
}
DARK: Final = frozenset({Work.FORWARD, Work.REDUCE, Work.UPDATE, Work.OTHER, Work.GRADIENTS})
"""Colours on which text is white."""
BUDGET: Final = "#B00020"
"""Of the line of the device's budget."""
