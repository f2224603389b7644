"""Managed parameters: stand-ins in the user's module for tensors whose payload moves between devices.

A managed parameter is a traceable wrapper subclass around a shell (`shell`). Under compilation it flattens to that, so
graphs see a placeholder whose payload the executor supplies. Everywhere else an operator that reads it gathers the true
value first, and an operator that writes it writes the true value.

    role    stands for                                    after a read
    param   the parameter itself, and its ``detach``      a plain tensor with the current value
    grad    ``param.grad`` after a compiled backward      a plain tensor with the gradient of that backward
    state   a part of its optimizer state                 a plain tensor with the current value
    view    a view of a gathered value                    reads go through until the parameter changes; writes are
                                                          refused by name

What goes around operators (addresses, storages, sharing) is refused by name; NumPy gets a read-only copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NoReturn, Protocol

import numpy as np
import torch

from chunkc._torch_compat.core import graph_break, hidden_from_dynamo, is_capturing, pytree, use_count, wrapper_tensor
from chunkc.errors import ChunkcError
from chunkc.runtime.params.shell import Shell

Role = Literal["param", "grad", "state", "view"]
aten = torch.ops.aten
_NO_VERSION = -1
_ZEROING = frozenset({aten.zero_.default, aten._foreach_zero_.default})
_FILLS = frozenset(
    {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
)
"""Operators that overwrite all of their first argument, whatever it held."""
_NORMS = frozenset({aten._foreach_norm.Scalar, aten.linalg_vector_norm.default, aten.norm.Scalar})
_ALIASES = frozenset({aten.detach.default, aten.alias.default})


class ValueStore(Protocol):
    """Reads and writes of one kind of values, by the index of a parameter; a read drains updates.

    Tensors of each role also call the methods that stand for their own kind of values.
    """

    @property
    def holds(self) -> Literal["params", "states"]: ...
    def name_of(self, index: int) -> str: ...
    def is_entered(self) -> bool: ...
    def version_of(self, index: int) -> int: ...


def _refusing(access: str) -> Any:
    """A method that refuses ``access`` to memory."""

    def refuse(tensor: ManagedTensor, *_: object, **__: object) -> NoReturn:
        _refuse_memory(tensor, access)

    return refuse


_NUM_ATTRIBUTES: Final = 5


class ManagedTensor(torch.Tensor):
    """A parameter (or its gradient) whose payload a chunk holds. See the module docstring."""

    _inner: torch.Tensor
    _role: Role
    chunkc_index: int
    chunkc_store: Any
    _chunkc_stamp: int

    @staticmethod
    def __new__(
        cls, inner: torch.Tensor, role: Role, index: int, runtime: ValueStore | None, stamp: int = 0
    ) -> ManagedTensor:
        outer: ManagedTensor = wrapper_tensor(cls, inner, inner.requires_grad and role == "param")
        outer._inner = inner
        outer._role = role
        outer.chunkc_index = index
        outer.chunkc_store = runtime
        outer._chunkc_stamp = stamp
        return outer

    def __init__(self, inner: torch.Tensor, role: Role, index: int, runtime: ValueStore | None, stamp: int = 0) -> None:
        """Nothing: keeps ``Tensor.__init__`` from seeing the arguments of ``__new__``."""

    def is_renewable(self) -> bool:
        """Whether nothing but one Python object holds it, and it has nothing that its user gave it."""
        is_as_made = len(vars(self)) == _NUM_ATTRIBUTES and not self.requires_grad
        return is_as_made and use_count(self) == 1 and not weakref.getweakrefcount(self)

    def renew(self, runtime: ValueStore, stamp: int) -> None:
        """Show the gradient of a later backward from now on."""
        self.chunkc_store, self._chunkc_stamp = runtime, stamp

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{_describe(self)}(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Role, int]]:
        runtime = self.chunkc_store
        if runtime is not None and not runtime.is_entered():
            text = (
                f"{_describe(self)} is used inside another torch.compile, or inside a compiled model that it is no "
                "parameter of; compiled code would read memory that is not there. Do this in eager mode, or on a copy "
                "(`param.detach().clone()`)"
            )
            raise graph_break(text) if is_capturing() else ChunkcError(text)
        return ["_inner"], (self._role, self.chunkc_index)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Role, int], size: object, stride: object
    ) -> ManagedTensor:
        role, index = context
        return ManagedTensor(inner["_inner"], role, index, None)

    def _stable_hash_for_caching(self) -> str:
        """All that a capture knows of it, for the key of AOTAutograd's cache."""
        layout = tuple(self.shape), tuple(self.stride()), self.dtype, self.device, self.requires_grad
        return repr((self._role, self.chunkc_index, *layout))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = _plain(self)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def exact(self) -> torch.Tensor:
        """A copy of the parameter in the dtype that it was handed over in."""
        value: torch.Tensor = _store(self).read_exact(self.chunkc_index)
        return value

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """A copy that NumPy refuses to write to, since what is written there would be lost."""
        array = _read(self).requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def tolist(self) -> Any:
        return _read(self).tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse; capture asks for its identity and size only."""
        if is_capturing():
            return super().untyped_storage()
        _refuse_memory(self, "untyped_storage()")

    data_ptr = _refusing("data_ptr()")
    storage = _typed_storage = _refusing("storage()")
    share_memory_ = _refusing("share_memory_()")
    __dlpack__ = _refusing("DLPack export")
    apply_ = _refusing("apply_()")
    map_ = _refusing("map_()")
    map2_ = _refusing("map2_()")

    def register_hook(self, hook: Any) -> Any:
        """Refuse for parameters: their gradients do not pass through autograd."""
        _refuse_hook(self)
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        _refuse_hook(self)
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd, still managed: in-place writes reach the chunk."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            raise ChunkcError(
                f"{_describe(self)}.data cannot be replaced (Module.to, .half, .cuda and vector_to_parameters do "
                "that): its memory, dtype and device belong to the compiled model. Convert the model before "
                "chunkc.compile, or write values in place with `param.copy_(value)`"
            )

    @classmethod
    @hidden_from_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        managed = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ManagedTensor)]
        if any(type(x._inner) not in (Shell, torch.Tensor) for x in managed):
            return _trace(func, args, kwargs)
        if func in _ALIASES:
            return _alias(args[0])
        return _run(func, args, kwargs, managed)


def _trace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner_args, inner_kwargs = pytree.tree_map_only(ManagedTensor, lambda x: x._inner, (args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    return _like(args[0], out) if func in _ALIASES else out


def _alias(tensor: ManagedTensor) -> ManagedTensor:
    """Another handle on the same place, an ordinary tensor in inference mode too, as a detach has to be."""
    with torch.inference_mode(False):
        return _like(tensor, tensor._inner.detach())


def _like(tensor: ManagedTensor, inner: torch.Tensor) -> ManagedTensor:
    return ManagedTensor(inner, tensor._role, tensor.chunkc_index, tensor.chunkc_store, tensor._chunkc_stamp)


def _refuse_memory(tensor: ManagedTensor, access: str) -> NoReturn:
    advice = "`param.detach().clone()` for a copy, or `with chunkc.full_params(model):` for real tensors"
    if _is_of_state(tensor):
        advice = "`.clone()` for a copy"
    raise ChunkcError(
        f"{_describe(tensor)} has no memory of its own for {access}: its payload moves between host and device. Use "
        f"{advice}"
    )


def _refuse_lost_write(func: Any, view: ManagedTensor) -> NoReturn:
    advice = "the whole parameter or gradient (`param.copy_(value)`), or inside `with chunkc.full_params(model):`"
    if _is_of_state(view):
        advice = "the whole part of the state (`optimizer.state[param]['exp_avg'].copy_(value)`)"
    raise ChunkcError(
        f"{func} writes in place to {_describe(view)}, a view of a copy, which would be lost; write to {advice}"
    )


def _refuse_norm_of_part(tensor: ManagedTensor) -> None:
    """Refuse what would be taken for the norm of the whole, as torch's clip_grad_norm_ does."""
    store, index = tensor.chunkc_store, tensor.chunkc_index
    if store is not None and tensor._role in ("param", "grad") and store.is_divided(index):
        raise ChunkcError(
            f"{_describe(tensor)} is this rank's part of a tensor that ranks divide along tp, and its norm is not that "
            "of the tensor. chunkc.clip_grad_norm_ and max_grad_norm= take the norm over all ranks; of a part, write "
            "out its sum of squares"
        )


