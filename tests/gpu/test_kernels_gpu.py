"""The kernels on a GPU: every check that the interpreter runs, rounding of bfloat16 included, and what needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import cast_checks
import chunk_adam_checks
import grad_norm_checks
import pytest
import torch
import triton
from kernel_chunks import KernelChunk, step_inputs, values

from chunkc.triton_kernels.cast import restore
from chunkc.triton_kernels.grad_norm import grad_norm
from chunkc.triton_kernels.launch import MAX_NUMEL, make_tiles

pytestmark = pytest.mark.gpu

CASES = [(module, name) for module in (chunk_adam_checks, cast_checks, grad_norm_checks) for name in module.CHECKS]
HUGE_NBYTES = 6 * MAX_NUMEL + 2**30


@pytest.mark.parametrize(("module", "name"), CASES, ids=[f"{module.__name__}-{name}" for module, name in CASES])
def test_check(module: ModuleType, name: str) -> None:
    module.CHECKS[name](torch.device("cuda"))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles or takes from its cache while the test runs."""
    names: list[str] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: names.append(src.name)
        yield names


def test_steps_compile_nothing_and_wait_for_nothing(compilations: list[str]) -> None:
    """After the first: other values, other sizes, another number of tiles, and no synchronisation."""
    device = torch.device("cuda")
    sizes = [(4096,), (1, 15, 100_003), (16, 50)]
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
    launch = chunk.launch()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        chunk.after["grad"].copy_(gradient)
        launch.run()
    stream.synchronize()
    chunk.check()


def test_offsets_beyond_32_bits() -> None:
    """The last elements of the largest chunk, whose byte offsets need 34 bits."""
    if torch.cuda.mem_get_info()[0] < HUGE_NBYTES:
        pytest.skip(f"runs where {HUGE_NBYTES >> 30} GiB of device memory are free")
    numel, used = MAX_NUMEL, 5000
    tiles = make_tiles([(numel - used, numel, 0)], "cuda")
    payload = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    param32 = torch.zeros(numel, device="cuda")
    param32[-used:] = values(used, 1).to("cuda")
    restore(param32, payload, tiles)
    assert torch.equal(payload[-used:].cpu(), values(used, 1).bfloat16())
    assert int(torch.count_nonzero(payload[: 1 << 30])) == 0
    out = torch.zeros(2, device="cuda")
    grad_norm(payload, tiles, out)
    exact = float(values(used, 1).bfloat16().double().square().sum())
    assert abs(float(out[0]) - exact) <= 1e-5 * exact
