"""Steps whose updates begin while backward runs: the bits of a run that begins none, whatever comes in between.

Every scenario runs twice, with second homes and without, and ends with equal parameters, states and counts; what it
looks at on the way is equal too. Counts say how many steps were begun, committed and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overflows import Poisoned, poisonous
from pair import Pair, Tower, batch
from torch import nn

import chunkc
from chunkc.ir.actions import Op
from chunkc.runtime.devices.worker_streams import WorkRunner

HW = "emulated-450k-16m"
"""Room for all parameters of two layers, and for no states."""
NUM_HOMES = 12
Seen = list[Any]
Scenario = Callable[[Pair], Seen]


def backward(pair: Pair, seed: int) -> torch.Tensor:
    loss = pair.model(*batch(seed))
    loss.backward()
    return loss.detach()


def finish(pair: Pair) -> None:
    pair.optimizer.step()
    pair.optimizer.zero_grad()


def train(pair: Pair, num_steps: int, first: int = 0) -> Seen:
    seen = []
    for seed in range(first, first + num_steps):
        seen.append(backward(pair, seed))
        finish(pair)
    return seen


def plain_loop(pair: Pair) -> Seen:
    return train(pair, 5)


def schedule_behind(pair: Pair) -> Seen:
    """A scheduler in torch's order: what backward sees is what the step takes."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pair.optimizer, 0.5)
    for seed in range(5):
        backward(pair, seed)
        finish(pair)
        scheduler.step()
    return []


def schedule_before(pair: Pair) -> Seen:
    """Another learning rate between backward and step, each time."""
    for seed in range(6):
        backward(pair, seed)
        pair.optimizer.param_groups[0]["lr"] *= 0.5
        finish(pair)
    return []


def looks_between(pair: Pair) -> Seen:
    """Everything that can be read between backward and step shows what was before the step."""
    seen = train(pair, 2)
    for seed in (2, 3):
        backward(pair, seed)
        seen += [p.grad.clone() for p in pair.model.parameters() if p.grad is not None]
        seen += [p.clone() for p in pair.model.parameters()]
        seen += list(pair.model.state_dict().values())
        seen += [s["exp_avg"] for s in pair.optimizer.state_dict()["state"].values()]
        finish(pair)
    return seen


def evaluates_between(pair: Pair) -> Seen:
    seen = train(pair, 2)
    for seed in (2, 3):
        backward(pair, seed)
        with torch.no_grad():
            seen.append(pair.model(*batch(99)))
        finish(pair)
    return seen


def edits_a_gradient(pair: Pair) -> Seen:
    train(pair, 2)
    backward(pair, 2)
    grad = pair.model.head.weight.grad
    assert grad is not None
    grad.mul_(0.5)
    finish(pair)
    return train(pair, 1, 3)


def replaces_a_gradient(pair: Pair) -> Seen:
    train(pair, 2)
    backward(pair, 2)
    pair.model.head.weight.grad = torch.full_like(pair.plain.head.weight, 1e-3)
    finish(pair)
    return train(pair, 1, 3)


def removes_a_gradient(pair: Pair) -> Seen:
    train(pair, 2)
    backward(pair, 2)
    pair.model.head.weight.grad = None
    finish(pair)
    return train(pair, 1, 3)


def gives_up_a_step(pair: Pair) -> Seen:
    """Gradients that are zeroed, not stepped."""
    train(pair, 2)
    for seed in (2, 3):
        backward(pair, seed)
        pair.optimizer.zero_grad()
    return train(pair, 2, 4)


def loads_between(pair: Pair) -> Seen:
    """Other parameters and states arrive between backward and step."""
    train(pair, 1)
    model = {name: value.clone() for name, value in pair.model.state_dict().items()}
    optimizer = pair.optimizer.state_dict()
    train(pair, 1, 1)
    backward(pair, 2)
    pair.model.load_state_dict(model)
    pair.optimizer.load_state_dict(optimizer)
    finish(pair)
    return train(pair, 1, 3)


def writes_a_parameter(pair: Pair) -> Seen:
    train(pair, 2)
    backward(pair, 2)
    with torch.no_grad():
        pair.model.head.weight.add_(0.01)
    finish(pair)
    return train(pair, 1, 3)


def fails_between(pair: Pair) -> Seen:
    """The user's exception, caught by the user, who goes on."""
    train(pair, 2)
    backward(pair, 2)
    with pytest.raises(KeyError):
        raise KeyError("between backward and step")
    finish(pair)
    return train(pair, 1, 3)