def _is_of_state(tensor: ManagedTensor) -> bool:
    """Whether it is a part of an optimizer state, or a view of one."""
    store: ValueStore | None = tensor.chunkc_store
    return store is not None and store.holds == "states"


def _refuse_hook(tensor: ManagedTensor) -> None:
    if isinstance(tensor, torch.nn.Parameter):
        raise ChunkcError(
            f"{_describe(tensor)} takes no gradient hooks, they would never run: gradients land in chunks, not in "
            "autograd. Work on `param.grad` between backward() and step()"
        )


def _describe(tensor: ManagedTensor) -> str:
    runtime = tensor.chunkc_store
    name = runtime.name_of(tensor.chunkc_index) if runtime is not None else f"#{tensor.chunkc_index}"
    return f"chunkc.{'Parameter' if tensor._role == 'param' else tensor._role.capitalize()}({name!r})"


def _read(tensor: ManagedTensor) -> torch.Tensor:
    store, index = _store(tensor), tensor.chunkc_index
    if tensor._role == "view":
        if tensor._chunkc_stamp not in (_NO_VERSION, store.version_of(index)):
            changed = "was taken before the parameter changed"
            if _is_of_state(tensor):
                changed = "was taken before the optimizer state changed"
            raise ChunkcError(
                f"{_describe(tensor)} {changed}, and shows what it was then; take the view again, or keep a copy with "
                "clone()"
            )
        return tensor._inner
    is_grad = tensor._role == "grad"
    value: torch.Tensor = store.read_grad(index, tensor._chunkc_stamp) if is_grad else store.read_param(index)
    return value


