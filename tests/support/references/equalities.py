"""The comparisons with plain PyTorch that acceptance tests make on every machine: (b) in fp32, (c) in 16 bits."""

from dataclasses import replace

import torch
from machines import EMULATED, Machine
from models import NUM_BATCHES, Case
from placements import smallest
from plan_runner import PlanRunner, Setup
from same_partition import same_partition_backend
from training import (
    SEMANTICS,
    GetPlain,
    Recipe,
    Trained,
    assert_close_elements,
    assert_same_gradients,
    assert_same_semantics,
    largest,
    largest_error,
    largest_loss_error,
    train_measured,
)

from chunkc._torch_compat.core import capture_settings

GRADIENT_TOLERANCE = 2.0**-7
ERROR_RATIO = 1.5
SIXTEEN_BITS = replace(SEMANTICS, num_steps=10)


def check_semantics(runner: PlanRunner, wanted: Trained, setup: Setup, recipe: Recipe = SEMANTICS) -> None:
    """Acceptance (b): a run that moves bytes equals ``wanted``, that of eager PyTorch, buffers included."""
    found = runner.train(setup, recipe)
    assert runner.stats()["h2d_nbytes"] > 0, "everything fits, nothing is shown"
    assert_same_semantics(found, wanted)
    if wanted.buffers:
        assert found.buffers.keys() == wanted.buffers.keys()
        assert_close_elements(found.buffers, wanted.buffers, 1e-5 * largest(wanted.buffers), "buffers")


def check_sixteen_bits(
    runner: PlanRunner, plain_of: GetPlain, plain_16_of: GetPlain, wish: Recipe = SIXTEEN_BITS
) -> None:
    """Acceptance (c) at the smallest budget; errors are means over several orders of the batches.

    Gradients of two right runs in bf16 may lie on either side of the exact ones: only the first is held to plain bf16.
    """
    setup, errors = smallest(runner), []
    for first_batch in range(NUM_BATCHES):
        recipe = replace(wish, first_batch=first_batch)
        exact, plain = plain_of(runner.case.name, recipe), plain_16_of(runner.case.name, recipe)
        found = runner.train(setup, recipe)
        assert all(g.dtype is torch.bfloat16 for g in found.gradients.values())
        if first_batch == 0:
            assert_same_gradients(found.gradients, plain.gradients, GRADIENT_TOLERANCE)
        errors += [_errors(found, exact), _errors(plain, exact)]
    for kind, values in zip(("gradients", "parameters", "losses"), zip(*errors, strict=True), strict=True):
        error, allowed = (sum(values[which::2]) / NUM_BATCHES for which in (0, 1))
        assert 0 < error <= ERROR_RATIO * allowed, f"{kind} are off by {error:.3g}, plain bf16 by {allowed:.3g}"


def _errors(found: Trained, exact: Trained) -> tuple[float, float, float]:
    return (
        largest_error(found.gradients, exact.gradients),
        largest_error(found.params, exact.params),
        largest_loss_error(found.losses, exact.losses),
    )


def train_same_partition(case: Case, backend: str, recipe: Recipe, machine: Machine = EMULATED) -> Trained:
    """Plain PyTorch under torch.compile with chunkc's partition: what masks of dropout are held against."""
    model = case.build().to(machine.torch_device)
    model.compile(backend=same_partition_backend(backend), fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), **recipe.options)
    with capture_settings():
        return train_measured(model, machine.put(case.batches()), optimizer, recipe)
