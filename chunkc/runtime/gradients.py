"""Where the gradients of one model are between its backward and the step, and what ``param.grad`` shows of them.

    landed   in the chunk, over the parameter's payload, where the backward program put it
    apart    a tensor of its own in host memory: another graph of the same backward needed the payload after it landed,
             or no plan has laid out chunks yet

A gradient may have both parts; their sum is the gradient. ``param.grad`` is a handle with the stamp of its backward, so
that a handle that was kept never shows the gradient of a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from chunkc.errors import AccumulationError
from chunkc.runtime.params import ManagedTensor, ParamStore, inner_of


class Gradients:
    """The gradients of one model's parameters, by index.

    Attributes:
        landed: parameters whose payload is a gradient.
        apart: parts of gradients that do not stand in chunks, in compute dtype and host memory.
        zeroed: parameters whose ``grad`` was zeroed in place.
        stamp: number of the latest backward.
    """

    def __init__(self, params: Sequence[nn.Parameter], store: ParamStore) -> None:
        self.landed: set[int] = set()
        self.apart: dict[int, torch.Tensor] = {}
        self.zeroed: set[int] = set()
        self.stamp = 0
        self._params, self._store = params, store
        self._handles: dict[int, ManagedTensor] = {}
        self._replaced: dict[int, torch.Tensor] = {}
        self._backward: int | None = None
        self._call = -1
        self._ran: Counter[object] = Counter()

    @property
    def pending(self) -> bool:
        """Whether some backward's gradients were neither stepped nor discarded."""
        return bool(self.landed or self.apart)

    def is_handle(self, index: int) -> bool:
        """Whether ``param.grad`` is what the latest backward handed out."""
        grad = self._params[index].grad
        return grad is not None and grad is self._handles.get(index)

    def waiting(self) -> list[int]:
        """Parameters that show a gradient which nobody has zeroed."""
        return [i for i, p in enumerate(self._params) if p.grad is not None and i not in self.zeroed]

    def joins(self, backward: int, call: int, graph: object, num_forwards: int) -> bool:
        """Whether ``graph``, which ran forward in ``call``, goes on with the backward that landed the latest gradients.

        ``num_forwards``: how often it ran there, as a frame does that a forward comes to more than once.

        Raises:
            AccumulationError: when it belongs to that backward, but would add a second contribution to it.
        """
        if not self.pending or backward != self._backward:
            return False
        if call != self._call or self._ran[graph] >= num_forwards:
            raise AccumulationError(
                "one backward() reaches two forwards of the compiled model; summing their gradients is accumulation "
                "over micro-batches, which was not declared. Call backward() and step() for each loss, or run both "
                "batches as one. The gradients of this backward are discarded"
            )
        return True

    def begin(self, backward: int, call: int) -> None:
        """A new backward: what earlier ones handed out is old."""
        self.stamp += 1
        self.zeroed.clear()
        self._ran.clear()
        self._backward, self._call = backward, call

    def land(self, indexes: Iterable[int]) -> None:
        """The gradients of ``indexes`` stand in their chunks now."""
        self.landed.update(indexes)

    def add(self, index: int, part: torch.Tensor) -> None:
        """One more part that does not stand in a chunk; a tensor in host memory may be kept as it is."""
        part, before = part.to("cpu"), self.apart.get(index)
        self.apart[index] = part if before is None else before + part

    def hand_out(self, graph: object, indexes: Iterable[int]) -> None:
        """``graph`` has run backward: set ``param.grad``.

        A plain gradient that was there (of an eager operator, or assigned) is added, as autograd would do, and kept
        for the case that this backward fails.
        """
        self._ran[graph] += 1
        for index in indexes:
            param = self._params[index]
            if param.grad is not None and not self.is_handle(index) and index not in self.zeroed:
                self._replaced[index] = param.grad
                self.add(index, param.grad.detach().clone())
            shell = inner_of(param).detach()  # storage-less already: nothing is allocated
            self._handles[index] = ManagedTensor(shell, "grad", index, self._store, self.stamp)
            param.grad = self._handles[index]

    def forget(self) -> None:
        """Gradients were stepped or discarded; ``param.grad`` stays what it is."""
        self.landed.clear()
        self.apart.clear()
        self._replaced.clear()

    def take_back(self) -> None:
        """Gradients are lost: parameters show what they showed before this model handed them out."""
        replaced = dict(self._replaced)
        self.forget()
        for index, handle in self._handles.items():
            if self._params[index].grad is handle:
                self._params[index].grad = replaced.get(index)

    def close(self) -> None:
        """Let go of everything, where the garbage collector cannot look."""
        self.take_back()
        self._handles.clear()
