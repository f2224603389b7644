"""The CUDA device's calls to CUDA and to torch's allocator: which the double of CUDA stands in for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import torch

from chunkc._torch_compat.cuda import call_on_cuda_stream, cuda_sleep, is_current_cuda_stream
from chunkc.errors import HardwareError

_CYCLES_PER_MS: Final = 1_500_000
_CUDA_SUCCESS: Final = 0
_WARM_UP_NUMEL: Final = 256
_NO_TRITON: Final = (
    "training on a GPU needs Triton, which is not installed: CUDA builds of torch for Linux bring theirs; elsewhere "
    "pip install 'chunkc[triton]', or name an emulated device in hw"
)


KernelLaunch = Callable[[], None]
"""Launches kernels on the current stream, without waiting, over what their tensors hold then; any number of times."""


class ChunkKernels(Protocol):
    """The kernels of chunks, checked and made ready once; ``chunkc.triton_kernels`` has shapes and dtypes."""

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor: ...

    def make_norm_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor: ...

    def chunk_update(self, rule: str, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> KernelLaunch:
        """Update one chunk by a rule; ``tensors``: gradient, payload, tiles, row_of_param, rows, control.

        ``states``: the rule's lists; of a rule of quantised states also the tables of codes.
        """

    def restore(self, param32: torch.Tensor, payload: torch.Tensor, tiles: torch.Tensor) -> KernelLaunch: ...

    def grad_norm(
        self, grad: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, partial: torch.Tensor
    ) -> KernelLaunch:
        """Sum of squares and finiteness of one chunk, into ``out``; ``partial`` is working memory."""


class CudaApi:
    """CUDA device ``index`` and torch's allocator. Streams and events are opaque; threads may share it.

    Raises:
        HardwareError: Triton, in which the kernels of chunks are written, is not installed.
    """

    def __init__(self, index: int) -> None:
        if importlib.util.find_spec("triton") is None:
            raise HardwareError(_NO_TRITON)
        self.torch_device = torch.device("cuda", index)
        self._latest_stream: torch.cuda.Stream | None = None

    def new_stream(self) -> torch.cuda.Stream:
        """A stream that does not synchronise with the default stream."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        """The calling thread's stream; the same object while the stream is the same, since asking is slow."""
        latest = self._latest_stream
        if latest is None or not is_current_cuda_stream(latest):
            self._latest_stream = latest = torch.cuda.current_stream(self.torch_device)
        return latest

    def key(self, stream: torch.cuda.Stream) -> int:
        return stream.cuda_stream

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Call ``work``, whose operators go to ``stream``; returns when they are enqueued."""
        call_on_cuda_stream(stream, work)

    def record(self, stream: torch.cuda.Stream, used: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Record an event behind what is enqueued on ``stream``: ``used`` again, if nobody asks for it."""
        event = used
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # a thread that waits for it sleeps
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make what is enqueued on ``stream`` from here on run after ``event``."""
        event.wait(stream)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        """Block the calling thread, asleep, until ``event`` has happened."""
        event.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def sleep(self, stream: torch.cuda.Stream, milliseconds: float) -> None:
        with torch.cuda.stream(stream):
            cuda_sleep(int(milliseconds * _CYCLES_PER_MS))

    def warm_up(self) -> None:
        """Load cuBLAS, whose workspaces stay: one for this thread, one for autograd's."""
        with torch.inference_mode(False), torch.enable_grad():
            for dtype in (torch.float32, torch.float16):
                square = torch.zeros(_WARM_UP_NUMEL, _WARM_UP_NUMEL, dtype=dtype, device=self.torch_device)
                torch.autograd.backward(torch.mm(square.requires_grad_(), square).sum())
        self.synchronize()

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device, of all processes."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def allocator_nbytes(self, kind: str, moment: str) -> int:
        """Statistic of torch's allocator: requested, allocated or reserved bytes, ``current`` or ``peak``."""
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        return int(stats[f"{kind}_bytes"]["all"][moment])

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor from torch's allocator; raises ``torch.OutOfMemoryError``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def upload(self, table: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a small host tensor to the device without waiting: torch keeps the pinned copy until then."""
        target.copy_(table.pin_memory(), non_blocking=True)

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin a range of host memory, exactly; raises `HardwareError` when CUDA refuses."""
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
        """Undo ``register_host``; copies from and to the range have finished."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def kernels(self) -> ChunkKernels:
        return TritonKernels()


class TritonKernels:
    def __init__(self) -> None:
        from chunkc.triton_kernels.block_update import BLOCK_FORMULAS, block_update_launch
        from chunkc.triton_kernels.cast import restore_launch
        from chunkc.triton_kernels.chunk_update import chunk_update_launch
        from chunkc.triton_kernels.grad_norm import grad_norm_launches, make_norm_tiles
        from chunkc.triton_kernels.launch import make_tiles

        self.make_tiles, self.make_norm_tiles = make_tiles, make_norm_tiles
        self._restore, self._chunk_update, self._grad_norm = restore_launch, chunk_update_launch, grad_norm_launches
        self._block_rules, self._block_update = BLOCK_FORMULAS, block_update_launch

    def chunk_update(self, rule: str, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> KernelLaunch:
        make_launch = self._block_update if rule in self._block_rules else self._chunk_update
        return make_launch(rule, states, *tensors).run

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
