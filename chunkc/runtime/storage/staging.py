"""The staging store: where parameters stand before the first training graph gives them chunks.

Each parameter keeps the tensor that it was handed over in. Chunks consume these one by one, so that the model never
exists twice. A parameter that was handed over on the meta device is *blank*: it takes memory when it is first written,
as a whole; reading it before, or training, is an error that names it.

Where several ranks train the same parameters, the first of them alone keeps values, and reads are collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.ir.state_spec import MASTER
from chunkc.runtime.devices.host_slab import map_private

_MAPPED_NBYTES: Final = 2**16
"""From this size on a value has its own mapping: malloc would keep the memory when chunks have taken the value."""


@dataclass(slots=True)
class StagedState:
    """Optimizer states loaded before there were chunks; ``param32`` only where finer than the parameter."""

    lists: dict[str, torch.Tensor]
    param32: torch.Tensor | None


class StagingStore:
    """Per-tensor storage by parameter index; ``dtypes`` are those that parameters were handed over in.

    ``blank``: parameters that were never given a value.
    """

    def __init__(self, values: Sequence[torch.Tensor], names: Sequence[str] = (), ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._values: list[torch.Tensor | None] = list(values)
        self._states: dict[int, StagedState] = {}
        self._names = tuple(names) or tuple(f"#{index}" for index in range(len(values)))
        self.dtypes = tuple(v.dtype for v in values)
        blank = bytes(value.is_meta and value.numel() > 0 for value in values)
        self.blank = {index for index, is_blank in enumerate(self._ranks.collect(blank)[0]) if is_blank}
        for index, value in enumerate(values):
            if not self._ranks.is_first:
                self._values[index] = torch.empty_like(value, device="meta")
            elif value.is_meta and not value.numel():
                self._values[index] = self.empty(index)

    def holds(self, index: int) -> bool:
        return self._values[index] is not None

    def is_blank(self, index: int) -> bool:
        return index in self.blank

    def check_complete(self) -> None:
        """Raise `ChunkcError` that names parameters which were never given a value."""
        blank = [name for index, name in enumerate(self._names) if self.is_blank(index)]
        if blank:
            more = f" and {len(blank) - 5} more" if len(blank) > 5 else ""
            advice = (
                ", initialise them in place (`torch.nn.init`, `param.copy_(value)`), or write them inside "
                "`with chunkc.full_params(model):`"
            )
            if self._ranks.tensor_size > 1:  # all would draw the same numbers for their parts
                advice = " with whole tensors, of which each rank takes its part"
            raise ChunkcError(
                f"{', '.join(blank[:5])}{more} came on the meta device and were never given a value. Load them "
                f"(`chunkc.load_pretrained(model, path)`, `model.load_state_dict(state)`){advice}"
            )

    def empty(self, index: int) -> torch.Tensor:
        """An uninitialised host tensor like the parameter as handed over; raises `KeyError` when it has left."""
        with torch.inference_mode(False):
            like = torch.empty_like(self._held(index), device="meta")
            if like.nbytes < _MAPPED_NBYTES:
                return torch.empty_like(like, device="cpu")
            return map_private(like.nbytes).view(like.dtype).as_strided(like.shape, like.stride())

    def value(self, index: int) -> torch.Tensor:
        """The parameter in the dtype that it was handed over in; raises `ChunkcError` when it has no value."""
        if self.is_blank(index):
            raise ChunkcError(
                f"{self._names[index]} came on the meta device and has no value yet; load a state dict or write the "
                "whole parameter before it is read"
            )
        return self._from_first(self._held(index))

    def _held(self, index: int) -> torch.Tensor:
        value = self._values[index]
        if value is None:
            raise KeyError(f"parameter {index} has left the staging store")
        return value

    def _from_first(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` of rank 0, which on the other ranks says shape and dtype only."""
        if self._ranks.size == 1:
            return value
        with torch.inference_mode(False), torch.no_grad():
            received = value if self._ranks.is_first else torch.empty_like(value, device="cpu")
            self._ranks.broadcast(received.as_strided((received.numel(),), (1,)))
            return received

    def exact(self, index: int) -> torch.Tensor:
        """The finest value known: a loaded param32, else the staged tensor itself."""
        state = self.state(index)
        return self.value(index) if state is None or state.param32 is None else state.param32

    def kept(self, index: int) -> tuple[torch.Tensor, StagedState | None]:
        """Value and loaded optimizer state as they stand here, for rank 0, which alone keeps them."""
        return self._held(index), self._states.get(index)

    def nbytes(self) -> int:
        held = [v for i, v in enumerate(self._values) if v is not None and i not in self.blank]
        return sum(v.numel() * v.element_size() for v in held)

    def write(self, index: int, value: torch.Tensor, *, keep_finer: bool = True) -> None:
        """Replace a parameter; with ``keep_finer``, elements of param32 that merely round to ``value`` stay."""
        if not self._ranks.is_first:
            self.blank.discard(index)
            return
        state = self._states.get(index)
        if state is not None and state.param32 is not None:
            state.param32 = keep_master(state.param32, value.to(self.dtypes[index])) if keep_finer else None
        staged = self.empty(index) if self.is_blank(index) else self._held(index)
        self._values[index] = staged.copy_(value)
        self.blank.discard(index)

    def state(self, index: int, names: Sequence[str] = ()) -> StagedState | None:
        """Loaded optimizer states, those of ``names`` alone, or None; of rank 0."""
        state = self._states.get(index)
        lists = {} if state is None else {name: state.lists[name] for name in names if name in state.lists}
        if self._ranks.size == 1:
            return None if state is None else StagedState(lists, state.param32)
        own = bytes([state is not None, state is not None and state.param32 is not None, *(n in lists for n in names)])
        has_state, has_param32, *has_lists = self._ranks.collect(own)[0]
        if not has_state:
            return None
        like = torch.empty_like(self._held(index), device="meta", dtype=torch.float32)
        held = [name for name, is_held in zip(names, has_lists, strict=True) if is_held]
        shared = {name: self._from_first(lists.get(name, like)) for name in held}
        param32 = like if state is None else state.param32
        return StagedState(shared, self._from_first(param32) if has_param32 and param32 is not None else None)

    def read_state(self, index: int, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """States by name, zeros where none was loaded; ``param32`` is the finest value known."""
        value, state = self.exact(index), self.state(index, [name for name in names if name != MASTER])
        found = {MASTER: value, **({} if state is None else state.lists)}
        return tuple(found[name] if name in found else torch.zeros_like(value) for name in names)

    def write_state(self, index: int, states: Mapping[str, torch.Tensor], param32: torch.Tensor | None) -> None:
        """Keep optimizer states for the chunks to come; ``param32`` also becomes the parameter's value."""
        if param32 is not None:
            self._states.pop(index, None)
            self.write(index, param32)
            param32 = None if self.dtypes[index] is torch.float32 else self._float_copy(index, param32)
        if self._ranks.is_first:
            copies = {name: self._float_copy(index, value) for name, value in states.items()}
            self._states[index] = StagedState(copies, param32)

    def _float_copy(self, index: int, value: torch.Tensor) -> torch.Tensor:
        held = self._held(index)
        return torch.empty_like(held, device="cpu", dtype=torch.float32).copy_(value)

    def forget(self, index: int) -> None:
        self._values[index] = None
        self.blank.discard(index)
        self._states.pop(index, None)


def keep_master(master: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the master's dtype; where it is merely the master rounded, the master's own element."""
    value = value.to(master.device)
    if value.dtype == master.dtype:
        return value
    return torch.where(master.to(value.dtype) == value, master, value.to(master.dtype))


def round_to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` with no more precision than ``dtype`` has; itself where its own dtype has no more."""
    return value if torch.promote_types(value.dtype, dtype) is dtype else value.to(dtype)
