"""Train architectures under every choice for activations, each at its least budget; compare bits.

What forward saves for backward is kept, computed again, moved to host memory, or all three: in the *mixture* half of
the layers are computed again, and of what is then saved every second value moves. Each choice trains the same model
from the same seed, on a device of the least memory that `BudgetError` names for it. Operators that run one by one must
give the bits of the run that keeps: losses, first gradients, parameters and both moments. Inductor rounds by where it
cuts and what it fuses; so there each run is held, bit for bit, against one of the same segments in which nothing moves.
Both run by torch's deterministic algorithms: else Inductor's threads add to one row of an embedding's gradient in any
order, and the same program rounds in two ways (seen of BERT's token types on a busy machine).

Models have the dropout of their modules set to a tenth; to those without any it is added in front of every linear layer
and behind every convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

import chunkc
from chunkc.compiler import build
from chunkc.passes import PIPELINE, Draft, Pass, PlanOptions
from chunkc.passes.support.moved_values import movable

Values = dict[str, torch.Tensor]
Batch = dict[str, torch.Tensor]
CHOICES = ("keep", "recompute", "offload", "mixture")
DROPOUT, SEED, NUM_STEPS = 0.1, 5, 3
HALF = 0.5
"""Of the layers, those that keep their activations in a mixture."""
OPTIMIZER = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}


class Architecture(Protocol):
    """A kind of model, as `architectures` has them."""

    @property
    def name(self) -> str: ...

    def build(self) -> nn.Module: ...

    def batches(self) -> list[Batch]: ...


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """One architecture under all choices; mappings are by choice, bytes of a step.

    ``unequal``: what differs, from what it must be equal to.
    """

    name: str
    backend: str
    least_nbytes: Mapping[str, int]
    moved_nbytes: Mapping[str, int]
    num_ops: Mapping[str, int]
    unequal: Mapping[str, Sequence[str]]
    is_random: bool

    @property
    def failures(self) -> list[str]:
        """List what is not as it must be."""
        found = [f"{choice}: other {', '.join(kinds)}" for choice, kinds in self.unequal.items() if kinds]
        found += [f"{choice} moves nothing" for choice in ("offload", "mixture") if not self.moved_nbytes[choice]]
        return found + ([] if self.is_random else ["no dropout"])


@dataclass(slots=True)
class Trained:
    """State after training, by parameter name, with the plan and what was counted."""

    plan: chunkc.Plan
    stats: Mapping[str, int]
    losses: list[float] = field(default_factory=list)
    gradients: Values = field(default_factory=dict)
    parameters: Values = field(default_factory=dict)
    m: Values = field(default_factory=dict)
    v: Values = field(default_factory=dict)

    def unequal(self, other: Trained) -> list[str]:
        """Kinds of values of which some element differs."""
        found = [] if self.losses == other.losses else ["losses"]
        for kind in ("gradients", "parameters", "m", "v"):
            own, others = getattr(self, kind), getattr(other, kind)
            same = own.keys() == others.keys() and all(torch.equal(own[n], value) for n, value in others.items())
            found += [] if same else [kind]
        return found


@dataclass(frozen=True, slots=True)
class Wish:
    """A pass before all others that changes the options."""

    change: Callable[[Draft], PlanOptions]
    name: str = "wish"
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset({"wish"})
    conflicts: frozenset[str] = frozenset({"moves"})

    def __call__(self, draft: Draft) -> Draft:
        return replace(draft, options=self.change(draft))


def every_second_value(draft: Draft) -> PlanOptions:
    """Every second saved value that may move, moves."""
    values = sorted(value.index for piece in movable(draft.schedule).values() for value in piece)
    return replace(draft.options, fixed_moves=tuple(values[::2]))


def kept_alike(plan: chunkc.Plan, draft: Draft) -> PlanOptions:
    """Nothing that is saved moves; cuts and places of optimizer states are those of ``plan``."""
    forward, backward = (tuple(s.first_op for s in plan.graph_segments(g)[1:]) for g in ("forward", "backward"))
    return replace(draft.options, cuts=(forward, backward), os_home="host")


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice for activations; ``budget``: share of layers that keep theirs, where it is fixed."""

    activations: Any
    passes: tuple[Pass, ...] = ()
    budget: float = build.RECOMPUTE_ALL

    @classmethod
    def of(cls, name: str) -> Choice:
        """The choice of that name."""
        return cls("recompute", (Wish(every_second_value),), HALF) if name == "mixture" else cls(name)

    def kept(self, plan: chunkc.Plan) -> Choice:
        """The same layers computed again, in the segments of ``plan``, with nothing moved."""
        activations = "recompute" if self.activations == "recompute" else "keep"
        return Choice(activations, (Wish(partial(kept_alike, plan)),), self.budget)

    def options(self, backend: str) -> dict[str, Any]:
        """Options of ``compile`` and ``plan``."""
        passes = [*self.passes, *PIPELINE] if self.passes else None
        return {"activations": self.activations, "passes": passes, "dtype": torch.float32, "backend": backend}


