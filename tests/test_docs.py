"""The pages in docs/ are right where that can be read off: errors say what they are listed by, links lead somewhere."""

import ast
import json
import pkgutil
import re
from pathlib import Path

import pytest

import chunkc
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.verify.states import TensorState

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = [path for folder in ("chunkc", "passes") for path in sorted((ROOT / folder).rglob("*.py"))]
ROW = re.compile(r"^\| `(.+?)` \| `(\w+)` \|", re.MULTILINE)


def said() -> str:
    """Every text that the package can say; what is filled in is a zero character."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_errors_are_listed_by_words_that_they_say() -> None:
    texts, rows = said(), ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    assert len(rows) > 30
    unsaid = [text for text, kind in rows if not text.startswith("any text") and text not in texts]
    assert not unsaid
    assert {kind for _, kind in rows} <= set(chunkc.__all__)


def headings(page: Path) -> set[str]:
    """What a link may name behind ``#``, as both GitHub and the site spell it."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_python_is_python(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not heading or heading in headings(target), link
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_the_glossary_leads_to_code() -> None:
    """Its last column names modules, classes and members that there are; all actions, streams and states are in it."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    names = re.findall(r"\| `(chunkc\.[\w.]+)` \|$", text, re.MULTILINE)
    assert len(names) > 60
    for name in names:
        pkgutil.resolve_name(name)
    members = (*Op, *Stream, *ChunkList, *TensorState)
    assert [member for member in members if not re.search(rf"\b({member.name}|{member})\b", text)] == []


def test_files_that_pages_name_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`((?:chunkc|passes|tests|triton_kernels)/[\w./]*)`", page.read_text("utf-8"))
    }
    assert len(named) > 30 and sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_page_is_in_the_index() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    assert [name for name in names if name != "index.md" and f"({name})" not in text] == []


def test_the_status_has_a_mark_in_every_row() -> None:
    rows = [line for line in (ROOT / "docs" / "status.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row != "| | |"]
    assert len(rows) >= 55 and [row for row in rows if row.split(" | ")[1][:1] not in "✓✗"] == []


def test_the_first_step_is_as_it_was_measured() -> None:
    """On the page of questions, in the table of benchmarks, and below it."""
    page, benchmarks = ((ROOT / "docs" / name).read_text("utf-8") for name in ("faq.md", "benchmarks.md"))
    [name] = set(re.findall(r"\((\.\./benchmarks/results/first_step-[\d-]+\.json)\)", benchmarks))
    medians_s = json.loads((ROOT / "docs" / name).read_text("utf-8"))["median_s"]
    figures = [f"{medians_s[cache]['first_step']:.1f} s" for cache in ("cold", "warm")]
    assert all(figure in page and figure in benchmarks for figure in figures)
    assert all(
        f"{medians_s['cold'][phase]} s" in benchmarks for phase in ("captured", "planned", "compiled", "second_step")
    )


def test_names_of_the_package_in_python_blocks_exist() -> None:
    used = set()
    for page in PAGES:
        for block in re.findall(r"^```(?:python|diff)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            used |= set(re.findall(r"\bchunkc\.(\w+)\(", block))
    assert used and used <= set(chunkc.__all__)


def test_functions_of_modules_that_a_page_calls_are_there_after_import_chunkc() -> None:
    """``chunkc.report.plot.plot(...)``, where nothing but ``chunkc`` is imported."""
    text = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    called = set(re.findall(r"\bchunkc\.report\.(\w+)\.(\w+)\(", text))
    assert called == {("plot", "plot"), ("html", "page")}
    for module, function in called:
        assert module in chunkc.report.__all__ and callable(getattr(getattr(chunkc.report, module), function))
