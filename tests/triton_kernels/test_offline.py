"""Kernels compiled for GPUs that are not here: full-width accesses, no spills, few registers, for sm_70 to sm_120."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from offline import compile_offline, source_of
from torch import Tensor

from chunkc.triton_kernels.block_update import BLOCK_NUMEL, NUM_CODES, block_update_launch
from chunkc.triton_kernels.block_update import MAX_REGISTERS as BLOCK_MAX_REGISTERS
from chunkc.triton_kernels.cast import restore_launch
from chunkc.triton_kernels.chunk_update import FORMULAS, ROW_COLUMNS, chunk_update_launch
from chunkc.triton_kernels.grad_norm import UNROLLED, grad_norm_launches
from chunkc.triton_kernels.launch import BLOCK, EDGE, NUM_WARPS, Launch, make_tiles

CAPABILITIES = (70, 75, 80, 86, 90, 100, 120)
EVERY_CASE = (70, 80, 90)
"""For the others the ordinary run compiles the kernels that a step in 16 bits takes."""

OF_A_STEP = (
    "adam-bf16-bf16",
    "sgd-bf16-bf16",
    "sgd_momentum-bf16-bf16",
    "lion-bf16-bf16",
    "adam-fp16-fp16",
    "restore-fp16",
    "squares-bf16",
    "add tiles",
)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# A multiprocessor has 65536 registers: 80 to a thread leave room for 6 blocks of 128 threads. Each thread has 8
# elements of 14 bytes or more in flight, together 86 KB: more than latency times bandwidth of any of these GPUs.
MAX_REGISTERS = 80


def lists(*dtypes: torch.dtype) -> list[Tensor]:
    return [torch.zeros(2 * BLOCK, dtype=dtype) for dtype in dtypes]


TILES = make_tiles([(0, 2 * BLOCK, 0)], "cpu")


def update(rule: str, grad: torch.dtype, payload: torch.dtype | None) -> Launch:
    gradient, *states = lists(grad, F32, *[F32] * FORMULAS[rule][1])
    param16 = states[0] if payload is None else lists(payload)[0]
    tables = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, ROW_COLUMNS), torch.zeros(2))
    return chunk_update_launch(rule, states, gradient, param16, TILES, *tables)


def adam(grad: torch.dtype, payload: torch.dtype | None) -> Launch:
    return update("adam", grad, payload)


def block_update(grad: torch.dtype) -> Launch:
    gradient, param32, *codes = lists(grad, F32, torch.uint8, torch.uint8)
    scales = [torch.zeros(2 * BLOCK // BLOCK_NUMEL) for _ in codes]
    borders, bases = torch.zeros(2, NUM_CODES), torch.zeros(2, 2, 3073, dtype=torch.int32)
    tables = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, ROW_COLUMNS), torch.zeros(2))
    states = [param32, *codes, *scales, borders, borders, bases]
    return block_update_launch("adam_8bit", states, gradient, torch.zeros_like(gradient), TILES, *tables)


def squares(grad: torch.dtype) -> Launch:
    return grad_norm_launches(*lists(grad), TILES, torch.zeros(2))[0]


def words(*dtypes: torch.dtype) -> int:
    """128-bit accesses of one thread to its elements in lists of these dtypes."""
    return sum(BLOCK // (32 * NUM_WARPS) * dtype.itemsize // 16 for dtype in dtypes)


Case = tuple[Callable[[], Launch], int, int]

# name -> launch, vector loads and vector stores to a thread
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "adam-fp16-fp16": (lambda: adam(F16, F16), words(F16, F32, F32, F32), words(F32, F32, F32, F16)),
        "adam-fp32-fp32": (lambda: adam(F32, F32), words(F32, F32, F32, F32), words(F32, F32, F32, F32)),
        "adam-fp32-bf16": (lambda: adam(F32, BF16), words(F32, F32, F32, F32), words(F32, F32, F32, BF16)),
        "adam-bf16-fp32": (lambda: adam(BF16, F32), words(BF16, F32, F32, F32), words(F32, F32, F32, F32)),
        "adam-bf16-param32": (lambda: adam(BF16, None), words(BF16, F32, F32, F32), words(F32, F32, F32)),
        **{
            f"{rule}-bf16-bf16": (
                partial(update, rule, BF16, BF16),
                words(BF16, *[F32] * (1 + num_states)),
                words(*[F32] * (1 + num_states), BF16),
            )
            for rule, (_, num_states) in FORMULAS.items()
        },
        "restore-bf16": (lambda: restore_launch(*lists(F32, BF16), TILES), words(F32), words(BF16)),
        "restore-fp16": (lambda: restore_launch(*lists(F32, F16), TILES), words(F32), words(F16)),
        "squares-bf16": (lambda: squares(BF16), UNROLLED * words(BF16), 0),
        "squares-fp32": (lambda: squares(F32), UNROLLED * words(F32), 0),
        "add tiles": (lambda: grad_norm_launches(*lists(F32), TILES, torch.zeros(2))[1], 0, 0),
    }
)


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(case, at, marks=() if at in EVERY_CASE or case in OF_A_STEP else pytest.mark.slow)
        for case in CASES
        for at in CAPABILITIES
    ],
)
def test_compiled(case: str, capability: int, tmp_path: Path) -> None:
    make, num_loads, num_stores = CASES[case]
    compiled = compile_offline(make(), capability, tmp_path)
    assert (compiled.count("ld", 4), compiled.count("st", 4)) == (num_loads, num_stores)
    assert compiled.count("ld", 2) == compiled.count("st", 2) == 0
    assert compiled.spilled_nbytes == compiled.stack_nbytes == 0
    assert compiled.num_registers <= MAX_REGISTERS


@pytest.mark.long(but="90-grad0")
@pytest.mark.parametrize("grad", [BF16, pytest.param(F32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", EVERY_CASE)
def test_block_update_compiled(grad: torch.dtype, capability: int, tmp_path: Path) -> None:
    """Vectors wherever a tile is full: eight codes at a time, and no spills; rounding as in `chunk_update`."""
    compiled = compile_offline(block_update(grad), capability, tmp_path)
    assert (compiled.count("ld", 4), compiled.count("st", 4)) == (words(grad, F32), words(F32, grad))
    assert (compiled.count("ld", 2), compiled.count("st", 2)) == (2, 2)
    assert compiled.spilled_nbytes == compiled.stack_nbytes == 0
    assert compiled.num_registers <= BLOCK_MAX_REGISTERS
    assert ".ftz" not in compiled.ptx and ".approx" not in compiled.ptx


def test_misaligned_lists_get_no_vectors(tmp_path: Path) -> None:
    """What the counts above prove goes with the alignment of the lists, and the count sees when it is gone."""
    source, target = lists(F32, F16)
    assert compile_offline(restore_launch(source[16:], target[16:], TILES), 80, tmp_path).count("ld", 4) == words(F32)
    assert compile_offline(restore_launch(source[1:], target[1:], TILES), 80, tmp_path).count("ld", 4) == 0


def test_arithmetic_is_exactly_rounded_and_not_contracted(tmp_path: Path) -> None:
    """The same bits on every GPU: IEEE square root and quotient, subnormal numbers kept, the written FMAs alone."""
    launch = adam(F32, F32)
    ptx = compile_offline(launch, 80, tmp_path).ptx
    num_elements = BLOCK // (32 * NUM_WARPS) + EDGE // (32 * NUM_WARPS)
    assert ".ftz" not in ptx and ".approx" not in ptx
    assert ptx.count("sqrt.rn.f32") == ptx.count("div.rn.f32") == num_elements
    assert ptx.count("fma.rn.f32") == 6 * num_elements


def test_values_do_not_compile_anew() -> None:
    """Another size, another table and other numbers give the signature of the first, so the kernel is reused."""
    first, second = lists(F32, F16), [data.repeat(3)[: 3 * BLOCK + 5] for data in lists(F32, F16)]
    a, b = source_of(restore_launch(*first, TILES)), source_of(restore_launch(*second, TILES))
    assert (a.signature, a.attrs, a.constants) == (b.signature, b.attrs, b.constants)
    one = source_of(restore_launch(*(data[:1] for data in first), TILES))
    assert (one.signature, one.attrs) == (a.signature, a.attrs)
    odd_table = torch.zeros(7, dtype=torch.int32)[1:].view(2, 3)
    tables = [source_of(restore_launch(*first, tiles)) for tiles in (TILES, odd_table)]
    assert tables[0].attrs == tables[1].attrs
