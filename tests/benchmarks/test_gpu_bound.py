"""The bound of a step by hand: rates of round numbers, and a model whose parameters are counted."""

from typing import Any

import pytest
from gpu_bound import Work, bound, parts_ms
from gpu_models import Shape

from chunkc.cost.rates import CopyLaw, CostRates
from chunkc.ir.actions import Stream

NUM_PARAMS = 110336


def shape() -> Any:
    return Shape(layers=2, hidden=64, heads=2, batch=2, length=32, vocabulary=128)


def rates(cpu_gparam_per_s: float = 1e-3) -> CostRates:
    """Computing takes next to no time, a copy of 1e6 bytes a millisecond up and two down."""
    return CostRates(
        hw="by hand",
        matmul_tflops={"float32": 1.0, "bfloat16": 1e6},
        attention_tflops={"bfloat16": 1e6},
        device_memory_gb_per_s=1.0,
        copies={Stream.H2D: CopyLaw(0.0, 1.0), Stream.D2H: CopyLaw(0.0, 0.5)},
        cpu_update_gparam_per_s={"bfloat16": cpu_gparam_per_s},
        gpu_update_gparam_per_s={"bfloat16": 1.0},
    )


def test_parts_are_those_of_the_formula() -> None:
    resident = 10_000
    others = NUM_PARAMS - resident
    parts = parts_ms(Work.of(shape()), rates(), resident / NUM_PARAMS, 0.25)
    copied = (12 * 0.25 + 2 * 0.75) * others
    assert parts["h2d_ms"] == pytest.approx(copied / 1e6) and parts["d2h_ms"] == pytest.approx(copied / 0.5e6)
    assert parts["host_update_ms"] == pytest.approx(0.75 * others / 1e6 * 1e3)
    assert parts["compute_ms"] == pytest.approx((resident + 0.25 * others) / 1e9 * 1e3, rel=0.01)


def test_what_fits_is_bound_by_computing() -> None:
    found = bound(shape(), rates(), 14 * NUM_PARAMS)
    everything = parts_ms(Work.of(shape()), rates(), 1.0, 0.0)
    assert found["bound_ms"] == pytest.approx(everything["compute_ms"], rel=0.1)
    assert found["bound_ms"] <= everything["compute_ms"] and everything["h2d_ms"] == everything["host_update_ms"] == 0


def test_a_slow_host_is_spared_as_far_as_copies_allow() -> None:
    """At the best share the host's updates take as long as the slower direction of copies."""
    slow = bound(shape(), rates(cpu_gparam_per_s=0.03), 0)
    assert 0 < slow["streamed_share"] < 1
    assert slow["host_update_ms"] == pytest.approx(slow["d2h_ms"], rel=0.1) == slow["bound_ms"]
    fast = bound(shape(), rates(cpu_gparam_per_s=1.0), 0)
    assert fast["streamed_share"] == 0 and fast["bound_ms"] == pytest.approx(2 * NUM_PARAMS / 0.5e6)
    assert slow["bound_by_host_updates_ms"] == pytest.approx(NUM_PARAMS / 0.03e9 * 1e3)
