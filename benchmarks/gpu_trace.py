"""A trace of steps by torch's profiler, and how long each of the machine's resources was busy in it.

On a GPU kernels and copies are the GPU's own records. Host updates are ranges on the CPU: those of chunkc's actions
(``update ... @cpu``), of `HOST_UPDATE`, and of any torch optimizer's step. Where there is no GPU, chunkc's other
actions count by their stream, too. A resource is busy while at least one of its records runs.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

WINDOW = "measured steps"
HOST_UPDATE = "host update"
RESOURCES = ("compute", "h2d", "d2h", "cpu")
_STREAM = re.compile(r"@(compute|h2d|d2h|cpu)\b")
Event = Mapping[str, Any]


def trace(steps: Callable[[], object], path: Path) -> dict[str, float]:
    """Run ``steps`` until nothing is pending, write ``path`` (``.json.gz``), and return busy shares."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=kinds, experimental_config=every_thread) as profile:
        with torch.profiler.record_function(WINDOW):
            steps()
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    with gzip.open(path) as file:
        return busy_shares(json.load(file)["traceEvents"])


def busy_shares(events: Iterable[Event]) -> dict[str, float]:
    """Of the time of the measured steps, for each resource."""
    complete = [event for event in events if event.get("ph") == "X"]
    window = next(event for event in complete if event["name"] == WINDOW and event["cat"] == "user_annotation")
    start_us, end_us = window["ts"], window["ts"] + window["dur"]
    has_gpu = any(event["cat"] == "kernel" for event in complete)
    spans: dict[str, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
    for event in complete:
        resource = _resource(event, has_gpu=has_gpu)
        first, last = max(start_us, event["ts"]), min(end_us, event["ts"] + event["dur"])
        if resource is not None and first < last:
            spans[resource].append((first, last))
    return {name: round(sum(_lengths(found)) / (end_us - start_us), 4) for name, found in spans.items()}


def _resource(event: Event, *, has_gpu: bool) -> str | None:
    """Which of `RESOURCES` an event keeps busy."""
    kind, name = event["cat"], event["name"]
    if kind == "kernel":
        return "compute"
    if kind == "gpu_memcpy":
        return "h2d" if "HtoD" in name else "d2h" if "DtoH" in name else "compute"
    if kind not in ("user_annotation", "cpu_op"):
        return None
    if name == HOST_UPDATE or name.startswith("Optimizer.step"):
        return "cpu"
    found = _STREAM.search(name)
    stream = None if found is None else found.group(1)
    return stream if stream == "cpu" or not has_gpu else None


def _lengths(spans: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Of the union of ``spans``, piece by piece."""
    end = float("-inf")
    for first, last in sorted(spans):
        if last > end:
            yield last - max(first, end)
            end = last