def fails_in_forward(pair: Pair) -> Seen:
    train(pair, 2)
    backward(pair, 2)
    pair.optimizer.zero_grad()
    with pytest.raises(IndexError):
        pair.model(batch(3)[0] + 100_000, batch(3)[1])
    return train(pair, 2, 4)


def other_shapes(pair: Pair) -> Seen:
    """Two plans over one layout take turns."""
    seen = []
    for seed, length in enumerate((8, 4, 8, 4, 8, 4)):
        seen.append(pair.model(*batch(seed, length)))
        seen[-1].backward()
        finish(pair)
    return [loss.detach() for loss in seen]


def another_optimizer(pair: Pair) -> Seen:
    """A new optimizer starts from states of zero."""
    train(pair, 3)
    pair.optimizer = chunkc.AdamW(pair.model.parameters(), lr=5e-3)
    return train(pair, 3, 3)


def clips(bound: Callable[[int], float]) -> Scenario:
    def scenario(pair: Pair) -> Seen:
        seen = []
        for seed in range(6):
            backward(pair, seed)
            seen.append(chunkc.clip_grad_norm_(pair.model, bound(seed)))
            finish(pair)
        return seen

    return scenario


SCENARIOS: dict[str, tuple[Scenario, tuple[int, int, int]]] = {
    "plain loop": (plain_loop, (4, 4, 0)),
    "schedule behind": (schedule_behind, (4, 4, 0)),
    "schedule before": (schedule_before, (3, 0, 3)),
    "looks between": (looks_between, (3, 3, 0)),
    "evaluates between": (evaluates_between, (3, 3, 0)),
    "edits a gradient": (edits_a_gradient, (3, 2, 1)),
    "replaces a gradient": (replaces_a_gradient, (3, 2, 1)),
    "removes a gradient": (removes_a_gradient, (3, 2, 1)),
    "gives up a step": (gives_up_a_step, (5, 3, 2)),
    "loads between": (loads_between, (3, 2, 1)),
    "writes a parameter": (writes_a_parameter, (3, 2, 1)),
    "fails between": (fails_between, (3, 3, 0)),
    "fails in forward": (fails_in_forward, (4, 3, 1)),
    "other shapes": (other_shapes, (5, 5, 0)),
    "another optimizer": (another_optimizer, (4, 4, 0)),
    "never clipped": (clips(lambda seed: 1e6), (5, 5, 0)),
    "always clipped": (clips(lambda seed: 1e-3), (3, 0, 3)),
    "every second step clipped": (clips(lambda seed: 1e-3 if seed % 2 else 1e6), (5, 2, 3)),
}


