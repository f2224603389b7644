"""The kernels on a GPU: every check that the interpreter runs, rounding of bfloat16 included, and what needs a GPU."""

from collections.abc import Iterator
from types import ModuleType

import block_update_checks
import cast_checks
import chunk_update_checks
import grad_norm_checks
import pytest
import torch
import triton
from kernel_chunks import KernelChunk, step_inputs

from chunkc.triton_kernels.launch import MAX_NUMEL

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

MODULES = (chunk_update_checks, block_update_checks, cast_checks, grad_norm_checks)
CASES = [(module, name) for module in MODULES for name in module.CHECKS]
HUGE_NBYTES = (2 + 3 * 4) * MAX_NUMEL + 2**30


@pytest.mark.parametrize(("module", "name"), CASES, ids=[f"{module.__name__}-{name}" for module, name in CASES])
def test_check(module: ModuleType, name: str) -> None:
    module.CHECKS[name](torch.device("cuda"))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    names: list[str] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: names.append(src.name)
        yield names


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_steps_compile_nothing_and_wait_for_nothing(compilations: list[str]) -> None:
    """After the first: other values, other sizes, another number of tiles, and no synchronisation."""
    device = torch.device("cuda")
    sizes = [(4096,), (1, 15, 33, 100_003), (16, 50)]
    chunks = [KernelChunk.make(device, step_inputs(), torch.bfloat16, torch.bfloat16, s) for s in sizes]
    launches = [chunk.launch() for chunk in chunks]
    launches[0].run()
    torch.cuda.synchronize()
    seen = len(compilations)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for launch in launches:
            launch.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for chunk in chunks[1:]:
        chunk.check()
    assert len(compilations) == seen


def test_runs_on_the_current_stream() -> None:
    """Behind what the stream was given before: the gradient is written there, late."""
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    chunk = KernelChunk.make(device, step_inputs(), torch.bfloat16, torch.bfloat16)
    gradient = chunk.after["grad"].clone()
    chunk.after["grad"].zero_()
    launch, busy = chunk.launch(), torch.zeros(4096, 4096, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(50):
            busy = busy @ busy
        chunk.after["grad"].copy_(gradient)
        launch.run()
    stream.synchronize()
    chunk.check()


def test_offsets_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < HUGE_NBYTES:
        pytest.skip(f"runs where {HUGE_NBYTES >> 30} GiB of device memory are free")
    chunk_update_checks.offsets_beyond_32_bits(
        lambda _, dtype: torch.zeros(MAX_NUMEL, dtype=dtype, device="cuda"), torch.device("cuda")
    )
