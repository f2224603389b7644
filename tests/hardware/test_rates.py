"""`Rates`: the copy law, slow-downs by set, and what a profile's rates must be."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.hardware.profile import Condition, CopyRate, DtypeRate, Figure, Measurement, Rates, Slowdown

ONE = Figure(1.0, 0.1)


def rates(**changes: Any) -> Rates:
    made = Rates(
        h2d=CopyRate(Figure(5.0, 1.0), Figure(20.0, 2.0)),
        d2h=CopyRate(Figure(0.0, 0.5), Figure(16.0, 2.0)),
        slowdowns=(Slowdown("h2d", ("d2h",), Figure(1.5, 0.1)), Slowdown("h2d", ("cpu", "d2h"), Figure(2.5, 0.1))),
        cpu_update_gparam_per_s=(DtypeRate("bfloat16", ONE),),
        gpu_update_gparam_per_s=(DtypeRate("bfloat16", ONE),),
        matmul_tflops=(DtypeRate("float32", ONE), DtypeRate("bfloat16", Figure(3.0, 0.1))),
        attention_tflops=(DtypeRate("bfloat16", ONE),),
        device_memory_gb_per_s=ONE,
        compute_launch_us=ONE,
        copy_launch_us=ONE,
        handoff_us=ONE,
        num_rounds=3,
        conditions=(Condition("torch", "2.13"),),
        table=(Measurement("copy h2d", 4096, "us", ONE, (1.0, 1.05, 0.95)),),
    )
    return dataclasses.replace(made, **changes)


def test_a_copy_takes_latency_and_bytes_over_bandwidth() -> None:
    assert rates().h2d.time_us(0) == 5.0
    assert rates().h2d.time_us(20_000_000) == pytest.approx(1005.0)


def test_slowdowns_are_found_by_set() -> None:
    assert rates().slowdown("h2d", ()).median == 1.0
    assert rates().slowdown("h2d", ["d2h", "cpu"]).median == 2.5
    with pytest.raises(HardwareError, match="slow-down of d2h by h2d was not measured"):
        rates().slowdown("d2h", ["h2d"])


def test_a_profile_carries_rates(tmp_path: Path) -> None:
    hw = dataclasses.replace(Hardware.parse("emulated-64m-2g"), rates=rates())
    hw.save(tmp_path / "machine.json")
    loaded = Hardware.load(tmp_path / "machine.json")
    assert loaded == hw
    assert loaded.rates == rates()
    assert hash(loaded) == hash(hw)


def test_figures_agree_within_the_larger_spread() -> None:
    assert Figure(1.0, 0.1).agrees_with(Figure(1.4, 0.5))
    assert Figure(1.4, 0.5).agrees_with(Figure(1.0, 0.1))
    assert not Figure(1.0, 0.1).agrees_with(Figure(1.4, 0.3))


# path of a field in the rates' JSON, what stands there instead, piece of the message
FAULTS: list[tuple[tuple[str | int, ...], Any, str]] = [
    (
        ("h2d", "latency_us", "median"),
        -1.0,
        "rates.h2d.latency_us: a figure's median must be a number from 0 to 1e+12",
    ),
    (("h2d", "latency_us", "spread"), float("nan"), "rates.h2d.latency_us.spread: must be a finite number, found nan"),
    (("h2d", "gb_per_s", "median"), 0, "rates.h2d: gb_per_s must be a positive finite number, found 0"),
    (("h2d", "latency_us", "median"), "5", "rates.h2d.latency_us.median: must be a finite number, found '5'"),
    (("h2d", "latency_us"), 5.0, "rates.h2d.latency_us: must be an object, found 5.0"),
    (("h2d", "colour"), 1, "rates.h2d: fields missing or unknown: colour"),
    (("slowdowns",), {}, "rates.slowdowns: must be a list, found {}"),
    (("slowdowns", 0, "by"), "d2h", "rates.slowdowns[0].by: must be a list, found 'd2h'"),
    (("slowdowns", 1, "factor", "median"), 0.0, "the slow-down of h2d must be a positive finite number"),
    (("matmul_tflops", 0, "dtype"), 32, "rates.matmul_tflops[0].dtype: must be a text, found 32"),
    (("matmul_tflops", 0, "rate", "median"), 0.0, "a rate for float32 must be a positive finite number"),
    (("device_memory_gb_per_s", "median"), 0.0, "device_memory_gb_per_s must be a positive finite number"),
    (("num_rounds",), 0, "num_rounds must be at least 1, found 0"),
    (("num_rounds",), True, "rates.num_rounds: must be a whole number from 0 to 2**63 - 1, found True"),
    (("table", 0, "size"), 1.5, "rates.table[0].size: must be a whole number from 0 to 2**63 - 1, found 1.5"),
]


@pytest.mark.parametrize(("path", "value", "piece"), FAULTS)
def test_faulty_rates(tmp_path: Path, path: tuple[str | int, ...], value: Any, piece: str) -> None:
    profile = tmp_path / "machine.json"
    dataclasses.replace(Hardware.parse("emulated-64m-2g"), rates=rates()).save(profile)
    content = json.loads(profile.read_text())
    place = content["rates"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    profile.write_text(json.dumps(content))
    with pytest.raises(HardwareError, match=re.escape(piece)) as refusal:
        Hardware.load(profile)
    assert "machine.json" in str(refusal.value)
