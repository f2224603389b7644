"""``chunkc.full_params``: a compiled model whose parameters are plain tensors for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.plan_ahead import swapped_tensors
from chunkc.distributed.agreement import Kind
from chunkc.errors import ChunkcError
from chunkc.runtime.model.model import ModelRuntime


@dataclass(frozen=True, slots=True)
class _Opened:
    """A plain parameter that stands for a managed one, whose ``version`` is that at entry."""

    index: int
    real: nn.Parameter
    version: int


@contextmanager
def full_params(model: nn.Module) -> Iterator[nn.Module]:
    """Give the module plain parameters with real memory within the block, to read or to write.

    Blocks may nest. Plain parameters are in the dtype that the model was handed over in; those from the meta device
    that were never given a value are NaN. What was written is kept when the block ends, also by an exception. The whole
    model stands in host memory a second time meanwhile.

    Raises:
        ChunkcError: under tensor parallelism. When the block ends, for what cannot be kept: parameters that were
            replaced or converted, gradients that a plain backward gave them, or parameters that a step of the compiled
            model changed meanwhile.
    """
    compiled = compiled_of(model)
    if compiled.is_open:
        yield model
        return
    runtime, opened = compiled.runtime, list[_Opened]()
    if runtime.parameters.shards:
        raise ChunkcError(
            "full_params is not built for tensor parallelism, under which a module reads DTensors: take "
            "model.state_dict(), whose values have full_tensor()"
        )

    def plain(param: torch.Tensor) -> torch.Tensor:
        index: int = param.chunkc_index  # type: ignore[attr-defined]
        blank = runtime.parameters.staging.is_blank(index)
        value = (
            runtime.parameters.staging.empty(index).fill_(torch.nan) if blank else runtime.parameters.read_exact(index)
        )
        real = nn.Parameter(value, requires_grad=param.requires_grad)
        opened.append(_Opened(index, real, runtime.parameters.version_of(index)))
        return real

    held: set[torch.Tensor] = set()
    compiled.is_open = True
    try:
        with compiled.settings.in_fp32.resting(), swapped_tensors(model, plain, buffers=False):
            try:
                yield model
            finally:
                held.update(model.parameters())
    finally:
        compiled.is_open = False
        _keep_written(runtime, opened, held)


def _keep_written(runtime: ModelRuntime, opened: Sequence[_Opened], held: Collection[torch.Tensor]) -> None:
    lost: dict[str, str] = {}
    for param in opened:
        name, dtype = runtime.parameters.name_of(param.index), runtime.parameters.staging.dtypes[param.index]
        if param.real not in held:
            lost[name] = "replaced"
        elif param.real.dtype is not dtype or tuple(param.real.shape) != runtime.infos[param.index].shape:
            lost[name] = f"converted to {tuple(param.real.shape)} {param.real.dtype}"
        elif runtime.parameters.version_of(param.index) != param.version:
            lost[name] = "changed by the compiled model meanwhile"
        else:
            is_written = _is_written(runtime, param)
            runtime.ranks.agree(Kind.READ, lambda: [f"{name} was {'' if is_written else 'not '}written"], name)  # noqa: B023
            if is_written:
                runtime.parameters.write_param(param.index, param.real.detach())
            if param.real.grad is not None:
                lost[name] = "given a gradient, which the compiled model cannot step"
    if lost:
        first = ", ".join(f"{name} was {what}" for name, what in list(lost.items())[:5])
        raise ChunkcError(f"full_params keeps values that were written in place, but {first} ({len(lost)} in all)")


def _is_written(runtime: ModelRuntime, param: _Opened) -> bool:
    """Whether a block has changed it; one without a value was NaN everywhere when the block began."""
    if runtime.parameters.staging.is_blank(param.index):
        return not bool(param.real.isnan().all())
    return not torch.equal(param.real, runtime.parameters.read_exact(param.index))
