"""Links of the documentation's pages: which files of the repository they lead to, and where the site has those.

The site is built from docs/. A link that leaves docs/, such as ``../examples/gan.py``, leads to a page of the site that
shows the file: ``repository/examples/gan.py.md``. The repository's own pages (CONTRIBUTING.md) become pages as they
are, with the files that they lead to; JSON is copied, since a browser shows it.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

COPIED = "repository"
AS_DATA = {".json", ".jsonl", ".png", ".svg"}
LINK = re.compile(r"(?P<before>\]\(|\b(?:src|srcset|href)=\")(?P<path>[^)\s\"#]+)(?P<rest>#[^)\s\"]*)?")
FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//[^;]*"
    r"|\burl\([\"']?(?:https?:)?//[^)]*\)"
)


def is_local(path: str) -> bool:
    return "://" not in path and not path.startswith(("mailto:", "data:", "/"))


def prose(page: str) -> str:
    """The page without its fenced code, in which nothing is a link."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def targets(page: str, at: str) -> list[str]:
    """Paths below the repository's root of all that the page at ``at`` (``docs/index.md``) links to."""
    found = [link["path"] for link in LINK.finditer(prose(page)) if is_local(link["path"])]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(at), path)) for path in found]


def place(path: str) -> str:
    """Where the site's sources have a file of the repository: ``docs/index.md`` is ``index.md`` there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    kept = Path(path).suffix in {*AS_DATA, ".md"}
    return f"{COPIED}/{path}" if kept else f"{COPIED}/{path}.md"


def outside(pages: dict[str, str], read: Callable[[str], str]) -> set[str]:
    """Files outside of docs/ that pages, by their paths, lead to: directly, or through each other's links."""
    found: set[str] = set()
    waiting = list(pages.items())
    while waiting:
        at, page = waiting.pop()
        for path in targets(page, at):
            if not path.startswith("docs/") and path not in found:
                found.add(path)
                waiting += [(path, read(path))] if path.endswith(".md") else []
    return found


def rewritten(page: str, at: str) -> str:
    """The page at ``at`` with links to where the site has their targets, and tables as the site reads them.

    In a table GitHub wants ``\\|`` for a bar within code, where MkDocs would show the backslash.
    """
    here = posixpath.dirname(place(at))

    def moved(link: re.Match[str]) -> str:
        if not is_local(link["path"]):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(at), link["path"]))
        return f"{link['before']}{posixpath.relpath(place(target), here or '.')}{link['rest'] or ''}"

    pieces = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if piece.startswith("```") else _with_bars(LINK.sub(moved, piece)) for piece in pieces)


def _with_bars(text: str) -> str:
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    return rows.sub(lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), text)


def shown(path: str, text: str) -> str:
    """A page that shows a file, left out of the search."""
    fence = "`" * 8
    language = {".py": "python", ".toml": "toml", ".yml": "yaml"}.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def from_elsewhere(folder: Path) -> Iterator[tuple[Path, str]]:
    """What pages, style sheets and pictures below ``folder`` would fetch from another server, with the file."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in {".html", ".css", ".svg"}:
            for found in FROM_ELSEWHERE.finditer(file.read_text(encoding="utf-8")):
                yield file.relative_to(folder), found[0][:200]
