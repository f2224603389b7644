"""The page: complete, correct for any name, bounded, and in need of nothing else."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from costs import RATES, with_work
from plans import chain, distributed, evicting

from chunkc.cost import simulate_with
from chunkc.ir.plan import Plan
from chunkc.report import Plan as ReportedPlan
from chunkc.report.frame import LANE_NAMES
from chunkc.report.html import MAX_STALLS, page
from chunkc.report.trace import trace

VOID = {"meta", "img", "input", "br"}


class Page(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: dict[str, str] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id") or tag))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            name = self.open[-1][1]
            self.texts[name] = self.texts.get(name, "") + data


def made(plan: Plan, *, timed: bool = True) -> str:
    return page(plan, simulate_with(plan, RATES) if timed else None)


PLANS = {name: with_work(spec.build(), 3) for name, spec in (("evicting", evicting()), ("two ranks", distributed()))}


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_the_whole_plan_is_in_the_page(name: str, timed: bool) -> None:
    plan = PLANS[name]
    texts = Page(made(plan, timed=timed)).texts
    assert texts["plan"] == ReportedPlan.of(plan).text()
    lines = {" ".join(line.split()) for line in texts["plan"].splitlines()}
    assert {f"{label} {action}" for p in plan.programs for label, action in p.labelled()} <= lines
    assert texts["summary"] == ReportedPlan.of(plan).summary()
    assert ("simulated, not measured" in texts["simulation"]) == timed


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_fetched(name: str) -> None:
    """The script names one address, which a click opens."""
    found = Page(made(PLANS[name]))
    attributes = [attribute for _, attribute, _ in found.attributes]
    assert not {"src", "href", "srcset", "action", "data", "poster", "background"} & {*attributes}
    policy = next(
        value for tag, name, value in found.attributes if tag == "meta" and name == "content" and "src" in value
    )
    assert policy.startswith("default-src 'none'")
    script = found.texts["script"].replace('const PERFETTO = "https://ui.perfetto.dev";', "")
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", script + found.texts["style"])
    assert {tag for tag, _, _ in found.attributes} & {"link", "iframe", "object", "embed", "img"} == set()


@pytest.mark.parametrize("timed", [True, False])
def test_both_panels_have_a_legend(timed: bool) -> None:
    plan = PLANS["two ranks"]
    source, data = made(plan, timed=timed), json.loads(Page(made(plan, timed=timed)).texts["data"])
    memory, actions = re.findall(r'<ul class="legend">(.*?)</ul>', source, re.DOTALL)
    swatches = r'<li><i style="background:(#\w+)"></i>([^<]+)</li>'
    assert re.findall(swatches, memory) == [(colour, name) for name, colour, *_ in reversed(data["memory"]["kinds"])]
    used = {data["works"][work][1] for lane in data["lanes"] for work in lane[3]}
    assert used <= {colour for colour, _ in re.findall(swatches, actions)}
    assert "budget " in memory and len(re.findall(swatches, memory)) >= 3


@pytest.mark.parametrize("name", PLANS)
def test_the_trace_in_the_page_is_the_trace(name: str) -> None:
    plan = PLANS[name]
    packed = Page(made(plan)).texts["trace"]
    events = trace(plan, simulate_with(plan, RATES))
    assert json.loads(gzip.decompress(base64.b64decode(packed))) == json.loads(json.dumps(events))
    untimed = made(plan, timed=False)
    assert "trace" not in Page(untimed).texts and 'id="perfetto"' not in untimed and 'id="perfetto"' in made(plan)


def test_streams_have_words_for_names_outside_of_actions() -> None:
    source = made(PLANS["two ranks"])
    table = re.search(r'<table class="streams">.*?</table>', source, re.DOTALL)
    assert table is not None
    names = re.findall(r"<tr><td>([^<]+)</td>", table[0])
    assert names == ["device", "host to device", "device to host", "between ranks", "host", "overhead"]
    rows = re.findall(r"<td>([^<]*)</td></tr>", source.partition('id="stalls"')[2].partition("</table>")[0])
    assert rows and not any(re.search(r"\b(h2d|d2h|cpu|comm)\b", row) for row in rows)


def test_names_are_text_whatever_is_in_them() -> None:
    name = """</script><script>alert("1")</script>&amp;{{plan}}'<b>"""
    plan = replace(PLANS["evicting"], model=name)
    source = made(plan)
    texts = Page(source).texts
    assert texts["title"] == f"{name} on {plan.hw}" == texts["h1"]
    assert name in texts["plan"] and source.count("<script") == 3


def test_the_data_of_the_timeline() -> None:
    plan = PLANS["evicting"]
    data = json.loads(Page(made(plan)).texts["data"])
    labels = {label for lane in data["lanes"] for label in lane[4]}
    busy = {lane[0]: sum(lane[2]) / data["ticks"] * data["period"] for lane in data["lanes"]}
    assert labels == {label for p in plan.programs[:3] for label, _ in p.labelled()} - {"f4"}  # a drop takes no time
    assert busy == pytest.approx(
        {LANE_NAMES[s.stream]: s.busy_ms for s in simulate_with(plan, RATES).streams}, rel=1e-4
    )
    assert data["budget"] == plan.memory.device_budget_nbytes and data["phases"][0][0] == "forward"


def test_the_page_of_a_long_plan_is_bounded() -> None:
    """What comes to the plan's text is in proportion to it, and stalls are counted where they are too many."""
    plan = with_work(chain(250).build(), 0)
    timeline = simulate_with(plan, RATES)
    source = page(plan, timeline)
    assert len(timeline.stalls) > MAX_STALLS and "shorter ones</td>" in source
    assert source.partition('id="stalls"')[2].count("<tr>") == MAX_STALLS + 2
    assert len(source) < 2 * len(ReportedPlan.of(plan).text()) + 400_000


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script: runs where node is installed")
@pytest.mark.parametrize("timed", [True, False])
def test_the_script_draws_zooms_describes_and_filters(tmp_path: Path, timed: bool) -> None:
    plan = PLANS["evicting"]
    texts = Page(made(plan, timed=timed)).texts
    code = texts["script"]
    (tmp_path / "texts.json").write_text(json.dumps({name: texts.get(name, "") for name in ("plan", "data", "trace")}))
    (tmp_path / "code.js").write_text(code)
    stand_in = Path(__file__).parent / "page_stand_in.js"
    command = ["node", str(stand_in), str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["outside"] == 0 and found["rectangles"] > 20 and found["zoomed"] != found["whole"]
    assert found["reset"] == found["whole"]
    assert "run fwd.0 @compute" in found["action"] and "non-model" in found["memory"]
    assert ("ms" in found["memory"]) == timed
    assert set(found["filtered"].split("\n")) == {x for x in texts["plan"].split("\n") if re.search(r"\bfetch c0\b", x)}
    assert found["count"].startswith(f"{len(found['filtered'].splitlines())} of ")
    assert found["clicked"] == "f1" and found["scrolled"] == found["whole"] != found["button"]
    if timed:
        events = json.loads(json.dumps(trace(plan, simulate_with(plan, RATES))))
        sent = found["sent"]
        assert sent["before"] == ["PING"] and json.loads(sent["trace"]) == json.loads(sent["saved"]) == events
        assert sent["opened"] == sent["told"] == "https://ui.perfetto.dev" and sent["strangers"] == 0
