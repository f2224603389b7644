"""The table of the benchmark of the GPU, from whole journals and from those of runs that were killed."""

from typing import Any

import pytest
from gpu_cases import STAND_IN_CONTESTS
from gpu_table import figures, is_complete, table


def journal() -> list[dict[str, Any]]:
    contest = STAND_IN_CONTESTS[0]
    parts = {f"{name}_ms": 1.0 for name in ("compute", "h2d", "d2h", "host_update", "bound_by_host_updates")}
    named = {"contest": contest.name}

    def block(system: str, number: int, seconds: float) -> dict[str, Any]:
        return {"kind": "block", **named, "system": system, "round": number, "num_steps": 8, "seconds": seconds}

    return [
        {"kind": "run"},
        {
            "kind": "contest",
            **named,
            "facts": contest.facts(),
            "bound": {"bound_ms": 5.0, **parts},
            "dense_bf16_tflops": 2,
        },
        block("chunkc", 0, 0.080),
        block("zero_offload", 0, 0.240),
        {"kind": "facts", **named, "system": "chunkc", "simulated": {"step_ms": 8.0}, "peak_reserved_nbytes": 1 << 30},
        block("chunkc", 1, 0.096),
        {"kind": "lost", **named, "system": "zero_offload", "why": "failed: exit code -9 before 'block'\nlast line"},
        {
            "kind": "trace",
            **named,
            "system": "chunkc",
            "busy_shares": {"compute": 0.5, "h2d": 0.25, "d2h": 0.0, "cpu": 1.0},
        },
        {"kind": "kernels", "outcome": "ran", "kernels": {"cast": {"ratio": 0.9}}},
        {"kind": "end"},
    ]


def test_figures_are_medians_and_ratios_of_rounds() -> None:
    found = journal()
    ours, other = (figures(found, found[1], system) for system in ("chunkc", "zero_offload"))
    assert ours is not None and other is not None and figures(found, found[1], "fsdp2") is None
    assert ours["step_ms"] == pytest.approx(11.0) and ours["step_ms_of_blocks"] == pytest.approx([10.0, 12.0])
    assert ours["tokens_per_s"] == pytest.approx(64 / 0.011) and ours["of_bound"] == pytest.approx(2.2)
    assert ours["of_simulated"] == pytest.approx(11 / 8) and ours["of_chunkc"] == 1.0
    assert ours["mfu"] == pytest.approx(found[1]["facts"]["step_flops"] / 0.011 / 2e12)
    assert other["of_chunkc"] == pytest.approx(3.0) and other["of_simulated"] is None and other["busy_shares"] == {}


def test_every_part_of_a_journal_makes_a_table() -> None:
    found = journal()
    for end in range(len(found) + 1):
        said = table(found[:end])
        assert ("30.0" in said) == (end > 3) and ("exit code -9" in said) == (end > 6)
        assert is_complete(found[:end]) == (end > 8)