def pair_of(wishes: dict[str, Any], **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(HW, Tower(depth=2), wishes, **options)


def run(scenario: Scenario, num_homes: int, **options: Any) -> tuple[Pair, Seen]:
    is_clipped = scenario.__qualname__.startswith("clips")
    wishes = {"num_second_homes": num_homes, "tracks_grad_norm": is_clipped}
    pair = pair_of(wishes, **options)
    return pair, scenario(pair)


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_equal(*pair)
    else:
        assert found == wanted


def assert_same(first: Pair, second: Pair) -> None:
    assert_equal(dict(first.model.state_dict()), dict(second.model.state_dict()))
    assert_equal(first.optimizer.state_dict(), second.optimizer.state_dict())


def counts(pair: Pair) -> tuple[int, int, int]:
    found = chunkc.metrics(pair.model)
    return tuple(int(found[f"num_{kind}_steps"]) for kind in ("begun", "committed", "dropped"))  # type: ignore[return-value]


@pytest.mark.long(but="fails in forward")
@pytest.mark.parametrize("name", SCENARIOS)
def test_begun_steps_change_no_bit(name: str) -> None:
    scenario, wanted = SCENARIOS[name]
    begun, seen = run(scenario, NUM_HOMES)
    plan = chunkc.plan_of(begun.model)
    assert sum(a.op is Op.BEGIN for a in plan.program("backward").actions) == NUM_HOMES
    alone, seen_alone = run(scenario, 0)
    assert counts(alone) == (0, 0, 0)
    assert_equal(seen, seen_alone)
    assert_same(begun, alone)
    assert counts(begun) == wanted


def test_host_memory_of_second_homes_is_planned_and_taken() -> None:
    """14 bytes a parameter in 16 bits, 16 in fp32, of the chunks that have one."""
    begun, _ = run(plain_loop, NUM_HOMES)
    alone, _ = run(plain_loop, 0)
    plans = chunkc.plan_of(begun.model), chunkc.plan_of(alone.model)
    chunks = [c for c in plans[0].layout.chunks if c.has_second_home]
    assert len(chunks) == NUM_HOMES
    assert plans[0].memory.host_nbytes - plans[1].memory.host_nbytes == sum(16 * c.numel for c in chunks)
    assert chunkc.stats(begun.model)["num_slot_allocations"] == 0
    assert chunkc.stats(begun.model)["num_unasked_syncs"] == chunkc.stats(alone.model)["num_unasked_syncs"]
    assert "second homes (updates begin before step()): 12 chunks" in plans[0].summary()


@pytest.mark.long(but="whole")
@pytest.mark.parametrize("windows", [(3, 3, 3, 3), (3, 2, 3, 1, 3)], ids=["whole", "shorter ones"])
def test_micro_batches(windows: tuple[int, ...]) -> None:
    """Updates begin in the micro-batch that is taken for the last; where that is wrong, nothing of it is kept."""

    def scenario(pair: Pair) -> Seen:
        seed = 0
        for size in windows:
            for _ in range(size):
                seed += 1
                backward(pair, seed)
            finish(pair)
        return []

    begun, _ = run(scenario, NUM_HOMES, accumulate=3)
    alone, _ = run(scenario, 0, accumulate=3)
    assert_same(begun, alone)
    num_begun, num_committed, num_dropped = counts(begun)
    assert num_begun == num_committed + num_dropped and num_committed >= 2
    assert (num_dropped > 0) == (len(set(windows)) > 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["nan", "inf"])
def test_fp16_commits_by_the_factor_of_its_scale_and_drops_overflows(kind: int) -> None:
    def scenario(pair: Pair) -> Seen:
        for seed in range(7):
            noise = poisonous(kind) if seed == 3 else torch.zeros(192)
            pair.model(*batch(seed), noise).backward()
            finish(pair)
        return []

    pairs = []
    for num_homes in (NUM_HOMES, 0):
        wishes = {"num_second_homes": num_homes, "tracks_grad_norm": True}
        torch.manual_seed(0)
        pairs.append(Pair("emulated-645k-16m", Poisoned(), wishes, dtype=torch.float16, loss_scale=2.0**10))
        scenario(pairs[-1])
    assert_same(*pairs)
    assert counts(pairs[0]) == (6, 4, 2), "the overflow, and the step behind it, whose count was taken for one more"


class Frozen(nn.Module):
    """Some parameters stop training in between, so that chunks hold stepped and unstepped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(12))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.one_hot(tokens, 48).float()
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return nn.functional.cross_entropy(hidden.flatten(0, 1), targets.flatten() % 48)


@pytest.mark.long
def test_parameters_that_rest_keep_their_states_in_both_homes() -> None:
    def scenario(pair: Pair) -> Seen:
        for seed in range(8):
            resting = (1, 5, 9) if seed in (3, 4, 6) else ()
            for index, layer in enumerate(pair.model.layers):
                layer.weight.requires_grad_(index not in resting)
            tokens, targets = batch(seed)
            pair.model(tokens % 48, targets).backward()
            finish(pair)
        return []

    pairs = []
    for num_homes in (NUM_HOMES, 0):
        torch.manual_seed(0)
        pairs.append(Pair("emulated-400k-16m", Frozen(), {"num_second_homes": num_homes}))
        scenario(pairs[-1])
    assert_same(*pairs)
    assert counts(pairs[0])[1] > 0


@pytest.mark.long(but="True-3")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("tracks_grad_norm", [False, True])
def test_a_step_that_was_not_begun_waits_for_its_gradients(
    tracks_grad_norm: bool, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk has a second home, nothing begins before the first step, and gradients come home late."""
    attempt = WorkRunner.attempt

    def late(self: WorkRunner, label: str, *rest: Any) -> Any:
        if label.startswith("evict"):
            time.sleep(0.005)
        return attempt(self, label, *rest)

    monkeypatch.setattr(WorkRunner, "attempt", late)
    pairs = []
    for num_homes in (999, 0):
        wishes = {"num_second_homes": num_homes, "tracks_grad_norm": tracks_grad_norm}
        pairs.append(pair_of(wishes, accumulate=accumulate))
        for number in range(accumulate):
            backward(pairs[-1], number)
        finish(pairs[-1])
    assert counts(pairs[0])[0] == 0
    assert_same(*pairs)
