"""The machine that a plan is made for: its spelling, its catalogue of rates, and what is here of it."""

from chunkc.hardware.host_memory import free_host_nbytes
from chunkc.hardware.local_gpu import PresentGpu, present_gpu
from chunkc.hardware.machine import Hardware
from chunkc.hardware.spelling import format_size, parse_size

__all__ = ["Hardware", "PresentGpu", "format_size", "free_host_nbytes", "parse_size", "present_gpu"]
