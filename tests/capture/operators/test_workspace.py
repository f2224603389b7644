"""Workspaces of kernels by device."""

import torch

from chunkc.capture.operators.workspace import BASE_NBYTES, device_type_of, kernel_workspace_nbytes, workspace_nbytes

aten = torch.ops.aten


def test_packed_operands_are_a_cpus() -> None:
    a, b = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(32, 16, dtype=torch.bfloat16)
    out = torch.empty(64, 16, dtype=torch.bfloat16)
    operands = sum(t.numel() * 2 for t in (a, b, out))
    assert kernel_workspace_nbytes(aten.mm, [a, b], [out], "cpu") == BASE_NBYTES + operands
    assert kernel_workspace_nbytes(aten.mm, [a, b], [out], "cuda") == BASE_NBYTES
    assert kernel_workspace_nbytes(aten.mm, [a.float(), b.float()], [out.float()], "cpu") == BASE_NBYTES


def test_convolutions_on_a_gpu_copy_operands_and_sum_gradients_in_fp32() -> None:
    x, w, y = torch.empty(2, 8, 16, 16), torch.empty(4, 8, 3, 3), torch.empty(2, 4, 14, 14)
    nbytes = 4 * (x.numel() + w.numel() + y.numel())
    assert kernel_workspace_nbytes(aten.convolution, [x, w], [y], "cuda") == BASE_NBYTES + nbytes
    backward = kernel_workspace_nbytes(aten.convolution_backward, [y, x, w], [x, w], "cuda")
    assert backward == BASE_NBYTES + nbytes + 4 * (x.numel() + w.numel()) + 4 * w.numel()
    assert kernel_workspace_nbytes(aten.convolution, [x, w], [y], "cpu") > BASE_NBYTES


def test_the_device_is_that_of_the_tensors_unless_it_is_given() -> None:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in "ab"]
    product = graph.call_function(aten.mm.default, tuple(inputs))
    for node in (*inputs, product):
        node.meta["val"] = torch.empty(32, 32, dtype=torch.bfloat16)
    assert workspace_nbytes(product) == workspace_nbytes(product, "cpu") > workspace_nbytes(product, "cuda")
    assert device_type_of([torch.empty(1)]) == "cpu"