def measure(architecture: Architecture, backend: str = "eager") -> ChoiceRow:
    """Train ``architecture`` under every choice, and compare; ChunkcError when one is refused."""
    runs: dict[str, Trained] = {}
    unequal: dict[str, list[str]] = {}
    for name in CHOICES:
        choice = Choice.of(name)
        with deterministic(backend != "eager"):
            runs[name] = train_in_least(architecture, choice, backend)
            if backend == "eager":
                unequal[name] = runs[name].unequal(runs["keep"])
            else:
                unequal[name] = unequal_alike(architecture, choice, runs[name], backend)
    return ChoiceRow(
        name=architecture.name,
        backend=backend,
        least_nbytes={name: run.plan.memory.device_budget_nbytes for name, run in runs.items()},
        moved_nbytes={name: run.stats["moved_saved_nbytes"] for name, run in runs.items()},
        num_ops={name: sum(s.end_op - s.first_op for s in run.plan.segments) for name, run in runs.items()},
        unequal=unequal,
        is_random=is_random(architecture),
    )


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Torch's deterministic algorithms within the block, or not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def unequal_alike(architecture: Architecture, choice: Choice, run: Trained, backend: str) -> list[str]:
    """What differs from a run in the same segments that keeps on a large device what it saves."""
    same = train(architecture, choice.kept(run.plan), 1 << 30, backend, chunk_size=run.plan.layout.chunk_numel)
    spans = [[(s.graph, s.first_op, s.end_op) for s in plan.segments] for plan in (run.plan, same.plan)]
    return run.unequal(same) if spans[0] == spans[1] and not same.plan.moves else ["segments"]


def train_in_least(architecture: Architecture, choice: Choice, backend: str) -> Trained:
    """Train in the least memory by the estimate, or in what compiled segments need where that is more."""
    try:
        return train(architecture, choice, least_nbytes(architecture, choice, backend), backend)
    except chunkc.BudgetError as error:
        if backend == "eager":  # whose estimate is exact
            raise
        return train(architecture, choice, error.min_device_nbytes, backend)


def least_nbytes(architecture: Architecture, choice: Choice, backend: str) -> int:
    """The least device memory that a refusal names for ``choice``."""
    with torch.device("meta"):
        model = with_dropout(architecture.build())
    batch = architecture.batches()[0]
    try:
        with patch.object(build, "RECOMPUTE_ALL", choice.budget):
            chunkc.plan(model, machine(1), example_inputs=batch, **choice.options(backend))
    except chunkc.BudgetError as error:
        return error.min_device_nbytes
    raise ValueError(f"{architecture.name} trains in one byte")


def machine(nbytes: int) -> chunkc.Hardware:
    """An emulated device of ``nbytes``."""
    hw = chunkc.Hardware.parse("emulated-1m-1g")
    return replace(hw, name=f"emulated-{nbytes}-1g", gpu_memory_nbytes=nbytes)


