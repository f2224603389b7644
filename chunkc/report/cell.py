"""A plan or a timeline in a notebook's cell: one small table of HTML, complete in itself.

Names come from models and files, so every text is escaped; there is no script, and no style but alignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.report.units import ESTIMATE_NOTE, percent, plural, printable, repeated, size

_MOVES = ((Stream.H2D, "from host to device"), (Stream.D2H, "from device to host"), (Stream.COMM, "from other ranks"))


def cell(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    """Return HTML of a table whose first column is text and others are numbers, with lines below."""
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    lines = "".join(f"<div>{_text(note)}</div>" for note in notes)
    heads = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    return (
        f"<div><div><b>{_text(title)}</b></div><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        f"{lines}</div>"
    )


def plan_cell(plan: Plan) -> str:
    """Return memory beside its budgets, and what moves, as HTML."""
    layout, memory = plan.layout, plan.memory
    ranks = f", rank {layout.rank} of {layout.world_size}" if layout.world_size > 1 else ""
    rows = [
        (str(tier), size(needed), size(memory.budgets[tier]), percent(needed, memory.budgets[tier]))
        for tier, needed in memory.needs.items()
    ]
    moves = [f"{size(plan.moved_nbytes(stream))} {words}" for stream, words in _MOVES if plan.moved_nbytes(stream)]
    notes = [
        f"{size(layout.model_data_nbytes())} of parameters and optimizer states, "
        f"{plural(len(layout.chunks), 'chunk')}, {plural(len(plan.segments), 'segment')}",
        f"moved per {repeated(plan)}: {', '.join(moves) or 'nothing'}",
        *([ESTIMATE_NOTE] if memory.is_estimate else []),
    ]
    title = f"plan {plan.digest()}: {plan.model} on {plan.hw}{ranks}"
    return cell(title, ("memory", "planned", "budget", "share"), rows, notes)


def _cells(row: Sequence[str]) -> str:
    first, *numbers = map(_text, row)
    return f"<th>{first}</th>" + "".join(f'<td style="text-align: right">{number}</td>' for number in numbers)


def _text(text: str) -> str:
    return escape(printable(text.strip()))
