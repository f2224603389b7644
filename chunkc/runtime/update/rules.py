"""Update rules: element-wise optimizers, each by states, coefficients and the formula of an element.

A rule is written twice and no more: here in PyTorch for the host, which Inductor compiles (`cpu_update_kernel`), and
under the same name in `chunkc.triton_kernels.chunk_update` for a GPU. Both take a gradient that is scaled, states that
a first step finds zero, and the coefficients of one parameter in one step, float64 rounded to float32 once. Formulas
make new values, and each from the old ones; semantics are torch.optim's::

    adam          g = g + l2 * p;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
                  p = p * decay - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    sgd           p = p - lr * (g + l2 * p)
    sgd_momentum  g = g + l2 * p;  b = momentum * b + (1 - dampening) * g, in the first step g
                  p = p - lr * b, with Nesterov's momentum p - lr * (g + momentum * b)
    lion          p = p * decay - lr * sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g

(Kingma and Ba, "Adam", algorithm 1; Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2; Chen
et al., "Symbolic discovery of optimization algorithms", algorithm 2.) ``decay`` is ``1 - lr * weight_decay`` where the
decay is decoupled (AdamW, Lion), else 1; ``l2`` is ``weight_decay`` where it is a penalty (Adam, SGD), else 0. Adam's
quotient is ``(lr * c / (1 - beta1^t)) * m / (sqrt(v) + eps * c)`` with ``c = sqrt(1 - beta2^t)``: one division to an
element instead of two, and no more roundings.

``adam_8bit`` is Adam whose states are quantised (`block_quantisation`): an update decodes a block, applies the formula
to float32, and encodes the new states. The parameter takes its step from these and not from their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from chunkc.errors import ChunkcError
from chunkc.ir.state_spec import ADAM_8BIT_STATES, ADAM_STATES, StateSpec

Sqrt = Callable[[Tensor], Tensor]
"""A square root that is rounded to nearest."""

Formula = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor], Sqrt], tuple[Tensor, ...]]
"""New param32 and states from the gradient, param32, states and coefficients."""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """An element-wise optimizer; ``counts_steps`` where coefficients depend on more than the first step."""

    name: str
    title: str
    states: StateSpec
    formula: Formula = field(compare=False, repr=False)
    counts_steps: bool = False


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """``decoupled``: the weight decay shrinks the parameter (AdamW); else it adds to the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    def coefficients(self, step: int) -> tuple[float, ...]:
        correction = (1 - self.beta2**step) ** 0.5
        return (
            self.lr / (1 - self.beta1**step) * correction,
            self.eps * correction,
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            0.0 if self.decoupled else self.weight_decay,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
        )


def _adam(g: Tensor, p: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], sqrt: Sqrt) -> tuple[Tensor, ...]:
    step_size, eps, decay, l2, beta1, rest1, beta2, rest2 = row
    g = g + l2 * p
    m = beta1 * states[0] + rest1 * g
    v = beta2 * states[1] + rest2 * g * g
    return p * decay - step_size * m / (sqrt(v) + eps), m, v


@dataclass(frozen=True, slots=True)
class SgdHyper:
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool

    def coefficients(self, step: int) -> tuple[float, ...]:
        share = 1.0 if step == 1 else 1 - self.dampening
        return self.lr, self.weight_decay, self.momentum, share, float(self.momentum != 0), float(self.nesterov)


def _sgd(g: Tensor, p: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], sqrt: Sqrt) -> tuple[Tensor, ...]:
    lr, l2 = row[:2]
    return (p - lr * (g + l2 * p),)


def _sgd_momentum(
    g: Tensor, p: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], sqrt: Sqrt
) -> tuple[Tensor, ...]:
    lr, l2, momentum, share, has_momentum, nesterov = row[:6]
    g = g + l2 * p
    moved = momentum * states[0] + share * g
    ahead = torch.where(nesterov != 0, g + momentum * moved, moved)
    direction = torch.where(has_momentum != 0, ahead, g)
    return p - lr * direction, torch.where(has_momentum != 0, moved, states[0])


@dataclass(frozen=True, slots=True)
class LionHyper:
    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    def coefficients(self, step: int) -> tuple[float, ...]:
        decay = 1 - self.lr * self.weight_decay
        return self.lr, decay, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2


def _lion(g: Tensor, p: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], sqrt: Sqrt) -> tuple[Tensor, ...]:
    lr, decay, beta1, rest1, beta2, rest2 = row[:6]
    direction = torch.sign(beta1 * states[0] + rest1 * g)
    return p * decay - lr * direction, beta2 * states[0] + rest2 * g


def _of_one(name: str) -> StateSpec:
    return StateSpec((name,), ("float32",))


ADAM: Final = UpdateRule("adam", "Adam", ADAM_STATES, _adam, counts_steps=True)
ADAM_8BIT: Final = UpdateRule("adam_8bit", "8-bit Adam", ADAM_8BIT_STATES, _adam, counts_steps=True)
SGD: Final = UpdateRule("sgd", "SGD", StateSpec((), ()), _sgd)
SGD_MOMENTUM: Final = UpdateRule("sgd_momentum", "SGD", _of_one("momentum_buffer"), _sgd_momentum)
LION: Final = UpdateRule("lion", "Lion", _of_one("exp_avg"), _lion)

_BY_STATES: Final[Mapping[StateSpec, UpdateRule]] = MappingProxyType(
    {rule.states: rule for rule in (ADAM, ADAM_8BIT, SGD, SGD_MOMENTUM, LION)}
)

OPTIMIZERS: Final[Mapping[str, StateSpec]] = MappingProxyType(
    {
        "adamw": ADAM.states,
        "adam": ADAM.states,
        "adamw8bit": ADAM_8BIT.states,
        "sgd": SGD_MOMENTUM.states,
        "lion": LION.states,
    }
)
"""The states that plans make room for, by name; those of SGD serve with momentum and without."""

Hyper = AdamHyper | SgdHyper | LionHyper
"""Hyperparameters of one parameter group as of the call of ``step()``."""

NUM_COEFFICIENTS: Final = 8
"""Of a rule at most."""

ROW_NUMEL: Final = NUM_COEFFICIENTS + 1
"""Columns of a row: the rule's coefficients, then zeros, and last 1 in the first step, else 0."""


def row_of(hyper: Hyper, step: int) -> tuple[float, ...]:
    """One row of a step's table (`ROW_NUMEL`), in float64; ValueError when the step count is below 1."""
    if step < 1:
        raise ValueError(f"step counts start at 1, not {step}")
    found = hyper.coefficients(step)
    return (*found, *(0.0,) * (NUM_COEFFICIENTS - len(found)), float(step == 1))


@lru_cache(maxsize=64)
def coefficients_of(hyper: Hyper, step: int, grad_scale: float = 1.0) -> Tensor:
    """The gradient's factor and the rule's coefficients, float32, made once for all chunks of a step.

    Nobody writes to them. ValueError below step 1.
    """
    with torch.inference_mode(False):
        return torch.tensor((grad_scale, *row_of(hyper, step)[:NUM_COEFFICIENTS]), dtype=torch.float32, device="cpu")


def states_of(optimizer: str) -> StateSpec:
    """The states that a plan for ``optimizer`` makes room for; ChunkcError for an unknown name."""
    if optimizer not in OPTIMIZERS:
        raise ChunkcError(f"optimizer={optimizer!r} is none that chunkc has: give one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


def rule_of(states: StateSpec) -> UpdateRule:
    """The rule that keeps ``states``: no two keep the same; KeyError when none does."""
    return _BY_STATES[states]
