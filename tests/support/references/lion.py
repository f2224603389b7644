"""Lion by its paper's algorithm (Chen et al., 2023, algorithm 2), one operator a line.

update = beta1 * m + (1 - beta1) * g
p = p - lr * (sign(update) + weight_decay * p)      (here the decay first, as torch's optimizers round it)
m = beta2 * m + (1 - beta2) * g
"""

from typing import Any

import torch
from torch import Tensor

SURE = 1e-4
"""Share of the largest update of a parameter below which rounding may decide the sign of an element."""


class Lion(torch.optim.Optimizer):
    """The paper's loop; ``is_sure``: elements whose update was never near zero, zeros apart."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), **options: Any) -> None:
        self.is_sure: dict[Tensor, Tensor] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                update = beta1 * m + (1 - beta1) * p.grad
                is_sure = (update.abs() > SURE * update.abs().max()) | (update == 0)
                self.is_sure[p] = self.is_sure.get(p, torch.ones_like(is_sure)) & is_sure
                p.mul_(1 - lr * decay).sub_(lr * update.sign())
                m.mul_(beta2).add_((1 - beta2) * p.grad)
