"""What hides a difference between versions of torch behaves alike on all of them."""

import copy
import gc
import json
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from torch import nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import LocalSource
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import counters
from torch._guards import Guard
from torch.torch_version import TorchVersion

import chunkc
from chunkc._torch_compat.core import capture_settings, outlives, without_guards
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.host_slab import allocate_slab
from chunkc.runtime.devices.malloc_meter import NonModelMeter
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.storage.transaction import Transactions

logger = logging.getLogger("talkative")


class Talkative(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logger.info("called with %s", x.shape)
        return super().forward(x).sum()


@pytest.mark.long
def test_logging_in_a_forward_breaks_no_graph_and_torch_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = chunkc.compile(Talkative(4, 4), "emulated-1m-1m", backend="eager")
    model(torch.ones(2, 4)).backward()
    assert model.weight.grad is not None, "no compiled forward ran"
    elsewhere = "torch.utils.cpp_extension"  # once a process, on machines with CUDA's tools and no GPU
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name != elsewhere]
    assert told == []


def test_functions_to_ignore_can_be_copied_into_json() -> None:
    """As torch 2.11 does for its metrics; outside of a capture the setting is as it was."""
    assert not torch._dynamo.config.ignore_logging_functions
    with capture_settings():
        assert logging.Logger.warning in torch._dynamo.config.ignore_logging_functions
        names = copy.deepcopy(torch._dynamo.config.ignore_logging_functions)
        assert "Logger.warning" in json.loads(json.dumps(names))
    assert not torch._dynamo.config.ignore_logging_functions


def test_no_dispatch_mode_looks_at_what_a_plan_is_bound_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    bind = Executor.__init__

    def looking(executor: Executor, *args: Any) -> None:
        seen.append(len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        bind(executor, *args)

    monkeypatch.setattr(Executor, "__init__", looking)
    model = chunkc.compile(nn.Linear(4, 4), "emulated-1m-1m", backend="eager")
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [0]


def collected_while_dynamo_runs(owners: list[object]) -> int:
    """How many frames Dynamo compiles of a forward that breaks in two, in whose second part ``owners`` go."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        owners.clear()
        return x * 2

    for code in (forward.__code__, weakref.finalize.__call__.__code__):
        torch._dynamo.reset_code(code)  # frames without tensors are compiled once a process
    counters.clear()
    run = torch.compile(forward, backend=lambda module, inputs: module.forward)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 4.0))
    return int(counters["frames"]["total"])


def cuda_device() -> CudaDevice:
    api = FakeCuda()
    return CudaDevice("fake", api, MemoryLedger(api), api.total, 2**20)


def transactions() -> Transactions:
    made = Transactions(lambda: None, lambda work: work)
    made.run(lambda: None)
    return made


OWNERS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "slab": lambda: allocate_slab(4096)[0],
    "meter": NonModelMeter,
    "emulated device": lambda: EmulatedDevice("emulated-1m-1m", 2**20, 2**20),
    "CUDA device": cuda_device,
    "transactions": transactions,
}


@pytest.mark.parametrize("owner", OWNERS)
def test_dynamo_traces_nothing_of_what_is_called_when_an_object_goes(owner: str) -> None:
    """Compiled frames of finalizers take seconds, keep guards, and may be refused for what they call."""
    gc.collect()
    assert collected_while_dynamo_runs([OWNERS[owner]()]) == 2


def test_a_finalizer_of_pythons_own_is_traced() -> None:
    model = nn.Identity()
    weakref.finalize(model, list)
    owners: list[object] = [model]
    del model
    assert collected_while_dynamo_runs(owners) > 2


def test_memory_outlives_all_objects_of_python_over_it() -> None:
    """Where a view has it, or autograd alone, whatever is collected; and no longer."""
    leaf = torch.ones(4, requires_grad=True)
    held, viewed = leaf.exp(), torch.ones(4)
    is_saved, is_viewed = outlives(held.untyped_storage()), outlives(viewed.untyped_storage())
    total, view = held.sum(), viewed.view(2, 2)
    del held, viewed
    gc.collect()
    assert is_saved() and is_viewed()
    assert view.untyped_storage().nbytes() == 16
    total.backward()
    del view
    assert not is_saved() and not is_viewed()


class _Found:
    """An object that a guard found."""


def test_a_guard_that_is_built_again_may_find_another_object() -> None:
    """Guards are built twice where some are left out, and a property may give a new object each time."""
    first, second = _Found(), _Found()
    guards = [Guard(LocalSource(name), GuardBuilder.TYPE_MATCH) for name in ("x", "y")]
    for guard in guards:
        guard.set_export_info("TYPE_MATCH", None, ["built once"], weakref.ref(first))
    with pytest.raises(AssertionError, match="must be identical"):
        guards[0].set_export_info("TYPE_MATCH", None, ["built again"], weakref.ref(second))
    entries = [GuardFilterEntry(g.name, True, first, g.guard_types[0], (), False, g) for g in guards]
    keep = without_guards(lambda name, value, kind: "x" in name and value is first and kind == "TYPE_MATCH")
    if TorchVersion(torch.__version__) < "2.13":
        assert keep == {}, "2.11 does not see requires_grad change without the guards inside of a tensor subclass"
        return
    assert keep["guard_filter_fn"](entries) == [False, True]
    guards[1].set_export_info("TYPE_MATCH", None, ["built again"], weakref.ref(second))
    assert guards[1].code_list == ["built again"]
