"""A calibration of a small emulated device: agreement, budgets, refusals, and the profile in use."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.calibrate import QUICK, calibrate, measure, tables
from chunkc.calibrate.fit import rates_of
from chunkc.calibrate.memory import Shares, fill, regions, scale_for
from chunkc.calibrate.rounds import Effort, Sampler
from chunkc.calibrate.timing import Timer
from chunkc.cli import main
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.hardware.profile import Figure, Rates
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.protocol import Event

MIB = 2**20
HW = "emulated-4m-8m"
BRIEF = Effort(num_rounds=1, num_batches=1, batch_ms=0.1)


@pytest.fixture(autouse=True)
def no_debug_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHUNKC_EMULATED", raising=False)


def emulated(device_nbytes: int, host_nbytes: int, kind: type[EmulatedDevice] = EmulatedDevice) -> EmulatedDevice:
    return kind("emulated", device_nbytes, host_nbytes)


def sampler(device: EmulatedDevice, effort: Effort) -> Sampler:
    scale = scale_for(device, Hardware.parse(HW))
    return Sampler(Timer(device, effort.batch_ms, effort.num_batches), scale, Shares.of(device, scale))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "machine.json"
    command = [sys.executable, "-m", "chunkc", "calibrate", "--hw", HW, "--quick", "--json", "-o", str(path)]
    environ = {name: value for name, value in os.environ.items() if name != "CHUNKC_EMULATED"}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert json.loads(found.stdout) == json.loads(path.read_text())
    assert found.stdout.count("\n") == 1
    lines = found.stderr.splitlines()  # and what builds of torch log in between
    told = [line for line in lines if line.startswith(("warming up", "round ", "saved "))]
    assert told == ["warming up", *(f"round {number} of 7" for number in range(1, 8)), f"saved {path}"]
    return path


def figures(value: Any, name: str = "") -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Figure):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from figures(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from figures(entry, f"{name}[{i}]")


# --- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_calibrations_differ_by_less_than_the_spread_they_report() -> None:
    """Rounds of both take turns; a figure disagrees with a probability below 1 in 1,000 (`chunkc.calibrate.fit`)."""
    with closing(emulated(4 * MIB, 8 * MIB)) as device:
        pair = [sampler(device, QUICK) for _ in range(2)]
        for one in pair:
            one.warm_up()
        for index in range(QUICK.num_rounds):
            for one in pair if index % 2 else reversed(pair):
                one.round()
        first, second = (dict(figures(rates_of(one.samples, ()))) for one in pair)
    assert first.keys() == second.keys()
    apart = [name for name in first if not first[name].agrees_with(second[name])]
    assert len(apart) <= len(first) // 20, {name: (first[name], second[name]) for name in apart}


@pytest.mark.long
def test_every_figure_was_measured_in_every_round(profile: Path) -> None:
    rates = Hardware.load(profile).rates
    assert rates is not None
    assert rates.num_rounds == QUICK.num_rounds
    assert all(len(entry.rounds) == rates.num_rounds for entry in rates.table)
    assert {(of, by) for of in Stream for by in subsets_without(of)} == {(s.of, s.by) for s in rates.slowdowns}
    assert [entry.dtype for entry in rates.matmul_tflops] == ["float32", "bfloat16"]
    for found in (rates.cpu_update_gparam_per_s, rates.gpu_update_gparam_per_s):
        assert [entry.dtype for entry in found] == ["float32", "float32 8-bit", "bfloat16", "bfloat16 8-bit"]
    copied = [entry.size for entry in rates.table if entry.name == "copy h2d"]
    assert copied == sorted(copied) and copied[0] == 4096 and copied[-1] > 500_000


def subsets_without(of: Stream) -> list[tuple[str, ...]]:
    """All sets of activities without `of`, COMM not being one of them; none for COMM."""
    names = sorted({"compute", "cpu", "d2h", "h2d"} - {str(of)})
    if of is Stream.COMM:
        return []
    return [tuple(name for i, name in enumerate(names) if bits >> i & 1) for bits in range(1, 8)]


def test_figures_follow_from_the_table(profile: Path) -> None:
    rates = Hardware.load(profile).rates
    assert rates is not None
    largest = {entry.name: entry for entry in sorted(rates.table, key=lambda entry: entry.size)}
    matmul = largest["matmul bfloat16"]
    assert rates.matmul_tflops[1].rate.median == pytest.approx(2 * matmul.size**3 / matmul.figure.median / 1e6)
    update = largest["update cpu float32"]
    assert rates.cpu_update_gparam_per_s[0].rate.median == pytest.approx(update.size / update.figure.median / 1e3)
    copy = largest["copy d2h"]
    assert 1 / 3 < rates.d2h.time_us(copy.size) / copy.figure.median < 3  # a law that is fitted to all sizes


# --- the profile in use -----------------------------------------------------------------------------------------------


def losses(hw: str | Path) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = chunkc.compile(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), hw, dtype=torch.float32, backend="eager"
    )
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-4)
    found = []
    for _ in range(3):
        loss = model(torch.ones(4, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, chunkc.plan_of(model).hw


@pytest.mark.long
def test_a_model_trains_with_a_profile_and_its_plan_says_so(profile: Path) -> None:
    plain, plain_hw = losses(HW)
    for hw in (profile, str(profile)):
        calibrated, calibrated_hw = losses(hw)
        assert calibrated == plain
        assert (calibrated_hw, plain_hw) == (f"{HW} (calibrated)", HW)
    assert plain[-1] < plain[0]


def test_a_profile_can_be_calibrated_again(profile: Path) -> None:
    again = calibrate(profile, BRIEF)
    assert str(again) == f"{HW} (calibrated)"
    assert again.rates != Hardware.load(profile).rates


def test_the_tables_show_every_rate_and_every_set(profile: Path) -> None:
    hw = Hardware.load(profile)
    assert hw.rates is not None
    text = tables(hw, hw.rates)
    for piece in (f"{HW} (calibrated): medians of 7 rounds", "matrix product, bfloat16", "compute + d2h + h2d", "256k"):
        assert piece in text
    assert f"{hw.rates.cpu_update_gparam_per_s[0].rate.median:.4g}" in text


def test_conditions_say_what_ran_beside(profile: Path) -> None:
    rates = Hardware.load(profile).rates
    assert rates is not None
    conditions = {condition.name: condition.value for condition in rates.conditions}
    assert {"date", "duration", "other processes", "torch", "cores", "OMP_WAIT_POLICY"} <= conditions.keys()
    assert conditions["torch"] == torch.__version__


# --- budgets ----------------------------------------------------------------------------------------------------------


class Watched(EmulatedDevice):
    least_device_nbytes = least_host_nbytes = 2**62

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        self.least_device_nbytes = min(self.least_device_nbytes, self.free_device_nbytes())
        self.least_host_nbytes = min(self.least_host_nbytes, self.free_host_nbytes())
        return super().launch(stream, label, waits, work)


@pytest.mark.parametrize(("device_mib", "host_mib"), [(1, 2), (8, 4)])
def test_budgets_hold_and_all_memory_comes_back(device_mib: int, host_mib: int) -> None:
    with closing(emulated(device_mib * MIB, host_mib * MIB, Watched)) as device:
        device.start_reading()
        hw = measure(Hardware.parse(f"emulated-{device_mib}m-{host_mib}m"), device, BRIEF, lambda line: None)
        assert isinstance(hw.rates, Rates)
        assert isinstance(device, Watched)
        assert device.least_device_nbytes >= 0 and device.least_host_nbytes >= 0
        assert device.least_device_nbytes < device_mib * MIB // 8  # it did take the memory
        assert device.free_device_nbytes() == device_mib * MIB
        assert device.free_host_nbytes() == host_mib * MIB


@pytest.mark.long
def test_outputs_of_operators_fit_beside_the_arena() -> None:
    with closing(emulated(64 * MIB, 8 * MIB)) as device:
        if not device.meter.available:
            pytest.skip("non-model bytes cannot be read on this system: needs glibc's malloc")
        one = sampler(device, BRIEF)
        one.warm_up()  # libraries, threads, and the updates' working memory, which belongs to the device
        device.start_reading()
        one.round()
        assert device.read_nonmodel_nbytes() <= one.shares.device_nbytes - one.shares.arena_nbytes


class Failing(EmulatedDevice):
    num_launches = 0

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        self.num_launches += 1
        return super().launch(stream, label, waits, work if self.num_launches < 1000 else _fail)


def _fail() -> None:
    raise ZeroDivisionError("in a piece of work")


def test_a_failure_is_raised_and_all_memory_comes_back() -> None:
    with closing(emulated(2 * MIB, 4 * MIB, Failing)) as device:
        with pytest.raises(ZeroDivisionError):
            measure(Hardware.parse("emulated-2m-4m"), device, BRIEF, lambda line: None)
        assert device.free_device_nbytes() == 2 * MIB
        assert device.free_host_nbytes() == 4 * MIB


def test_memory_is_filled_with_positive_numbers_of_every_dtype() -> None:
    with closing(emulated(MIB, 2 * MIB)) as device:
        scale = scale_for(device, Hardware.parse(HW))
        with regions(device, Shares.of(device, scale)) as memory:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                numbers = memory.host_update.view(dtype).float()
                assert bool((numbers > 0).all()) and bool((numbers < 4).all())
            assert memory.device_math.view(torch.bfloat16).unique().numel() > 50
    odd = torch.zeros(4097, dtype=torch.uint8)
    fill(odd)
    assert bool((odd[:4096].view(torch.bfloat16) > 0).all())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hw", "piece"),
    [
        ("8xv100-240g", "8xv100-32g-240g has 8: name one"),
        ("2xemulated-64m-2g", "has 2: name one"),
        ("emulated-512k-64m", "needs 1m of device and 2m of host memory; emulated-512k-64m leaves 512k and 64m"),
        ("emulated-64m-1m", "leaves 64m and 1m"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(hw: str, piece: str) -> None:
    with pytest.raises(HardwareError, match=piece):
        calibrate(hw, BRIEF)


def test_a_gpu_that_is_absent_is_not_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="rtx2060-8g-16g is not here"):
        calibrate("rtx2060-8g-16g", BRIEF)


def test_debug_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_EMULATED", "delay=2")
    with pytest.raises(HardwareError, match="CHUNKC_EMULATED=delay=2 changes how fast the device is"):
        calibrate(HW, BRIEF)


def test_a_machine_without_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkc.calibrate.memory.free_host_nbytes", lambda: 10 * MIB)
    with pytest.raises(HardwareError, match=f"takes {12 * MIB} bytes of host memory, {10 * MIB} are free"):
        calibrate(HW, BRIEF)


@pytest.mark.long
def test_a_device_in_use_stays_open() -> None:
    hw = Hardware.parse(HW)
    model = chunkc.compile(nn.Linear(64, 64), hw, dtype=torch.float32, backend="eager")
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        calibrate(hw, BRIEF)
        model.zero_grad()


@pytest.mark.parametrize(
    ("path", "piece"), [("machine.txt", "does not end in .json"), ("no_such_folder/machine.json", "cannot write")]
)
def test_a_bad_path_is_refused_before_anything_is_measured(
    path: str, piece: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["calibrate", "--hw", HW, "--quick", "-o", path])
    assert refusal.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and piece in err and "warming up" not in err
