"""This rank's GPU: which one it is, and what is known of it before anything runs there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed

from chunkc.errors import HardwareError
from chunkc.hardware.catalogue import gpus
from chunkc.hardware.nvml import NvmlGpu, nvml_gpu

__all__ = ["PresentGpu", "number_of_environ", "present_gpu"]


@dataclass(frozen=True, slots=True)
class PresentGpu:
    """This rank's CUDA device; ``index`` is CUDA's, ``gpu`` a name of the catalogue or ``sm<NN>``.

    ``memory_nbytes``: what CUDA programs can have of it, a little less than what it is sold with.
    """

    index: int
    gpu: str
    memory_nbytes: int
    capability: tuple[int, int]
    by_nvml: NvmlGpu | None = None

    @property
    def nominal_nbytes(self) -> int:
        """The memory that it is sold with; that which it has, for one that the catalogue does not know."""
        row = gpus().get(self.gpu)
        variants = () if row is None else row.variants
        return min((v for v in variants if v >= self.memory_nbytes), default=self.memory_nbytes)

    def is_a(self, gpu: str) -> bool:
        """Whether ``gpu``, a name or ``sm<NN>``, says what it is."""
        return gpu in (self.gpu, "sm{}{}".format(*self.capability))


def present_gpu() -> PresentGpu | None:
    """This rank's CUDA device, if there is one; without a CUDA context where NVML knows the device.

    The script's choice (``init_process_group(device_id=...)``, ``torch.cuda.set_device``), else that of LOCAL_RANK, or
    the only one that the process sees.
    """
    if not torch.cuda.is_available():
        return None
    index, count = _gpu_of_job(), torch.cuda.device_count()
    if index is None:
        is_chosen = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        chosen, local_rank = torch.cuda.current_device() if is_chosen else 0, number_of_environ("LOCAL_RANK", 0)
        index = chosen if chosen or count == 1 else local_rank
    if index >= count:
        raise HardwareError(f"hw='auto': LOCAL_RANK={index}, but {count} CUDA devices are visible")
    by_nvml = nvml_gpu(index)
    if by_nvml is not None:
        name, nbytes, capability = by_nvml.name, by_nvml.memory_nbytes, by_nvml.capability
    else:
        device = torch.cuda.get_device_properties(index)
        name, nbytes, capability = device.name, device.total_memory, (device.major, device.minor)
    known = (gpu for gpu, row in gpus().items() if row.is_device(name, nbytes))
    return PresentGpu(index, next(known, "sm{}{}".format(*capability)), nbytes, capability, by_nvml)


def _gpu_of_job() -> int | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    device: torch.device | None = getattr(torch.distributed.group.WORLD, "bound_device_id", None)
    return None if device is None or device.type != "cuda" else device.index


def number_of_environ(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise HardwareError(f"{variable}={text!r} is no whole number; torchrun sets it, so unset it elsewhere")
    return int(text)
