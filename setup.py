"""README.md as an index of packages shows it, where links to files of the repository lead nowhere.

    [project.urls] in pyproject.toml     a link to docs/memory.md
    Source = "https://..."               leads to <Source>/blob/main/docs/memory.md; a picture is shown
    no Source                            is its text alone; a picture is left out

Everything else about the package stands in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

CODE = r"```.*?```|`[^`]*`"
LINK = re.compile(rf"({CODE})|(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)", re.DOTALL)


def described(text: str, source: str | None) -> str:
    """Return ``text`` without relative links.

    They are absolute below ``source``, the address of the repository; without one their text is left.
    """

    def replaced(link: re.Match[str]) -> str:
        code, mark, label, target = link.groups()
        if code:
            return str(code)
        label = LINK.sub(replaced, label)  # a picture that is a link
        if "://" in target:
            return f"{mark}[{label}]({target})"
        if source is None:
            return "" if mark else label
        if target.startswith("#"):
            return f"[{label}]({target})"
        return f"{mark}[{label}]({source}/{'raw' if mark else 'blob'}/main/{target})"

    return LINK.sub(replaced, text)


if __name__ == "__main__":
    root = Path(__file__).parent
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    setup(
        long_description=described((root / "README.md").read_text(encoding="utf-8"), urls.get("Source")),
        long_description_content_type="text/markdown",
    )
