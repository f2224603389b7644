"""Parameters, gradients and optimizer states of one model, wherever they stand now.

Before the first plan parameters stand in a staging store, afterwards in chunks. Managed parameters and optimizers read
and write through here; every observation drains pending updates first. ``model`` adds what runs over this memory.

The user finds a parameter on the model's device, and the values and gradients that its operators gather, one at a time.
What the whole model hands out at once (state dicts, optimizer states) is in host memory: the device need not hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import nn

from chunkc.distributed.coordination import mean_of_ranks, of_first_rank
from chunkc.distributed.process_group import Kind, Ranks
from chunkc.errors import ChunkcError
from chunkc.ir.layout import Layout
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.state_spec import ADAM_STATES, MASTER
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.devices.requested import RequestedGradients
from chunkc.runtime.model.backward_rules import refuse_lost
from chunkc.runtime.model.memory_accounting import Accounting
from chunkc.runtime.params.gradients import Gradients
from chunkc.runtime.params.manage import manage_all
from chunkc.runtime.params.managed_tensor import inner_of
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.storage.parameter_io import ChunkValues, Flats
from chunkc.runtime.storage.snapshot import SnapshotReader
from chunkc.runtime.storage.staging import StagingStore, keep_master, round_to
from chunkc.runtime.storage.transaction import Transactions
from chunkc.runtime.update.foreign_updates import ForeignUpdates
from chunkc.runtime.update.loss_scale import multiply


class ModelMemory:
    """Values of one model; see the module docstring. Whoever uses it from outside calls ``settle`` first.

    Attributes:
        infos: all parameters by index, in compute dtype.
        accumulate: backwards whose gradients one step may take; with more than one, gradients overlay no parameter.
        ranks: with which the model is trained; every read and write of a value is collective.
        owners: which optimizer steps each parameter (kept by the optimizers).
        params: the managed parameters by index; the user's module holds the same objects.
        gradients: of the latest backward.
        requested: which gradients backwards are asked for.
        state_spec: the optimizer states that plans make room for; the layout's once there is one.
        has_optimizer: whether one of chunkc's holds some parameter (set by the optimizers).
        foreign: updates by other optimizers than chunkc's.
        accounting: reservation on the device and what was measured of it.
        saving: the latest checkpoint, done or under way (kept by what saves them).
        transactions: what changes values and counts together runs in these.
    """

    holds: Final = "params"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        params: Sequence[nn.Parameter],
        device: Device,
        accumulate: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        """Make ``params`` managed: the same objects afterwards, in compute dtype, values in a staging store."""
        self.infos = tuple(infos)
        self.accumulate = accumulate
        self.owners: dict[int, object] = {}
        self.device = device
        self.ranks = ranks or Ranks()
        self.accounting = Accounting(device)
        self.transactions = Transactions(device.check_usable, device.follow_caller)
        self.saving: Future[Path] | None = None
        self._consumed = False
        self._closed = False
        self._entered: set[int] = set()
        self._store: ChunkStore | None = None
        self._values: ChunkValues | None = None
        self.staging = StagingStore([p.detach() for p in params], [info.name for info in infos], self.ranks)
        self.params = tuple(params)
        manage_all(self.params, self.infos, self, device.torch_device)
        self.gradients = Gradients(self.params, self)
        self.requested = RequestedGradients(self.ranks, self.params, self.name_of)
        self.state_spec = ADAM_STATES
        self.has_optimizer = False
        self.foreign = ForeignUpdates()

    @property
    def layout(self) -> Layout | None:
        """The layout once there is one."""
        return None if self._store is None else self._store.layout

    @property
    def is_sixteen_bit(self) -> bool:
        """Whether some trained parameter has a master copy that is more precise than itself."""
        return any(info.dtype != "float32" for info in self.infos if info.trainable)

    def staged_nbytes(self) -> int:
        """Bytes of the parameters that still wait in the staging store."""
        return self.staging.nbytes()

    def adopt(self, layout: Layout, static: dict[str, int]) -> ChunkStore:
        """The chunks; made at the first call, when they consume the staging store.

        Raises:
            RankError: when the ranks' layouts differ; nothing has changed then.
        """
        if self._store is None or self._values is None:
            self.ranks.agree(Kind.LAYOUT, layout.lines)
            self._store = ChunkStore(layout, self.device)
            self.state_spec = layout.state_spec
            self._values = ChunkValues(self._store, static, self.ranks)
        self._values.load(self.staging)
        return self._store

    def settle(self) -> None:
        """Wait for a transaction that its caller has left; subclasses undo what else an exception interrupted."""
        self.transactions.finish()

    def drain(self) -> None:
        """`settle`, then `join`."""
        self.settle()
        self.join()

    def join(self) -> None:
        """Finish pending updates; what a worker raised is raised here."""
        if self._closed:
            raise ChunkcError(
                f"the compiled model of {self.name_of(0)} was deleted and its memory given back; keep it to read it"
            )
        if self._store is not None:
            self.accounting.num_asked_syncs += 1
            self.device.synchronize()

    def to_cold(self) -> None:
        """Bring every payload home before it is written; subclasses know how. All ranks call it."""

    def reduce_gradients(self) -> bool:
        """Bring together what ranks have made of gradients; return whether there was anything to do.

        Subclasses know how. All ranks call it, behind an agreement on what needs it.
        """
        return False

    # Parameters.

    def name_of(self, index: int) -> str:
        """The parameter's name in the user's model."""
        return self.infos[index].name

    def version_of(self, index: int) -> int:
        """Autograd's version of the parameter: every write and every update raises it."""
        return self.params[index]._version

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Within the block this thread may flatten parameters: it calls this model's own compiled code."""
        thread = threading.get_ident()
        before = thread in self._entered
        self._entered.add(thread)
        try:
            yield
        finally:
            if not before:
                self._entered.discard(thread)

    def is_entered(self) -> bool:
        """Whether the calling thread is inside ``entering``."""
        return threading.get_ident() in self._entered

    def read_param(self, index: int) -> torch.Tensor:
        """A copy in compute dtype, on the model's device."""
        if self.gradients.is_kept(index):
            self.foreign.read(index)
        return self._read(index).to(self.params[index].dtype).to(self.device.torch_device)

    def read_exact(self, index: int) -> torch.Tensor:
        """Copy in host memory in the dtype that the parameter was handed over in; of param32 if there is one."""
        return self._read(index).to("cpu")

    def _together(self, what: str, index: int) -> None:
        """All ranks are about to read or write the same of a parameter."""
        self.ranks.agree(Kind.READ, lambda: [f"{what} of {self.name_of(index)}"], f"{what} of {self.name_of(index)}")

    def _read(self, index: int) -> torch.Tensor:
        """A copy in the dtype that the parameter was handed over in, wherever it stands."""
        self.drain()
        self._together("the value", index)
        if self._values is None or self.staging.holds(index):
            return self.staging.value(index).detach().clone()
        return self._values.read_param(index).to(self.staging.dtypes[index])

    def write_param(self, index: int, value: torch.Tensor, *, keep_finer: bool = True) -> None:
        """Replace a parameter's value; a forward that waits for its backward is then refused by autograd.

        ``keep_finer``: what is merely param32 rounded leaves param32 as it is. Otherwise param32 becomes ``value``,
        rounded to the dtype that the parameter was handed over in.
        """
        self.drain()
        if self.gradients.is_kept(index) and self.foreign.written(index) and not self.has_optimizer:
            self.foreign.tell(self.name_of(index))
        if self._values is None or self.staging.holds(index):
            self.staging.write(index, value, keep_finer=keep_finer)
        else:
            self._together("a new value", index)
            self.to_cold()
            value = of_first_rank(self.ranks, value)
            if keep_finer:
                exact = keep_master(self._values.read_param(index), value)
            else:
                exact = round_to(value, self.staging.dtypes[index])
            self._values.write_param(index, exact, payload=index not in self._overlaid())
        self._raise_versions([index])

    def _raise_versions(self, indexes: Iterable[int]) -> None:
        """Tell autograd that these parameters changed: graphs that saved them refuse to run backward."""
        shells = [tensor for i in indexes for tensor in (self.params[i], inner_of(self.params[i]))]
        torch.autograd.graph.increment_version(shells)

    # Gradients.

    def _overlaid(self) -> Set[int]:
        """Parameters whose payload is a gradient now."""
        return self.gradients.landed if self.accumulate == 1 else frozenset()

    def _accumulated(self) -> frozenset[int]:
        """Parameters whose gradient chunks hold what the next micro-batch adds to."""
        return frozenset(self.gradients.landed if self.accumulate > 1 else ())

    def read_grad(self, index: int, stamp: int) -> torch.Tensor:
        """A copy of the gradient of backward number ``stamp``, on the model's device.

        That backward must be the last one. A gradient that was zeroed, and to which no backward has added, is zeros.
        """
        self._require_gradient(index, stamp)
        self.foreign.read_gradient(index)
        self._together("the gradient", index)
        self.reduce_gradients()
        found, factor = self._gradient(index).to(self.device.torch_device), self.gradients.factor
        return found if factor is None else multiply(found, factor)

    def _gradient(self, index: int) -> torch.Tensor:
        """The gradient as it stands, in chunks and apart; all ranks read it together."""
        apart = self.gradients.apart.get(index)
        if not self.gradients.is_kept(index):
            return self._zeros(index)
        if index not in self.gradients.landed and apart is not None:
            return apart.clone()
        landed = self._chunk_values().read_gradient(index)
        return landed if apart is None else landed.add_(apart.to(landed.device))

    def write_grad(self, index: int, stamp: int, value: torch.Tensor) -> None:
        """Replace a gradient that has not been stepped, or one of zeros."""
        self._require_gradient(index, stamp)
        self._together("a new gradient", index)
        self.reduce_gradients()
        value = self.averaged(value)  # what eager operators add is each rank's own
        self.gradients.zeroed.discard(index)
        self._apply_factor()
        self.gradients.measured = None
        if index in self.gradients.landed and self.gradients.handed_out([index]):
            self._chunk_values().write_gradient(index, value)
            self.gradients.apart.pop(index, None)
        else:
            self.gradients.apart[index] = value.detach().to("cpu", copy=True)

    def zero_grad(self, index: int, stamp: int) -> None:
        """``param.grad.zero_()``: a gradient of zeros, or, where it was stepped already, none."""
        if self.gradients.is_kept(index) or stamp != self.gradients.stamp_of(index):
            self.write_grad(index, stamp, self._zeros(index))
        self.gradients.zeroed.add(index)

    def _zeros(self, index: int) -> torch.Tensor:
        """A gradient of zeros, in host memory."""
        return torch.zeros(self.infos[index].shape, dtype=self.params[index].dtype, device="cpu")

    def _require_gradient(self, index: int, stamp: int) -> None:
        self.drain()
        refuse_lost(self.gradients, index, stamp, self.name_of(index), is_consumed=self._consumed)

    def _apply_factor(self) -> None:
        """Multiply the gradients themselves by the factor, where the step can not; the model must be drained."""
        gradients = self.gradients
        factor, gradients.factor = gradients.factor, None
        if factor is None:
            return
        gradients.measured = None
        for index in gradients.landed:
            self._chunk_values().multiply_gradient(index, factor)
        for part in gradients.apart.values():
            multiply(part, factor.to(part.device))

    def averaged(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a gradient outside of chunks, added up in float32, in host memory."""
        return mean_of_ranks(self.ranks, gradient)

    def _move_apart(self, indexes: Iterable[int]) -> None:
        """Free payloads of these parameters from gradients, which go on in host memory unless withheld."""
        values, indexes = self._chunk_values(), list(indexes)
        handed_out = self.gradients.handed_out(indexes)
        for index in indexes:
            if index in handed_out:
                self.gradients.add(index, values.read_gradient(index))
            values.restore_payload(index)
            self.gradients.landed.discard(index)

    def _move_into_chunks(self) -> None:
        """Bring together what is apart: afterwards every gradient stands whole in its chunk."""
        values = self._chunk_values()
        for index in list(self.gradients.apart):
            values.write_gradient(index, self._gradient(index))
            self.gradients.landed.add(index)
            del self.gradients.apart[index]

    # Optimizer states.

    def read_state(self, param: int, names: Sequence[str] | None = None) -> tuple[torch.Tensor, ...]:
        """Copies of a parameter's states, and param32, called ``names`` (all), in float32 and host memory."""
        names = (*self.state_spec.names, MASTER) if names is None else names
        self.drain()
        self._together("the optimizer state", param)
        if self._values is None or self.staging.holds(param):
            return tuple(found.float().clone() for found in self.staging.read_state(param, names))
        return tuple(self._values.read_state(param, name).to("cpu") for name in names)

    def write_state(self, param: int, states: Mapping[str, torch.Tensor], param32: torch.Tensor | None) -> None:
        """Replace optimizer states and, if given, param32, of a parameter that is trained."""
        self.drain()
        if self._values is None or self.staging.holds(param):
            self.staging.write_state(param, states, param32)
            self._raise_versions([param])
            return
        self._together("a new optimizer state", param)
        self._values.write_states(param, {name: of_first_rank(self.ranks, value) for name, value in states.items()})
        if param32 is not None:
            self.write_param(param, param32)

    def own_ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Elements of a parameter that this rank has, in the order of its memory, ``[first, end)`` each.

        One that has no elements, or no chunks yet, is rank 0's.
        """
        numel = self.infos[index].numel
        if self._store is None or self.staging.holds(index) or not numel:
            return ((0, numel),) if self.ranks.is_first else ()
        runs = self._store.own_runs(index)
        return tuple((run[0].first, run[-1].first + run[-1].end - run[-1].start) for run in runs)

    @property
    def is_in_first_replica(self) -> bool:
        """Whether this rank is one of those whose chunks count where there are several of each."""
        return self.layout is None or self.ranks.rank < self.layout.world_size

    def write_own(self, index: int, value: Flats, states: Mapping[str, Flats]) -> None:
        """Replace this rank's elements of a parameter in chunks and of the given ones of its states.

        All are 1-D and as exact as they are to be, one for each of ``own_ranges``. The model is in the cold state
        (``to_cold``), so that nothing is exchanged.
        """
        self.drain()
        if self.infos[index].numel:
            self._chunk_values().write_own(index, value, states, payload=index not in self._overlaid())
        self._raise_versions([index])

    def is_trained(self, index: int) -> bool:
        """Whether the parameter has, or before the first plan may get, an optimizer state."""
        return self.infos[index].trainable if self._values is None else self._values.is_trained(index)

    def snapshot(self, max_copied_nbytes: int) -> SnapshotReader | None:
        """This rank's chunks as they are now, to read in training until ``end_snapshot``; None without chunks.

        ``max_copied_nbytes`` bounds what is copied aside; see `chunkc.runtime.storage.snapshot`.
        """
        self.drain()
        if self._values is None:
            return None
        return self._values.snapshot(max_copied_nbytes)

    def end_snapshot(self, reader: SnapshotReader | None) -> None:
        """``reader`` has read what it wanted; None where there was nothing to keep."""
        if self._store is not None and reader is not None:
            self._store.end_snapshot(reader.snapshot)

    def _chunk_values(self) -> ChunkValues:
        if self._values is None:
            raise ChunkcError("the model has not run a compiled forward yet")
        return self._values

    def names(self, indexes: Sequence[int], most: int = 5) -> str:
        """The first names of parameters, for messages, and how many more there are."""
        names = ", ".join(self.name_of(i) for i in indexes[:most])
        return names + (f" and {len(indexes) - most} more" if len(indexes) > most else "")
