"""Advice for ranks that do different things with one model, at the end of errors.

Ranks exchange gradients graph by graph, the last one first. Where a forward breaks into several graphs, all losses must
reach the same of them; within one graph they may reach different outputs (`chunkc.runtime.devices.requested`).
"""

from __future__ import annotations

from typing import Final

_SAME_CALLS: Final = "Call forward, backward, step, evaluation, reads of parameters and saves on every rank"
_SAME_INPUTS: Final = (
    "Build the model, its optimizer and its inputs alike on every rank; where lengths differ, pad the batches of a "
    "step to one length"
)
_SAME_GRAPHS: Final = (
    "The loss of every rank must reach the same graphs of a forward that breaks into several: add the outputs of the "
    "other graphs to it, as in loss + 0 * output.sum(), or remove the break (fullgraph=True names it)"
)
_BACKWARD: Final = "the backward goes on with graph "


def advice_on_calls(has_backward: bool) -> str:
    """Advise ranks that call different things; ``has_backward``: one of the calls is a backward pass."""
    return f"{_SAME_CALLS}. {_SAME_GRAPHS}" if has_backward else _SAME_CALLS


def advice_on_programs(is_broken_backward: bool) -> str:
    """Advise ranks whose programs differ; ``is_broken_backward``: in a backward of several graphs."""
    return _SAME_GRAPHS if is_broken_backward else _SAME_INPUTS


def backward_line(position: int, num_graphs: int) -> str:
    """Return the line by which a rank describes the backward pass of one graph out of several."""
    return f"{_BACKWARD}{position + 1} of the {num_graphs} graphs of the forward"


def is_backward_line(line: str) -> bool:
    """Whether ``line`` is a `backward_line`."""
    return line.startswith(_BACKWARD)
