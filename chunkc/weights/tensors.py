"""The tensors of a compiled model's state, by name and one at a time.

``model.state_dict()`` holds all values at once. `ModelTensors` reads or writes one value where it stands (staging
store, chunks at home, chunks on the device). All ranks that train the model read or write a parameter together; files
are rank 0's, which leads (`led_read`, `led_write`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch
from torch import nn

from chunkc.distributed.coordination import run_on_rank0
from chunkc.errors import ChunkcError
from chunkc.runtime.devices.host_slab import FreedPages
from chunkc.runtime.model.parameters import Parameters
from chunkc.runtime.params.managed_tensor import ManagedTensor

T = TypeVar("T")

_EXTRA_STATE: Final = "_extra_state"
"""The last part of the name that torch gives to what ``get_extra_state`` returns, which may be a tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter (``param``: its index) or persistent buffer; tied tensors are one entry.

    ``dtype`` is as handed over; a parameter's compute dtype may be another.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    param: int | None
    buffer: torch.Tensor | None

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class ModelTensors:
    """Names of the state of a compiled model (or of a part of one), and access to one value at a time.

    Under tensor parallelism values are those of whole tensors, of which each rank reads and writes its part.

    Attributes:
        entries: in the order of the state dict.
        others: names of other state (``get_extra_state``), whose values only their module can take.
    """

    def __init__(self, model: nn.Module) -> None:
        self._memory = memory_of(model)
        self._freed, self._last_nbytes = FreedPages(), 0
        self.ranks = self._memory.ranks
        groups: dict[tuple[str, int], list[str]] = {}
        held: dict[tuple[str, int], torch.Tensor] = {}
        others, params = [], dict(model.named_parameters(remove_duplicate=False))
        for name, held_value in model.state_dict(keep_vars=True).items():
            value = params.get(name, held_value)  # in place of a DTensor the part that it shows
            if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == _EXTRA_STATE:
                others.append(name)
                continue
            key = ("param", value.chunkc_index) if isinstance(value, ManagedTensor) else ("buffer", id(value))
            groups.setdefault(key, []).append(name)
            held.setdefault(key, value if isinstance(value, ManagedTensor) else value.detach())
        self.entries = tuple(self._entry(names, held[key], key) for key, names in groups.items())
        self.others = tuple(others)
        self._by_name = {name: entry for entry in self.entries for name in entry.names}

    def _entry(self, names: list[str], value: torch.Tensor, key: tuple[str, int]) -> Entry:
        is_param = key[0] == "param"
        dtype = self._memory.staging.dtypes[key[1]] if is_param else value.dtype
        is_part = is_param and key[1] in self._memory.shards
        shape = tuple(self._memory.shards[key[1]].shape if is_part else value.shape)
        param, buffer = (key[1], None) if is_param else (None, value)
        return Entry(names[0], tuple(names[1:]), shape, dtype, param, buffer)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def entry(self, name: str) -> Entry:
        """The entry that has ``name`` among its names; KeyError when none has."""
        return self._by_name[name]

    def is_blank(self, entry: Entry) -> bool:
        """Whether it is a parameter from the meta device that was never given a value."""
        return entry.param is not None and self._memory.staging.is_blank(entry.param)

    def read(self, entry: Entry) -> torch.Tensor:
        """A host copy in the entry's dtype, of the fp32 master where there is one; ChunkcError when blank.

        Memory is given back as if the previous copy were no longer held.
        """
        self._freed.add(self._last_nbytes)
        self._last_nbytes = entry.nbytes
        if entry.param is not None:
            return self._memory.read_whole(entry.param)
        return _held(entry).to("cpu", copy=True)

    def write(self, entry: Entry, value: torch.Tensor) -> None:
        """Replace parameter and fp32 master by ``value`` of the same shape, rounded to the entry's dtype."""
        _check_shape(entry, value)
        with torch.no_grad():
            if entry.param is not None:
                part = self._memory.part(entry.param, value)
                self._memory.write_param(entry.param, part, keep_finer=False)
            else:
                _held(entry).copy_(value)

    def led_read(self, lead: Callable[[Callable[[Entry], torch.Tensor]], T]) -> T:
        """Run ``lead`` on rank 0 with what `read` is; all ranks return its result or raise its error."""

        def read(tell: Callable[[str], None], entry: Entry) -> torch.Tensor:
            if entry.param is not None:
                tell(entry.name)
            return self.read(entry)

        return run_on_rank0(
            self.ranks, lambda tell: lead(partial(read, tell)), lambda name: self.read(self.entry(name))
        )

    def led_write(self, lead: Callable[[Callable[[Entry, torch.Tensor], None]], T]) -> T:
        """Run ``lead`` on rank 0 with what `write` is; all ranks return its result or raise its error."""

        def write(tell: Callable[[tuple[str, torch.dtype]], None], entry: Entry, value: torch.Tensor) -> None:
            _check_shape(entry, value)
            tell((entry.name, value.dtype))
            self._write_led(entry, value)

        def follow(payload: tuple[str, torch.dtype]) -> None:
            entry = self.entry(payload[0])
            self._write_led(entry, torch.empty((), dtype=payload[1]).expand(entry.shape))

        return run_on_rank0(self.ranks, lambda tell: lead(partial(write, tell)), follow)

    def _write_led(self, entry: Entry, value: torch.Tensor) -> None:
        """`write` of rank 0's ``value``; those of the other ranks have its dtype and shape."""
        has_parts = entry.param is not None and self.ranks.tensor_size > 1
        if has_parts or (entry.param is None and self.ranks.job_size > 1):
            leads = self.ranks.is_first_of_job
            value = value.contiguous() if leads else torch.empty(entry.shape, dtype=value.dtype)
            self.ranks.broadcast_in_job(value)
        self.write(entry, value)


def memory_of(model: nn.Module) -> Parameters:
    """Memory of the compiled model that ``model`` is, or is a part of; ChunkcError when there is not one."""
    params = list(model.parameters())
    memories: list[Parameters] = [p.chunkc_store for p in params if isinstance(p, ManagedTensor)]
    if not memories or len(memories) < len(params) or any(memory is not memories[0] for memory in memories):
        raise ChunkcError(
            f"the parameters of this {type(model).__name__} do not stand in one compiled model: call chunkc.compile "
            "first, and outside of `with chunkc.full_params(model):`"
        )
    return memories[0]


def _check_shape(entry: Entry, value: torch.Tensor) -> None:
    if tuple(value.shape) != entry.shape:
        raise ChunkcError(f"{entry.name} has shape {entry.shape}, not {tuple(value.shape)}")


def _held(entry: Entry) -> torch.Tensor:
    if entry.buffer is None:
        raise TypeError(f"{entry.name} is no buffer")
    return entry.buffer
