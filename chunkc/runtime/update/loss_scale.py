"""Loss scales, which keep small fp16 gradients representable, and their rules of growth and backoff.

The rules are those of ``torch.amp.GradScaler`` (dynamic loss scaling, Micikevicius et al., "Mixed precision training",
ICLR 2018, section 3.2). Scale and count stay on the device, so that neither a backward, which multiplies its tangents
by the scale, nor a step, which divides gradients by it, waits for the host. After some 140 overflows more than growths
torch's scale has no finite inverse, and its next step makes every parameter NaN; the scale here stops before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

SMALLEST: Final = torch.finfo(torch.float32).tiny
"""The least scale that overflows lead to; its inverse is finite."""


class LossScale:
    """One scale: ``scale``, float32 [], and ``growth_tracker``, int32 [], steps in a row without overflow."""

    def __init__(
        self,
        device: torch.device,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        is_dynamic: bool = True,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.is_dynamic = is_dynamic
        self.scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device=device)

    def inverse(self) -> torch.Tensor:
        """Return the factor of gradients, float32 [], computed in float64 as torch does."""
        return self.scale.double().reciprocal().float()

    @torch.no_grad()
    def update(self, found: torch.Tensor) -> None:
        """Follow one step; ``found`` (float32 [], on the device) is not 0 where it overflowed."""
        if not self.is_dynamic:
            return
        overflowed, count = found != 0, self.growth_tracker + 1
        is_due = count == self.growth_interval
        grown = (self.scale.double() * self.growth_factor).float()
        better = torch.where(is_due & grown.isfinite(), grown, self.scale)
        worse = (self.scale.double() * self.backoff_factor).float().clamp_min(SMALLEST)
        self.scale.copy_(torch.where(overflowed, worse, better))
        self.growth_tracker.copy_(torch.where(overflowed | is_due, 0, count))

    def state_dict(self) -> dict[str, Any]:
        """As torch.amp.GradScaler's; waits for the device."""
        return {
            "scale": float(self.scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self.growth_tracker.fill_(state["_growth_tracker"])


def times(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return ``value`` times ``factor`` (float32 []), in float32, rounded once to the dtype of ``value``."""
    if value.device.type == "cpu":
        return (value * factor).to(value.dtype)
    return multiply_in_float32(value, factor, None)


def multiply(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`times` in place; returns ``value``."""
    return value.mul_(factor) if value.device.type == "cpu" else multiply_in_float32(value, factor, value)


def multiply_in_float32(value: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """On a GPU torch rounds an operand without dimensions first: 2^16 is infinite in fp16."""
    row = value if value.dim() else value.reshape(1)
    target = torch.empty_like(row) if out is None else out if out.dim() else out.reshape(1)
    return torch.mul(row, factor.reshape(1), out=target).reshape(value.shape)


def scale_tangents(names: Sequence[str], args: list[Any], scale: torch.Tensor) -> None:
    """Replace the tangents among the inputs of a backward graph by their products with ``scale``."""
    for position, name in enumerate(names):
        value = args[position]
        if name.startswith("tangents") and isinstance(value, torch.Tensor) and value.is_floating_point():
            args[position] = times(value, scale)
