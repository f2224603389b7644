"""Pages of host memory that the system has really given."""

import ctypes
import mmap
import os

import torch


def resident_nbytes(memory: torch.Tensor) -> int:
    """Bytes of the pages of ``memory``, which begins at a page, that are resident: mincore(2)."""
    num_pages = -(-memory.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    if mincore(memory.data_ptr(), num_pages * mmap.PAGESIZE, found) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(page & 1 for page in found) * mmap.PAGESIZE