def train(
    architecture: Architecture, choice: Choice, nbytes: int, backend: str, chunk_size: int | str = "auto"
) -> Trained:
    """Train on a device of ``nbytes``, the same masks whatever the choice."""
    model = chunkc.compile(
        with_dropout(architecture.build()),
        machine(nbytes),
        fullgraph=True,
        chunk_size=chunk_size,
        **choice.options(backend),
    )
    optimizer, batches = chunkc.AdamW(model.parameters(), **OPTIMIZER), architecture.batches()
    losses, gradients = list[float](), Values()
    torch.manual_seed(SEED)
    for step in range(NUM_STEPS):
        with patch.object(build, "RECOMPUTE_ALL", choice.budget):
            loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = Trained(chunkc.plan_of(model), chunkc.stats(model), losses, gradients)
    found.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    names = list(found.parameters)
    for index, state in optimizer.state_dict()["state"].items():
        found.m[names[index]], found.v[names[index]] = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    return found


# --- dropout ----------------------------------------------------------------------------------------------------------


class DroppingLinear(nn.Linear):
    """A linear layer with dropout in front of it.

    Behind it a gradient may come transposed (Mamba), which torch's captured backward of dropout gets wrong: its
    ``aot_eager`` fails, too.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, DROPOUT, self.training))


class DroppingConv2d(nn.Conv2d):
    """A convolution with dropout behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), DROPOUT, self.training)


def with_dropout(model: nn.Module) -> nn.Module:
    """Set dropout where modules or configurations name it.

    Else it goes in front of linear layers and behind convolutions.
    """
    found = False
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for owner in (*model.modules(), *configs.values()):
        named = ["p"] if isinstance(owner, nn.Dropout) else [n for n in vars(owner) if "drop" in n and "layer" not in n]
        for name in named:
            if isinstance(getattr(owner, name), float):
                setattr(owner, name, DROPOUT)
                found = True
    kinds = ((nn.Linear, DroppingLinear), (nn.Conv2d, DroppingConv2d))
    for plain, dropping in kinds if not found else ():
        for module in (m for m in model.modules() if type(m) is plain):
            module.__class__ = dropping
    return model


def is_random(architecture: Architecture) -> bool:
    """Whether a seed decides the loss."""
    model, batch = with_dropout(architecture.build()), architecture.batches()[0]
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
    return bool(losses[0] != losses[1])


# --- the table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    "architecture", "backend", *(f"{choice}: least KiB" for choice in CHOICES), "moved KiB", "moved KiB in the mixture",
    "operators computed again", "bits",
)  # fmt: skip


def cells_of(architecture: Architecture, backend: str) -> tuple[list[str], bool]:
    """The cells of one line, and whether all is well. A refusal is a line too: the others go on."""
    try:
        row = measure(architecture, backend)
    except (chunkc.ChunkcError, RuntimeError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [architecture.name, backend, *[""] * (len(COLUMNS) - 3), what], False
    least = [f"{row.least_nbytes[choice] / 1024:,.1f}" for choice in CHOICES]
    moved = [f"{row.moved_nbytes[choice] / 1024:,.1f}" for choice in ("offload", "mixture")]
    again = str(row.num_ops["recompute"] - row.num_ops["keep"])
    return [row.name, backend, *least, *moved, again, "; ".join(row.failures) or "equal"], not row.failures


def section(lines: Sequence[str]) -> list[str]:
    """The part of the page that has these lines."""
    text = f"""\
The same models with dropout of {DROPOUT}, under every choice for their activations: kept (`activations="keep"`), all
layers computed again (`"recompute"`), moved to host memory (`"offload"`), and a mixture, in which half of the layers
are computed again and every second of the values that are then saved moves. Each trains {NUM_STEPS} steps from one seed
(eps={OPTIMIZER["eps"]}), in the smallest budget that `BudgetError` names for it. *equal*: losses, first gradients,
parameters and both moments have the bits of the run that keeps; under Inductor, whose roundings depend on where
segments begin, those of a run of the same segments that keeps all it saves. The models are so small that what is alive
beside one segment decides their budgets, and moving gains little."""
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *lines]
    return ["## Activations", "", text, "", *table, ""]
