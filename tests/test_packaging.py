"""The source distribution, and what an index of packages shows of it; tests/test_checkout.py installs it."""

import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("chunkc", "passes", "triton_kernels", "benchmarks", "docs", "examples", "tests")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt")
HIDDEN = (".ci/run", ".ci/types", ".pre-commit-config.yaml")
MADE = ("PKG-INFO", "setup.cfg", "chunkc.egg-info")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
described = runpy.run_path(str(ROOT / "setup.py"))["described"]


def sources() -> set[str]:
    """What a checkout has of the folders and files that are distributed."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = {p.relative_to(ROOT).as_posix() for p in paths if p.suffix != ".pyc" and "__pycache__" not in p.parts}
    return kept | {*FILES, *HIDDEN, "pyproject.toml", "setup.py"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, built by setuptools as pip does, and unpacked."""
    pytest.importorskip("setuptools", "77", reason="setuptools builds the package")
    checkout, built = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("built")
    for name in sources():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).symlink_to(ROOT / name)
    program = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", program, str(built)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=300)
    [archive] = built.iterdir()
    assert archive.name == f"chunkc-{PROJECT['version']}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(built, filter="data")
    return built / archive.name.removesuffix(".tar.gz")


def facts(text: str) -> Message:
    return message_from_string(text)


@pytest.mark.long
def test_the_source_distribution_is_the_checkout(unpacked: Path) -> None:
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {name for name in files if name.split("/")[0] not in MADE} == sources()


def test_what_an_index_shows(unpacked: Path) -> None:
    shown = facts((unpacked / "PKG-INFO").read_text(encoding="utf-8"))
    text = str(shown.get_payload())
    assert shown["Description-Content-Type"] == "text/markdown" and text.lstrip().startswith("# chunkc\n")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    assert shown["License-Expression"] == "Apache-2.0" and shown["Requires-Python"] == ">=3.11"


def test_only_the_extra_and_the_tests_take_triton(unpacked: Path) -> None:
    needed = facts((unpacked / "PKG-INFO").read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    plain = {re.split(r"[^\w-]", line)[0] for line in needed if "extra ==" not in line}
    assert plain == {"torch", "numpy", "safetensors", "psutil", "tabulate", "tqdm", "nvidia-ml-py"}
    triton = [line for line in needed if line.startswith("triton")]
    assert {re.findall(r"extra == [\"'](\w+)", line)[0] for line in triton} == {"dev", "triton"}


@pytest.mark.parametrize(
    ("text", "alone", "linked"),
    [
        ("see [the page](docs/a.md#b).", "see the page.", "see [the page](https://host/x/blob/main/docs/a.md#b)."),
        ("![a picture](a.png)", "", "![a picture](https://host/x/raw/main/a.png)"),
        ("[out](https://torch)", "[out](https://torch)", "[out](https://torch)"),
        ("[below](#measured)", "below", "[below](#measured)"),
        ("`a[0](b)` stays", "`a[0](b)` stays", "`a[0](b)` stays"),
        (
            "[![a picture](a.png)](a.md)",
            "",
            "[![a picture](https://host/x/raw/main/a.png)](https://host/x/blob/main/a.md)",
        ),
    ],
)
def test_links_of_a_description(text: str, alone: str, linked: str) -> None:
    assert described(text, None) == alone
    assert described(text, "https://host/x") == linked
