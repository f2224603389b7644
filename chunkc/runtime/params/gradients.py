"""Places of one model's gradients between backward and step, and what ``param.grad`` shows of them.

    chunk    over the parameter's payload or in a gradient chunk, where the backward program put it
    host     a tensor of its own in host memory: another graph of the same backward needed the payload after it landed,
             or no plan has laid out chunks yet

A gradient may have both parts; their sum is the gradient. ``param.grad`` is a handle with the stamp of its backward (of
the first micro-batch that had a gradient), so that a kept handle never shows the gradient of a later one. A handle
that nobody keeps is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import torch
from torch import nn

from chunkc._torch_compat.core import num_references, num_references_of_one_name
from chunkc.runtime.params.managed_tensor import ManagedTensor, ValueStore, inner_of
from chunkc.runtime.update.loss_scale import LossScale, multiply


class Gradients:
    """The gradients of one model's parameters, by index.

    Attributes:
        chunk_grads: parameters whose gradient stands in a chunk, or zeros in place of one that was withheld.
        host_grads: parts of gradients that do not stand in chunks, in compute dtype and host memory.
        zeroed: parameters whose ``grad`` was zeroed in place, and got nothing since.
        stamp: number of the latest backward.
        num_micro_batches: backwards whose gradients add up since the last step.
        factor: pending factor of all of them by clipping and unscaling, float32 [] on the device; None for 1.
        unscaling: the factor that the latest backward left, which undoes a loss scale; None for 1.
        found: 1 where the script's scaler found one infinite or NaN, else 0: float32 []; None before it looked.
        accumulate: backwards whose gradients one step may take; with more than one, gradients overlay no parameter.
        is_consumed: whether a step took the latest gradients.
        measured: parameters whose gradients the latest backward measured, if these are all and unchanged since.
    """

    def __init__(self, params: Sequence[nn.Parameter], accumulate: int = 1) -> None:
        self.accumulate = accumulate
        self.chunk_grads: set[int] = set()
        self.host_grads: dict[int, torch.Tensor] = {}
        self.zeroed: set[int] = set()
        self.stamp = 0
        self.num_micro_batches = 0
        self.factor: torch.Tensor | None = None
        self.unscaling: torch.Tensor | None = None
        self.found: torch.Tensor | None = None
        self.measured: frozenset[int] | None = None
        self.is_consumed = False
        self.params = params
        self._handles: dict[int, ManagedTensor] = {}
        self._shells: dict[int, torch.Tensor] = {}
        self._stamps: dict[int, int] = {}
        self._live: set[int] = set()
        self._replaced: dict[int, torch.Tensor] = {}
        self._backward: int | None = None
        self._calls: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether some backward's gradients were neither stepped nor discarded."""
        return bool(self.chunk_grads or self.host_grads)

    @property
    def overlaid(self) -> Set[int]:
        """Parameters whose payload is a gradient now."""
        return self.chunk_grads if self.accumulate == 1 else frozenset()

    @property
    def accumulated(self) -> frozenset[int]:
        """Parameters whose gradient chunks hold what the next micro-batch adds to."""
        return frozenset(self.chunk_grads if self.accumulate > 1 else ())

    def is_handle(self, index: int) -> bool:
        """Whether ``param.grad`` is what the latest backward published."""
        grad = self.params[index].grad
        return grad is not None and grad is self._handles.get(index)

    def is_kept(self, index: int) -> bool:
        """Whether a gradient stands somewhere and can be stepped; zeros of a withheld one are none."""
        return (index in self.chunk_grads and index in self._live) or index in self.host_grads

    def doubtful(self, indexes: Iterable[int]) -> list[int]:
        """Those of ``indexes`` whose ``grad`` is none that the latest backward published and memory holds."""
        params, handles = self.params, self._handles
        kept = {*self._live.intersection(self.chunk_grads), *self.host_grads}
        return [i for i in indexes if i not in kept or params[i].grad is not handles.get(i)]

    def present(self, trained: Set[int]) -> tuple[frozenset[int], list[int]]:
        """All parameters with a ``grad``, and those of them that are `doubtful` or not ``trained``."""
        present = frozenset(i for i, p in enumerate(self.params) if p.grad is not None)
        return present, sorted({*self.doubtful(present), *present.difference(trained)})

    def published(self, indexes: Iterable[int]) -> frozenset[int]:
        """Those of ``indexes`` whose gradient was published since the last step; the others were withheld."""
        return frozenset(self._live.intersection(indexes))

    def unshown(self) -> list[int]:
        """Parameters whose gradient is kept, though ``grad`` was removed, replaced or zeroed."""
        return [i for i in {*self.chunk_grads, *self.host_grads} if i in self.zeroed or not self.is_handle(i)]

    def stamp_of(self, index: int) -> int:
        return self._stamps.get(index, self.stamp)

    def drop_removed(self) -> None:
        """Forget gradients that ``param.grad`` shows no more; count micro-batches anew where none is left."""
        for index in [i for i in (*self.chunk_grads, *self.host_grads) if not self.is_handle(i)]:
            self.chunk_grads.discard(index)
            self.host_grads.pop(index, None)
            self._live.discard(index)
            self._replaced.pop(index, None)
        for index in self.zeroed:
            self._replaced.pop(index, None)
        if not any(i not in self.zeroed for i in (*self.chunk_grads, *self.host_grads)):
            self.num_micro_batches = 0

    def waiting(self) -> list[int]:
        """Parameters that show a gradient which nobody has zeroed."""
        shown = [i for i, p in enumerate(self.params) if p.grad is not None]
        return [i for i in shown if not (i in self.zeroed and self.is_handle(i))]

    def joins(self, backward: int, call: int) -> bool:
        """Whether ``backward`` has landed gradients of ``call`` already: their micro-batch goes on."""
        return backward == self._backward and call in self._calls

    def is_under_way(self, backward: int) -> bool:
        """Whether ``backward`` landed the latest gradients."""
        return self.pending and backward == self._backward

    def begin(self, backward: int, call: int) -> None:
        """Begin a new backward, or one more micro-batch."""
        self.stamp += 1
        if self.num_micro_batches == 0:
            self.found = None
        self.num_micro_batches += 1
        self.factor = self.unscaling = self.measured = None
        self.is_consumed = False
        if backward != self._backward:
            self._calls.clear()
        self._calls.add(call)
        self._backward = backward

    def land(self, indexes: Iterable[int]) -> None:
        """Note that the gradients of ``indexes`` stand in their chunks, those withheld as zeros."""
        self.chunk_grads.update(indexes)

    def note_landed(self, graded: frozenset[int], scale: LossScale | None, *, is_measured: bool) -> None:
        """Note that gradients of ``graded``, multiplied by ``scale``, have landed, and whether with norms."""
        if scale is not None:
            self.factor = self.unscaling = scale.inverse()
        is_all = is_measured and self.chunk_grads == graded and not self.host_grads
        self.measured = self.published(graded) if is_all else None

    def add(self, index: int, part: torch.Tensor) -> None:
        """Add a part that does not stand in a chunk; a tensor in host memory may be kept as it is."""
        part, before = part.to("cpu"), self.host_grads.get(index)
        self.host_grads[index] = part if before is None else before + part

    def publish(
        self,
        store: ValueStore,
        averaged: Callable[[torch.Tensor], torch.Tensor],
        indexes: Iterable[int],
        scale: torch.Tensor | None = None,
    ) -> None:
        """Set ``param.grad``, of ``store``, after a graph has run backward on a loss times ``scale``.

        A plain gradient that was there (of an eager operator, or assigned) is added, as autograd would do, ``averaged``
        over ranks, and kept for the case that this backward fails.
        """
        num_own = num_references_of_one_name()
        for index in indexes:
            param = self.params[index]
            if param.grad is not None and not self.is_handle(index):
                self._replaced[index] = param.grad
                plain = averaged(param.grad.detach()).clone()
                self.add(index, plain if scale is None else multiply(plain, scale.to(plain.device)))
            self.zeroed.discard(index)
            if index in self._live and self.is_handle(index):
                continue  # one tensor, to which each backward adds
            self._stamps[index] = self.stamp
            handle = self._handles.pop(index, None)
            if handle is not None and num_references(handle) == num_own and handle.is_renewable():
                handle.renew(store, self.stamp)
            else:
                handle = self._new_handle(store, index)
            self._handles[index] = param.grad = handle
            self._live.add(index)

    def _new_handle(self, store: ValueStore, index: int) -> ManagedTensor:
        if index not in self._shells:
            self._shells[index] = inner_of(self.params[index]).detach()  # storage-less already: nothing is allocated
        return ManagedTensor(self._shells[index], "grad", index, store, self.stamp)

    def forget(self) -> None:
        """Note that gradients were stepped or discarded; ``param.grad`` stays what it is."""
        self.factor = self.unscaling = self.found = self.measured = None
        self.chunk_grads.clear()
        self.host_grads.clear()
        self._replaced.clear()
        self._live.clear()
        self.num_micro_batches = 0
        self.is_consumed = False

    def consume(self) -> None:
        self.forget()
        self.is_consumed = True

    def retract(self) -> None:
        """Give gradients up: parameters show what they showed before this model published gradients."""
        for index, handle in self._handles.items():
            if self.params[index].grad is handle:
                self.params[index].grad = self._replaced.get(index)
        self.forget()

    def close(self) -> None:
        """Let go of everything, where the garbage collector cannot look."""
        self.retract()
        self._handles.clear()
        self._shells.clear()
