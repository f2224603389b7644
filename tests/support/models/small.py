"""A small model beside its plain twin, brought to each of the phases in which a user may touch its parameters.

staged    compiled, no forward yet: values stand in the staging store
graded    one step done, then forward and backward: payloads hold gradients
pending   the step was just called: updates run on workers (delayed, where the test asks)
settled   two steps done and observed, gradients zeroed
"""

import copy
from dataclasses import dataclass

import torch
from machines import EMULATED, Machine
from torch import nn

import chunkc

PHASES = ("staged", "graded", "pending", "settled")
HW = "emulated-96k-64m"
OPTIONS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
TOLERANCE = 1e-6  # a dropped update, a stale learning rate or a lost write is 1e-4 or more


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.randn(16) + 2, requires_grad=False)
        self.last = nn.Linear(16, 4)
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("offset", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.relu(self.first(x)))) * self.scale
        return ((self.last(hidden) + self.offset) ** 2).mean()


@dataclass(slots=True)
class Twins:
    """A compiled model and its plain twin; whatever is done to both must come out equal."""

    model: nn.Module
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    plain_optimizer: torch.optim.Optimizer
    x: torch.Tensor

    def sides(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]:
        return (self.model, self.optimizer), (self.plain, self.plain_optimizer)

    def backward(self) -> None:
        for model, _ in self.sides():
            model(self.x).backward()

    def step(self) -> None:
        for _, optimizer in self.sides():
            optimizer.step()
            optimizer.zero_grad()

    def check_params(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(
                p.detach().clone(), q.detach(), atol=TOLERANCE, rtol=0, msg=lambda m, n=name: n + m
            )

    def check_gradients(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad.clone(), q.grad, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: n + m)

    def check_training(self) -> None:
        """From here on, whatever waits is stepped and two more steps give equal parameters."""
        if any(p.grad is not None for p in self.plain.parameters()):
            self.step()
        for _ in range(2):
            self.backward()
            self.check_gradients()
            self.step()
        self.check_params()


def twins_at(
    phase: str,
    dtype: torch.dtype = torch.float32,
    hw: str | chunkc.Hardware = HW,
    machine: Machine = EMULATED,
    accumulate: int = 1,
) -> Twins:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        plain = Small()
        x = torch.randn(4, 8)
    model = chunkc.compile(copy.deepcopy(plain), hw, dtype=dtype, backend="eager", accumulate=accumulate)
    plain, x = plain.to(machine.torch_device), machine.put(x)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    twins = Twins(model, plain, chunkc.AdamW(model.parameters(), **OPTIONS), plain_optimizer, x)
    for _ in range({"staged": 0, "graded": 1, "pending": 1, "settled": 2}[phase]):
        twins.backward()
        twins.step()
    if phase == "graded":
        twins.backward()
    if phase == "settled":
        chunkc.stats(model)
    return twins
