"""The path of a stranger: README.md line by line, in a new environment, from a copy of the sources.

It installs packages from an index, those of constraints.txt, so it needs minutes and a network. `make` takes from the
environment that the demo trains less and that few tests run: tests/test_readme.py goes the same path without installs.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from printed_blocks import REWRITE, as_printed, blocks_of, is_printed

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("chunkc", "passes", "triton_kernels", "benchmarks", "docs", "examples", "tests")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt")
LESS = {"DEMO_ARGS": "--compare 3 --steps 3 --target 6", "TEST_ARGS": "tests/test_docs.py", "TEST_WORKERS": "0"}


def commands() -> list[str]:
    """All commands of README.md, in order."""
    blocks = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def programs() -> dict[str, str]:
    """Both sides of README.md's diff, by the name of a file."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    sides = {"before.py": "+", "train.py": "-"}
    return {name: "\n".join(line[1:] for line in diff.splitlines() if line[:1] != left) for name, left in sides.items()}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root)
    return root


def environment(folder: Path, checkout: Path) -> dict[str, str]:
    """Variables of a shell in which a new environment is active; nothing of this one's is left."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "COV_"))}
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    constraints = {"PIP_CONSTRAINT": str(checkout / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **LESS, **constraints, "PATH": path, "VIRTUAL_ENV": str(folder)}


def run(command: Sequence[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_line_of_the_readme_works_in_a_new_environment(tmp_path: Path, checkout: Path) -> None:
    environ = environment(tmp_path / "new", checkout)
    pip = [str(tmp_path / "new/bin/python"), "-m", "pip"]
    probe = [*pip, "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "tabulate"]
    if subprocess.run(probe, env=environ, capture_output=True, timeout=600).returncode != 0:
        pytest.skip("no index of packages can be reached")
    shown = {block.command: block for block in blocks_of(README) if block.lines}
    printed = {command: run(["bash", "-c", command], checkout, environ) for command in commands()}
    assert re.findall(r"^(ok|FAILED) ", printed["make demo"], re.MULTILINE) == ["ok"] * 3
    assert "passed" in printed["make test"] and "failed" not in printed["make test"]
    for command, block in shown.items():
        if as_printed():
            assert is_printed(block, printed[command].splitlines()), f"`{command}`: {REWRITE}"
    for name, source in programs().items():
        (tmp_path / name).write_text(source, encoding="utf-8")
        output = run([str(tmp_path / "new/bin/python"), name], tmp_path, environ)
        assert output.startswith("plan ") == (name == "train.py")
