"""Values of one model's parameters and optimizer states, wherever they stand now.

Before the first plan parameters stand in a staging store, afterwards in chunks. Managed parameters and optimizers read
and write through here; every observation drains pending updates first.

The user finds a parameter on the model's device, and the values that its operators gather, one at a time. What the
whole model hands out at once (state dicts, optimizer states) is in host memory: the device need not hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from chunkc.distributed.agreement import Kind
from chunkc.distributed.coordination import of_first_rank
from chunkc.errors import ChunkcError
from chunkc.ir.layout import Layout
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.state_spec import ADAM_STATES, MASTER
from chunkc.runtime.model.memory_accounting import Accounting
from chunkc.runtime.model.program_state import ModelPhase, ProgramState
from chunkc.runtime.params.manage import manage_all
from chunkc.runtime.params.managed_tensor import inner_of
from chunkc.runtime.params.outside_reads import OutsideReads
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.storage.parameter_io import ChunkValues, Flats
from chunkc.runtime.storage.snapshot import SnapshotReader
from chunkc.runtime.storage.staging import StagingStore, keep_master, round_to
from chunkc.runtime.update.foreign_updates import ForeignUpdates

if TYPE_CHECKING:
    from chunkc.distributed.tensor_shards import TensorShard

_hooks_of, _grad_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class Parameters:
    """Values of one model; see the module docstring. All ranks read and write together.

    Args:
        infos: all parameters by index, in compute dtype.
        params: become managed: the same objects afterwards, in compute dtype, with values in the staging store.
        state: of the model, which goes to the cold state before values are written.

    Attributes:
        state_spec: the optimizer states that plans make room for; the layout's once there is one.
        trained: parameters that have, or before the first plan may get, an optimizer state.
        shells: what stands for each parameter inside compiled graphs.
        foreign: updates by other optimizers than chunkc's.
        outside: reads outside of every plan.
        shards: of the parameters that are this rank's parts of DTensors, what they are parts of.
    """

    holds: Final = "params"

    def __init__(
        self, infos: Sequence[ParamInfo], params: Sequence[nn.Parameter], state: ProgramState, accounting: Accounting
    ) -> None:
        self.infos, self.params = tuple(infos), tuple(params)
        self.device, self.ranks = state.device, state.ranks
        self.runtime: Any = None
        self.foreign = ForeignUpdates()
        self.outside = OutsideReads(self.infos)
        self.has_optimizer = False
        self._state, self._accounting, self._gradients = state, accounting, state.gradients
        self.transactions = state.transactions
        self._target: Layout | None = None
        self._entered: set[int] = set()
        self.shards: dict[int, TensorShard] = {}
        self.store: ChunkStore | None = None
        self._values: ChunkValues | None = None
        self.staging = StagingStore([p.detach() for p in params], [info.name for info in infos], self.ranks)
        self.state_spec = ADAM_STATES
        self.trained = frozenset(i for i, info in enumerate(self.infos) if info.trainable)
        manage_all(self.params, self.infos, self, self.device.torch_device)
        self.shells = tuple(map(inner_of, self.params))

    @property
    def layout(self) -> Layout | None:
        return None if self.store is None else self.store.layout

    @property
    def is_sixteen_bit(self) -> bool:
        """Whether some trained parameter has a master copy that is more precise than itself."""
        return any(info.dtype != "float32" for info in self.infos if info.trainable)

    def staged_nbytes(self) -> int:
        return self.staging.nbytes()

    def adopt(self, layout: Layout, static: dict[str, int]) -> ChunkStore:
        """The chunks of ``layout``; RankError when ranks' layouts differ.

        The first call consumes the staging store, the first one after `leave_layout` the chunks that were left.
        """
        if not self.accepts(layout):
            raise ChunkcError("a plan of a layout was to run that the model has left; please report this")
        if self.store is None or self._values is None or self._target is not None:
            self.ranks.agree(Kind.LAYOUT, layout.lines)
            enter = partial(self._enter, layout, static)
            enter() if self._values is None else self.transactions.run(enter)
        store, values = self.store, self.values
        values.load(self.staging)
        if store is None:
            raise ChunkcError("a layout was adopted without a chunk store; please report this")
        return store

    def _enter(self, layout: Layout, static: dict[str, int]) -> None:
        """Move what stands in chunks of another layout into new ones; until then it is kept as it is."""
        left = self._values
        if left is not None:
            left.leave()
        store = ChunkStore(layout, self.device)
        values = ChunkValues(store, static, self.ranks)
        if left is not None:
            try:
                values.take(left)
            except BaseException:
                self._state.enter(ModelPhase.BROKEN)
                raise
        self.store, self._values, self._target = store, values, None
        self.state_spec = layout.state_spec
        self.trained = frozenset(filter(values.is_trained, range(len(self.infos))))

    def accepts(self, layout: Layout) -> bool:
        """Whether a plan of ``layout`` may run: that of the chunks, or the one that they are to move to."""
        current = self.next_layout
        return current is None or layout is current or layout == current

    @property
    def next_layout(self) -> Layout | None:
        """The layout that plans are to be made for: that of the chunks, unless they are to move to another."""
        return self.layout if self._target is None else self._target

    def leave_layout(self, target: Layout) -> None:
        """Let the next call of `adopt` move all values into chunks of ``target``."""
        self._target = target

    @property
    def is_between_layouts(self) -> bool:
        """Whether values are to move, since the model has left its layout and not entered the next one."""
        return self._target is not None

    def drain(self) -> None:
        """Undo what an exception has interrupted, then `join`."""
        self._state.settle()
        self.join()

    def join(self) -> None:
        """Finish pending updates; what a worker raised is raised here."""
        if self._state.phase is ModelPhase.CLOSED:
            raise ChunkcError(
                f"the compiled model of {self.name_of(0)} was deleted and its memory given back; keep it to read it"
            )
        if self.store is not None:
            self._accounting.num_asked_syncs += 1
            self.device.synchronize()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def whole(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """``value``, which is of the shape that chunks hold, as state dicts have it: of a part the DTensor."""
        return self.shards[index].whole(value) if index in self.shards else value

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """The shape of a parameter, or of the tensor that it is a part of."""
        return tuple(self.shards[index].shape if index in self.shards else self.infos[index].shape)

    def part(self, index: int, value: Any) -> Any:
        """This rank's part of ``value``, a DTensor or whole tensor, where the parameter is a part."""
        if index not in self.shards or not isinstance(value, torch.Tensor):
            return value
        if self.shards[index].is_exchanged(value):
            self.agree_on("a loaded value", index)
        return self.shards[index].part(value)

    def is_divided(self, index: int) -> bool:
        """Whether this rank has a part of the parameter that other ranks do not have."""
        return index in self.shards and self.shards[index].is_divided

    def name_of(self, index: int) -> str:
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
        return threading.get_ident() in self._entered

    def note_differentiable_read(self, index: int) -> None:
        """An operator that autograd records is about to read a parameter."""
        self.outside.read(index, is_entered=self.is_entered())

    def read_param(self, index: int) -> torch.Tensor:
        """A copy in compute dtype, on the model's device."""
        if self._gradients.is_kept(index):
            self.foreign.read(index)
        return self._read(index).to(self.params[index].dtype).to(self.device.torch_device)

    def read_exact(self, index: int) -> torch.Tensor:
        """Copy in host memory in the dtype that the parameter was handed over in; of param32 if there is one."""
        return self._read(index).to("cpu")

    def read_whole(self, index: int) -> torch.Tensor:
        """`read_exact` of the whole tensor, of whose parts ranks along ``tp`` have one each."""
        value = self.read_exact(index)
        return self.shards[index].gathered(value) if index in self.shards else value

    def agree_on(self, what: str, index: int) -> None:
        """All ranks are about to read or write the same of a parameter."""
        self.ranks.agree(Kind.READ, lambda: [f"{what} of {self.name_of(index)}"], f"{what} of {self.name_of(index)}")

    def _read(self, index: int) -> torch.Tensor:
        self.drain()
        self.agree_on("the value", index)
        if self._values is None or self.staging.holds(index):
            return self.staging.value(index).detach().clone()
        return self._values.read_param(index).to(self.staging.dtypes[index])

    def write_param(self, index: int, value: torch.Tensor, *, keep_finer: bool = True) -> None:
        """Replace a parameter's value; autograd then refuses backwards of earlier forwards.

        With ``keep_finer`` a value that is merely param32 rounded leaves param32 as it is.
        """
        self.drain()
        if self._gradients.is_kept(index) and self.foreign.written(index) and not self.has_optimizer:
            self.foreign.tell(self.name_of(index))
        if self._values is None or self.staging.holds(index):
            self.staging.write(index, value, keep_finer=keep_finer)
        else:
            self.agree_on("a new value", index)
            self._state.to_cold()
            value = of_first_rank(self.ranks, value)
            if keep_finer:
                exact = keep_master(self._values.read_param(index), value)
            else:
                exact = round_to(value, self.staging.dtypes[index])
            self._values.write_param(index, exact, payload=index not in self._gradients.overlaid)
        self.raise_versions([index])

    def has_hooks(self) -> bool:
        """Whether some parameter has gradient hooks."""
        return any(map(_hooks_of, self.params)) or any(map(_grad_hooks_of, self.params))

    def raise_versions(self, indexes: Iterable[int]) -> None:
        """Tell autograd that these parameters changed: graphs that saved them refuse to run backward."""
        tensors = [tensor for i in indexes for tensor in (self.params[i], self.shells[i])]
        torch.autograd.graph.increment_version(tensors)

    def read_state(self, param: int, names: Sequence[str] | None = None) -> tuple[torch.Tensor, ...]:
        """Copies of a parameter's states, and param32, called ``names`` (all), in float32 and host memory."""
        names = (*self.state_spec.names, MASTER) if names is None else names
        self.drain()
        self.agree_on("the optimizer state", param)
        if self._values is None or self.staging.holds(param):
            return tuple(found.float().clone() for found in self.staging.read_state(param, names))
        return tuple(self._values.read_state(param, name).to("cpu") for name in names)

    def write_state(self, param: int, states: Mapping[str, torch.Tensor], param32: torch.Tensor | None) -> None:
        """Replace optimizer states and, if given, param32, of a parameter that is trained."""
        self.drain()
        if self._values is None or self.staging.holds(param):
            self.staging.write_state(param, states, param32)
            self.raise_versions([param])
            return
        self.agree_on("a new optimizer state", param)
        self._values.write_states(param, {name: of_first_rank(self.ranks, value) for name, value in states.items()})
        if param32 is not None:
            self.write_param(param, param32)

    def own_ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Elements of a parameter that this rank has, in the order of its memory, ``[first, end)`` each."""
        numel = self.infos[index].numel
        if self.store is None or self.staging.holds(index) or not numel:
            return ((0, numel),) if self.ranks.is_first else ()
        runs = self.store.own_runs(index)
        return tuple((run[0].first, run[-1].in_param.stop) for run in runs)

    def saved_ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """`own_ranges` where this rank's elements count; none where it has a copy of another rank's."""
        return self.own_ranges(index) if self.is_in_first_replica and not self._is_copy(index) else ()

    def _is_copy(self, index: int) -> bool:
        """Whether the first of the ranks along ``tp`` has the parameter just the same."""
        return index in self.ranks.uncounted

    @property
    def is_in_first_replica(self) -> bool:
        """Whether this rank is one of those whose chunks count where there are several of each."""
        return self.layout is None or self.ranks.replica == 0

    def write_own(self, index: int, value: Flats, states: Mapping[str, Flats] | None) -> None:
        """Replace this rank's elements of a parameter and of its states.

        Values are 1-D, one for each of ``own_ranges``; states not given become zero, and None keeps them all. The model
        is in the cold state.
        """
        self.drain()
        if self.infos[index].numel:
            self.values.write_own(index, value, states, payload=index not in self._gradients.overlaid)
        self.raise_versions([index])

    def is_trained(self, index: int) -> bool:
        return index in self.trained

    def snapshot(self, max_copied_nbytes: int) -> SnapshotReader | None:
        """Begin a snapshot of what this rank saves of chunks, until ``end_snapshot``; None without chunks."""
        self.drain()
        if self._values is None:
            return None
        saved = (index for index in range(len(self.infos)) if not self._is_copy(index))
        return self._values.snapshot(saved, max_copied_nbytes)

    def end_snapshot(self, reader: SnapshotReader | None) -> None:
        if self.store is not None and reader is not None:
            self.store.end_snapshot(reader.snapshot)

    @property
    def values(self) -> ChunkValues:
        """Values in chunks; ChunkcError before the first plan."""
        if self._values is None:
            raise ChunkcError("the model has not run a compiled forward yet")
        return self._values

    def names(self, indexes: Sequence[int], most: int = 5) -> str:
        """The first names of parameters, for messages, and how many more there are."""
        names = ", ".join(self.name_of(i) for i in indexes[:most])
        return names + (f" and {len(indexes) - most} more" if len(indexes) > most else "")
