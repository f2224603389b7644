"""Shells: what managed tensors are inside, and what compiled code is called with in their place.

A shell has the shape, dtype, strides and device of a parameter and no memory. Whatever shows the variables of torch's
own frames (pytest, IPython) would read memory that is not there, so a shell prints what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from chunkc._torch_compat.core import as_plain_subclass
from chunkc.ir.schedule import ParamInfo


class Shell(torch.Tensor):
    """A tensor without storage; to operators and to torch.compile a plain one."""

    __torch_function__ = nn.Parameter.__torch_function__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shell(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @staticmethod
    def of(info: ParamInfo, device: torch.device, *, requires_grad: bool) -> Shell:
        """The shell of a parameter."""
        return Shell.empty(info.shape, info.stride, getattr(torch, info.dtype), device, requires_grad=requires_grad)

    @staticmethod
    def empty(
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        requires_grad: bool = False,
    ) -> Shell:
        """The shell of any dense tensor."""
        plain = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        plain.untyped_storage().resize_(0)
        return as_plain_subclass(Shell, plain, requires_grad)

    def detach(self) -> Shell:
        return as_plain_subclass(Shell, self, requires_grad=False)
