"""The machine a plan is made for: its memory, its rates, and its spelling in a few characters.

An ``hw`` string names a machine without needing one, by the grammar of `spelling`: ``8xv100-240g`` is one node of eight
V100 with 240 GiB of host memory, ``4x8xa100-40g-1024g`` four nodes of eight A100, ``emulated-64m-2g`` a device made of
host memory under a budget of 64 MiB. GPU memory is per device, host memory per node and shared by its ranks.
``sm86-10g-32g`` is any GPU of compute capability 8.6, rates unknown. Names and rates come from ``hardware.toml``.

Everything here is arithmetic on strings and files, except `Hardware.detect`, which looks at this machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import torch
import torch.distributed

from chunkc.errors import HardwareError
from chunkc.files import Decoder, read_json, save_text, shown
from chunkc.hardware.catalogue import Tflops, check_rate, gpus, machines
from chunkc.hardware.host_memory import free_host_nbytes
from chunkc.hardware.local_gpu import PresentGpu, number_of_environ, present_gpu
from chunkc.hardware.profile import Rates
from chunkc.hardware.spelling import (
    EMULATED,
    MAX_NBYTES,
    Spelling,
    any_gpu_capability,
    format_size,
    parse_size,
    parse_spelling,
)

__all__ = ["Hardware", "PresentGpu", "Tflops", "format_size", "free_host_nbytes", "parse_size", "present_gpu"]

PROFILE_FORMAT: Final = "chunkc-hardware"
PROFILE_VERSION: Final = 2
PROFILE_MAX_NBYTES: Final = 2**26
_MAX_DEVICES: Final = 2**20
_MAX_CORES: Final = 2**20
_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine: `num_nodes` equal nodes of `gpus_per_node` equal GPUs, one rank for each GPU.

    ``Hardware.parse(str(hw)) == hw`` for every machine that `parse` made. Bandwidths are in 1e9 bytes per second, those
    of links per direction. A rate that is ``None`` is unknown or, for a link, the link is absent.

    Attributes:
        name: the canonical spelling with all sizes explicit, or the alias, which says more than a spelling can.
        gpu: a name of ``hardware.toml`` such as ``"v100"``, or ``"emulated"``, or ``"sm<NN>"``.
        gpu_memory_nbytes, host_memory_nbytes: of one device, and of one node, shared by its ranks.
        nvlink_gb_per_s: all NVLinks of one device together to the others of its node.
        internode_gb_per_s, num_cpu_cores: of one node, where known: a spelling does not say them.
        rates: measured by ``chunkc calibrate``; the rates above are those of the data sheet.
    """

    name: str
    gpu: str
    num_nodes: int
    gpus_per_node: int
    gpu_memory_nbytes: int
    host_memory_nbytes: int
    hbm_gb_per_s: float | None = None
    tflops: Tflops | None = None
    pcie_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None
    c2c_gb_per_s: float | None = None
    internode_gb_per_s: float | None = None
    compute_capability: tuple[int, int] | None = None
    num_cpu_cores: int | None = None
    rates: Rates | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "gpu"):
                if not isinstance(value, str) or not value:
                    raise HardwareError(f"{field.name} must be a non-empty string, found {value!r}")
            elif value is None and field.default is None:
                continue
            elif field.name.endswith("_gb_per_s"):
                check_rate(field.name, value)
            elif field.name not in ("tflops", "compute_capability", "rates"):
                _check_count(field.name, value)
        if self.num_gpus > _MAX_DEVICES:
            raise HardwareError(f"{self.num_gpus} devices are more than {_MAX_DEVICES}, the most of any machine")

    def __str__(self) -> str:
        return self.name

    @property
    def num_gpus(self) -> int:
        """Devices of all nodes together: the world size that a plan for this machine assumes."""
        return self.num_nodes * self.gpus_per_node

    def num_ranks(self, world_size: int | None = None) -> int:
        """``world_size``, by default all devices; raises HardwareError where the machine has fewer."""
        if world_size is None:
            return self.num_gpus
        if not 1 <= world_size <= self.num_gpus:
            raise HardwareError(
                f"world_size={world_size}: every rank takes a device of its own, and {self} has {self.num_gpus}; give "
                f"1 to {self.num_gpus}, or hardware with more devices (8xv100-240g)"
            )
        return world_size

    def sharding(self, shard: str, world_size: int | None = None) -> tuple[int, int]:
        """Number of ranks that divide model data among them, and of its replicas.

        ``shard``: ``"all"`` ranks divide it, or those of a ``"node"``, and every node has all of it. HardwareError for
        another word, and where nodes have one rank or unequal numbers of them.
        """
        num_ranks, per_node = self.num_ranks(world_size), self.gpus_per_node
        if shard not in ("all", "node"):
            raise HardwareError(f"shard={shard!r}: give 'all' (over all ranks) or 'node' (within each node)")
        if shard == "all" or num_ranks <= per_node:
            return num_ranks, 1
        if per_node == 1 or num_ranks % per_node:
            raise HardwareError(
                f"shard='node' divides model data within nodes of equally many ranks, two or more, and not {num_ranks} "
                f"ranks on nodes of {per_node} (hw={self}). Use shard='all'"
            )
        return per_node, num_ranks // per_node

    def job_sharding(self, shard: str) -> tuple[int, int]:
        """The `sharding` of the running job; HardwareError also where ``"node"`` is not a node of the job."""
        sharding, (num_nodes, per_node) = self.sharding(shard), _job_shape()
        if shard == "node" and not self.emulated and per_node != self.gpus_per_node:
            raise HardwareError(
                f"shard='node' divides model data within nodes, and hw={self} has nodes of {self.gpus_per_node} GPUs, "
                f"but this job has {per_node} ranks on each of {num_nodes} nodes. Name the machine as the job uses it"
            )
        return sharding

    def for_job(self) -> Hardware:
        """This machine as the ranks of the running job use it, one device each.

        A machine of one device stands for as many nodes and devices as the job has; ranks share a node's host memory.
        Raises HardwareError where it names another number of devices than there are ranks.
        """
        num_nodes, gpus_per_node = _job_shape()
        if self.num_gpus == num_nodes * gpus_per_node:
            return self
        if self.num_gpus == 1:
            counts = "".join(f"{count}x" for count in (num_nodes, gpus_per_node)[num_nodes == 1 :])
            return replace(self, name=counts + self.name, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
        ranks = f"{num_nodes * gpus_per_node} ranks" if num_nodes * gpus_per_node > 1 else "1 rank"
        raise HardwareError(
            f"hw={self} has {self.num_gpus} devices, but this job has {ranks}: start one process for each device "
            f"(`torchrun --nproc-per-node={self.gpus_per_node} ...`), or name the machine that is used. chunkc.plan "
            "plans for any machine"
        )

    @property
    def emulated(self) -> bool:
        """Whether the device is host memory by name (not: whether a named GPU happens to be absent here)."""
        return self.gpu == EMULATED

    @property
    def host_nbytes_per_rank(self) -> int:
        """One rank's equal share of its node's host memory."""
        return self.host_memory_nbytes // self.gpus_per_node

    @property
    def host_link_gb_per_s(self) -> float | None:
        """Bandwidth between one device and the host, per direction: of NVLink-C2C if any, else of PCIe."""
        return self.pcie_gb_per_s if self.c2c_gb_per_s is None else self.c2c_gb_per_s

    @property
    def compute_dtype(self) -> torch.dtype:
        """Mixed precision's compute dtype: bfloat16 from sm_80 on and on emulated devices, else float16."""
        if self.compute_capability is not None and self.compute_capability < (8, 0):
            return torch.float16
        return torch.bfloat16

    @classmethod
    def of(cls, hw: Hardware | str | os.PathLike[str]) -> Hardware:
        """The machine of ``hw=``: a `Hardware`, a spelling, or the path of a profile (`Path`, or ``*.json``)."""
        if isinstance(hw, Hardware):
            return hw
        if isinstance(hw, str) and not hw.strip().lower().endswith(".json"):
            return cls.parse(hw)
        return cls.load(hw)

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """Read a spelling, an alias or ``"auto"``, in any case; a HardwareError says what would be right."""
        alias = text.strip().lower()
        if alias == "auto":
            return cls.detect()
        machine = machines().get(alias)
        if machine is None:
            return _spelled(parse_spelling(text))
        return replace(
            _spelled(parse_spelling(machine.hw)),
            name=alias,
            num_cpu_cores=machine.num_cpu_cores,
            internode_gb_per_s=machine.internode_gb_per_s,
        )

    @classmethod
    def detect(cls) -> Hardware:
        """Return this machine, as the ranks of this job (torch.distributed, torchrun, else one) use it.

        With CUDA: model and whole memory of this rank's device, the bandwidth of its PCIe link, where the driver says
        it, and the host memory that is free. Without: an emulated machine, whose device and host are the same memory:
        of what is free, 5/8 are for the devices of the node together, 1/4 for the host, and 1/8 is left to Python, its
        libraries and the data loader. Free memory respects cgroup limits. Sizes are in whole MiB.
        """
        num_nodes, gpus_per_node = _job_shape()
        free_nbytes = free_host_nbytes()
        present = present_gpu()
        if present is not None:
            gpu, gpu_nbytes, host_nbytes = present.gpu, present.memory_nbytes, free_nbytes
        else:
            gpu, gpu_nbytes = EMULATED, free_nbytes * 5 // 8 // gpus_per_node
            host_nbytes = free_nbytes // 4
        if min(gpu_nbytes, host_nbytes) < _MIB:
            raise HardwareError(f"hw='auto': {free_nbytes} bytes of free memory are too few for {gpus_per_node} ranks")
        sizes = (gpu_nbytes // _MIB * _MIB, host_nbytes // _MIB * _MIB)
        machine = replace(_spelled(Spelling(gpu, *sizes, num_nodes, gpus_per_node)), num_cpu_cores=os.cpu_count())
        by_nvml = None if present is None else present.by_nvml
        link_gb_per_s = None if by_nvml is None else by_nvml.pcie_gb_per_s
        return machine if link_gb_per_s is None else replace(machine, pcie_gb_per_s=link_gb_per_s)

    def profile(self) -> dict[str, Any]:
        """Every field under a format version, ready for JSON: what `save` writes."""
        return {"format": PROFILE_FORMAT, "version": PROFILE_VERSION, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile for `load` and ``hw=``, whole or not at all; raises ChunkcError."""
        save_text(path, json.dumps(self.profile(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Hardware:
        """Read a profile that `save` wrote; a HardwareError names the file and the place inside."""
        try:
            return _from_profile(read_json(os.fspath(path), max_nbytes=PROFILE_MAX_NBYTES))
        except (OSError, ValueError) as error:
            raise HardwareError(f"hw profile {os.fspath(path)!r}: {error}") from error


def _spelled(spelling: Spelling) -> Hardware:
    hw = Hardware(
        name=str(spelling),
        gpu=spelling.gpu,
        num_nodes=spelling.num_nodes,
        gpus_per_node=spelling.gpus_per_node,
        gpu_memory_nbytes=spelling.gpu_memory_nbytes,
        host_memory_nbytes=spelling.host_memory_nbytes,
        compute_capability=any_gpu_capability(spelling.gpu),
    )
    row = gpus().get(spelling.gpu)
    if row is None:
        return hw
    return replace(
        hw,
        hbm_gb_per_s=row.hbm_gb_per_s(spelling.gpu_memory_nbytes),
        tflops=row.tflops,
        pcie_gb_per_s=row.pcie_gb_per_s,
        nvlink_gb_per_s=row.nvlink_gb_per_s,
        c2c_gb_per_s=row.c2c_gb_per_s,
        compute_capability=row.compute_capability,
    )


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise HardwareError(f"{name} must be a positive whole number, found {count!r}")
    most = MAX_NBYTES if name.endswith("_nbytes") else _MAX_CORES
    if count > most:
        raise HardwareError(f"{name} must be at most {most}, found {count}")


def _job_shape() -> tuple[int, int]:
    world_size = number_of_environ("WORLD_SIZE", 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
    ranks_per_node = number_of_environ("LOCAL_WORLD_SIZE", world_size)
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise HardwareError(f"{world_size} ranks do not fill nodes of {ranks_per_node}; name the hardware")
    return world_size // ranks_per_node, ranks_per_node


def _from_profile(profile: Any) -> Hardware:
    if not isinstance(profile, dict) or profile.pop("format", None) != PROFILE_FORMAT:
        raise HardwareError(f"no hardware profile: it lacks 'format': {PROFILE_FORMAT!r}")
    if (version := profile.pop("version", None)) != PROFILE_VERSION:
        found = f"its format version is {shown(version)}"
        raise HardwareError(f"{found}, this chunkc reads {PROFILE_VERSION}; save it again")
    return Decoder().decode(Hardware, profile)
