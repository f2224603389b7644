"""A result's command is the line that was typed, with the launcher that began it."""

import sys

import provenance
import pytest


@pytest.mark.parametrize(("run_id", "launcher"), [(None, "python"), ("none", "torchrun --nproc-per-node 4")])
def test_the_command_names_its_launcher(run_id: str | None, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/a.py", "--pairs", "3"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    assert provenance.command() == f"OMP_NUM_THREADS=1 {launcher} benchmarks/a.py --pairs 3"
