"""Memory that MKL, torch's library of matrix products on CPUs, keeps for itself.

MKL packs operands into buffers that it takes at the first product of a kind and gives back only when the process ends:
tens of MB after a few shapes. Seen on torch 2.13.0 and 2.15.0; a build without MKL has no such function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch


def mkl_kept_reader() -> Callable[[], int] | None:
    """Return a reader of the bytes of MKL's own buffers, in use or not; None without MKL."""
    library = ctypes.PyDLL(torch._C.__file__)  # also finds symbols of what it depends on
    if not hasattr(library, "mkl_serv_mem_stat"):
        return None
    mem_stat = library.mkl_serv_mem_stat
    mem_stat.argtypes, mem_stat.restype = (ctypes.POINTER(ctypes.c_int),), ctypes.c_int64
    return partial(mem_stat, ctypes.c_int())  # which it writes the number of buffers to
