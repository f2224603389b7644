"""Busy shares of resources, read from traces as torch's profiler writes them on a GPU and without one."""

import threading
from pathlib import Path
from typing import Any

import torch
from gpu_trace import HOST_UPDATE, busy_shares, trace


def event(kind: str, name: str, start_us: float, length_us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start_us, "dur": length_us}


def test_a_gpus_own_records_count() -> None:
    """Overlapping records once, what lies outside of the window not, ranges of launches on the CPU not."""
    events = [
        event("user_annotation", "measured steps", 100.0, 100.0),
        event("gpu_user_annotation", "measured steps", 100.0, 100.0),
        {"ph": "M", "name": "process_name"},
        event("kernel", "gemm", 90.0, 30.0),
        event("kernel", "triton_poi", 115.0, 15.0),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 140.0, 10.0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 150.0, 20.0),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 195.0, 20.0),
        event("user_annotation", "run fwd.1 @compute after f3", 100.0, 90.0),
        event("user_annotation", "fetch c1 @h2d", 100.0, 90.0),
        event("user_annotation", "update c1 @cpu after s2", 100.0, 25.0),
        event("user_annotation", "Optimizer.step#AdamW.step", 120.0, 10.0),
        event("user_annotation", "host update", 150.0, 10.0),
    ]
    assert busy_shares(events) == {"compute": 0.4, "h2d": 0.2, "d2h": 0.05, "cpu": 0.4}


def test_without_a_gpu_actions_count_by_their_stream() -> None:
    events = [
        event("user_annotation", "measured steps", 0.0, 100.0),
        event("user_annotation", "run fwd.1 @compute after f3", 0.0, 50.0),
        event("user_annotation", "fetch c1 @h2d", 40.0, 10.0),
        event("user_annotation", "update c1 @cpu", 90.0, 10.0),
    ]
    assert busy_shares(events) == {"compute": 0.5, "h2d": 0.1, "d2h": 0.0, "cpu": 0.1}


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    """Steps that do nothing but a host update on another thread are busy with it."""

    def update() -> None:
        with torch.profiler.record_function(HOST_UPDATE):
            torch.ones(2000, 2000) @ torch.ones(2000, 2000)

    def steps() -> None:
        thread = threading.Thread(target=update)
        thread.start()
        thread.join()

    path = tmp_path / "trace.json.gz"
    found = trace(steps, path)
    assert path.stat().st_size > 0 and found["cpu"] > 0.5 and found["h2d"] == 0.0
