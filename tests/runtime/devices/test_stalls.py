"""How long the compute stream of the emulated device waited, and for what."""

import time

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.emulated import EmulatedDevice


def test_the_compute_stream_remembers_what_it_waited_for_and_how_long() -> None:
    """A wait of the host for an event is nobody's stall, nor is one for work that has ended."""
    device = EmulatedDevice("emulated-1m-1m", 2**20, 2**20)
    done = device.launch(Stream.CPU, "s0", [], lambda: None)
    done.wait()
    asked = device.launch(Stream.D2H, "b0", [], lambda: time.sleep(0.02))
    asked.wait()
    begun_s = time.perf_counter()
    slow = device.launch(Stream.H2D, "f0", [], lambda: time.sleep(0.5))
    device.launch(Stream.COMPUTE, "f1", [done, slow], lambda: None)
    limit_s = time.perf_counter() - begun_s
    device.launch(Stream.COMPUTE, "f2", [done, slow], lambda: None)
    assert set(device.stalled_s()) == {Stream.H2D}
    assert 0.03 <= device.stalled_s()[Stream.H2D] <= limit_s
    device.close()
