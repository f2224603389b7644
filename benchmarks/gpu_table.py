"""The table of a GPU benchmark from its journal's records alone, of a whole run or a part."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from tabulate import tabulate

Record = Mapping[str, Any]
Key = tuple[str, str]
GIB = 1 << 30
CHUNKC = "chunkc"
RESOURCES = ("compute", "h2d", "d2h", "cpu")
MFU = "(6 N + 12 L H S) T / step time / dense bf16 rate of hardware.toml; see gpu_models.Shape"
HEADERS = (
    "system", "step ms", "tokens/s", "MFU", "/bound", "/simulated", "/chunkc", *(f"{r} %" for r in RESOURCES), "GiB",
)  # fmt: skip


def table(records: Iterable[Record]) -> str:
    """A table for each contest, then the kernels, then what went wrong."""
    found = list(records)
    parts = [_contest(contest, found) for contest in found if contest["kind"] == "contest"]
    parts += [_kernels(record) for record in found if record["kind"] == "kernels"]
    parts += [_trouble(record) for record in found if record["kind"] in ("lost", "not run")]
    return "\n\n".join(parts)


def figures(records: Iterable[Record], contest: Record, system: str) -> dict[str, Any] | None:
    """The row of one system from its blocks, facts and trace; None where it has run no block.

    ``of_bound`` and ``of_simulated`` are step time over the bound's and the simulated one; ``of_chunkc`` is the median
    over rounds of its block over chunkc's.
    """
    of_contest = [r for r in records if r.get("contest") == contest["contest"]]
    blocks = blocks_of(of_contest, system)
    if not blocks:
        return None
    ours = blocks_of(of_contest, CHUNKC)
    step_ms = statistics.median(blocks.values())
    facts, tracing = (_latest(of_contest, kind, system) for kind in ("facts", "trace"))
    shape, flops = contest["facts"]["shape"], contest["facts"]["step_flops"]
    ratios = [step / ours[number] for number, step in blocks.items() if number in ours]
    bound, dense = contest["bound"], contest["dense_bf16_tflops"]
    simulated = facts.get("simulated")
    return {
        "step_ms": step_ms,
        "step_ms_of_blocks": list(blocks.values()),
        "tokens_per_s": shape["batch"] * shape["length"] / step_ms * 1e3,
        "mfu": None if not dense else flops / step_ms / dense / 1e9,
        "of_bound": None if bound is None else step_ms / bound["bound_ms"],
        "of_simulated": None if simulated is None else step_ms / simulated["step_ms"],
        "of_chunkc": statistics.median(ratios) if ratios else None,
        "busy_shares": tracing.get("busy_shares", {}),
        "peak_reserved_nbytes": facts.get("peak_reserved_nbytes"),
    }


def blocks_of(records: Iterable[Record], system: str) -> dict[int, float]:
    """Milliseconds of a step in each of a system's blocks, by round."""
    return {
        r["round"]: r["seconds"] / r["num_steps"] * 1e3
        for r in records
        if r["kind"] == "block" and r["system"] == system
    }


def is_complete(records: Iterable[Record]) -> bool:
    """Whether chunkc has run in every contest, and the kernels."""
    found = list(records)
    contests = [r for r in found if r["kind"] == "contest"]
    is_measured = all(figures(found, contest, CHUNKC) is not None for contest in contests)
    return is_measured and any(r["kind"] == "kernels" and r["outcome"] == "ran" for r in found)


def _latest(records: Iterable[Record], kind: str, system: str) -> Record:
    return next((r for r in reversed(list(records)) if r["kind"] == kind and r["system"] == system), {})


def _contest(contest: Record, records: list[Record]) -> str:
    rows = []
    for system in contest["facts"]["systems"]:
        found = figures(records, contest, system)
        if found is not None:
            rows.append(_row(system, found))
    bound = contest["bound"]
    said = "not known, as nothing was calibrated"
    if bound is not None:
        parts = ", ".join(f"{name} {bound[f'{name}_ms']:.1f}" for name in ("compute", "h2d", "d2h", "host_update"))
        said = (
            f"{bound['bound_ms']:.1f} ms ({parts}), {bound['bound_by_host_updates_ms']:.1f} ms if the host updates all"
        )
    heading = f"{contest['contest']}, {contest['facts']['num_params']:,} parameters; bound of a step {said}"
    aligned = ("left", *["right"] * (len(HEADERS) - 1))
    body = tabulate(rows, headers=HEADERS, disable_numparse=True, colalign=aligned) if rows else "nothing was measured"
    return f"{heading}\n\n{body}"


def _row(system: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    busy, peak = found["busy_shares"], found["peak_reserved_nbytes"]
    ratios = (found[name] for name in ("of_bound", "of_simulated", "of_chunkc"))
    return (
        system,
        f"{found['step_ms']:.1f}",
        f"{found['tokens_per_s']:.0f}",
        "" if found["mfu"] is None else f"{found['mfu']:.1%}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        *(f"{100 * busy[name]:.0f}" if name in busy else "" for name in RESOURCES),
        "" if peak is None else f"{peak / GIB:.1f}",
    )


def _kernels(record: Record) -> str:
    if record["outcome"] != "ran":
        return f"kernels: {record['outcome']}"
    return "kernels: " + ", ".join(f"{name} {row['ratio']} of a copy" for name, row in record["kernels"].items())


def _trouble(record: Record) -> str:
    who = ", ".join(record[name] for name in ("contest", "system") if name in record)
    lines = record["why"].strip().splitlines()
    return f"{who}: {lines[0]}" + (f" ... {lines[-1]}" if len(lines) > 1 else "")
