"""``chunkc.GradScaler``: loss scaling managed by a script.

Its public behaviour is that of ``torch.amp.GradScaler``. A model compiled in fp16 scales by itself; scripts that were
written for torch's scaler keep their calls. ``scale`` finds the compiled models behind a loss by its autograd graph and
tells them that somebody else scales. Nothing but ``get_scale`` and ``state_dict`` reads a value from the device:
whether a step overflowed is decided there (``chunkc.runtime.execution.grad_norm``), and the scale follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from chunkc._torch_compat.core import pytree
from chunkc.errors import ChunkcError
from chunkc.runtime.model.optimizer_steps import OptimizerSteps
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.runtime.optim.state_dict import find_runtime
from chunkc.runtime.update.loss_scale import LossScale

T = TypeVar("T")


class _Looked(NamedTuple):
    """Model of one optimizer's gradients, and 1 where one of them was not finite, else 0 (float32 [])."""

    runtime: OptimizerSteps
    found: torch.Tensor


class GradScaler:
    """Scales losses, unscales gradients, skips steps that overflowed, and adapts the scale.

    Gradients are scaled until `unscale_`, as ``param.grad`` shows; `step` unscales them where the script has not.

    Args:
        device: taken for torch's sake and not needed: the scale stands where the first loss is.
        init_scale: as torch's, and so are the next three.
        growth_factor: what the scale is multiplied by after steps that did not overflow.
        backoff_factor: what the scale is multiplied by when a step overflows.
        growth_interval: steps without an overflow before the scale grows.
        enabled: whether this does anything; if not, `scale` returns what it is given and `step` steps. A model compiled
            in fp16 then scales by itself.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not growth_factor > 1.0:
            raise ValueError(f"growth_factor must be above 1, found {growth_factor}")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must lie between 0 and 1, found {backoff_factor}")
        self._enabled = enabled
        start = torch.device("cpu") if device is None else torch.device(device)
        start = start if start.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
        self._scale = LossScale(start, init_scale, growth_factor, backoff_factor, growth_interval)
        self._found: dict[int, _Looked] = {}
        self._stepped: set[int] = set()
        self._is_agreed = False

    def is_enabled(self) -> bool:
        return self._enabled

    def scale(self, outputs: T) -> T:
        """``outputs``, a tensor or any nest of tensors, times the scale."""
        if not self._enabled:
            return outputs
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            self._move_to(leaf.device)
        for runtime in _models_behind(leaves):
            runtime.clipping.is_scaled_outside = True
        scaled: T = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * self._scale.scale, outputs)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer``'s model by the scale; once before each step.

        Raises:
            RuntimeError: at a second call since the last `update`, or after the optimizer's step.
            ChunkcError: when ``optimizer`` is not one of chunkc's, or `scale` was not used for its model.
            RankError: when other ranks scale by something else.
        """
        if not self._enabled:
            return
        key = id(optimizer)
        if key in self._stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if key in self._found:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        runtime = _runtime_of(optimizer)
        runtime.transactions.run(lambda: self._unscale(runtime, key))

    def _unscale(self, runtime: OptimizerSteps, key: int) -> None:
        found = runtime.clipping.unscale(self._scale.inverse(), self._to_agree_on)
        self._is_agreed = True
        if found is not None:
            self._found[key] = _Looked(runtime, found)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step``, which changes nothing where a gradient is infinite or NaN.

        Raises:
            RuntimeError: when it was called for this optimizer since the last `update`, or with a closure.
            ChunkcError: when there were no gradients to look at.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        key = id(optimizer)
        if key in self._stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if key not in self._found:
            self.unscale_(optimizer)
        if key not in self._found:
            raise ChunkcError("step() comes after backward(): the model of this optimizer had no gradient to look at")
        result = optimizer.step(**kwargs)
        self._stepped.add(key)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last call found, or set it to ``new_scale``.

        Raises:
            ChunkcError: when there was neither a step nor an `unscale_`, and no ``new_scale``.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            value = new_scale.detach() if isinstance(new_scale, torch.Tensor) else torch.tensor(new_scale)
            self._scale.scale.copy_(value.reshape(()))
            self._is_agreed = False
        elif not self._found:
            raise ChunkcError("update() comes after unscale_() or step(): no gradients were looked at since the last")
        else:
            runtime = next(iter(self._found.values())).runtime
            runtime.transactions.run(self._adapt)
            return
        self._found.clear()
        self._stepped.clear()

    def _adapt(self) -> None:
        found = [looked.found for looked in self._found.values()]
        self._scale.update(sum(found, torch.zeros((), device=self._scale.scale.device)))
        self._found.clear()
        self._stepped.clear()

    def get_scale(self) -> float:
        """The scale, 1 when disabled; waits for the device."""
        return float(self._scale.scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._scale.growth_factor = new_factor
        self._is_agreed = False

    def get_backoff_factor(self) -> float:
        return self._scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._scale.backoff_factor = new_factor
        self._is_agreed = False

    def get_growth_interval(self) -> int:
        return self._scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._scale.growth_interval = new_interval
        self._is_agreed = False

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with which it can be exchanged; empty when disabled."""
        return self._scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state over; RuntimeError when it is empty, as that of a disabled scaler."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        self._scale.load_state_dict(state_dict)
        self._is_agreed = False

    def _to_agree_on(self) -> list[str]:
        """List what all ranks must have alike, once; afterwards decisions of all ranks change it alike."""
        return ["a GradScaler as agreed on" if self._is_agreed else f"a GradScaler with {self.state_dict()}"]

    def _move_to(self, device: torch.device) -> None:
        if self._scale.scale.device != device:
            self._scale.scale = self._scale.scale.to(device)
            self._scale.growth_tracker = self._scale.growth_tracker.to(device)


def _runtime_of(optimizer: torch.optim.Optimizer) -> OptimizerSteps:
    if not isinstance(optimizer, ChunkOptimizer):
        raise ChunkcError(
            f"chunkc.GradScaler goes with chunkc.AdamW and its like (Adam, SGD, Lion), found "
            f"{type(optimizer).__name__}; use torch.amp.GradScaler for parameters of plain models"
        )
    return optimizer.runtime


def _models_behind(outputs: list[torch.Tensor]) -> Iterator[OptimizerSteps]:
    """The compiled models whose parameters ``outputs`` depend on, each once."""
    todo = deque(t.grad_fn for t in outputs if t.grad_fn is not None)
    seen, found = set(todo), set[int]()
    while todo:
        node = todo.popleft()
        variable = getattr(node, "variable", None)
        known = find_runtime(variable) if isinstance(variable, torch.Tensor) else None
        if known is not None and id(known[0]) not in found:
            found.add(id(known[0]))
            yield known[0]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
