"""One script of what a loop may do, carried out by the ranks of a job and by plain PyTorch in one process.

A script is words: ``forward backward step zero`` is a step of training. Rank ``r`` takes part ``r`` of every batch,
the plain side all parts as one. Both note what they see:

    shared   parameters, gradients, states and norms: the same bits on all ranks, and close to the plain side's
    losses   whose mean over the ranks is the plain side's

    forward          the next batch, with gradients      step, zero     of the optimizer
    backward         of the oldest forward that waits    model_zero     of the model
    backward_latest  of the latest one                   forget         let go of the oldest forward
    train            forward backward step zero          evaluate       the next batch, without gradients, in eval mode
    train_clipped    with the clip before the step       infer          the same in inference mode
    grads            every ``.grad``                     clip           to ``MAX_NORM``
    state            both state dicts                    slower         halves the learning rate
    read             every parameter, by ``detach``      write          a parameter, in place
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pair import SMALL, Tower, batch
from torch import nn

import chunkc

LR = 1e-2
EPS = 1e-4
MAX_NORM = 0.815
TIGHT = "emulated-480k-64m"
Inputs = tuple[torch.Tensor, ...]
Clip = Callable[[nn.Module, float], torch.Tensor]
TOLERANCES = {"gradients": 1e-5, "params": 1e-3 * LR, "states": 1e-3, "norm": 1e-5}
"""Relative to the largest element of the kind, but for parameters: a thousandth of an update."""


@dataclass(frozen=True, slots=True)
class Seen:
    shared: list[tuple[str, dict[str, torch.Tensor]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def seeded_tower() -> nn.Module:
    torch.manual_seed(0)
    return Tower(depth=2)


class Side:
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch_of: Callable[[int], Inputs], clip: Clip
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.seen = Seen()
        self._batch_of, self._clip = batch_of, clip
        self._num_batches = 0
        self._waiting: list[torch.Tensor] = []

    def run(self, script: str) -> Seen:
        for word in script.split():
            getattr(self, word)()
        return self.seen

    def run_each(self, scripts: Sequence[str]) -> list[Seen]:
        found = []
        for script in scripts:
            self.seen = Seen()
            found.append(self.run(script))
        return found

    def restart_at(self, number: int) -> None:
        """Let go of forwards that wait, and go on with batch ``number``."""
        self._waiting.clear()
        self._num_batches = number

    def _next(self) -> Inputs:
        self._num_batches += 1
        return self._batch_of(self._num_batches - 1)

    def _see(self, kind: str, values: dict[str, torch.Tensor]) -> None:
        self.seen.shared.append((kind, {n: v.detach().clone() for n, v in values.items()}))

    def forward(self) -> None:
        loss = self.model(*self._next())
        self.seen.losses.append(loss.item())
        self._waiting.append(loss)

    def backward(self) -> None:
        self._waiting.pop(0).backward()

    def backward_latest(self) -> None:
        self._waiting.pop().backward()

    def forget(self) -> None:
        self._waiting.pop(0)

    def step(self) -> None:
        self.optimizer.step()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def model_zero(self) -> None:
        self.model.zero_grad()

    def train(self) -> None:
        self.run("forward backward step zero")

    def train_clipped(self) -> None:
        self.run("forward backward clip step zero")

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.seen.losses.append(self.model(*self._next()).item())
        self.model.train()

    def infer(self) -> None:
        with torch.inference_mode():
            self.seen.losses.append(self.model(*self._next()).item())

    def grads(self) -> None:
        self._see("gradients", {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})

    def read(self) -> None:
        self._see("params", dict(self.model.named_parameters()))

    def write(self) -> None:
        with torch.no_grad():
            self.model.head.bias.add_(0.25)  # type: ignore[operator, union-attr]

    def state(self) -> None:
        self._see("params", self.model.state_dict())
        states: dict[int, dict[str, Any]] = self.optimizer.state_dict()["state"]
        for key in ("exp_avg", "exp_avg_sq"):
            self._see("states", {str(index): found[key] for index, found in states.items()})

    def clip(self) -> None:
        self._see("norm", {"all": self._clip(self.model, MAX_NORM)})

    def slower(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def side_on_rank(hw: str = TIGHT, **options: Any) -> Side:
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = chunkc.compile(seeded_tower(), hw, **SMALL, **options)
    optimizer = chunkc.AdamW(model.parameters(), lr=LR, eps=EPS)
    return Side(model, optimizer, lambda n: batch(n * num_ranks + rank), chunkc.clip_grad_norm_)


def scripts_on_ranks(scripts: Sequence[str], hw: str = TIGHT, accumulate: int = 1) -> list[Seen]:
    return side_on_rank(hw, accumulate=accumulate).run_each(scripts)


def scripts_plainly(scripts: Sequence[str], num_ranks: int) -> list[Seen]:
    model = seeded_tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)

    def batch_of(number: int) -> Inputs:
        parts = [batch(number * num_ranks + rank) for rank in range(num_ranks)]
        return tuple(torch.cat(same) for same in zip(*parts, strict=True))

    def clip(model: nn.Module, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    return Side(model, optimizer, batch_of, clip).run_each(scripts)


def check_seen(found: Sequence[Seen], wanted: Seen) -> None:
    """All ranks saw the same bits, and what plain PyTorch saw."""
    for number, (kind, values) in enumerate(wanted.shared):
        scale = 1.0 if kind == "params" else max((float(v.abs().max()) for v in values.values()), default=0.0)
        for seen in found:
            assert seen.shared[number][0] == kind and seen.shared[number][1].keys() == values.keys()
            for name, value in values.items():
                ours, first = seen.shared[number][1][name], found[0].shared[number][1][name]
                assert torch.equal(ours, first), f"ranks saw other {kind} of {name} as observation {number}"
                error = float((ours - value).abs().max())
                assert error <= TOLERANCES[kind] * scale, f"observation {number}: {kind} of {name} are off by {error}"
    assert all(len(seen.shared) == len(wanted.shared) for seen in found)
    losses = [sum(of) / len(found) for of in zip(*(seen.losses for seen in found), strict=True)]
    for number, (loss, other) in enumerate(zip(losses, wanted.losses, strict=True)):
        assert abs(loss - other) <= 1e-5 * abs(other), f"loss {number}: {loss}, plain PyTorch {other}"