def _write(tensor: ManagedTensor, value: torch.Tensor) -> None:
    runtime = _store(tensor)
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        result = f"{tuple(value.shape)} {value.dtype}"
        raise ChunkcError(f"{_describe(tensor)} keeps its shape and dtype; an in-place operator made it {result}")
    if tensor._role == "grad":
        runtime.write_grad(tensor.chunkc_index, tensor._chunkc_stamp, value)
    else:
        runtime.write_param(tensor.chunkc_index, value)


def _store(tensor: ManagedTensor) -> Any:
    if tensor.chunkc_store is None:
        raise ChunkcError(f"{_describe(tensor)} belongs to no compiled model any more; read it before the model goes")
    return tensor.chunkc_store


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], managed: list[ManagedTensor]) -> Any:
    """Run an operator on true values and write what it mutated back to where they live."""
    written = _written(func, args, kwargs)
    for tensor in written:
        if tensor._role == "view":
            _refuse_lost_write(func, tensor)
    if func in _NORMS:
        for tensor in managed:
            _refuse_norm_of_part(tensor)
    if func is aten.copy_.default and isinstance(args[0], ManagedTensor) and args[0]._role == "param":
        return _copy_exactly(args[0], args[1])
    if func in _FILLS and isinstance(args[0], ManagedTensor) and args[0]._role == "param":
        return _fill(func, args[0], args[1:], kwargs)
    if func in _ZEROING and all(t._role == "grad" for t in managed):
        for tensor in managed:
            _store(tensor).zero_grad(tensor.chunkc_index, tensor._chunkc_stamp)
        return args[0] if func is aten.zero_.default else None
    if torch.is_grad_enabled():
        for tensor in managed:
            if tensor._role == "param" and tensor.requires_grad:
                _store(tensor).note_differentiable_read(tensor.chunkc_index)
    values: dict[object, torch.Tensor] = {}
    for tensor in managed:
        if _value_key(tensor) not in values:
            values[_value_key(tensor)] = _read(tensor)
    plain_args, plain_kwargs = pytree.tree_map_only(ManagedTensor, lambda x: values[_value_key(x)], (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    for tensor in written:
        _write(tensor, values[_value_key(tensor)])
    if written:
        originals = {id(values[_value_key(tensor)]): tensor for tensor in written}
        return pytree.tree_map_only(torch.Tensor, lambda x: originals.get(id(x), x), out)
    if any(r.alias_info is not None for r in func._schema.returns):
        source = managed[0]
        runtime, index, stamp = source.chunkc_store, source.chunkc_index, source._chunkc_stamp
        if source._role != "view":
            stamp = _NO_VERSION if source._role == "grad" else runtime.version_of(index)
        wrap = partial(ManagedTensor, role="view", index=index, runtime=runtime, stamp=stamp)
        return pytree.tree_map_only(torch.Tensor, wrap, out)
    return out


def _copy_exactly(target: ManagedTensor, source: torch.Tensor) -> ManagedTensor:
    """``target.copy_(source)`` without rounding to compute dtype on the way to param32."""
    value = _read(source) if isinstance(source, ManagedTensor) else source
    _store(target).write_param(target.chunkc_index, value.expand(target.shape))
    return target


def _fill(func: Any, target: ManagedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ManagedTensor:
    """Fill a parameter without reading it, in the dtype and with the random numbers of its initialisation."""
    dtype = _store(target).staging.dtypes[target.chunkc_index]
    value = torch.empty_strided(target.shape, target.stride(), dtype=dtype, device=target.device)
    args, kwargs = pytree.tree_map_only(ManagedTensor, _read, (args, kwargs))
    func(value, *args, **kwargs)
    return _copy_exactly(target, value)


def _value_key(tensor: ManagedTensor) -> object:
    """Return a key shared by tensors whose values are in the same place, as a parameter and its ``data``."""
    if tensor._role == "view":
        return id(tensor)
    return id(tensor.chunkc_store), tensor._role, tensor.chunkc_index, tensor._chunkc_stamp


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ManagedTensor]:
    written: list[ManagedTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [x for x in pytree.tree_leaves(value) if isinstance(x, ManagedTensor)]
    return written


def _plain(tensor: ManagedTensor) -> torch.Tensor:
    """A tensor that chunkc does not manage; a parameter stays one, in the dtype it was handed over in."""
    if tensor._role == "param" and isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.exact(), requires_grad=tensor.requires_grad)
    return _read(tensor)


def inner_of(param: torch.Tensor) -> torch.Tensor:
    """The shell that stands for a managed parameter inside compiled graphs."""
    if not isinstance(param, ManagedTensor):
        raise TypeError(f"not a managed tensor: {type(param).__name__}")
    return param._inner
