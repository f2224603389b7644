"""Private torch APIs of CUDA streams, seen on torch 2.11.0 and 2.13.0.

Where a version has the names no more, torch's own slower ways are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

_NAMES: Final = ("_cuda_getDevice", "_cuda_getCurrentRawStream", "_cuda_getCurrentStream", "_cuda_setStream")
_HAS_NAMES: Final = all(hasattr(torch._C, name) for name in _NAMES)


def is_current_cuda_stream(stream: torch.cuda.Stream) -> bool:
    """Whether ``stream`` is this thread's of its initialised device; torch takes 10 microseconds."""
    if not _HAS_NAMES:
        return bool(torch.cuda.current_stream(stream.device) == stream)
    return torch._C._cuda_getCurrentRawStream(stream.device_index) == stream.cuda_stream


def call_on_cuda_stream(stream: torch.cuda.Stream, call: Callable[[], None]) -> None:
    """Run ``call`` as ``with torch.cuda.stream(stream)`` does, without its some 10 microseconds."""
    index = stream.device_index
    if not _HAS_NAMES or torch._C._cuda_getDevice() != index:
        with torch.cuda.stream(stream):
            call()
    elif torch._C._cuda_getCurrentRawStream(index) == stream.cuda_stream:
        call()
    else:
        before_id, _, device_type = torch._C._cuda_getCurrentStream(index)
        torch._C._cuda_setStream(stream_id=stream.stream_id, device_index=index, device_type=device_type)
        try:
            call()
        finally:
            torch._C._cuda_setStream(stream_id=before_id, device_index=index, device_type=device_type)


def cuda_sleep(num_cycles: int) -> None:
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]
