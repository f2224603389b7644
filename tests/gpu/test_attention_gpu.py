"""Attention on this GPU: the kernel that torch picks is the one planned, within the workspace that is allowed."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attention_calls import calls
from machines import Machine
from torch.nn.attention import SDPBackend

from chunkc._torch_compat.core import pytree
from chunkc.capture.attention.kernels import AttentionCall, AttentionKernel, KernelSupport, choose_kernel
from chunkc.capture.operators.workspace import kernel_workspace_nbytes

aten = torch.ops.aten
Note = Callable[[str, object], None]
pytestmark = pytest.mark.gpu
BACKENDS = {
    SDPBackend.CUDNN_ATTENTION: AttentionKernel.CUDNN,
    SDPBackend.FLASH_ATTENTION: AttentionKernel.FLASH,
    SDPBackend.EFFICIENT_ATTENTION: AttentionKernel.EFFICIENT,
    SDPBackend.MATH: AttentionKernel.MATH,
}
SHAPES = [(2, 16, 1024, 64), (1, 8, 640, 128), (4, 3, 200, 40), (1, 1, 64, 64)]
BLOCK_NBYTES = 512


@pytest.fixture(params=[True, False], ids=["deterministic", "any-order"])
def deterministic(request: pytest.FixtureRequest, cuda: Machine) -> Iterator[bool]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(before)


def test_torch_picks_the_kernel_that_is_planned(deterministic: bool, note: Note) -> None:
    gpu, support = torch.cuda.get_device_capability(), KernelSupport.current()
    note("kernels of attention are chosen by", support)
    found = {name: BACKENDS[SDPBackend(_choice(call))] for name, call in calls("cuda").items()}
    assert found == {name: choose_kernel(call, gpu, support) for name, call in calls("cuda").items()}


def _choice(call: AttentionCall) -> int:
    tensors = (call.query, call.key, call.value)
    return torch._fused_sdp_choice(*tensors, call.mask, call.dropout, call.is_causal, enable_gqa=call.is_grouped)


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_takes_no_more_than_its_workspace(
    kind: str, shape: Sequence[int], deterministic: bool, note: Note
) -> None:
    batch, heads, tokens, width = shape
    gpu = torch.cuda.get_device_capability()
    if kind != "efficient" and gpu < ((9, 0) if kind == "cudnn" else (8, 0)):
        pytest.skip(f"sm_{gpu[0]}{gpu[1]} has no {kind} attention")
    if kind == "cudnn" and deterministic:
        pytest.skip("cuDNN's attention is not deterministic")
    query, key, value, gradient = (
        torch.zeros(batch, tokens, heads, width, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)
    )
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    options: dict[str, Any] = {"scale": 1 / math.sqrt(width)}
    bias = () if kind == "flash" else (None, True)
    results = _within_workspace(forward, [query, key, value, *bias, 0.0, True], options, f"{kind} {shape}", note)
    out, sums = results[:2]
    if kind == "efficient":
        rest = [None, out, sums, *results[2:4], 0.0, [True, True, True, False], True]
    elif kind == "flash":
        rest = [out, sums, None, None, tokens, tokens, 0.0, True, *results[6:8]]
    else:
        rest = [out, sums, *results[6:8], None, None, None, tokens, tokens, 0.0, True]
    _within_workspace(backward, [gradient, query, key, value, *rest], options, f"{kind} {shape} backward", note)


def _within_workspace(packet: Any, args: list[Any], options: dict[str, Any], name: str, note: Note) -> Any:
    """The results of a call whose peak is checked: its second, since the first may load and tune."""
    packet.default(*args, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = packet.default(*args, **options)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    outputs = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
    allowed = kernel_workspace_nbytes(packet, tensors, outputs, "cuda")
    note(f"workspace of {name}, bytes taken of those allowed", (peak - kept, allowed))
    assert peak - kept <= allowed + 8 * BLOCK_NBYTES
    return results
