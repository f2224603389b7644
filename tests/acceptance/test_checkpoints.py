"""ACCEPTANCE 14 on one rank: a run that was saved and resumed goes on to the bit, or within (b) where more changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pair import MIXED, Pair, batch
from resumed import NUM_STEPS, POLICIES, Run, check_equal
from small import Small
from torch import nn

import chunkc
from chunkc import ChunkcError
from chunkc.checkpoint.contents import runtime_of


@pytest.mark.long(but="fp32-10")
@pytest.mark.parametrize(
    ("policy", "half"),
    [
        ("fp32", 10),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("fp32", 50), ("mixed", 5), ("bf16", 5), ("bf16", 50))
        ),
    ],
)
def test_a_run_is_one_half_a_resume_and_the_other(tmp_path: Path, policy: str, half: int) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("there", "here"), [*(pytest.param(num, num, marks=pytest.mark.slow) for num in (1, 2)), (2, 3)]
)
def test_with_micro_batches_and_discarded_gradients(tmp_path: Path, there: int, here: int) -> None:
    """Also into a run that is planned for more of them; gradients that were let go of are in nobody's way."""
    first, second = Run(accumulate=there), Run(seed=7, accumulate=here)
    second.num_parts = there
    first.train(0, 3)
    first.save(tmp_path, asynchronous=True)
    first.model(*batch(0)).backward()
    with pytest.raises(ChunkcError, match="gradients wait to be stepped"):
        first.save(tmp_path)
    with pytest.raises(ChunkcError, match="gradients wait to be stepped"):
        first.load(tmp_path)
    first.optimizer.zero_grad()
    first.load(tmp_path)
    assert first.save(tmp_path).name == "00000002-step-3"
    losses = first.train(3, 6)
    wanted = first.bits()
    second.load(tmp_path)
    assert second.train(3, 6) == losses
    check_equal(second.bits(), wanted)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Inductor adds up the gradient of an embedding by atomic operations of several threads otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
def test_with_inductor(tmp_path: Path) -> None:
    whole, first, second = (Run(seed=s, backend="inductor") for s in (0, 0, 7))
    losses = whole.train(0, NUM_STEPS)
    assert first.train(0, 50) == losses[:50]
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.train(50, NUM_STEPS) == losses[50:]
    check_equal(second.bits(), whole.bits())


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"hw": "emulated-4m-16m"}, marks=pytest.mark.slow),
        {"hw": "emulated-340k-16m"},
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


@pytest.mark.long
def test_a_run_resumed_elsewhere_trains_on_as_plain_pytorch(tmp_path: Path) -> None:
    """Acceptance (b), across a save: losses, and every element of the parameters."""
    first, second = Pair(), Pair("emulated-900k-16m", wishes=MIXED)
    for seed in range(3):
        first.train(seed)
    second.train(20)
    chunkc.save_checkpoint(tmp_path, first.model, first.optimizer)
    chunkc.load_checkpoint(tmp_path, second.model, second.optimizer)
    second.plain, second.plain_optimizer = first.plain, first.plain_optimizer
    for seed in range(3, 6):
        second.train(seed)
    second.check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("fp32", "mixed"),
        *(
            pytest.param(a, b, marks=pytest.mark.slow)
            for a, b in (("mixed", "bf16"), ("mixed", "fp32"), ("bf16", "mixed"), ("fp32", "bf16"), ("bf16", "fp32"))
        ),
    ],
)
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
    states = [[runtime.parameters.read_state(index) for index in range(len(runtime.params))] for runtime in runtimes]
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    handed_over = next(iter(second.model.state_dict().values())).dtype
    for index, p in enumerate(second.model.parameters()):
        assert torch.equal(p.chunkc_store.read_exact(index), states[0][index][2].to(handed_over))


@pytest.mark.long
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


@pytest.mark.long
def test_the_model_alone_is_loaded_without_moments(tmp_path: Path) -> None:
    first, second = Run(**POLICIES["bf16"]), Run(seed=7)
    first.train(0, 3)
    first.save(tmp_path)
    second.train(0, 2)
    before, generator = second.bits(), torch.get_rng_state()
    chunkc.load_checkpoint(tmp_path, second.model)
    after = second.bits()
    assert torch.equal(torch.get_rng_state(), generator)
    index = {n: p.chunkc_index for n, p in first.model.named_parameters()}
    for name in second.model.state_dict():
        if name in index:
            assert torch.equal(after[name], runtime_of(first.model).parameters.read_state(index[name])[2]), name
    check_equal({n: v for n, v in after.items() if "exp" in n}, {n: v for n, v in before.items() if "exp" in n})


class Counting(nn.Linear):
    """Keeps numbers by torch's way for what is no buffer."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Packed(Counting):
    """Gives the same as a tensor, which is no part of the module."""

    def get_extra_state(self) -> torch.Tensor:  # type: ignore[override]
        return torch.arange(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:  # type: ignore[override]
        self.seen = len(state)


def test_extra_states_of_modules_come_back(tmp_path: Path) -> None:
    models = [nn.Sequential(Counting(4, 4), Packed(4, 4)) for _ in range(2)]
    for model in models:
        chunkc.compile(model, "emulated-96k-16m", dtype=torch.float32, backend="eager")
    optimizers = [chunkc.AdamW(model.parameters()) for model in models]
    models[0][0].seen, models[0][1].seen = 5, 6
    chunkc.save_checkpoint(tmp_path, models[0], optimizers[0])
    chunkc.load_checkpoint(tmp_path, models[1], optimizers[1])
    assert [part.seen for part in models[1]] == [5, 6]
