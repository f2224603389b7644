"""The CUDA device's calls to CUDA and to torch's allocator: one protocol, implemented by torch.

Everything above this file is ordinary Python that a recording double can drive on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import torch

from chunkc._torch_compat.cuda import call_on_cuda_stream, cuda_sleep, is_current_cuda_stream
from chunkc.errors import HardwareError

_CYCLES_PER_MS: Final = 1_500_000
_CUDA_SUCCESS: Final = 0
_WARM_UP_NUMEL: Final = 256


KernelLaunch = Callable[[], None]
"""Launches kernels on the current stream, without waiting, over what their tensors hold then; any number of times."""


class ChunkKernels(Protocol):
    """The kernels of chunks, checked and made ready once.

    See ``chunkc.triton_kernels`` for shapes and dtypes.
    """

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        """The table of tiles of a chunk that an update takes."""

    def make_norm_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        """The table of tiles of a chunk that a norm takes."""
        ...

    def chunk_update(self, rule: str, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> KernelLaunch:
        """Update one chunk by a rule.

        ``states`` are param32 and states; the others gradient, payload, tiles, row_of_param, rows and control.
        """
        ...

    def restore(self, param32: torch.Tensor, payload: torch.Tensor, tiles: torch.Tensor) -> KernelLaunch:
        """Write param16 from param32."""
        ...

    def grad_norm(
        self, grad: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, partial: torch.Tensor
    ) -> KernelLaunch:
        """Sum of squares and finiteness of one chunk, into ``out``; ``partial`` is working memory."""
        ...


class CudaApi(Protocol):
    """One CUDA device. Streams and events are opaque; all methods may be called from any thread.

    Attributes:
        torch_device: of all tensors made here.
    """

    torch_device: torch.device

    def new_stream(self) -> Any:
        """A stream that does not synchronise with the default stream."""
        ...

    def current_stream(self) -> Any:
        """Return the calling thread's stream of this device; the same object while the stream is the same."""
        ...

    def key(self, stream: Any) -> int:
        """Return a number that tells streams apart."""
        ...

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Call ``work``, whose operators go to ``stream``; returns when they are enqueued."""
        ...

    def record(self, stream: Any, used: Any = None) -> Any:
        """An event at the end of what is enqueued on ``stream``.

        It may be ``used``, an earlier one that nobody asks for any more. Streams that were told to wait for that one
        still wait for what it stood for.
        """
        ...

    def wait_event(self, stream: Any, event: Any) -> None:
        """Make what is enqueued on ``stream`` from here on run after ``event``."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether ``event`` has happened, without waiting."""
        ...

    def wait_on_host(self, event: Any) -> None:
        """Block the calling thread, asleep, until ``event`` has happened."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the device has nothing to do."""
        ...

    def sleep(self, stream: Any, milliseconds: float) -> None:
        """Keep ``stream`` busy for about so long."""
        ...

    def warm_up(self) -> None:
        """Make CUDA and its libraries take the memory that they take once."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device, of all processes."""
        ...

    def allocator_nbytes(self, kind: str, moment: str) -> int:
        """Return a statistic of torch's allocator in bytes, ``current`` or ``peak``.

        ``kind`` is ``requested`` (what tensors asked for), ``allocated`` (blocks that hold them) or ``reserved`` (all
        that the allocator has of the device).
        """
        ...

    def reset_peaks(self) -> None:
        """Let the allocator's peaks start from now."""
        ...

    def release_cached(self) -> None:
        """Give blocks that the allocator holds unused back to the device."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor from torch's allocator; raises ``torch.OutOfMemoryError``."""
        ...

    def upload(self, table: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a small host tensor to the device, without waiting: on the current stream, from pinned memory."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin a range of host memory, exactly.

        Raises:
            HardwareError: when CUDA refuses.
        """
        ...

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``; copies from and to the range have finished."""
        ...

    def kernels(self) -> ChunkKernels:
        """The kernels for chunks on this device, imported when they are first asked for."""
        ...


class TorchCuda:
    """`CudaApi` of device ``index`` by torch.

    Asking torch for the current stream takes as long as half a launch: the object is kept while the stream is the same.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._latest_stream: torch.cuda.Stream | None = None

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        latest = self._latest_stream
        if latest is None or not is_current_cuda_stream(latest):
            self._latest_stream = latest = torch.cuda.current_stream(self.torch_device)
        return latest

    def key(self, stream: torch.cuda.Stream) -> int:
        return stream.cuda_stream

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        call_on_cuda_stream(stream, work)

    def record(self, stream: torch.cuda.Stream, used: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = used
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # a thread that waits for it sleeps
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        event.wait(stream)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def sleep(self, stream: torch.cuda.Stream, milliseconds: float) -> None:
        with torch.cuda.stream(stream):
            cuda_sleep(int(milliseconds * _CYCLES_PER_MS))

    def warm_up(self) -> None:
        """Matrix products load cuBLAS, whose workspaces stay: one for this thread, one for autograd's."""
        with torch.inference_mode(False), torch.enable_grad():
            for dtype in (torch.float32, torch.float16):
                square = torch.zeros(_WARM_UP_NUMEL, _WARM_UP_NUMEL, dtype=dtype, device=self.torch_device)
                torch.autograd.backward(torch.mm(square.requires_grad_(), square).sum())
        self.synchronize()

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def allocator_nbytes(self, kind: str, moment: str) -> int:
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        return int(stats[f"{kind}_bytes"]["all"][moment])

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def upload(self, table: torch.Tensor, target: torch.Tensor) -> None:
        """torch's pinned allocator keeps the pinned copy until this copy of it has finished."""
        target.copy_(table.pin_memory(), non_blocking=True)

    def register_host(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self.torch_device):
            result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
            if int(result) == _CUDA_SUCCESS:
                return
            with suppress(RuntimeError):  # the runtime keeps the error for the next launch that looks: take it away
                torch.zeros(1, device=self.torch_device)
        raise HardwareError(
            f"CUDA does not pin {nbytes} bytes of host memory (error {int(result)}): free host memory, raise what this "
            "container or its cgroup may lock, or name a smaller host memory in hw"
        )

    def unregister_host(self, address: int) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def kernels(self) -> ChunkKernels:
        return TritonKernels()


class TritonKernels:
    """``chunkc.triton_kernels``, imported when it is made."""

    def __init__(self) -> None:
        from chunkc.triton_kernels.cast import restore_launch
        from chunkc.triton_kernels.chunk_update import chunk_update_launch
        from chunkc.triton_kernels.grad_norm import grad_norm_launches, make_norm_tiles
        from chunkc.triton_kernels.launch import make_tiles

        self._restore, self._chunk_update, self._make_tiles = restore_launch, chunk_update_launch, make_tiles
        self._grad_norm, self._make_norm_tiles = grad_norm_launches, make_norm_tiles

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        return self._make_tiles(pieces, device)

    def make_norm_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        return self._make_norm_tiles(pieces, device)

    def chunk_update(self, rule: str, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> KernelLaunch:
        return self._chunk_update(rule, states, *tensors).run

    def restore(self, param32: torch.Tensor, payload: torch.Tensor, tiles: torch.Tensor) -> KernelLaunch:
        return self._restore(param32, payload, tiles).run

    def grad_norm(
        self, grad: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, partial: torch.Tensor
    ) -> KernelLaunch:
        squares, total = self._grad_norm(grad, tiles, out, partial=partial)

        def launch() -> None:
            squares.run()
            total.run()

        return launch
