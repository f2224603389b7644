"""``chunkc calibrate``: this machine's real rates, measured through the protocol that plans run on.

Memory, streams, copies and updates are those of training: the same code measures an emulated device and a GPU.
docs/calibration.md explains the figures, `fit` their spread, `rounds` the order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import psutil
import torch

from chunkc.calibrate.fit import rates_of
from chunkc.calibrate.memory import Shares, scale_for
from chunkc.calibrate.rounds import QUICK, THOROUGH, Effort, Sampler, run_rounds
from chunkc.calibrate.show import tables
from chunkc.calibrate.timing import Timer
from chunkc.compiler.device_selection import HardwareLike, device_for
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.report.environment import environment
from chunkc.runtime.devices.protocol import Device

__all__ = ["QUICK", "THOROUGH", "Effort", "calibrate", "tables"]

_CALIBRATED: Final = " (calibrated)"


def calibrate(
    hw: HardwareLike = "auto", effort: Effort = THOROUGH, progress: Callable[[str], None] = lambda line: None
) -> Hardware:
    """Measure the device that ``hw`` names, and its host.

    Args:
        hw: as in ``chunkc.compile``. Its budgets are kept; all memory is given back at the end.
        effort: how long to measure.
        progress: called with a line for each round.

    Returns:
        The hardware with `Hardware.rates`, and a name that says so; ``save`` makes it a profile.

    Raises:
        HardwareError: several GPUs, a GPU that is not here, debug settings, or too little memory.
    """
    for variable in ("CHUNKC_EMULATED", "CHUNKC_CUDA"):
        if settings := os.environ.get(variable):
            raise HardwareError(f"{variable}={settings} changes how fast the device is: unset it to calibrate")
    machine = Hardware.of(hw)
    _check_is_here(machine)
    _, device = device_for(replace(machine))  # another object: a device of its own, which is closed here
    with contextlib.closing(device):
        return measure(machine, device, effort, progress)


def measure(machine: Hardware, device: Device, effort: Effort, progress: Callable[[str], None]) -> Hardware:
    """`calibrate` on a device at hand."""
    scale = scale_for(device, machine)
    sampler = Sampler(Timer(device, effort.batch_ms, effort.num_batches), scale, Shares.of(device, scale))
    load = _Load()
    with torch.no_grad():
        samples = run_rounds(sampler, effort, progress)
    rates = rates_of(samples, [*load.conditions(), *environment()])
    return replace(machine, name=machine.name.removesuffix(_CALIBRATED) + _CALIBRATED, rates=rates)


def _check_is_here(machine: Hardware) -> None:
    if machine.num_gpus != 1:
        raise HardwareError(
            f"one device and its host are calibrated at a time, {machine} has {machine.num_gpus}: name one"
        )
    if machine.emulated:
        return
    here = Hardware.detect()
    if here.gpu != machine.gpu:
        raise HardwareError(
            f"{machine} is not here, this machine is {here}: a calibration measures what it runs on. Name this machine "
            "by auto, or an emulated device, for example emulated-64m-2g"
        )


class _Load:
    """The load of other processes since this was made."""

    def __init__(self) -> None:
        self._date = datetime.now(UTC)
        self._start_s = time.monotonic()
        self._own_s = _own_cpu_s()
        self._all_s = _all_cpu_s()

    def conditions(self) -> list[tuple[str, str]]:
        """Date, duration, and the cores that other processes kept busy meanwhile."""
        seconds = time.monotonic() - self._start_s
        others = max(0.0, _all_cpu_s() - self._all_s - (_own_cpu_s() - self._own_s)) / seconds
        return [
            ("date", self._date.isoformat(timespec="seconds")),
            ("duration", f"{seconds:.1f} s"),
            ("other processes", f"kept {others:.2f} of {os.cpu_count()} cores busy meanwhile"),
        ]


def _own_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _all_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))
