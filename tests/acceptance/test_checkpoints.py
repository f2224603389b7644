"""ACCEPTANCE 14 on one rank: a run that was saved and resumed goes on to the bit, or within (b) where more changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pair import MIXED, Tower, batch
from small import Small
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import chunkc
from chunkc import ChunkcError
from chunkc.checkpoint import _save
from chunkc.checkpoint.contents import gather, runtime_of

HW = "emulated-640k-16m"
NUM_STEPS = 100
Bits = dict[str, torch.Tensor]


POLICIES = {
    "fp32": {},
    "mixed": {"dtype": torch.bfloat16},
    "bf16": {"dtype": torch.bfloat16, "handed_over": torch.bfloat16},
}


class Dropping(Tower):
    """A tower with dropout, whose head is tied to its embedding, and BatchNorm, which keeps running statistics."""

    def __init__(self, depth: int = 2, width: int = 48) -> None:
        super().__init__(depth, width)
        self.norm = nn.BatchNorm1d(8)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        for layer in self.layers:
            hidden = hidden + nn.functional.dropout(layer(hidden), 0.2, self.training)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Run:
    """A training run with two parameter groups and a scheduler; ``seed`` is that of its initialisation."""

    def __init__(self, seed: int = 0, hw: str = HW, wishes: dict[str, Any] | None = None, **options: Any) -> None:
        torch.manual_seed(seed)
        handed_over = options.pop("handed_over", torch.float32)
        self.model = chunkc.compile(
            Dropping().to(handed_over), hw, **{"dtype": torch.float32, "backend": "eager", **options}
        )
        if wishes is not None:
            settings = self.model._compiled_call_impl.settings
            settings.options = replace(settings.options, **wishes)
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        self.optimizer = chunkc.AdamW(groups, lr=1e-3)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=[1e-2, 2e-2], total_steps=2 * NUM_STEPS)

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last``; the generator of masks is set before step 0."""
        losses = []
        if first == 0:
            torch.manual_seed(99)
        for seed in range(first, last):
            loss = self.model(*batch(seed))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, **options: Any) -> Path:
        return chunkc.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, **options).result()

    def load(self, directory: Path) -> Any:
        return chunkc.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)

    def bits(self) -> Bits:
        """Parameters, buffers, fp32 masters, moments and learning rates."""
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        for key, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{order[key]} {name}": value for name, value in state.items()}
        return found | {f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)}


def check_equal(found: Bits, wanted: Bits) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("policy", "half"), [("fp32", 50), ("mixed", 5), ("bf16", 5), pytest.param("bf16", 50, marks=pytest.mark.slow)]
)
def test_a_hundred_steps_are_fifty_and_a_resume_and_fifty(tmp_path: Path, policy: str, half: int) -> None:
    """With dropout; the resumed run began as another one, and drew random numbers of its own before."""
    options = POLICIES[policy]
    whole, first, second = Run(**options), Run(**options), Run(seed=7, **options)
    losses = whole.train(0, 2 * half)
    assert first.train(0, half) == losses[:half]
    first.save(tmp_path, extra={"next": half, "order": torch.arange(3)})
    torch.rand(5)
    loaded = second.load(tmp_path)
    assert loaded.step == half == loaded.extra["next"] and torch.equal(loaded.extra["order"], torch.arange(3))
    check_equal(second.bits(), first.bits())
    assert second.train(half, 2 * half) == losses[half:]
    check_equal(second.bits(), whole.bits())
    first.load(tmp_path)
    torch.manual_seed(1)
    assert first.train(half, half + 2) != losses[half : half + 2], "the masks matter, or dropout would prove nothing"


@pytest.mark.slow
def test_with_inductor(tmp_path: Path) -> None:
    whole, first, second = (Run(seed=s, backend="inductor") for s in (0, 0, 7))
    losses = whole.train(0, NUM_STEPS)
    assert first.train(0, 50) == losses[:50]
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.train(50, NUM_STEPS) == losses[50:]
    check_equal(second.bits(), whole.bits())


@pytest.mark.parametrize(
    "options",
    [
        {"hw": "emulated-4m-16m"},
        {"hw": "emulated-330k-16m"},
        {"chunk_size": 12288},
        {"wishes": MIXED},
    ],
    ids=str,
)
def test_another_budget_chunk_size_and_placement_go_on_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = Run(), Run(seed=7, **options)
    first.train(0, 10)
    first.save(tmp_path)
    second.load(tmp_path)
    check_equal(second.bits(), first.bits())
    torch_state = torch.get_rng_state()
    losses = first.train(10, 20)
    torch.set_rng_state(torch_state)
    assert second.train(10, 20) == losses
    check_equal(second.bits(), first.bits())
    plans = [chunkc.plan_of(run.model) for run in (first, second)]
    one, other = ((plan.layout, plan.memory.device_budget_nbytes) for plan in plans)
    assert one != other, "something was different"


@pytest.mark.parametrize("there", POLICIES)
@pytest.mark.parametrize("here", POLICIES)
def test_another_dtype_policy_keeps_the_masters(tmp_path: Path, there: str, here: str) -> None:
    """Masters and moments are the same bits under any policy; parameters are the masters in the dtype of the model."""
    first, second = Run(**POLICIES[there]), Run(seed=7, **POLICIES[here])
    first.train(0, 5)
    first.save(tmp_path)
    second.load(tmp_path)
    for run in (first, second):
        assert runtime_of(run.model).num_forwards == (5 if run is first else 0)
    check_states(first, second)
    found = second.train(5, 6)[0]
    assert found == pytest.approx(first.train(5, 6)[0], rel=0.02)
    third = Run(seed=8, **POLICIES[here])
    third.train(0, 2)
    third.load(tmp_path)
    first.load(tmp_path)
    check_states(first, third)


