"""Several ranks whose device is CUDA's over a double, and what order their calls of CUDA keep."""

from functools import partial

import pytest
from cuda_order import found_faults, record
from fake_cuda import GIB, FakeCuda
from models import CASES, loss_of
from rank_training import Work, compiled, machine_of

import chunkc
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.storage.parameter_io import ChunkValues

MIB = 2**20
CONTEXT_NBYTES = GIB
RESIDENT = Work("odd", wishes={"os_home": "device", "chunk_numel": 4096})
"""Every rank sends its chunks from where they are updated, read and written."""


def order_around_writes() -> tuple[set[str], list[str]]:
    """Train two steps with new parameters between them: the streams of what was launched, and what order is missing."""
    api = FakeCuda()
    device = CudaDevice("fake", api, MemoryLedger(api), CONTEXT_NBYTES + 64 * MIB, 64 * MIB)
    batches, write_param = CASES[RESIDENT.name].batches(), ChunkValues.write_param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkc.api.device_for", lambda hw: (hw, device))
        model = compiled(RESIDENT, machine_of(64 * MIB, 64 * MIB))
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)

        def step(number: int) -> None:
            loss_of(model(**batches[number % len(batches)])).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        values = model.state_dict()
        recorder = record(device, api, patch)
        patch.setattr(
            ChunkValues, "write_param", lambda *a, **k: recorder.between_programs(partial(write_param, *a, **k))
        )
        step(1)
        model.load_state_dict(values)
        step(2)
        return {str(launch.stream) for launch in recorder.launches}, found_faults(recorder, device, api)
