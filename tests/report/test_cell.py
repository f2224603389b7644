"""A plan and a timeline in a notebook: one table that is well formed, escaped, and refers to nothing."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from costs import RATES
from plans import distributed, evicting
from plans_for_report import gpt_plan

from chunkc.cost import simulate_with
from chunkc.ir import plan as ir
from chunkc.report import Plan
from chunkc.report.frame import LANE_NAMES
from chunkc.report.timeline import Timeline

ALLOWED = {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
STRANGE = "<script>alert(1)</script>&\x1b[2J"


class Cell(HTMLParser):
    """Tags, attributes and rows of a fragment; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: set[str] = set()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("th", "td"):
            self.rows[-1][-1] += data
        else:
            self.texts.append(data)


def strange(plan: ir.Plan) -> Plan:
    return Plan.of(replace(plan, model=STRANGE, hw=STRANGE))


def test_a_plan() -> None:
    plan = Plan.of(gpt_plan())
    cell = Cell(plan._repr_html_())
    assert cell.rows[0] == ["memory", "planned", "budget", "share"]
    assert [row[0] for row in cell.rows[1:]] == ["device", "host"]
    assert cell.rows[1][1:] == ["3.23 MiB", "4.00 MiB", "80.7 %"]
    assert cell.texts[0] == f"plan {plan.digest()}: TinyGPT on emulated-4m-64m"
    assert any(text.startswith("moved per step: ") and "host to device" in text for text in cell.texts)


def test_ranks_are_said() -> None:
    plan = Plan.of(distributed().build())
    cell = Cell(plan._repr_html_())
    assert cell.texts[0].endswith("rank 0 of 2")
    assert any("from other ranks" in text for text in cell.texts)


def test_a_timeline() -> None:
    timeline = Timeline.of(simulate_with(evicting().build(), RATES))
    cell = Cell(timeline._repr_html_())
    assert cell.rows[0][:3] == ["stream", "busy ms", "share"]
    assert [row[0] for row in cell.rows[1:]] == [*(LANE_NAMES[s.stream] for s in timeline.streams), "overhead"]
    assert any(text.startswith("step ") for text in cell.texts)


@pytest.mark.parametrize("is_plan", [True, False])
def test_everything_is_escaped_and_nothing_is_loaded(is_plan: bool) -> None:
    plan = strange(gpt_plan())
    timeline = replace(Timeline.of(simulate_with(evicting().build(), RATES)), model=STRANGE, hw=STRANGE)
    text = plan._repr_html_() if is_plan else timeline._repr_html_()
    cell = Cell(text)
    assert cell.tags <= ALLOWED and cell.attributes <= {"style"}
    assert "\x1b" not in text and "http" not in text
    assert any("<script>alert(1)</script>&\\x1b[2J" in t for t in cell.texts)
