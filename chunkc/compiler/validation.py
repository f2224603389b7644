"""Checks of what ``compile`` and ``plan`` accept, and the dtype in which each parameter is computed.

Everything here is checked before anything changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from chunkc.distributed.data_group import STAGING_NBYTES
from chunkc.distributed.mesh import local_part
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.ir.plan import MAX_MICRO_BATCHES
from chunkc.ir.schedule import DTYPE_NBYTES, FLOAT_DTYPES, ParamInfo
from chunkc.passes import ACTIVATIONS, Activations, PlanOptions
from chunkc.runtime.update.rules import states_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DTYPES = {getattr(torch, name): name for name in DTYPE_NBYTES}


def unique_params(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of every parameter, tied ones once, in ``named_parameters()`` order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names


Example = tuple[tuple[Any, ...], dict[str, Any]]
Examples = Mapping[str, Any] | Sequence[Any]
"""Inputs of one forward, a tuple or a dict, or a list of such."""


def examples_of(example_inputs: Examples | None) -> tuple[Example, ...]:
    """The arguments of each example; ChunkcError for what is no tuple, dict, or list of these."""
    if example_inputs is None:
        return ()
    examples = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    wrong = [type(e).__name__ for e in examples if not isinstance(e, tuple | Mapping)]
    if wrong:
        raise ChunkcError(
            f"example_inputs are a list with a tuple (by position) or a dict (by keyword) for each shape, found "
            f"{wrong[0]}: write example_inputs=[(x,), (longer_x,)]"
        )
    return tuple(((), dict(e)) if isinstance(e, Mapping) else (tuple(e), {}) for e in examples)


def check_plannable(model: nn.Module) -> None:
    """Refuse what no plan can be made for: TypeError for no module, else ChunkcError naming the parts."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"chunkc takes an nn.Module, found {type(model).__name__}")
    _refuse_modules(model)
    params = unique_params(model)
    if not any(p.numel() for p in params):
        raise ChunkcError(f"{type(model).__name__} has no parameters: there is nothing to place or to train")
    _refuse(params, "are sparse or not strided", lambda p: p.layout is not torch.strided)
    _refuse(params, f"are not {', '.join(DTYPE_NBYTES)}", lambda p: p.dtype not in _DTYPES)
    _refuse(
        params,
        "are packed by a library whose parameters hold more than a tensor, which chunks cannot: keep packed bits in a "
        "plain nn.Parameter(..., requires_grad=False) of uint8, and scales in a buffer (docs/howto/qlora.md)",
        lambda p: not p.is_floating_point() and type(p) is not nn.Parameter and not hasattr(p, "chunkc_store"),
    )


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be trained as a compiled model; errors as `check_plannable`."""
    check_plannable(model)
    params = unique_params(model)
    if any(hasattr(p, "chunkc_store") for p in params):
        raise ChunkcError(
            f"{type(model).__name__} is compiled already; chunkc.compile works in place and takes a model once"
        )
    _refuse(
        params,
        "are neither in host memory nor on the meta device; hand the model over on the CPU",
        lambda p: p.device.type not in ("cpu", "meta"),
    )
    _refuse(
        params,
        "have gradient hooks, which would never run",
        lambda p: bool(p._backward_hooks or p._post_accumulate_grad_hooks),
    )
    _refuse(params, "hold gradients; step or zero them first", lambda p: p.grad is not None)
    _refuse_shared_memory(model, params)


def _refuse_modules(model: nn.Module) -> None:
    """Modules whose parameters or gradients are of a kind that cannot stand in chunks, by name."""
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ChunkcError(f"{where} is lazy: run one forward in plain PyTorch first, so that its parameters exist")
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ChunkcError(f"{where} makes sparse gradients, which do not land in chunks; use sparse=False")


def _refuse(params: dict[nn.Parameter, list[str]], rule: str, broken: Any) -> None:
    shown = [f"{names[0]} ({p.dtype}, {tuple(p.shape)})" for p, names in params.items() if broken(p)]
    if shown:
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        raise ChunkcError(f"parameters {', '.join(shown[:5])}{more} {rule}")


def _refuse_shared_memory(model: nn.Module, params: dict[nn.Parameter, list[str]]) -> None:
    """Refuse a parameter over bytes of another tensor, from which training would separate it silently."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    named: list[tuple[torch.Tensor, str]] = [(local_part(p), f"parameter {names[0]}") for p, names in params.items()]
    named += [(b, f"buffer {name}") for name, b in model.named_buffers() if b.layout is torch.strided and not b.is_meta]
    for param, name in named:
        if param.numel():
            storage, start = param.untyped_storage(), int(param.storage_offset()) * param.element_size()
            reach = sum((s - 1) * t for s, t in zip(param.shape, param.stride(), strict=True)) + 1
            end = start + reach * param.element_size()
            spans.setdefault(storage.data_ptr() or storage._cdata, []).append((start, end, name))
    for group in spans.values():
        group.sort()
        for (_, end, first), (start, _, second) in pairwise(group):
            if start < end and "parameter" in first + second:
                raise ChunkcError(
                    f"{first} and {second} are different tensors over the same memory, which training would separate; "
                    "tie parameters by assigning one to the other (`b.weight = a.weight`), and clone buffers"
                )


