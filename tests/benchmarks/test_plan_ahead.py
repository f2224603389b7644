"""Case 13: GPT-3 is planned within a minute and 4 GiB; a slice of it here, all of it in ``make soak``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_ahead.py"
MAX_S, MAX_NBYTES = 60.0, 4 << 30


def planned(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), f"--out={out}", *arguments]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert out.exists(), done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    for row in rows:
        assert f"{row['layers']:6} {row['num_operators']:9}" in done.stdout
    return rows


@pytest.mark.slow
def test_layers_of_gpt3_are_planned_in_their_share_of_time_and_without_their_memory(tmp_path: Path) -> None:
    """In processor seconds, since other tests may run beside; 19 billion parameters take 38 GB in bf16."""
    (row,) = planned(tmp_path, "--layers=10", "--backend=eager")
    assert row["num_params"] > 18e9
    assert row["cpu_s"] < MAX_S / 3
    assert row["peak_rss_nbytes"] - row["peak_rss_before_nbytes"] < 1 << 29
    assert sum(row["stages_s"].values()) <= row["seconds"]["total"] < 1.2 * sum(row["stages_s"].values()) + 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("eager", "inductor"))
def test_gpt3_175b_is_planned_in_a_minute_and_linearly_in_layers(backend: str, tmp_path: Path) -> None:
    half, whole = planned(tmp_path, "--layers", "48", "96", f"--backend={backend}")
    assert whole["num_params"] > 174e9
    assert whole["cpu_s"] < MAX_S
    assert whole["peak_rss_nbytes"] < MAX_NBYTES
    assert whole["cpu_s"] < 2.5 * half["cpu_s"]
    assert whole["device_peak_nbytes"] <= 40 << 30 and whole["num_segments"] > 96
