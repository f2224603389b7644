"""Loading holds the model and one tensor, saving one tensor more, read from the anonymous memory of a process.

What a process takes before there is a model (Python, torch, transformers) and what capturing one graph takes do not
grow with the model; they are allowed for as a fixed number of bytes, which is small beside any model worth loading.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "weights_memory.py"
MIB = 1 << 20
TRACING_NBYTES = 128 * MIB
"""What torch.compile and transformers import and build for one graph of the 50M model."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")


def run(size: str, way: str, folder: Path) -> dict[str, int]:
    command = [sys.executable, str(SCRIPT), size, way, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {} if way == "make" else json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("weights")
    run("50m", "make", found)
    return found


def check(found: dict[str, int], allowed_nbytes: int) -> None:
    """The bounds of a run, whatever its size; ``allowed_nbytes`` is for what does not grow with it."""
    plan, started = found["plan"], found["imported"]
    print({name: round(value / MIB) for name, value in found.items()}, "MiB")
    assert max(v for n, v in found.items() if n.endswith("peak")) - started <= 1.15 * plan + allowed_nbytes
    assert found["load_again_peak"] <= found["trained"] + found["largest"] + allowed_nbytes // 4
    assert found["save_peak"] <= found["loaded_again"] + found["largest"] + allowed_nbytes // 4
    assert found["loaded_again"] <= found["trained"] + allowed_nbytes // 4


def test_a_meta_model_is_loaded_within_its_plan(folder: Path) -> None:
    found = run("50m", "load", folder)
    assert found["load_peak"] <= 1.15 * found["plan"], "all of the process, with all that it has imported"
    assert found["load_peak"] <= found["built"] + found["model"] + found["largest"] + 24 * MIB
    check(found, TRACING_NBYTES)


@pytest.mark.parametrize("way", ("consume", "pretrained"))
def test_a_model_with_values_is_consumed_parameter_by_parameter(way: str, folder: Path) -> None:
    """The first training forward moves it into chunks within what those take, not that and the model."""
    check(run("50m", way, folder), TRACING_NBYTES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_billion_parameters(tmp_path: Path) -> None:
    """About 15 GiB of plan; the peak is that of the whole process, nothing subtracted or allowed for."""
    run("1b", "make", tmp_path)
    found = run("1b", "load", tmp_path)
    check(found, TRACING_NBYTES)
    assert max(v for n, v in found.items() if n.endswith("peak")) <= 1.15 * found["plan"]
