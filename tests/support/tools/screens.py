"""Pictures of terminals for docs/screens/: commands run in a terminal, drawn in 80 and 120 columns, light and dark.

    plan         the command of README.md that asks whether a model fits
    summary      the summary of the plan that it saved
    first_step   README.md's loop, at three moments of its first step
    error        a model that nobody knows

    OMP_WAIT_POLICY=passive python tests/support/tools/screens.py

The terminal has 80 columns. A wider one is sent the same: tables keep to 80, longer lines are broken by the terminal,
here by `broken`. What it shows is read as `terminal.played` does; of commands that print a plan it is standard output.
rich draws SVG, which fetches no font.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text
from terminal import played, terminal

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "screens"
WIDTHS = (80, 120)
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
PROGRESS = "chunkc: "
MOMENTS = ("capturing", "planning", "compiling")
PLAN = "plan.json"
UNKNOWN = "chunkc plan gpt-11b --hw rtx2060-8g-32g"

TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: "DejaVu Sans", Arial, sans-serif; font-size: 15px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def command_of_readme() -> str:
    """The command of README.md whose output README.md shows."""
    [found] = re.findall(r"^\$ (chunkc plan .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def loop_of_readme() -> str:
    """README.md's loop with chunkc, as a program."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-") + "\n"


def written(command: str, folder: Path, *, errors: bool = True) -> str:
    """Everything that ``command`` writes to a terminal, with what moves the cursor; ``errors``: its progress too."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TERM": "xterm-256color"}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    with terminal(WIDTHS[0]) as screen:
        told = screen.stream if errors else subprocess.DEVNULL
        subprocess.run(shlex.split(command), cwd=folder, env=environ, stdout=screen.stream, stderr=told, check=False)
        return screen.end()


def moments(text: str) -> list[str]:
    """Of each kind of work in `MOMENTS` the screen in the middle of it, as one line."""
    screens = [played(text[: found.end()]) for found in re.finditer(r"[^\r\n]+", text)]
    lines = [next((line for line in reversed(screen) if line), "") for screen in screens]
    shown = []
    for work in MOMENTS:
        found = list(dict.fromkeys(line for line in lines if line.startswith(PROGRESS + work)))
        shown.append(found[len(found) // 2])
    return shown


def picture(lines: Sequence[str], columns: int, theme: TerminalTheme, name: str) -> str:
    """An SVG of a terminal that shows ``lines``; commands are bold, and progress has the colour that it prints."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True, legacy_windows=False)
        for line in lines:
            text = Text(line)
            if line.startswith("$ "):
                text.stylize("bold")
            if line.startswith(PROGRESS):
                text.stylize("cyan", 0, len(PROGRESS))
            console.print(text, soft_wrap=True)
        drawn = console.export_svg(title=f"{columns} columns", theme=theme, code_format=TEMPLATE, unique_id=name)
    drawn = drawn.replace('stroke="rgba(255,255,255,0.35)"', 'stroke="#888888"')  # to be seen on white too
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def screens(folder: Path) -> dict[str, list[str]]:
    """Lines of each screen by name, from commands that run in ``folder``."""
    asked, summary = command_of_readme(), f"chunkc explain {PLAN} --summary"
    (folder / "train.py").write_text(loop_of_readme(), encoding="utf-8")
    found = {}
    for name, command in (("plan", asked), ("summary", summary), ("error", UNKNOWN)):
        found[name] = [f"$ {command}", *played(written(command, folder, errors=name == "error"))]
    steps = moments(written("python train.py", folder))
    found["first_step"] = [line for step in steps for line in ("$ python train.py", step, "")]
    return found


def broken(lines: Sequence[str], columns: int) -> list[str]:
    """Lines as a terminal breaks them, without empty ones at the end."""
    parts = [line[at : at + columns] for line in lines for at in range(0, max(1, len(line)), columns)]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def draw(found: dict[str, list[str]]) -> None:
    """Write the pictures of all screens."""
    FOLDER.mkdir(exist_ok=True)
    for name, lines in found.items():
        for columns, (tone, theme) in product(WIDTHS, THEMES.items()):
            path = FOLDER / f"{name}-{columns}-{tone}.svg"
            path.write_text(picture(broken(lines, columns), columns, theme, f"{name}-{tone}"), encoding="utf-8")
            print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(screens(Path(made)))
