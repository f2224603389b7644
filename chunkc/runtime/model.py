"""The run-time state of one compiled model: where its parameters are, what its gradients are, which program may run.

    phase      payloads hold                     legal next
    cold       param16, at home                  forward
    saved      param16; activations wait         backward, or another forward (the first is abandoned)
    graded     grad16 of a finished backward     step; or forward once every ``.grad`` is None (gradients discarded)

Every observation drains pending updates first. An exception inside a program brings the model back to ``cold`` with
the parameters of the last finished step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from chunkc.errors import AccumulationError, ChunkcError
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Phase
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.accounting import Accounting
from chunkc.runtime.adam import Hyper
from chunkc.runtime.device import Device
from chunkc.runtime.engine import find_accumulators, left_out
from chunkc.runtime.executor import Executor
from chunkc.runtime.interrupt import deferred_interrupt
from chunkc.runtime.params import ManagedTensor, inner_of, manage_all, storage_less
from chunkc.runtime.staging import StagingStore, keep_master
from chunkc.runtime.store import ChunkStore
from chunkc.runtime.values import ChunkValues


class ModelRuntime:
    """State machine over the executors of one model; see the module docstring.

    Attributes:
        infos: all parameters by index, in compute dtype.
        owners: which optimizer steps each parameter (kept by the optimizers).
        params: the managed parameters by index; the user's module holds the same objects.
        num_forwards: compiled forwards so far.
        executors: of every captured graph, by a key of its own.
        accounting: reservation on the device and what was measured of it.
    """

    def __init__(self, infos: Sequence[ParamInfo], params: Sequence[nn.Parameter], device: Device) -> None:
        """``params`` become managed: the same objects afterwards, in compute dtype, with values in a staging store."""
        self.infos = tuple(infos)
        self.owners: dict[int, object] = {}
        self.device = device
        self.num_forwards = 0
        self.accounting = Accounting(device)
        self._handed_dtypes = [p.dtype for p in params]
        self._phase: Phase = "cold"
        self._consumed = False
        self._closed = False
        self._broken = False
        self._entered: set[int] = set()
        self._zeroed: set[int] = set()
        self._accumulators: dict[int, Node] = {}
        self._watched: set[int] = set()
        self.executors: dict[object, Executor] = {}
        self._executor: Executor | None = None
        self._store: ChunkStore | None = None
        self._values: ChunkValues | None = None
        self._staging = StagingStore([p.detach() for p in params])
        self.params = tuple(params)
        manage_all(self.params, self.infos, self)
        self._stamp = 0
        self._grads = [self._make_grad(i) for i in range(len(self.params))]

    def _make_grad(self, index: int) -> ManagedTensor:
        shell = storage_less(self.infos[index], self.params[index].device)
        return ManagedTensor(shell, "grad", index, self, self._stamp)

    # What managed tensors need.

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
        """A copy in compute dtype."""
        return self.read_exact(index).to(self.params[index].dtype)

    def read_exact(self, index: int) -> torch.Tensor:
        """A copy in the dtype that the parameter was handed over in, from param32 where there is one."""
        self.drain()
        if self._values is None or self._staging.holds(index):
            return self._staging.value(index).detach().clone()
        return self._values.read_param(index).to(self._handed_dtypes[index])

    def write_param(self, index: int, value: torch.Tensor) -> None:
        """Replace a parameter's value; a forward that waits for its backward is then refused by autograd."""
        self.drain()
        if self._values is None or self._staging.holds(index):
            self._staging.write(index, value)
        else:
            self._abandon()
            exact = keep_master(self._values.read_param(index), value)
            self._values.write_param(index, exact, payload=self._phase != "graded")
        self._raise_versions([index])

    def read_grad(self, index: int, stamp: int) -> torch.Tensor:
        """A copy of the gradient of backward number ``stamp``, which must be the last one."""
        self._require_gradient(index, stamp)
        return self._chunk_values().read_gradient(index)

    def write_grad(self, index: int, stamp: int, value: torch.Tensor) -> None:
        """Replace a gradient that has not been stepped."""
        self._require_gradient(index, stamp)
        self._chunk_values().write_gradient(index, value)

    def zero_grad(self, index: int, stamp: int) -> None:
        """``param.grad.zero_()``: a gradient of zeros, or, where it was stepped already, none."""
        if self._phase == "graded" or stamp != self._stamp:
            self._require_gradient(index, stamp)
            self._chunk_values().write_gradient(index, torch.zeros(self.infos[index].shape))
        self._zeroed.add(index)

    def _require_gradient(self, index: int, stamp: int) -> None:
        if self._phase != "graded" or stamp != self._stamp:
            reason = "was consumed by step()" if self._consumed else "was discarded"
            if stamp != self._stamp:
                reason = "of an earlier backward is gone"
            raise ChunkcError(
                f"the gradient of {self.name_of(index)} {reason}: its memory holds the parameter again. Read gradients "
                "between backward() and step()"
            )
        self.drain()

    # What the optimizers need.

    @property
    def is_sixteen_bit(self) -> bool:
        """Whether some trained parameter has a master copy that is more precise than itself."""
        return any(info.dtype != "float32" for info in self.infos if info.trainable)

    def check_step(self, params: Mapping[int, nn.Parameter]) -> frozenset[int]:
        """Indexes of all parameters that have a gradient now; see ``OptimizerRuntime``."""
        present = [i for i, p in enumerate(self.params) if p.grad is not None]
        foreign = [i for i in present if self.params[i].grad is not self._grads[i]]
        if foreign:
            raise ChunkcError(
                f"{self._names(foreign)} hold gradients that did not come from the compiled model's backward; chunkc "
                "steps gradients of its own graph only. Assign gradients in place (`param.grad.copy_(g)`)"
            )
        if present and self._phase != "graded":
            raise ChunkcError(
                "step() was already called for the gradients of the last backward; call zero_grad() and run forward "
                "and backward before the next step()"
            )
        return frozenset(present)

    def step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> None:
        """Launch the step program and raise the autograd version of every parameter that it changes."""
        executor = self._running()
        self._phase, self._consumed = "cold", True
        self._raise_versions(hypers)
        try:
            with deferred_interrupt():
                executor.step(hypers, steps)
        except BaseException:
            self._broken = True
            raise

    def _raise_versions(self, indexes: Iterable[int]) -> None:
        """Tell autograd that these parameters changed: graphs that saved them refuse to run backward."""
        shells = [tensor for i in indexes for tensor in (self.params[i], inner_of(self.params[i]))]
        torch.autograd.graph.increment_version(shells)

    def read_state(self, param: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of exp_avg, exp_avg_sq and param32."""
        self.drain()
        if self._values is None:
            value = self._staging.value(param)
            state = self._staging.state(param)
            moments = (state.exp_avg, state.exp_avg_sq) if state else (torch.zeros_like(value), torch.zeros_like(value))
            return moments[0].float().clone(), moments[1].float().clone(), value.float().clone()
        return (*self._values.read_moments(param), self._values.read_param(param).float())

    def write_state(
        self, param: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, param32: torch.Tensor | None
    ) -> None:
        """Replace moments and, if given, param32."""
        self.drain()
        if self._values is None:
            self._staging.write_state(param, exp_avg, exp_avg_sq, param32)
            self._raise_versions([param])
            return
        if not self._values.is_trained(param):
            raise ChunkcError(f"{self.name_of(param)} is not trained by the compiled graph; it has no optimizer state")
        self._values.write_moments(param, exp_avg, exp_avg_sq)
        if param32 is not None:
            self.write_param(param, param32)

    # What the compiled graphs need.

    @property
    def layout(self) -> Layout | None:
        """The layout once there is one."""
        return None if self._store is None else self._store.layout

    def staged_nbytes(self) -> int:
        """Bytes of the parameters that still wait in the staging store."""
        return self._staging.nbytes()

    @property
    def executor(self) -> Executor | None:
        """The executor of the latest compiled forward."""
        return self._executor

    def adopt(self, layout: Layout, static: dict[str, int]) -> ChunkStore:
        """The chunks; made at the first call, when they consume the staging store."""
        if self._store is None or self._values is None:
            self._store = ChunkStore(layout, self.device)
            self._values = ChunkValues(self._store, static)
        self._values.load(self._staging)
        return self._store

    def before_forward(self) -> None:
        """Check what must hold before a training forward; nothing has changed when this raises.

        Raises:
            AccumulationError: when gradients wait that were neither stepped nor zeroed.
            ChunkcError: when a parameter has hooks.
        """
        if self._broken:
            raise ChunkcError(
                "an update failed halfway through the last step(), so some parameters have taken it and others have "
                "not; load a checkpoint into a newly compiled model"
            )
        self._check_hooks()
        if self._phase == "graded":
            waiting = [i for i, p in enumerate(self.params) if p.grad is not None and i not in self._zeroed]
            if waiting:
                raise AccumulationError(
                    f"gradients of {self._names(waiting)} were neither stepped nor zeroed before the next forward, "
                    "and accumulation over micro-batches was not declared. Call optimizer.step() or zero_grad() first"
                )

    def forward(self, executor: Executor, args: list[Any], held_nbytes: int) -> list[Any]:
        """Run a forward program from wherever the last call left the model.

        ``held_nbytes`` are bytes of inputs and buffers, alive before it begins, that count as non-model data.
        """
        self._abandon()
        if self._phase == "graded":
            self._running().restore()
            self._phase, self._consumed = "cold", False
        if executor is not self._executor:
            if self._executor is not None:
                self._executor.join()
            self._executor = executor
        is_first = executor.num_actions == 0
        self.accounting.start(held_nbytes)
        outputs = self._guarded(executor, lambda: executor.forward(args))
        self.accounting.end_forward(self.layout, outputs, is_first=is_first)
        self._phase = "saved"
        self.num_forwards += 1
        return outputs

    def backward(self, executor: Executor, args: list[Any]) -> list[Any]:
        """Run a backward program; afterwards every trained parameter's ``grad`` is its landed gradient."""
        self._check_backward(executor)
        self.accounting.begin_backward()
        outputs = self._guarded(executor, lambda: executor.backward(args))
        self.accounting.end_backward(self.layout)
        self._phase, self._consumed = "graded", False
        self._hand_out_gradients(executor.graded_params)
        return outputs

    def _hand_out_gradients(self, indexes: Iterable[int]) -> None:
        """Set ``param.grad`` to new handles; those of earlier backwards that the user kept know that they are old."""
        self._stamp += 1
        self._zeroed.clear()
        for index in indexes:
            self._grads[index] = self._make_grad(index)
            self.params[index].grad = self._grads[index]

    def _check_hooks(self) -> None:
        hooked = [i for i, p in enumerate(self.params) if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise ChunkcError(
                f"{self._names(hooked)} have gradient hooks, which would never run: gradients land in chunks, not in "
                "autograd. Remove the hooks, or work on `param.grad` between backward() and step()"
            )

    def _check_backward(self, executor: Executor) -> None:
        self._check_hooks()
        missing = left_out(self._accumulators, executor.graded_params)
        if missing:
            raise ChunkcError(
                f"this backward leaves out the gradients of {self._names(missing)}, as torch.autograd.grad and "
                "backward(inputs=...) do: a compiled backward makes all of them. Call loss.backward() and read "
                "`param.grad`; freeze parameters with requires_grad_(False) before chunkc.compile"
            )
        if executor is not self._executor or self._phase != "saved":
            raise AccumulationError(
                "backward was called for a forward whose parameters were meanwhile replaced by gradients or by another "
                "graph: one backward per forward, in the order F B, and accumulation must be declared"
            )
        waiting = [i for i in executor.graded_params if self.params[i].grad is not None and i not in self._zeroed]
        if waiting:
            raise AccumulationError(
                f"{self._names(waiting)} still hold gradients (already stepped, or not from this model's backward); "
                "adding to them was not declared. Call zero_grad() before backward()"
            )

    def _guarded(self, executor: Executor, run: Callable[[], list[Any]]) -> list[Any]:
        self.device.check_usable()
        try:
            return run()
        except BaseException:
            self._phase, self._consumed = "cold", False
            for index in executor.graded_params:
                if self.params[index].grad is self._grads[index]:
                    self.params[index].grad = None
            executor.recover()
            raise

    def _abandon(self) -> None:
        if self._phase == "saved":
            self._running().abandon()
            self._phase = "cold"

    def drain(self) -> None:
        """Finish pending updates; what a worker raised is raised here."""
        if self._closed:
            raise ChunkcError(
                f"the compiled model of {self.name_of(0)} was deleted and its memory given back; keep it to read it"
            )
        if self._executor is not None:
            self.accounting.num_asked_syncs += 1
            self.device.synchronize()

    def watch(self, outputs: Any) -> None:
        """Learn from the outputs of a forward how to tell that a backward asks for all gradients."""
        executor = self._executor
        if executor is not None and id(executor) not in self._watched:
            self._watched.add(id(executor))
            wanted = {i: self.params[i] for i in executor.graded_params if i not in self._accumulators}
            self._accumulators |= find_accumulators(outputs, wanted)

    def close(self) -> None:
        """Give all memory back. What autograd holds, where the garbage collector cannot look, is let go by hand."""
        try:
            self.drain()
        finally:
            for param, grad in zip(self.params, self._grads, strict=True):
                param.grad = None if param.grad is grad else param.grad
            self._grads, self._accumulators = [], {}
            self.executors.clear()
            if self._store is not None:
                self._store.close()
            self.accounting.unreserve()
            self._closed = True

    def _running(self) -> Executor:
        if self._executor is None:
            raise _not_run()
        return self._executor

    def _chunk_values(self) -> ChunkValues:
        if self._values is None:
            raise _not_run()
        return self._values

    def _names(self, indexes: Sequence[int], most: int = 5) -> str:
        names = ", ".join(self.name_of(i) for i in indexes[:most])
        return names + (f" and {len(indexes) - most} more" if len(indexes) > most else "")


def _not_run() -> ChunkcError:
    return ChunkcError("the model has not run a compiled forward yet")