def check_states(first: Run, second: Run) -> None:
    runtimes = [runtime_of(run.model) for run in (first, second)]
    states = [[runtime.read_state(index) for index in range(len(runtime.params))] for runtime in runtimes]
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    handed_over = next(iter(second.model.state_dict().values())).dtype
    for index, p in enumerate(second.model.parameters()):
        assert torch.equal(p._chunkc_runtime.read_exact(index), states[0][index][2].to(handed_over))


@pytest.fixture(params=["", "delay=2,seed=3,poison", "sync"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("CHUNKC_EMULATED", request.param)
    yield request.param


@pytest.mark.parametrize("max_copied_nbytes", [0, 60_000, 2**30])
def test_an_asynchronous_save_is_of_the_moment_of_the_call(
    tmp_path: Path, settings: str, max_copied_nbytes: int
) -> None:
    """Steps run on, with optimizer states in all places, while it is written: nothing of them is in it."""
    run, loaded = Run(hw="emulated-700k-16m", wishes=MIXED), Run(seed=7)
    run.train(0, 3)
    for k in range(3):
        wanted = run.bits()
        future = chunkc.save_checkpoint(
            tmp_path / str(k), run.model, run.optimizer, run.scheduler,
            asynchronous=True, max_copied_nbytes=max_copied_nbytes,
        )  # fmt: skip
        generator = torch.get_rng_state()
        run.train(3 + 4 * k, 7 + 4 * k)
        loaded.load(future.result())
        check_equal(loaded.bits(), wanted)
        assert torch.equal(torch.get_rng_state(), generator), "also the generators are of that moment"


@pytest.mark.parametrize("by", ["steps", "writes"])
def test_a_save_that_is_written_late_is_of_the_moment_of_the_call(tmp_path: Path, by: str) -> None:
    """The disk is as slow as can be: it begins when everything has changed."""
    run, loaded = Run(hw="emulated-700k-16m", wishes=MIXED), Run(seed=7)
    run.train(0, 3)
    wanted, runtime = run.bits(), runtime_of(run.model)
    contents = gather(run.model, runtime, run.optimizer, run.scheduler, {"a": 1}, 2**30)
    snapshot = runtime._store.snapshot
    if by == "steps":
        run.train(3, 8)
    else:
        run.model.load_state_dict(Run(seed=8).model.state_dict())
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert snapshot.num_copies == len({place.chunk for place in runtime.layout.placements})
    path = _save(tmp_path, run.model, runtime, contents, None)
    assert runtime._store.snapshot is None
    loaded.load(path)
    check_equal(loaded.bits(), wanted)


def test_saving_does_not_change_the_run_and_the_next_save_waits_for_the_last(tmp_path: Path) -> None:
    run, other = Run(), Run()
    losses = other.train(0, 12)
    found = []
    for k in range(6):
        found += run.train(2 * k, 2 * k + 2)
        future = chunkc.save_checkpoint(
            tmp_path, run.model, run.optimizer, run.scheduler, asynchronous=k % 3 > 0, keep=2
        )
    assert found == losses
    last = future.result().name
    assert [p.name for p in sorted(tmp_path.glob("0*"))] == ["00000005-step-10", last] and last == "00000006-step-12"
    check_equal(run.bits(), other.bits())


def test_staged_and_blank_models_are_saved_and_loaded(tmp_path: Path) -> None:
    """Before the first step: a resumed run that is saved at once loses nothing, and a meta model is filled."""
    options = POLICIES["bf16"]
    first, second, third = Run(**options), Run(seed=7, **options), Run(seed=8, **options)
    first.train(0, 4)
    first.save(tmp_path)
    second.load(tmp_path)
    second.save(tmp_path, asynchronous=True)
    third.load(tmp_path)
    check_equal(third.bits(), first.bits())
    with torch.device("meta"):
        blank = Small()
    blank.offset = torch.zeros(4)
    torch.manual_seed(0)
    small = chunkc.compile(Small(), "emulated-96k-64m", dtype=torch.float32, backend="eager")
    chunkc.compile(blank, "emulated-96k-64m", dtype=torch.float32, backend="eager")
    optimizers = [chunkc.AdamW(m.parameters()) for m in (small, blank)]
    with pytest.raises(ChunkcError, match=r"first\.weight, .* came on the meta device and were never given a value"):
        chunkc.save_checkpoint(tmp_path / "small", blank, optimizers[1])
    small(torch.ones(4, 8)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    chunkc.save_checkpoint(tmp_path / "small", small, optimizers[0])
    assert chunkc.load_checkpoint(tmp_path / "small", blank, optimizers[1]).step == 1
    wanted = small.state_dict()
    check_equal(blank.state_dict(), wanted)
    assert optimizers[1].step_counts == optimizers[0].step_counts


def test_the_model_alone_is_loaded_without_moments(tmp_path: Path) -> None:
    first, second = Run(**POLICIES["bf16"]), Run(seed=7)
    first.train(0, 3)
    first.save(tmp_path)
    second.train(0, 2)
    before, generator = second.bits(), torch.get_rng_state()
    chunkc.load_checkpoint(tmp_path, second.model)
    after = second.bits()
    assert torch.equal(torch.get_rng_state(), generator)
    index = {n: p._chunkc_index for n, p in first.model.named_parameters()}
    for name in second.model.state_dict():
        if name in index:
            assert torch.equal(after[name], runtime_of(first.model).read_state(index[name])[2]), name
    check_equal({n: v for n, v in after.items() if "exp" in n}, {n: v for n, v in before.items() if "exp" in n})
