"""Random orders of what a loop may do: each call gives what plain PyTorch gives, or is refused and changes nothing.

Both sides get the same calls. When chunkc refuses one, plain PyTorch does not get it either, so whatever a refusal had
changed would show later. When autograd refuses one (a parameter that was saved has changed), it must on both sides.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair import MIXED, Pair, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

LENGTHS = (8, 6, 5)
SLOW = pytest.mark.slow
Call = tuple[str, int]
calls = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["forward", "train", "train"]), st.integers(0, 8)),
        st.tuples(st.sampled_from(["backward", "backward twice", "backward of two"]), st.integers(0, 2)),
        st.tuples(st.sampled_from(["step", "step", "zero_grad", "model.zero_grad"]), st.just(0)),
        st.tuples(st.sampled_from(["zero in place", "evaluate", "state_dict", "gradients"]), st.integers(0, 2)),
        st.tuples(
            st.sampled_from(["write", "assign gradient", "penalty", "thread", "clip", "clip"]), st.integers(0, 2)
        ),
    ),
    min_size=4,
    max_size=16,
)


class Driver:
    """Carries out calls on both sides; ``losses`` are forwards whose backward may still come.

    ``accumulates``: gradients of several backwards may add up.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.accumulates = compiled_of(pair.model).runtime.accumulate > 1
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_refused = 0
        self.num_stale = 0

    def run(self, name: str, number: int) -> None:
        getattr(self, name.replace(" ", "_").replace(".", "_"))(number)

    def _both(self, call: Callable[[nn.Module, torch.optim.Optimizer, int], object]) -> tuple[object, object] | None:
        """What the call gives on both sides; None when it was refused."""
        pair = self.pair
        try:
            ours = call(pair.model, pair.optimizer, 0)
        except chunkc.ChunkcError:
            self.num_refused += 1
            return None
        except RuntimeError as error:
            if "donated buffers" in str(error):  # torch.compile's refusal of retain_graph=True
                self.num_refused += 1
                return None
            assert "modified by an inplace operation" in str(error)
            self.num_stale += 1
            before = [None if p.grad is None else p.grad.clone() for p in pair.plain.parameters()]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                call(pair.plain, pair.plain_optimizer, 1)
            for param, grad in zip(pair.plain.parameters(), before, strict=True):
                param.grad = grad  # autograd has accumulated some before it came to the one that changed
            return None
        return ours, call(pair.plain, pair.plain_optimizer, 1)

    def forward(self, number: int) -> None:
        found = self._both(lambda model, *_: model(*batch(number, LENGTHS[number % 3])))
        if found is not None:
            assert found[0].item() == pytest.approx(found[1].item(), rel=1e-4)
            self.losses.append(found)

    def train(self, number: int) -> None:
        self.forward(number)
        if self.losses:
            self.backward(len(self.losses) - 1)
        self.step(0)
        self.zero_grad(0)

    def _take(self, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.losses.pop(number % len(self.losses)) if self.losses else None

    def backward(self, number: int) -> None:
        loss = self._take(number)
        if loss is not None:
            self._both(lambda model, optimizer, side: loss[side].backward())

    def thread(self, number: int) -> None:
        """A backward on a thread of its own."""
        loss = self._take(number)
        if loss is None:
            return

        def call(model: nn.Module, optimizer: torch.optim.Optimizer, side: int) -> None:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(loss[side].backward).result()

        self._both(call)

    def backward_twice(self, number: int) -> None:
        loss = self._take(number)
        if loss is not None and self._both(lambda *a: loss[a[2]].backward(retain_graph=True)) is not None:
            self.model_zero_grad(0)
            self._both(lambda *a: loss[a[2]].backward())

    def backward_of_two(self, number: int) -> None:
        first, second = self._take(number), self._take(number)
        if first is None or second is None:
            return
        held, num_stale = any(p.grad is not None for p in self.pair.model.parameters()), self.num_stale
        found = self._both(lambda *a: (first[a[2]] + second[a[2]]).backward())
        assert found is None or self.accumulates, "two forwards in one backward are accumulation, not declared"
        if found is not None:
            return
        is_given_up = not held or (self.accumulates and all(p.grad is None for p in self.pair.model.parameters()))
        if is_given_up or self.num_stale > num_stale:  # autograd had come to some of the gradients, on either side
            self.model_zero_grad(0)

    def step(self, number: int) -> None:
        self._both(lambda model, optimizer, _: optimizer.step())

    def clip(self, number: int) -> None:
        """From the first call on, later plans measure gradients as they land."""
        norm_type = (2.0, 2.0, float("inf"))[number]
        found = self._both(
            lambda model, _, side: (
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
                if side
                else chunkc.clip_grad_norm_(model, 0.1, norm_type)
            )
        )
        if found is not None:
            assert found[0].item() == pytest.approx(found[1].item(), rel=1e-3, abs=1e-6)

    def zero_grad(self, number: int) -> None:
        self._both(lambda model, optimizer, _: optimizer.zero_grad())

    def model_zero_grad(self, number: int) -> None:
        self._both(lambda model, *_: model.zero_grad())

    def zero_in_place(self, number: int) -> None:
        self._both(lambda model, optimizer, _: optimizer.zero_grad(set_to_none=False))

    def evaluate(self, number: int) -> None:
        def call(model: nn.Module, *_: object) -> float:
            with torch.no_grad():
                return model(*batch(90 + number, LENGTHS[number])).item()

        found = self._both(call)
        assert found is not None
        assert found[0] == pytest.approx(found[1], rel=1e-4)

    def state_dict(self, number: int) -> None:
        self.pair.check()

    def gradients(self, number: int) -> None:
        """Every gradient that both sides show; after a step chunkc's are gone, which it says."""
        for ours, plain in zip(self.pair.model.parameters(), self.pair.plain.parameters(), strict=True):
            try:
                value = None if ours.grad is None else ours.grad.clone()
            except chunkc.ChunkcError:
                continue
            assert (value is None) == (plain.grad is None)
            if value is not None and plain.grad is not None:
                torch.testing.assert_close(value, plain.grad, rtol=1e-3, atol=1e-5)

    def write(self, number: int) -> None:
        def call(model: nn.Module, *_: object) -> None:
            with torch.no_grad():
                list(model.parameters())[number].mul_(1.01)

        self._both(call)

    def assign_gradient(self, number: int) -> None:
        def call(model: nn.Module, *_: object) -> None:
            param = list(model.parameters())[number]
            param.grad = torch.full(param.shape, 0.01)

        self._both(call)

    def penalty(self, number: int) -> None:
        """A gradient that an eager operator makes, alone."""
        self._both(lambda model, *_: (list(model.parameters())[number] * 0.01).sum().backward())


SCALED = {"loss_scale": 1024.0}
"""In fp32 a power of two changes no digit: what is scaled and unscaled on its way equals plain PyTorch's."""
PAIRS = [
    pytest.param(({}, 1, {}), id="host"),
    pytest.param((MIXED, 1, SCALED), id="mixed scaled", marks=SLOW),
]
ADDING_PAIRS = [
    pytest.param(({}, 3, SCALED), id="accumulating scaled"),
    pytest.param((MIXED, 3, {}), id="accumulating mixed", marks=SLOW),
]
NUM_EXAMPLES, NUM_ADDING_EXAMPLES = (settings().max_examples,) * 2 if settings().max_examples > 100 else (12, 4)
"""Few in a quick run, fewer where micro-batches add up: theirs take longer, and the orders above are theirs as well."""


def make_pair(request: pytest.FixtureRequest) -> Pair:
    """The longest sequences come first: they lay out the arena. Two forwards are alive together."""
    wishes, accumulate, options = request.param
    pair = Pair("emulated-730k-16m", wishes=wishes, accumulate=accumulate, **options)
    pair.train(0, max(LENGTHS))
    assert (min(pair.kinds().values()) > 0) == bool(wishes), pair.kinds()
    return pair


pair = pytest.fixture(scope="module", params=PAIRS, name="pair")(make_pair)
adding_pair = pytest.fixture(scope="module", params=ADDING_PAIRS, name="adding_pair")(make_pair)


@pytest.mark.long
@settings(max_examples=NUM_EXAMPLES)
@given(calls)
def test_random_orders_are_exact_or_refused(pair: Pair, found: list[Call]) -> None:
    check_order(pair, found)


@pytest.mark.long
@settings(max_examples=NUM_ADDING_EXAMPLES)
@given(calls)
def test_random_orders_of_micro_batches_are_exact_or_refused(adding_pair: Pair, found: list[Call]) -> None:
    check_order(adding_pair, found)


def check_order(pair: Pair, found: list[Call]) -> None:
    """Whatever was called: both models are equal behind it, and train on equally."""
    pair.restart()
    driver = Driver(pair)
    for call in found:
        driver.run(*call)
    pair.check()
    driver.losses.clear()
    pair.both(lambda model, _: model.zero_grad())
    for length in LENGTHS:
        pair.train(7, length)
    pair.check()
    assert driver.num_refused < len(found)


def test_a_lost_update_would_show(pair: Pair) -> None:
    """The driver's own check: one step taken on one side only is found."""
    pair.restart()
    driver = Driver(pair)
    driver.run("forward", 1)
    driver.run("backward", 0)
    pair.plain_optimizer.step()
    with pytest.raises(AssertionError):
        driver.run("state_dict", 0)
