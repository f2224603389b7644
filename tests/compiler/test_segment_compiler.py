"""What compiles segments, and when its workers for a GPU's kernels start."""

import subprocess
import sys

import pytest
import torch

from chunkc.compiler import segment_compiler
from chunkc.compiler.segment_compiler import SegmentCompiler


@pytest.mark.parametrize(
    ("backend", "device", "wanted"), [("inductor", "cuda", 1), ("inductor", "cpu", 0), ("eager", "cuda", 0)]
)
def test_workers_start_once_where_a_gpu_is_compiled_for(
    backend: str, device: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, awaited = list[None](), list[None]()
    monkeypatch.setattr(segment_compiler, "start_kernel_workers", lambda: started.append(None))
    monkeypatch.setattr(segment_compiler, "await_kernel_workers", lambda: awaited.append(None))
    compiler = SegmentCompiler.of(backend)
    for _ in range(2):
        compiler.begin(torch.device(device))
    compiler.compile_all([])
    assert len(started) == wanted and not awaited, "nothing is compiled, so nobody waits"


KERNELS = """
from chunkc._torch_compat.inductor import await_kernel_workers, start_kernel_workers
from torch._inductor.async_compile import AsyncCompile
print(await_kernel_workers(0.0))
start_kernel_workers()
print(await_kernel_workers())
print(AsyncCompile.use_process_pool())
"""


@pytest.mark.long
def test_workers_take_kernels_when_they_were_awaited() -> None:
    """Without being awaited they would leave the first kernels to this process, one by one."""
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
