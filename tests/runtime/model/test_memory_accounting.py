"""Readings of one model's device memory."""

import gc

import pytest
import torch

from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.malloc_meter import NonModelMeter
from chunkc.runtime.model.memory_accounting import Accounting

MIB = 1 << 20


@pytest.mark.skipif(not NonModelMeter().available, reason="no reading of malloc on this system")
def test_what_is_held_when_backward_begins_counts() -> None:
    """Taken between forward and backward, and let go of before any of backward's work has ended."""
    device = EmulatedDevice("emulated", 64 * MIB, 64 * MIB)
    accounting = Accounting(device)
    gc.collect()
    accounting.start(0)
    accounting.end_forward(None, (), is_first=False)
    between = torch.empty(32 * MIB, dtype=torch.uint8)
    accounting.begin_backward()
    del between
    accounting.end_backward(None)
    assert 32 * MIB <= accounting.measured_peak_nbytes < 36 * MIB
    device.close()
