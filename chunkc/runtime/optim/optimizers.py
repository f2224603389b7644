"""AdamW, Adam and SGD with torch's arguments and defaults; AdamW8bit and Lion.

``max_grad_norm``, on top of them, clips as `chunkc.runtime.optim.optimizer.ChunkOptimizer` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from chunkc.errors import ChunkcError
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.runtime.optim.state_dict import Groups
from chunkc.runtime.update.rules import (
    ADAM,
    ADAM_8BIT,
    LION,
    SGD_MOMENTUM,
    AdamHyper,
    Hyper,
    LionHyper,
    SgdHyper,
    UpdateRule,
)
from chunkc.runtime.update.rules import SGD as PLAIN_SGD

_IMPLEMENTATIONS: Final[dict[str, Any]] = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
"""Options of torch's optimizers that groups carry so that states can be exchanged with torch."""


class Adam(ChunkOptimizer):
    """Adam, whose weight decay is an L2 penalty; arguments and defaults are torch.optim.Adam's.

    Args:
        params: parameters of one compiled model, or groups of them.
        max_grad_norm: as of `AdamW`.
    """

    _decoupled: ClassVar[bool] = False
    _rule: ClassVar[UpdateRule] = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        options = {**_IMPLEMENTATIONS, "amsgrad": False, "capturable": False}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options}
        super().__init__(self._rule, params, {**defaults, "decoupled_weight_decay": self._decoupled}, max_grad_norm)

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        if group.get("decoupled_weight_decay", self._decoupled) != self._decoupled:
            right, wrong = ("Adam", "AdamW") if self._decoupled else ("AdamW", "Adam")
            raise ChunkcError(
                f"the group is one of {right}, whose weight decay differs from {wrong}'s: use chunkc.{right}"
            )

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = map(float, group["betas"])
        lr, eps, weight_decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        return AdamHyper(lr, beta1, beta2, eps, weight_decay, self._decoupled)


class AdamW(Adam):
    """Adam with decoupled weight decay; arguments and defaults are torch.optim.AdamW's.

    Args:
        params: parameters of one compiled model, or groups of them.
        max_grad_norm: every step clips all gradients of the model to this global norm (2-norm), as
            `chunkc.clip_grad_norm_` before it would; None clips nothing. May be changed between steps.
    """

    _decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, max_grad_norm=max_grad_norm)


class AdamW8bit(AdamW):
    """AdamW with 8-bit states: 6 bytes an element less; arguments and defaults are AdamW's.

    ``exp_avg`` and ``exp_avg_sq`` are a code of one byte for each element and a float32 scale for each 256
    (`chunkc.runtime.update.block_quantisation`; Dettmers et al., ICLR 2022). State dicts and checkpoints hold the
    float32 values that they stand for, so that they can be exchanged with AdamW's: those of AdamW are rounded when they
    are loaded, those of AdamW8bit come back bit for bit. All parameters are quantised, also small ones.

    Args:
        params: parameters of one compiled model, or groups of them.
        max_grad_norm: as of `AdamW`.
    """

    _rule: ClassVar[UpdateRule] = ADAM_8BIT


class SGD(ChunkOptimizer):
    """Stochastic gradient descent; arguments and defaults are torch.optim.SGD's.

    Without momentum the state of a parameter is its fp32 master; a group with momentum gives all a ``momentum_buffer``.

    Args:
        params: parameters of one compiled model, or groups of them.
        max_grad_norm: as of `AdamW`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        self._without_buffer: set[nn.Parameter] = set()
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(PLAIN_SGD, params, {**defaults, "nesterov": nesterov, **_IMPLEMENTATIONS}, max_grad_norm)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; parameters of groups without momentum are taken for stepped without a buffer."""
        super().load_state_dict(state_dict)
        plain = [group for group in self.param_groups if not float(group["momentum"])]
        self._without_buffer.update(param for group in plain for param in group["params"])

    def needed_rule(self, groups: Groups) -> UpdateRule:
        return SGD_MOMENTUM if any(float(group.get("momentum", 0)) for group in groups) else PLAIN_SGD

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Refuse, by ChunkcError, dampening behind steps without momentum: plans tell only a first step."""
        lr, momentum, dampening, decay = (
            float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay")
        )
        if momentum == 0.0:
            self._without_buffer.update(group["params"])
        elif dampening and not self._without_buffer.isdisjoint(group["params"]):
            raise ChunkcError(
                f"dampening={dampening} in a group that was stepped with momentum=0 is not supported: set its "
                "momentum before its first step, or leave dampening at 0"
            )
        return SgdHyper(lr, momentum, dampening, decay, bool(group["nesterov"]))


class Lion(ChunkOptimizer):
    """Lion, "Symbolic discovery of optimization algorithms" (Chen et al., 2023), algorithm 2.

    Args:
        params: parameters of one compiled model, or groups of them.
        betas: of the direction, whose sign is the step, and of the momentum ``exp_avg``.
        weight_decay: decoupled, as AdamW's.
        max_grad_norm: as of `AdamW`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(LION, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, max_grad_norm)

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = map(float, group["betas"])
        return LionHyper(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))
