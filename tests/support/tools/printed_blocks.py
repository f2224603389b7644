"""Blocks of Markdown that commands printed: found in a page, printed again, and compared or written anew.

A block is what stands behind a line ``$ chunkc ...`` in the same code block, fenced or indented; in README.md, a fenced
``text`` block behind a ``console`` block is what the last of its commands printed. A line ``...`` in a block leaves
lines out. Commands run in the order of the page, in a folder that has the modules which the page says to write: an
indented or fenced block behind a line that names a file, "`train.py`:".

    python tests/support/tools/printed_blocks.py README.md docs/reading_a_plan.md

writes the blocks of these pages anew. Advice in a block depends on the time that planning took: look at it.
"""

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

LEFT_OUT = "..."
REWRITE = "stale: python tests/support/tools/printed_blocks.py PAGE writes it anew"
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
ADVICE = re.compile(r"^with +it$")


@dataclass(frozen=True)
class Block:
    """Lines ``first`` to ``end`` of a page, behind ``indent``, which ``command`` printed."""

    command: str
    first: int
    end: int
    indent: str
    lines: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)[1:]


@dataclass(frozen=True)
class _Code:
    """A code block: its lines of the page, what stands before each of them, and its language."""

    first: int
    end: int
    indent: str
    language: str


def as_printed() -> bool:
    version = importlib.metadata.version("torch").partition("+")[0]
    return f"torch=={version}" in CONSTRAINTS.read_text(encoding="utf-8").splitlines()


def blocks_of(page: str) -> tuple[Block, ...]:
    """The blocks of a page, in order; commands of which the page shows no output have empty ones."""
    lines, found, pending = page.splitlines(), [], ""
    for code in _codes(lines):
        inside = [line.removeprefix(code.indent) for line in lines[code.first : code.end]]
        starts = [i for i, line in enumerate(inside) if line.startswith("$ ")]
        if code.language == "text" and pending:
            found[-1] = Block(pending, code.first, code.end, code.indent, tuple(inside))
        for start, end in pairwise([*starts, len(inside)]):
            first = start + 1
            while first < end and not inside[first]:
                first += 1
            last = end
            while last > first and not inside[last - 1]:
                last -= 1
            at = code.first
            found.append(Block(inside[start][2:], at + first, at + last, code.indent, tuple(inside[first:last])))
        pending = found[-1].command if starts and not found[-1].lines else ""
    return tuple(block for block in found if block.command.split()[0] == "chunkc")


def modules_of(page: str) -> dict[str, str]:
    lines, found = page.splitlines(), {}
    for code in _codes(lines):
        above = next((line for line in reversed(lines[: code.first]) if line and not line.startswith("```")), "")
        named = re.search(r"`(\w+\.py)`:$", above)
        if named is not None:
            found[named[1]] = "\n".join(line.removeprefix(code.indent) for line in lines[code.first : code.end]) + "\n"
    return found


def _codes(lines: Sequence[str]) -> Iterator[_Code]:
    at = 0
    while at < len(lines):
        if lines[at].startswith("```"):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```"))
            yield _Code(at + 1, end, "", lines[at][3:])
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1]):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
                end += 1
            while not lines[end - 1]:
                end -= 1
            yield _Code(at, end, "    ", "")
            at = end
        else:
            at += 1


def is_printed(block: Block, printed: Sequence[str]) -> bool:
    """Whether a command printed the block, left out lines apart; advice, which depends on time, does not count."""
    rest = _without_advice([line.rstrip() for line in printed])
    pieces = list(_pieces(_without_advice(block.lines)))
    if len(pieces) == 1:
        return rest == pieces[0]
    for piece in pieces:
        at = next((i for i in range(len(rest) - len(piece) + 1) if rest[i : i + len(piece)] == piece), None)
        if at is None:
            return False
        rest = rest[at + len(piece) :]
    return True


def shown(block: Block, printed: Sequence[str]) -> list[str]:
    """The lines of the block as printed now, of parts those that begin as the old ones do; SystemExit if none does."""
    pieces = list(_pieces(list(block.lines)))
    if len(pieces) == 1:
        return list(printed)
    marks = [line for line in block.lines if line.strip() == LEFT_OUT]
    found: list[str] = []
    for mark, piece in zip(["", *marks], pieces, strict=True):
        found += [mark] if mark else []
        if piece:
            start = _start(block, piece[0], printed)
            found += printed[start : start + len(piece)]
    return found


def _start(block: Block, old: str, printed: Sequence[str]) -> int:
    """The first line with the first words of ``old``; where there is none, with these but for their numbers."""
    for begin in (_words, _words_without_numbers):
        for i, line in enumerate(printed):
            if begin(line) == begin(old):
                return i
    raise SystemExit(f"`{block.command}` prints no line that begins like {old!r}")


def _words(line: str) -> list[str]:
    return line.split()[:3]


def _words_without_numbers(line: str) -> list[str]:
    return [re.sub(r"\d[\d.,]*", "0", word) for word in _words(line)]


def _pieces(lines: Sequence[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    for line in lines:
        if line.strip() == LEFT_OUT:
            yield piece
            piece = []
        else:
            piece.append(line)
    yield piece


def _without_advice(lines: Sequence[str]) -> list[str]:
    start = next((i for i, line in enumerate(lines) if ADVICE.match(line)), None)
    if start is None:
        return list(lines)
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return [*lines[:start], *lines[end:]]


def rewritten(page: str, run: Callable[[list[str]], str]) -> str:
    lines, moved = page.splitlines(), 0
    blocks = list(blocks_of(page))
    while blocks and not blocks[-1].lines:
        blocks.pop()
    for block in blocks:
        printed = run(block.arguments).rstrip("\n").splitlines()
        if block.lines:
            new = [(block.indent + line).rstrip() for line in shown(block, printed)]
            lines[block.first + moved : block.end + moved] = new
            moved += len(new) - (block.end - block.first)
    return "\n".join(lines) + "\n"


def write_modules(page: str, folder: Path) -> None:
    for name, source in modules_of(page).items():
        (folder / name).write_text(source, encoding="utf-8")


def main(pages: Sequence[str]) -> None:
    for name in pages:
        page = Path(name).read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            write_modules(page, Path(folder))
            Path(name).write_text(rewritten(page, partial(_run, folder)), encoding="utf-8")


def _run(folder: str, arguments: list[str]) -> str:
    print("$ chunkc", *arguments, flush=True)
    command = [sys.executable, "-m", "chunkc", *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: what was asked for does not fit
        raise SystemExit(f"chunkc {shlex.join(arguments)} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
