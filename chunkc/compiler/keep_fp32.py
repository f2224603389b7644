"""Parameters that stay in fp32 in a model computed in 16 bits.

Sums of squares in normalisations, and the logits by which routers choose, lose in 16 bits what matters. A pattern of
``keep_fp32`` names parameters. A module that owns one computes in fp32 with all that is inside it: hooks, captured with
the forward, cast floating-point inputs on the way in and outputs back. Batch normalisation keeps its dtype by itself
(``chunkc.compiler.validation``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from chunkc._torch_compat.core import pytree
from chunkc.compiler.validation import own_dtype_params, unique_params
from chunkc.errors import ChunkcError


def _kept(params: dict[nn.Parameter, list[str]], patterns: Sequence[str]) -> frozenset[nn.Parameter]:
    """The parameters that match ``patterns``, as file names do; ChunkcError for an idle one, or a string."""
    if isinstance(patterns, str):
        raise ChunkcError(f"keep_fp32={patterns!r}: give a sequence of patterns, for example ({patterns!r},)")
    names = [(name, param) for param, own in params.items() for name in own]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in names):
            some = ", ".join(name for name, _ in names[:3])
            raise ChunkcError(f"keep_fp32: {pattern!r} matches no parameter; their names are {some}, ...")
    return frozenset(p for name, p in names if any(fnmatchcase(name, pattern) for pattern in patterns))


class _Cast:
    """A hook of one module that casts its arguments or its results to ``dtype``; None leaves them.

    None in a copy of the model (``copy.deepcopy``, pickle): all its parameters have the dtypes of before.
    """

    def __init__(self, dtype: torch.dtype | None, *, of_results: bool) -> None:
        self.dtype = dtype
        self._of_results = of_results

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any) -> Any:
        """Before the forward ``last`` are keyword arguments, behind it results."""
        return self._cast(last if self._of_results else (args, last))

    def __deepcopy__(self, memo: object) -> _Cast:
        return _uncast(self._of_results)

    def __reduce__(self) -> tuple[Callable[[bool], _Cast], tuple[bool]]:
        return _uncast, (self._of_results,)

    def _cast(self, values: Any) -> Any:
        dtype = self.dtype
        if dtype is None:
            return values
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def _uncast(of_results: bool) -> _Cast:
    return _Cast(None, of_results=of_results)


class Fp32Modules:
    """Modules that compute in fp32, beside others in ``dtype``, for ``params``, which are kept in fp32."""

    def __init__(
        self,
        params: frozenset[nn.Parameter] = frozenset(),
        modules: Sequence[nn.Module] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.params = params
        self._modules = tuple(modules)
        self._dtype = dtype
        self._hooks: list[_Cast] = []

    def attach(self) -> list[RemovableHandle]:
        """Cast on their way in and out from now on."""
        handles = []
        for module in self._modules:
            before, behind = _Cast(torch.float32, of_results=False), _Cast(self._dtype, of_results=True)
            self._hooks += before, behind
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(behind))
        return handles

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block they cast, and are left without a trace."""
        handles = self.attach()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._hooks.clear()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within the block they compute as the user made them."""
        before = [hook.dtype for hook in self._hooks]
        for hook in self._hooks:
            hook.dtype = None
        try:
            yield
        finally:
            for hook, dtype in zip(self._hooks, before, strict=True):
                hook.dtype = dtype


def fp32_modules(model: nn.Module, patterns: Sequence[str], dtype: torch.dtype | None) -> Fp32Modules:
    """Return the parameters that match ``patterns``, and the modules that own them.

    Raises:
        ChunkcError: when a pattern matches nothing, a module has kept parameters and others, or the others have several
            dtypes.
    """
    kept, ignored = _kept(unique_params(model), patterns), own_dtype_params(model)
    others = {p.dtype for p in model.parameters() if p not in kept and p not in ignored} if dtype is None else {dtype}
    if kept and len(others) > 1:
        raise ChunkcError(
            f"keep_fp32: the other parameters have {len(others)} dtypes; pass dtype= to compute them in one"
        )
    common = next(iter(others), torch.float32)
    return Fp32Modules(kept, [] if common is torch.float32 else _owners_of(model, kept, ignored), common)


def _owners_of(model: nn.Module, kept: frozenset[nn.Parameter], ignored: frozenset[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost modules that own ``kept``; ChunkcError when one has others but ``ignored``."""
    owners: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p not in ignored]
        if module in inside or not any(p in kept for p in own):
            continue
        params = dict(module.named_parameters())
        outside = sorted(n for n, p in params.items() if p not in kept and p not in ignored)
        if outside:
            ours = ", ".join(n for n, p in params.items() if p in kept)
            raise ChunkcError(
                f"keep_fp32 keeps {ours} of {name or 'the model'} ({type(module).__name__}), but not its "
                f"{', '.join(outside[:5])}; a module computes in one dtype, so name all of its parameters: "
                f"{name + '.*' if name else '*'!r}"
            )
        owners.append(module)
        inside.update(module.modules())
    return owners
