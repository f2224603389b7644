"""Ctrl-C ends the command without a traceback while torch is imported, and importing the package imports no torch."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = {
    "slow": "print('importing', flush=True)\nimport time\ntime.sleep(60)",
    "deaf": "print('importing', flush=True)\nimport time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass",
}
COMMANDS = {
    "module": ["-m", "chunkc", "--version"],
    "script": ["-c", "import sys; from chunkc.__main__ import main; sys.exit(main())"],
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "torch.py").write_text(TORCH["slow"], encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_while_torch_is_imported_ends_without_a_traceback(
    command: str, torch: str, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(TORCH[torch], encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, *COMMANDS[command]],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, "interrupted\n")


def test_the_script_is_that_function() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["scripts"] == {"chunkc": "chunkc.__main__:main"}


def test_importing_the_package_imports_no_torch(environ: dict[str, str], tmp_path: Path) -> None:
    program = "import sys, chunkc; print(chunkc.__version__, 'compile' in dir(chunkc), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "0.1.0 True False\n"


def test_names_submodules_and_nothing_else_are_attributes() -> None:
    program = (
        "import chunkc; assert callable(chunkc.compile) and chunkc.hardware.Hardware is chunkc.Hardware\n"
        "assert not hasattr(chunkc, 'nonsense') and not hasattr(chunkc, '__wrapped__')\n"
        "from chunkc import *; assert plan is chunkc.plan"
    )
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
