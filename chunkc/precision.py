"""Parameters that stay in fp32 in a model computed in 16 bits: which, and how their modules meet the others.

Sums of squares in normalisations, and the logits by which routers choose, lose in 16 bits what matters. A pattern of
``keep_fp32`` names parameters; the modules that own them then compute in fp32: floating-point inputs are cast on the
way in and outputs back on the way out, by hooks on those modules, which are captured with the forward. Their parameters
have chunks of fp32.

Batch normalisation keeps its dtype by itself and takes inputs in 16 bits (``chunkc.policy``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from chunkc._torch_compat import pytree
from chunkc.errors import ChunkcError
from chunkc.policy import own_dtype_params


def kept_params(params: dict[nn.Parameter, list[str]], patterns: Sequence[str]) -> frozenset[nn.Parameter]:
    """The parameters one of whose names matches a pattern (``*``, ``?`` and ``[...]``, as in file names).

    Raises:
        ChunkcError: when ``patterns`` is a single string, or one of them matches no name.
    """
    if isinstance(patterns, str):
        raise ChunkcError(f"keep_fp32={patterns!r}: give a sequence of patterns, for example ({patterns!r},)")
    names = [(name, param) for param, found in params.items() for name in found]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in names):
            some = ", ".join(name for name, _ in names[:3])
            raise ChunkcError(f"keep_fp32: {pattern!r} matches no parameter; their names are {some}, ...")
    return frozenset(p for name, p in names if any(fnmatchcase(name, pattern) for pattern in patterns))


class _CastIn:
    """Floating-point arguments in fp32."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _cast(args, torch.float32), _cast(kwargs, torch.float32)


class _CastOut:
    """Floating-point results in the compute dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, self.dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


class Fp32Modules:
    """The modules of one model that compute in fp32 beside others that compute in ``dtype``."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._modules = tuple(modules)
        self._dtype = dtype
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Cast on their way in and out from now on."""
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(_CastIn(), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_CastOut(self._dtype)))

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Within the block they are as the user made them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            yield
        finally:
            self.attach()


def fp32_modules(model: nn.Module, kept: frozenset[nn.Parameter], dtype: torch.dtype | None) -> Fp32Modules:
    """The modules that own ``kept``, beside others computed in ``dtype``; None: in what they have.

    Raises:
        ChunkcError: when a module has kept parameters and others, or the others have several dtypes.
    """
    ignored = own_dtype_params(model)
    others = {p.dtype for p in model.parameters() if p not in kept and p not in ignored} if dtype is None else {dtype}
    if kept and len(others) > 1:
        raise ChunkcError(
            f"keep_fp32: the other parameters have {len(others)} dtypes; pass dtype= to compute them in one"
        )
    common = next(iter(others), torch.float32)
    return Fp32Modules([] if common is torch.float32 else _owners_of(model, kept, ignored), common)


def _owners_of(model: nn.Module, kept: frozenset[nn.Parameter], ignored: frozenset[nn.Parameter]) -> list[nn.Module]:
    """The modules that own parameters of ``kept``, which must be all of theirs; without those of ``ignored``.

    Raises:
        ChunkcError: when a module has kept parameters and others.
    """
    found = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        inside = {n for n, p in own.items() if p in kept}
        if not inside or all(p in ignored for p in own.values()):
            continue
        outside = sorted(own.keys() - inside)
        if outside:
            raise ChunkcError(
                f"keep_fp32 keeps {', '.join(sorted(inside))} of {name or 'the model'} ({type(module).__name__}), but "
                f"not its {', '.join(outside)}; a module computes in one dtype, so name all of its parameters: "
                f"{name + '.*' if name else '*'!r}"
            )
        found.append(module)
    return found
