"""Which device a model runs on, and whether this machine can hold what a plan takes.

    hw names                                  on a machine with a GPU                    without
    ``emulated-...``                          emulated                                   emulated
    ``auto``                                  the GPU, all of it                         emulated
    the GPU that is here                      the GPU, budget of the memory named        (is not here)
    another GPU, with no more memory          the GPU that is here, budget of the memory emulated, one warning naming
                                              named, one warning naming both             both
    a GPU with more memory than the one here  refused                                    emulated, one warning

So ``v100-240g`` on a larger GPU trains within a V100's memory, at the speed of the GPU that is here. Rates of a GPU are
those of its data sheet; where it is here, this machine's cores and link count (`at_hand`). ``CHUNKC_EMULATED=throttle``
makes an emulated device as slow as the rates of the machine that it was named after.

Each ``hw`` text makes a device of its own. Models that were given the same ``Hardware`` object share one device and its
budgets: the second gets what the first left. Devices on one GPU share what it has, whoever named them.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import replace

from chunkc.compiler.throttle import pace_law
from chunkc.cost.rates import cost_rates
from chunkc.distributed.process_group import Ranks
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware, PresentGpu, free_host_nbytes, present_gpu
from chunkc.hardware.assumptions import assumed
from chunkc.hardware.host_memory import HOST_MEMORY
from chunkc.hardware.usable_memory import UsableMemory
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Plan
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.cpu_affinity import HostCores, leaving_launcher, own_cores, usable_cores
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice

logger = logging.getLogger("chunkc")

HardwareLike = Hardware | str | os.PathLike[str]
MakeApi = Callable[[int], CudaApi]


class SharedEmulated(EmulatedDevice):
    """An emulated device that remembers the ``Hardware`` object it belongs to, whose id so stays taken."""

    def __init__(self, hw: Hardware, settings: DebugSettings) -> None:
        law, memory = pace_law(cost_rates(hw)) if settings.throttle else None, UsableMemory.of(hw)
        super().__init__(str(hw), memory.device.nbytes, memory.host.nbytes, settings, law)
        self.overhead_nbytes, self.leaves_slack = memory.device.reserved_nbytes, memory.device.leaves_slack
        self.kept_host_nbytes = memory.host.reserved_nbytes
        self.hardware = hw


class SharedCuda(CudaDevice):
    """A CUDA device that remembers the ``Hardware`` object it belongs to, and which GPU it is."""

    def __init__(
        self, hw: Hardware, gpu: PresentGpu, api: CudaApi, ledger: MemoryLedger, settings: DebugSettings
    ) -> None:
        super().__init__(str(hw), api, ledger, hw.gpu_memory_nbytes, hw.host_nbytes_per_rank, settings)
        self.hardware, self.gpu = hw, gpu


SharedDevice = SharedEmulated | SharedCuda

_shared: weakref.WeakValueDictionary[int, SharedDevice] = weakref.WeakValueDictionary()
"""The device of each ``Hardware`` object in use: budgets are a fact of the process, like the memory they stand for."""

_ledgers: weakref.WeakValueDictionary[int, MemoryLedger] = weakref.WeakValueDictionary()
"""What each GPU in use gives to this process, by its index."""


def device_for(
    hw: HardwareLike, find_gpu: Callable[[], PresentGpu | None] = present_gpu, make_api: MakeApi = CudaApi
) -> tuple[Hardware, SharedDevice]:
    """The machine that ``hw`` names and the device to run on; see the module docstring.

    ``find_gpu`` finds this rank's GPU, or None; ``make_api`` makes CUDA on a GPU by its index.

    Raises:
        HardwareError: for an unknown machine, one with another number of GPUs than the job has ranks, or one whose GPU
            has more memory than the one here.
    """
    machine = Hardware.of(hw).for_job()
    known = _shared.get(id(hw))
    if known is not None and known.hardware is hw:
        return machine, known
    gpu = None if machine.emulated else find_gpu()
    if gpu is None and isinstance(hw, str) and hw.strip().lower() == "auto":
        logger.warning("hw='auto': there is no CUDA device here, so one is emulated in host memory: %s", machine)
    device = _emulated(machine) if gpu is None else _cuda(machine, gpu, make_api)
    if isinstance(hw, Hardware):
        device.hardware = hw
        _shared[id(hw)] = device
    return machine, device


def _emulated(machine: Hardware) -> SharedEmulated:
    if not machine.emulated:
        logger.warning(
            "hw=%s: there is no CUDA device here, so the %s is emulated in host memory", machine, machine.gpu
        )
    return SharedEmulated(machine, DebugSettings.from_env(os.environ.get("CHUNKC_EMULATED", "")))


def _cuda(machine: Hardware, gpu: PresentGpu, make_api: MakeApi) -> SharedCuda:
    if machine.gpu_memory_nbytes > gpu.nominal_nbytes:
        raise HardwareError(
            f"hw={machine} names a {machine.gpu} with {machine.gpu_memory_nbytes} bytes, but the GPU here, "
            f"{gpu.gpu}, has {gpu.memory_nbytes}: name one with no more, or hw='auto'"
        )
    if not gpu.is_a(machine.gpu):
        logger.warning(
            "hw=%s: there is no %s here; running on this machine's %s within the memory named",
            *(machine, machine.gpu),
            gpu.gpu,
        )
    if gpu.by_nvml is not None and gpu.by_nvml.num_other_processes:
        logger.warning(
            "GPU %d is shared: %d other processes hold %.2f GiB of its memory and take part of its time",
            *(gpu.index, gpu.by_nvml.num_other_processes, gpu.by_nvml.others_nbytes / 2**30),
        )
    settings = DebugSettings.from_env(os.environ.get("CHUNKC_CUDA", ""), "CHUNKC_CUDA")
    if settings.throttle:
        raise HardwareError("CHUNKC_CUDA=throttle: only an emulated device can be throttled; unset it")
    api = make_api(gpu.index)
    ledger = _ledgers.get(gpu.index)
    if ledger is None:
        ledger = _ledgers[gpu.index] = MemoryLedger(api)
    return SharedCuda(machine, gpu, api, ledger, settings)


def at_hand(machine: Hardware, device: SharedDevice, cores: HostCores | None, ranks: Ranks) -> Hardware:
    """Return ``machine`` with the cores and the PCIe link of this one, if its GPU is the one here.

    The call is collective, and all ranks get the least of any: other rates would make other plans. What `chunkc
    calibrate` measured stays. A log line says what is assumed. ``cores`` are this rank's; None: all that the process
    may use.
    """
    gpu = device.gpu if isinstance(device, SharedCuda) else None
    if gpu is None or machine.tflops is None or machine.rates is not None or not gpu.is_a(machine.gpu):
        own = None
    else:
        num_cores = len(usable_cores() if cores is None else cores.ids)
        own = num_cores * machine.gpus_per_node, gpu.by_nvml and gpu.by_nvml.pcie_gb_per_s
    figures = [json.loads(text) for text in ranks.collect_from_job(json.dumps(own).encode())]
    if None in figures:
        return machine
    num_node_cores, links = min(cores for cores, _ in figures), [link for _, link in figures]
    link = machine.pcie_gb_per_s if None in links else min(links)
    logger.info(
        "hw=%s: planned by this machine's %d cores and PCIe at %.1f GB/s, by the data sheet, and by assumptions (%.0f "
        "us to launch a kernel); `chunkc calibrate -o machine.json` measures what hw='machine.json' then plans by",
        *(machine, num_node_cores, link or 0.0, assumed(machine.gpu).kernel_launch_us),
    )
    return replace(machine, num_cpu_cores=num_node_cores, pcie_gb_per_s=link)


def update_cores(device: SharedDevice, ranks: Ranks) -> HostCores | None:
    """The cores on which this rank's updates run; None: PyTorch's threads on any. Collective.

    Beside other ranks they are its own; beside a GPU some are left to the launching threads.
    """
    cores = own_cores(ranks.of_job) if ranks.of_job.job_size > 1 else None
    if not isinstance(device, SharedCuda):
        return cores  # the emulated device computes on them too
    return leaving_launcher(cores)


def count_libraries(device: SharedDevice) -> None:
    """Subtract from the budget of a GPU what libraries have taken of it since the device was made."""
    if isinstance(device, SharedCuda):
        device.count_libraries()


def check_room_aside(layout: Layout, ranks_per_node: int) -> None:
    """Refuse, by HardwareError, to copy what ``layout`` keeps on a GPU into host memory that is not free."""
    nbytes, free = layout.nbytes_in(Tier.DEVICE) * ranks_per_node, free_host_nbytes()
    if nbytes > free:
        raise HardwareError(
            f"to move the model to another layout, {nbytes} bytes that stand on the device are copied to host memory, "
            f"where {free} are free: call the largest shape first, or declare shapes by example_inputs, so that "
            "one layout serves all"
        )


def check_free_memory(plan: Plan, already_held_nbytes: int, *, is_host: bool = True, ranks_per_node: int = 1) -> None:
    """Refuse a plan that this machine's free host memory cannot hold, for all ranks of it together.

    ``already_held_nbytes`` are the model's, which the chunks consume as they fill. ``is_host``: host memory stands for
    the device too.

    Raises:
        HardwareError: with the numbers.
    """
    device_nbytes = plan.memory.device_peak_nbytes if is_host else 0
    free = free_host_nbytes()
    if (device_nbytes + plan.memory.host_nbytes) * ranks_per_node - already_held_nbytes <= free:
        return
    taken = f"{device_nbytes} device and {plan.memory.host_nbytes} host bytes, both of which are host memory here"
    if not is_host:
        taken = f"{plan.memory.host_nbytes} bytes of host memory"
    if ranks_per_node > 1:
        taken += f" on each of {ranks_per_node} ranks of this machine"
    raise HardwareError(
        f"the plan for {plan.hw} takes {taken}, where {free} bytes are free; use a smaller model, or name a machine "
        f"with less memory. Where a machine is given memory as it uses it, {HOST_MEMORY}=<size> says how much there is"
    )
