"""Shells can be shown without a read of the memory that they do not have."""

import pytest
import torch
from torch import nn

from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.params.shell import Shell


@pytest.mark.parametrize("shape", [(), (3,), (64, 32)])
def test_a_shell_is_shown_without_being_read(shape: tuple[int, ...]) -> None:
    plain = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
    info = ParamInfo("weight", (), shape, plain.stride(), "bfloat16", True)
    shell = Shell.of(info, torch.device("cpu"), requires_grad=True)
    assert (shell.shape, shell.dtype, shell.stride(), shell.device) == (*_layout(plain), torch.device("cpu"))
    assert shell.untyped_storage().nbytes() == 0 and shell.is_leaf and shell.requires_grad
    text = f"Shell(shape={shape}, dtype=torch.bfloat16, device='cpu')"
    assert repr(shell) == str(shell) == f"{shell}" == text
    again = shell.detach()
    assert repr(again) == text and not again.requires_grad and not again._is_view()
    assert again.untyped_storage().nbytes() == 0


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return tensor.shape, tensor.dtype, tensor.stride()
