"""``model.save_pretrained`` of a compiled transformers model, with one shard in memory at a time.

transformers' method takes a ``state_dict=`` and has a way for tensors on the meta device: they are told apart by name,
counted by shape, and asked for values (``contiguous()``) only when their shard is written. A `StreamedTensor` then
answers with the value. Conversions that must see values (fused experts) gather and hold what they convert. The method
runs on rank 0; other ranks take part in what it reads. Seen on transformers 5.23.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from chunkc._torch_compat.core import pytree
from chunkc.distributed.agreement import Kind
from chunkc.errors import ChunkcError
from chunkc.runtime.params.managed_tensor import ManagedTensor
from chunkc.weights.save import check_values, saved_name
from chunkc.weights.tensors import Entry, ModelTensors, memory_of

_SHAPES: Final = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "stride", "numel", "nelement", "element_size")),
        *(getattr(torch.Tensor, name) for name in ("untyped_storage", "is_floating_point", "__hash__")),
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes")),
        *(getattr(torch.Tensor, name).__get__ for name in ("is_meta", "requires_grad")),
    }
)
"""What is answered without the value."""


class StreamedTensor(torch.Tensor):
    """A tensor on the meta device whose value every operator that needs it gathers anew."""

    _gather: Callable[[], torch.Tensor]

    @staticmethod
    def of(gather: Callable[[], torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> StreamedTensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(StreamedTensor)
        made._gather = gather
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SHAPES:
            answer: Callable[..., Any] = super().__torch_function__
            return answer(func, types, args, kwargs)
        given = args, dict(kwargs or {})
        plain_args, plain_kwargs = pytree.tree_map_only(StreamedTensor, lambda tensor: tensor._gather(), given)
        return func(*plain_args, **plain_kwargs)


def streamed_state(
    model: nn.Module, tensors: ModelTensors, read: Callable[[Entry], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """State of a compiled model with parameters that ``read`` gathers when needed; tied ones once."""
    held = model.state_dict(keep_vars=True)
    extra = {name: held[name] for name in tensors.others if isinstance(held[name], torch.Tensor)}
    return extra | {
        saved_name(model, entry): StreamedTensor.of(partial(read, entry), entry.shape, entry.dtype)
        if entry.buffer is None
        else entry.buffer
        for entry in tensors.entries
    }


class SavePretrained:
    """``PreTrainedModel.save_pretrained`` with a streamed state dict.

    The saved configuration has the dtype of the values; transformers would take the first parameter's compute dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        if model is None:
            raise ReferenceError("the model that was to be saved is gone")
        save = type(model).save_pretrained
        call = inspect.signature(save).bind(model, *args, **kwargs)
        if call.arguments.get("state_dict") is not None or not _is_compiled(model):
            return save(*call.args, **call.kwargs)
        handed, ranks = _dtype(model), memory_of(model).ranks
        with ranks.agreement_scope():
            if ranks.tensor_size > 1:
                raise ChunkcError(
                    "save_pretrained reads modules on one rank, and under tensor parallelism all read together: call "
                    "chunkc.save_safetensors(model, folder), which writes whole tensors, and "
                    "model.config.save_pretrained(folder)"
                )
            if handed is not model.dtype and call.arguments.get("push_to_hub"):
                raise ChunkcError(
                    f"save_pretrained(push_to_hub=True) would say that weights in {handed} are in {model.dtype}, the "
                    "dtype that the model computes in. Call model.push_to_hub(name) instead"
                )
            tensors = ModelTensors(model)
            check_values(tensors, {entry.name: entry for entry in tensors.entries})
            tensors.ranks.agree(Kind.SAVE, lambda: [str(call.arguments.get("save_directory"))])
        results = []

        def lead(read: Callable[[Entry], torch.Tensor]) -> None:
            call.arguments["state_dict"] = streamed_state(model, tensors, read)
            results.append(save(*call.args, **call.kwargs))
            if handed is not model.dtype:
                model.config.dtype = handed
                model.config.save_pretrained(call.arguments["save_directory"])

        tensors.led_read(lead)
        if handed is not model.dtype:
            model.config.dtype = handed
        return results[0] if results else None

    def __deepcopy__(self, memo: dict[int, Any]) -> SavePretrained:
        return SavePretrained(memo[id(self._model())])

    def __reduce__(self) -> tuple[type[SavePretrained], tuple[Any]]:
        return SavePretrained, (self._model(),)


def stream_saves(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` and transformers models in it gather one shard at a time."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        for module in model.modules():
            if isinstance(module, modeling.PreTrainedModel):
                module.__dict__["save_pretrained"] = SavePretrained(module)


def _is_compiled(model: nn.Module) -> bool:
    return any(isinstance(param, ManagedTensor) for param in model.parameters())


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype that ``model.dtype`` would have for the saved values."""
    entries = ModelTensors(model).entries
    return next((e.dtype for e in entries if e.param is not None and e.dtype.is_floating_point), torch.float32)
