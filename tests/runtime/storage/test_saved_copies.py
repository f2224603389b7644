"""Copies of saved values: bytes of any tensor, storages that lose and regain memory, buffers that are reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plans import moving

from chunkc.errors import BudgetError
from chunkc.ir.plan import MovedValue, Plan
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.storage.saved_copies import CopyPool, SavedCopies


def emulated(host_nbytes: int = 1000) -> EmulatedDevice:
    return EmulatedDevice("emulated-1m-1k", 1 << 20, host_nbytes, DebugSettings(poison=True))


def copies_of(nbytes: int, device: EmulatedDevice) -> SavedCopies:
    return SavedCopies(device, torch.zeros(nbytes, dtype=torch.uint8), [MovedValue(0, nbytes, 0, 0, (0, 0))])


def plan() -> Plan:
    """A plan that moves one value of 300 bytes."""
    return moving().build()


TENSORS: dict[str, Any] = {
    "contiguous": lambda: torch.randn(5, 7),
    "strided": lambda: torch.randn(5, 7).t(),
    "a view": lambda: torch.randn(6, 7)[2:, ::2],
    "booleans": lambda: torch.randn(33) > 0,
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "half": lambda: torch.randn(9).to(torch.bfloat16),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_value_comes_back_as_it_was(kind: str) -> None:
    tensor = TENSORS[kind]()
    wanted, nbytes = tensor.clone(), tensor.untyped_storage().nbytes()
    copies = copies_of(nbytes, emulated())
    copies.hold([None, tensor], {0: {1}})
    assert copies.offload(0) == nbytes
    copies.discard(0)
    assert tensor.untyped_storage().nbytes() == 0 and tensor.shape == wanted.shape
    assert copies.away_nbytes == nbytes and copies.storages() == {tensor.untyped_storage()._cdata}
    with copies.returned({0}):
        copies.allocate(0)
        assert tensor.untyped_storage().nbytes() == nbytes
        assert copies.reload(0) == nbytes
        assert torch.equal(tensor, wanted)
    assert tensor.untyped_storage().nbytes() == 0, "somebody still holds it: it is away again"
    with copies.returned():
        assert torch.equal(tensor, wanted), "a backward that does not bring it back itself finds it here"
    assert torch.equal(tensor, wanted)


def test_memory_that_others_see_or_of_another_size_stays() -> None:
    tensor = torch.randn(8)
    shared, larger = copies_of(32, emulated()), copies_of(16, emulated())
    shared.hold([tensor, tensor[2:]], {0: {0}})
    larger.hold([tensor[:4]], {0: {0}})
    for copies in (shared, larger):
        assert [value.index for value in copies.kept] == [0]
        assert copies.offload(0) == 0
        copies.discard(0)
    assert tensor.untyped_storage().nbytes() == 32


def test_values_of_one_segment_go_apart_unless_they_share_memory() -> None:
    """Also where one storage is seen by two tensors of one value, or by two values."""
    moves = [MovedValue(i, nbytes, 0, 0, (0, 0)) for i, nbytes in enumerate((32, 16, 64, 64))]
    alone, twice, common = torch.randn(8), torch.randn(4), torch.randn(16)
    copies = SavedCopies(emulated(), torch.zeros(176, dtype=torch.uint8), moves)
    copies.hold([twice, common, alone, twice.view(2, 2), common.t()], {0: {2}, 1: {0, 3}, 2: {1}, 3: {4}})
    assert [value.index for value in copies.kept] == [2, 3]
    assert [copies.offload(i) for i in range(4)] == [32, 16, 0, 0]


def test_a_value_that_nobody_holds_is_no_work() -> None:
    copies, tensor = copies_of(32, emulated()), torch.randn(8)
    copies.hold([tensor], {0: {0}})
    assert copies.is_alive()
    del tensor
    assert not copies.is_alive() and copies.offload(0) == 0
    copies.discard(0)
    copies.allocate(0)
    assert copies.reload(0) == 0


def test_buffers_are_reused_when_their_forward_is_gone() -> None:
    device = emulated(host_nbytes=700)
    pool = CopyPool(device)
    pool.prepare(plan())
    assert pool.nbytes == 300 and device.num_allocations() == 1
    first, tensor = pool.begin(plan()), torch.zeros(300, dtype=torch.uint8)
    assert first is not None
    first.hold([tensor], {0: {0}})
    second, other = pool.begin(plan()), torch.zeros(300, dtype=torch.uint8)
    assert second is not None and pool.nbytes == 600
    second.hold([other], {0: {0}})
    with pytest.raises(BudgetError, match="2 forwards wait for their backward, with 600 bytes") as refused:
        pool.begin(plan())
    assert refused.value.missing_nbytes == 200 and refused.value.min_host_nbytes == 900
    del tensor
    assert pool.begin(plan()) is not None and device.num_allocations() == 2
    pool.close()
    assert pool.nbytes == 0 and device.free_host_nbytes() == 700


def test_plans_without_moves_take_nothing() -> None:
    pool, still = CopyPool(emulated()), moving().but(moves=()).build()
    pool.prepare(still)
    assert pool.begin(still) is None and pool.nbytes == 0


def test_values_that_stay_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pool, tensor = CopyPool(emulated()), torch.randn(8)
    caplog.set_level("INFO", logger="chunkc")
    for _ in range(3):
        copies = pool.begin(plan())
        assert copies is not None
        copies.hold([tensor], {0: {0}})
    assert len(caplog.records) == 1 and "300 bytes more than planned" in caplog.text
