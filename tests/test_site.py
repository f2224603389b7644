"""The documentation site: it lists every page once, its links lead to what it has, and it fetches from nowhere else."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import site_links
from printed_blocks import blocks_of

import chunkc

yaml = pytest.importorskip("yaml", reason="reads mkdocs.yml")
ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

INTEGRATIONS = (
    *("hf.ChunkcTrainer", "trl.ChunkcSFTTrainer", "trl.ChunkcDPOTrainer"),
    *("accelerate.ChunkcAccelerator", "lightning.ChunkcStrategy"),
)


def listed(entries: Any) -> Iterator[str]:
    """Pages of a ``nav``, in order."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, dict):
            for below in entry.values():
                yield from listed(below)
        else:
            yield entry


def test_every_page_is_listed_once() -> None:
    pages = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed(SITE["nav"])) == pages


def test_nothing_is_asked_of_other_servers() -> None:
    """The theme would fetch fonts, and any of these names a server."""
    assert SITE["theme"]["font"] is False
    assert not {"site_url", "repo_url", "extra_javascript", "extra_css"} & SITE.keys()
    assert "analytics" not in SITE["extra"]


def test_what_another_server_would_be_asked_for_is_found(tmp_path: Path) -> None:
    own = '<a href="https://a.b/">x</a><script src="assets/x.js"></script><link rel="canonical" href="https://a.b">'
    (tmp_path / "own.html").write_text(own)
    assert list(site_links.from_elsewhere(tmp_path)) == []
    others = [
        '<script async src="https://a.b/x.js"></script>',
        '<img alt="x" src="//a.b/x.png">',
        '<link href="https://a.b/f.css" rel="stylesheet">',
        '<link rel="preconnect" href="https://a.b">',
        "<style>@import url(https://a.b/f.css);</style>",
        "<style>p { background: url('https://a.b/x.png') }</style>",
    ]
    for i, text in enumerate(others):
        (tmp_path / f"{i}.html").write_text(text)
    (tmp_path / "own.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>')
    (tmp_path / "x.svg").write_text("<svg><style>@font-face { src: url('https://a.b/f.woff2') }</style></svg>")
    expected = [*(f"{i}.html" for i in range(len(others))), "x.svg"]
    assert [str(file) for file, _ in site_links.from_elsewhere(tmp_path)] == expected


def test_links_out_of_the_pages_lead_to_what_the_site_shows() -> None:
    files = {
        "CONTRIBUTING.md": "see [one](docs/one.md#a), [code](tests/a.py), [](https://a.b/c.md)\n",
        "docs/one.md": '[run](../runs/b.json) and [next](howto/two.md) <img src="c.png">\n',
        "docs/howto/two.md": "[all](../../CONTRIBUTING.md#top)\n```\n[code](../no)\n```\n",
    }
    pages = {name: text for name, text in files.items() if name.startswith("docs/")}
    assert site_links.outside(pages, files.__getitem__) == {"CONTRIBUTING.md", "runs/b.json", "tests/a.py"}
    moved = {name: site_links.rewritten(text, name) for name, text in files.items()}
    assert moved == {
        "CONTRIBUTING.md": "see [one](../one.md#a), [code](tests/a.py.md), [](https://a.b/c.md)\n",
        "docs/one.md": '[run](repository/runs/b.json) and [next](howto/two.md) <img src="c.png">\n',
        "docs/howto/two.md": "[all](../repository/CONTRIBUTING.md#top)\n```\n[code](../no)\n```\n",
    }
    assert site_links.rewritten("| `a\\|b` \\| |\n`a\\|b`\n", "docs/a.md") == "| `a|b` \\| |\n`a\\|b`\n"
    assert site_links.shown("tests/a.py", "x = 1").endswith("# tests/a.py\n\n````````python\nx = 1\n````````\n")


def shown_in(picture: Path) -> list[str]:
    """The lines of text of a terminal's picture."""
    rows: dict[float, str] = {}
    for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "-title" not in text.attrib["class"]:
            y = float(text.attrib["y"])
            rows[y] = rows.get(y, "") + (text.text or "").replace("\xa0", " ")
    return [rows[y].rstrip() for y in sorted(rows)]


def test_screens_show_what_the_commands_print() -> None:
    """In both widths and tones; README.md's block is compared with the command's output in its own test."""
    page = (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")
    names = {(name, columns) for name in ("plan", "summary", "first_step", "error") for columns in (80, 120)}
    files = {f"{name}-{columns}-{tone}.svg" for name, columns in names for tone in ("light", "dark")}
    assert {path.name for path in (ROOT / "docs" / "screens").iterdir()} == files
    assert {file for file in files if f"screens/{file}" in page} == files
    lines = {file: shown_in(ROOT / "docs" / "screens" / file) for file in files}
    for name, columns in names:
        light, dark = (lines[f"{name}-{columns}-{tone}.svg"] for tone in ("light", "dark"))
        assert light == dark and light and max(map(len, light)) <= columns
    [block] = [block for block in blocks_of((ROOT / "README.md").read_text("utf-8")) if block.lines]
    expected = "".join([f"$ {block.command}", *block.lines])
    assert all("".join(lines[f"plan-{columns}-light.svg"]) == expected for columns in (80, 120))
    [digest] = re.findall(r"^plan (\w+): ", "\n".join(block.lines), re.MULTILINE)
    assert all(f" plan {digest}," in lines[f"summary-{columns}-light.svg"][1] for columns in (80, 120))


def test_every_public_name_is_in_the_reference_once() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: chunkc\.([\w.]+)$", text, re.MULTILINE)
    assert sorted(names) == sorted([*chunkc.__all__, *(f"integrations.{name}" for name in INTEGRATIONS)])


def test_lists_and_tables_begin_behind_an_empty_line() -> None:
    """GitHub needs none, the site does: else a list is a part of the paragraph above."""
    joined = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        lines = site_links.prose(page.read_text(encoding="utf-8")).splitlines()
        for above, line in pairwise(lines):
            begins = re.match(r"([-*|]|\d+\.) ?\S", line) and not re.match(r"\*\*", line)
            goes_on = not above or re.match(r"([-*|] ?|\d+\. )\S|  ", above)
            if begins and not goes_on:
                joined.append(f"{page.name}: {line}")
    assert joined == []
