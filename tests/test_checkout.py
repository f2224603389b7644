"""A checkout's root imports the package, and any folder does once its source distribution is installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chunkc._checkout import load_beside

ROOT = Path(__file__).parent.parent
FOLDERS = {"chunkc": "chunkc", "passes": "chunkc/passes", "triton_kernels": "chunkc/triton_kernels"}
DEPENDENCIES = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]

PROGRAM = """
import json, sys
import chunkc
import chunkc.passes.prefetch, chunkc.triton_kernels
names = ("chunkc", "chunkc.passes", "chunkc.passes.prefetch", "chunkc.triton_kernels", "passes", "triton_kernels")
print(json.dumps({name: sys.modules[name].__file__ for name in names if name in sys.modules}))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", "77", reason="setuptools builds the package")
    target = tmp_path_factory.mktemp("installed")
    source = target.with_name("source")
    shutil.copytree(checkout, source)  # a build leaves files behind
    program = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(source.parent)]
    built = subprocess.run(command, cwd=source, check=True, timeout=300, capture_output=True, text=True)
    archive = source.parent / built.stdout.splitlines()[-1]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--no-compile", "--disable-pip-version-check", "--target", str(target), str(archive)]
    subprocess.run(command, check=True, timeout=300)
    return target


def imported_from(folder: Path, *installed: Path) -> dict[str, str]:
    """Files that `PROGRAM` imports in ``folder``, with ``-S``: chunkc is in no folders but ``installed``."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, installed), *DEPENDENCIES])}
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_the_root_of_a_checkout_imports_the_checkout(checkout: Path) -> None:
    """``python -c "import chunkc"`` finds the folder ``chunkc`` of the checkout, below which there is no ``passes``."""
    assert imported_from(checkout) == {
        "chunkc": str(checkout / "chunkc/__init__.py"),
        "chunkc.passes": str(checkout / "passes/__init__.py"),
        "chunkc.passes.prefetch": str(checkout / "passes/prefetch.py"),
        "chunkc.triton_kernels": str(checkout / "triton_kernels/__init__.py"),
    }


@pytest.mark.slow
def test_any_other_folder_imports_the_installed_package(installed: Path, tmp_path: Path) -> None:
    assert imported_from(tmp_path, installed) == {
        "chunkc": str(installed / "chunkc/__init__.py"),
        "chunkc.passes": str(installed / "chunkc/passes/__init__.py"),
        "chunkc.passes.prefetch": str(installed / "chunkc/passes/prefetch.py"),
        "chunkc.triton_kernels": str(installed / "chunkc/triton_kernels/__init__.py"),
    }


@pytest.mark.long
def test_an_install_has_every_file_once_and_one_name_at_top_level(installed: Path) -> None:
    sources = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert {name for name in files if name.startswith("chunkc/")} == sources
    assert {name.split("/")[0] for name in files if name.endswith(".py")} == {"chunkc"}


def test_a_broken_installation_loads_no_package_of_another_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """site-packages may have a ``triton_kernels`` that Triton ships."""
    (tmp_path / "triton_kernels").mkdir()
    (tmp_path / "triton_kernels/__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"broken_package\.triton_kernels is missing, .* is no checkout"):
        load_beside("broken_package", ("triton_kernels",), tmp_path)
    assert "broken_package.triton_kernels" not in sys.modules
    del sys.modules["broken_package"]
