"""The tensors of a compiled model's state, by name and one at a time.

``model.state_dict()`` holds all values at once. `ModelTensors` is the same set of names without any values: each is
read, or written, when it is asked for, wherever it stands then (staging store, chunks at home, chunks on the device).
Tied tensors are one entry with several names.

Where several ranks train the model, all of them read a parameter together, and all of them write it. Files are rank
0's: it leads, and the others take part in what it reads or writes (`led_read`, `led_write`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """One parameter or persistent buffer.

    Attributes:
        name: the first that the state dict has for it.
        aliases: its other names.
        dtype: as it was handed over; a parameter's compute dtype may be another.
        param: index of the managed parameter; None for a buffer.
        buffer: the buffer itself; None for a parameter.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    param: int | None
    buffer: torch.Tensor | None

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the first one first."""
        return self.name, *self.aliases

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class ModelTensors:
    """Names of the state of a compiled model (or of a part of one), and access to one value at a time.

    Attributes:
        entries: in the order of the state dict.
        others: names in the state dict that are neither (``get_extra_state``): only their module can take a value.
        ranks: with which the model is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Raises:
            ChunkcError: when ``model`` is not compiled, or is inside ``chunkc.full_params``.
        """
        self._memory = memory_of(model)
        self._freed, self._last_nbytes = FreedPages(), 0
        self.ranks = self._memory.ranks
        groups: dict[tuple[str, int], list[str]] = {}
        held: dict[tuple[str, int], torch.Tensor] = {}
        others = []
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == _EXTRA_STATE:
                others.append(name)
                continue
            is_param = isinstance(value, ManagedTensor)
            key = ("param", value._chunkc_index) if isinstance(value, ManagedTensor) else ("buffer", id(value))
            groups.setdefault(key, []).append(name)
            held.setdefault(key, value.detach() if not is_param else value)
        self.entries = tuple(self._entry(names, held[key], key) for key, names in groups.items())
        self.others = tuple(others)
        self._by_name = {name: entry for entry in self.entries for name in entry.names}

    def _entry(self, names: list[str], value: torch.Tensor, key: tuple[str, int]) -> Entry:
        is_param = key[0] == "param"
        dtype = self._memory.staging.dtypes[key[1]] if is_param else value.dtype
        shape = tuple(value.shape)
        param, buffer = (key[1], None) if is_param else (None, value)
        return Entry(names[0], tuple(names[1:]), shape, dtype, param, buffer)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def entry(self, name: str) -> Entry:
        """The entry that has ``name`` among its names.

        Raises:
            KeyError: when none has.
        """
        return self._by_name[name]

    def is_blank(self, entry: Entry) -> bool:
        """Whether it is a parameter that came on the meta device and was never given a value."""
        return entry.param is not None and self._memory.staging.is_blank(entry.param)

    def read(self, entry: Entry) -> torch.Tensor:
        """A copy in host memory, in the entry's dtype: of the fp32 master where there is one.

        Memory is given back as if the copy before were no longer held.

        Raises:
            ChunkcError: for a parameter that was never given a value.
        """
        self._freed.add(self._last_nbytes)
        self._last_nbytes = entry.nbytes
        if entry.param is not None:
            return self._memory.read_exact(entry.param)
        return _held(entry).to("cpu", copy=True)

    def write(self, entry: Entry, value: torch.Tensor) -> None:
        """Replace the value by ``value``, of any dtype, rounded to the entry's.

        The fp32 master and the parameter in compute dtype both take it; moments of the optimizer stay.

        Raises:
            ChunkcError: when ``value`` has another shape.
        """
        _check_shape(entry, value)
        with torch.no_grad():
            if entry.param is not None:
                self._memory.write_param(entry.param, value, keep_finer=False)
            else:
                _held(entry).copy_(value)

    def led_read(self, lead: Callable[[Callable[[Entry], torch.Tensor]], T]) -> T:
        """Rank 0 does ``lead``, which is given what `read` is; all ranks return, or raise, what it does."""

        def read(tell: Callable[[str], None], entry: Entry) -> torch.Tensor:
            if entry.param is not None:
                tell(entry.name)
            return self.read(entry)

        return run_on_rank0(
            self.ranks, lambda tell: lead(partial(read, tell)), lambda name: self.read(self.entry(name))
        )

    def led_write(self, lead: Callable[[Callable[[Entry, torch.Tensor], None]], T]) -> T:
        """Rank 0 does ``lead``, which is given what `write` is; all ranks return, or raise, what it does."""

        def write(tell: Callable[[tuple[str, torch.dtype]], None], entry: Entry, value: torch.Tensor) -> None:
            _check_shape(entry, value)
            tell((entry.name, value.dtype))
            self.write(entry, value if entry.param is not None else self._of_first(value))

        def follow(payload: tuple[str, torch.dtype]) -> None:
            entry = self.entry(payload[0])
            value = torch.empty((), dtype=payload[1]).expand(entry.shape)
            self.write(entry, value if entry.param is not None else self._of_first(value))

        return run_on_rank0(self.ranks, lambda tell: lead(partial(write, tell)), follow)

    def _of_first(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` of rank 0, in its dtype and shape."""
        if self.ranks.size == 1:
            return value
        found = value.contiguous().clone()
        self.ranks.broadcast(found)
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every entry; each value is made when it is its turn."""
        for entry in self.entries:
            yield entry.name, self.read(entry)


def memory_of(model: nn.Module) -> Parameters:
    """Memory of the values of a compiled model, or of the compiled model that ``model`` is a part of.

    Raises:
        ChunkcError: when there is none, or several.
    """
    params = list(model.parameters())
    found: list[Parameters] = [p._chunkc_store for p in params if isinstance(p, ManagedTensor)]
    if not found or len(found) < len(params) or any(memory is not found[0] for memory in found):
        raise ChunkcError(
            f"the parameters of this {type(model).__name__} do not stand in one compiled model: call chunkc.compile "
            "first, and outside of `with chunkc.full_params(model):`"
        )
    return found[0]


def _check_shape(entry: Entry, value: torch.Tensor) -> None:
    if tuple(value.shape) != entry.shape:
        raise ChunkcError(f"{entry.name} has shape {entry.shape}, not {tuple(value.shape)}")


def _held(entry: Entry) -> torch.Tensor:
    if entry.buffer is None:
        raise TypeError(f"{entry.name} is no buffer")
    return entry.buffer