def compute_dtype(dtype: torch.dtype | str, params: Sequence[torch.Tensor], hw: Hardware) -> torch.dtype | None:
    """The dtype that fp32 parameters are computed in; None leaves all as they are."""
    if dtype == "auto":
        dtypes = {p.dtype for p in params if p.is_floating_point()}
        return hw.compute_dtype if dtypes == {torch.float32} else None
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if _DTYPES.get(dtype) not in FLOAT_DTYPES:
        raise ChunkcError(f"dtype={dtype!r} is not supported; choose 'auto', {', '.join(FLOAT_DTYPES)}")
    return dtype  # type: ignore[return-value]


def reduction_nbytes(reduce_dtype: torch.dtype | None, hw: Hardware, num_ranks: int, num_replicas: int) -> int:
    """Device bytes to add up gradients of the ranks beside the plan; ChunkcError for another
    ``reduce_dtype`` than float32, and between replicas on GPUs."""
    if reduce_dtype not in (None, torch.float32):
        raise ChunkcError(
            f"reduce_dtype={reduce_dtype}: give torch.float32, or None to add up gradients as the backend does (NCCL "
            "in their dtype, gloo in float32)"
        )
    if reduce_dtype is None or hw.emulated or num_ranks == 1:
        return 0
    if num_replicas > 1:
        raise ChunkcError(
            "reduce_dtype=torch.float32 is not built for shard='node' on GPUs: means between nodes are NCCL's, in the "
            "dtype of the gradients. Use shard='all', or leave reduce_dtype at None"
        )
    return STAGING_NBYTES


def is_mixed(params: Sequence[torch.Tensor], dtype: torch.dtype | None) -> bool:
    """Return whether some parameter is computed in another dtype than it has: inputs are cast then, too."""
    return dtype is not None and any(p.is_floating_point() and p.dtype is not dtype for p in params)


def needs_scaling(infos: Sequence[ParamInfo]) -> bool:
    """Return whether a model is trained that computes in fp16 with some parameter, trained or frozen."""
    return any(info.trainable for info in infos) and any(info.dtype == "float16" for info in infos)


def own_dtype_params(model: nn.Module) -> frozenset[nn.Parameter]:
    """Parameters that keep their dtype whatever the others are computed in: those of batch normalisation."""
    norms = (m for m in model.modules() if isinstance(m, _BATCH_NORMS))
    return frozenset(p for m in norms for p in m.parameters(recurse=False))


def param_infos(
    model: nn.Module, dtype: torch.dtype | None, kept_fp32: Collection[nn.Parameter] = ()
) -> list[ParamInfo]:
    """Facts of every parameter by index, in compute dtype; those of ``kept_fp32`` in fp32.

    Of a DTensor they are those of this rank's part.
    Those of batch normalisation keep their dtype, for its kernels want them in that of the running statistics; so do
    packed bits, which no cast leaves what they are.
    """
    kept = own_dtype_params(model)
    infos = []
    for param, names in unique_params(model).items():
        computed = param.dtype if dtype is None or param in kept else dtype
        computed = torch.float32 if param in kept_fp32 else computed
        computed = computed if param.is_floating_point() else param.dtype
        part = local_part(param)
        dense = torch.empty_like(part, device="meta", memory_format=torch.preserve_format)
        infos.append(
            ParamInfo(
                name=names[0],
                aliases=tuple(names[1:]),
                shape=tuple(part.shape),
                stride=tuple(dense.stride()),
                dtype=_DTYPES[computed],
                trainable=param.requires_grad,
            )
        )
    return infos


def plan_options(
    chunk_size: int | str, activations: Activations, accumulate: int, in_flight: int, optimizer: str
) -> PlanOptions:
    """The planner's options for those of ``compile``; ChunkcError for values that no plan could honour."""
    if activations not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ChunkcError(f"activations must be one of {names}, got {activations!r}")
    return PlanOptions(
        chunk_numel=_chunk_numel(chunk_size),
        accumulate=_micro_batches(accumulate),
        in_flight=_in_flight(in_flight, accumulate),
        state_spec=states_of(optimizer),
        activations=activations,
        moved_share=1.0 if activations == "offload" else 0.0,
    )


def _micro_batches(accumulate: int) -> int:
    if not isinstance(accumulate, int) or not 1 <= accumulate <= MAX_MICRO_BATCHES:
        raise ChunkcError(f"accumulate={accumulate!r}: give the backwards before a step, 1 to {MAX_MICRO_BATCHES:,}")
    return accumulate


def _in_flight(in_flight: int, accumulate: int) -> int:
    if not isinstance(in_flight, int) or not 1 <= in_flight <= accumulate:
        raise ChunkcError(
            f"in_flight={in_flight!r}: give the micro-batches whose backward is still to come, 1 to "
            f"accumulate={accumulate}"
        )
    return in_flight


def _chunk_numel(chunk_size: int | str) -> int | None:
    if chunk_size == "auto":
        return None
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ChunkcError(f"chunk_size={chunk_size!r}: give a positive number of elements, or 'auto'")
    return chunk_size
