"""``chunkc calibrate`` on a GPU: figures that this GPU can have, and a profile that ``hw=`` takes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from machines import Machine

import chunkc
from chunkc.hardware.profile import DtypeRate

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
UPDATE_NBYTES = 28  # of a parameter: 16-bit gradient and parameter, and three fp32 lists both ways
ROOM = 1.25  # over the data sheet, for caches


def best(rates: tuple[DtypeRate, ...], dtype: str) -> float:
    (found,) = (rate.rate.median for rate in rates if rate.dtype == dtype)
    return found


def test_a_calibration_has_possible_figures_and_is_used(machine: Machine, tmp_path: Path, note: Note) -> None:
    """A rate above the data sheet's was read before the work had ended."""
    path, hw = tmp_path / "machine.json", "auto" if machine.kind == "cuda" else "emulated-4m-8m"
    command = [sys.executable, "-m", "chunkc", "calibrate", "--hw", hw, "--quick", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    note("calibration", done.stdout)
    found = chunkc.Hardware.load(path)
    rates = found.rates
    assert rates is not None
    if machine.kind == "cuda" and found.tflops is not None and found.tflops.bf16 and found.hbm_gb_per_s:
        assert found.tflops.bf16 / 10 < best(rates.matmul_tflops, "bfloat16") < found.tflops.bf16 * ROOM
        assert best(rates.attention_tflops, "bfloat16") < found.tflops.bf16 * ROOM
        assert found.hbm_gb_per_s / 4 < rates.device_memory_gb_per_s.median < found.hbm_gb_per_s * ROOM
        assert best(rates.gpu_update_gparam_per_s, "bfloat16") * UPDATE_NBYTES < found.hbm_gb_per_s * ROOM
        for copies in (rates.h2d, rates.d2h):
            assert 1.0 < copies.gb_per_s.median < (found.host_link_gb_per_s or 1e3) * ROOM
    model = chunkc.compile(torch.nn.Linear(8, 8), path, dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    model(machine.put(torch.ones(2, 8))).sum().backward()
    optimizer.step()
    assert chunkc.plan_of(model).hw == str(found)
