"""chunkc.AdamW and chunkc.Adam step as torch.optim does, and refuse what they cannot step rightly."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from one_chunk import (
    PAIRS,
    Adjust,
    OneChunk,
    Optimizer,
    assert_same_params,
    assert_same_states,
    groups_of,
    make_model,
    make_pair,
    set_gradients,
)
from torch import Tensor, nn

from chunkc.errors import ChunkcError
from chunkc.runtime.optim.optimizers import AdamW


def check_training(pair: tuple[type, type], adjust: Adjust | None = None) -> None:
    ours, theirs = pair
    model, runtime, plain = make_pair(adjust=adjust)
    optimizers: list[Optimizer] = [ours(groups_of(model), lr=1e-2), theirs(groups_of(plain), lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + 0.2 * i)) for o in optimizers]
    for step in range(20):
        set_gradients([model, plain], step, skip=("1.weight", "3.bias") if step % 4 == 1 else ())
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    runtime.drain()
    assert_same_params(model, plain)
    assert_same_states(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("pair", PAIRS)
def test_training_equals_torch(pair: tuple[type, type]) -> None:
    """Two groups, a scheduler stepped before the update has run, parameters without a gradient in some steps."""
    check_training(pair)


MUTATIONS: dict[str, Adjust] = {
    "no bias correction": lambda hyper, step: (hyper, 10**7 if step > 1 else 1),
    "no weight decay": lambda hyper, step: (replace(hyper, weight_decay=0.0), step),
    "lr 5 % stale": lambda hyper, step: (replace(hyper, lr=hyper.lr * 0.95), step),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_detects(mutation: str, pair: tuple[type, type]) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_training(pair, MUTATIONS[mutation])


def test_hyperparameters_are_those_at_the_call_of_step() -> None:
    model, runtime, plain = make_pair()
    lr = torch.tensor(1e-2)
    optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    set_gradients([model, plain], 0)
    optimizer.step()
    reference.step()
    lr.fill_(5.0)
    optimizer.param_groups[0].update(betas=(0.0, 0.0), eps=1.0, weight_decay=7.0)
    runtime.drain()
    assert_same_params(model, plain)


def test_one_cycle_scheduler_changes_lr_and_betas() -> None:
    model, runtime, plain = make_pair()
    optimizers = [AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=12) for o in optimizers]
    seen = set()
    for step in range(10):
        set_gradients([model, plain], step)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        seen.add(optimizers[0].param_groups[0]["betas"][0])
    runtime.drain()
    assert len(seen) > 5
    assert_same_params(model, plain)


def test_added_and_frozen_parameters() -> None:
    model, runtime, plain = make_pair()
    for m in (model, plain):
        m[1].requires_grad_(False)
    optimizers = [make(m[0].parameters()) for make, m in ((AdamW, model), (torch.optim.AdamW, plain))]
    for step in range(6):
        if step == 3:
            for optimizer, m in zip(optimizers, (model, plain), strict=True):
                optimizer.add_param_group({"params": [*m[1].parameters(), *m[3].parameters()], "lr": 0.1})
        set_gradients([model, plain], step, skip=("3.weight", "3.bias") if step < 3 else ())
        for optimizer in optimizers:
            optimizer.step()
    runtime.drain()
    assert_same_params(model, plain)
    assert_same_states(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_closure_and_step_hooks() -> None:
    model, runtime, plain = make_pair()
    called: list[str] = []
    optimizers = [AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)]
    optimizers[0].register_step_pre_hook(lambda *_: called.append("pre"))
    optimizers[0].register_step_post_hook(lambda *_: called.append("post"))
    losses = []
    for optimizer, m in zip(optimizers, (model, plain), strict=True):

        def closure(m: nn.Module = m) -> Tensor:
            loss = m(torch.ones(2, 7)).square().sum()
            loss.backward()
            called.append("closure")
            return loss

        losses.append(optimizer.step(closure))
    runtime.drain()
    assert called == ["pre", "closure", "post", "closure"]
    assert torch.equal(losses[0], losses[1])
    assert_same_params(model, plain)


def test_zero_gradients_are_gradients() -> None:
    model, runtime, plain = make_pair()
    optimizers = [AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())]
    for step in range(3):
        set_gradients([model, plain], step)
        for optimizer in optimizers:
            if step == 2:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    runtime.drain()
    assert_same_params(model, plain)
    optimizers[0].zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_without_gradients_warns_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, runtime, plain = make_pair()
    optimizer = AdamW(model.parameters())
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        optimizer.step()
        optimizer.step()
    assert [r.message for r in caplog.records if "no parameter has a gradient" in r.message] == [caplog.messages[0]]
    assert not runtime.pending and optimizer.state_dict()["state"] == {}
    assert_same_params(model, plain, 0.0)


def test_a_new_optimizer_starts_afresh_and_the_old_one_is_refused() -> None:
    model, runtime, plain = make_pair()
    old, reference = AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    for step in range(3):
        set_gradients([model, plain], step)
        old.step()
        reference.step()
    new, reference = AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        set_gradients([model, plain], 10 + step)
        new.step()
        reference.step()
    before = copy.deepcopy(new.state_dict())
    for attempt in (old.step, old.state_dict):
        with pytest.raises(ChunkcError, match=r"another one has begun since to step '0\.weight'.* and 1 more"):
            attempt()
    runtime.drain()
    assert_same_params(model, plain)
    assert_same_states(new.state_dict(), before)


def test_parameters_of_no_or_another_model_are_refused() -> None:
    model, _, plain = make_pair()
    with pytest.raises(ChunkcError, match=r"number 0 .*shape \(53, 7\).*compile the model before making the optimizer"):
        AdamW(plain.parameters())
    with pytest.raises(ChunkcError, match=r"parameter 0\.weight .*compile the model before"):
        AdamW(plain.named_parameters())
    optimizer = AdamW(model[0].parameters())
    other = make_model()
    OneChunk(other)
    for params, message in (
        (other[3].parameters(), r"'3\.weight' belongs to another"),
        (plain[3].parameters(), "plain"),
    ):
        with pytest.raises(ChunkcError, match=message):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1


def test_uncovered_gradients_are_refused_before_anything_changes() -> None:
    model, runtime, plain = make_pair()
    optimizer = AdamW(model[0].parameters())
    set_gradients([model], 0)
    with pytest.raises(ChunkcError, match=r"'1\.weight', '1\.bias', '3\.weight', '3\.bias' are not in its groups"):
        optimizer.step()
    assert not runtime.pending and optimizer.state_dict()["state"] == {}
    assert_same_params(model, plain, 0.0)


def test_bad_arguments_are_refused() -> None:
    model, _, _ = make_pair()
    params = list(model.parameters())
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        AdamW(params, max_grad_norm=0.0)
    with pytest.raises(ChunkcError, match="no option of a group"):
        AdamW([{"params": params, "max_grad_norm": 1.0}])
    for bad in ({"lr": -1.0}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
            AdamW(params, **bad)  # type: ignore[arg-type]
    for option in ("amsgrad", "maximize", "differentiable"):
        with pytest.raises(ChunkcError, match=f"{option}=True is not supported"):
            AdamW([{"params": params, option: True}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": params}, {"params": params[:1]}])
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    optimizer = AdamW(params)
    set_gradients([model], 0)
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ChunkcError, match="maximize=True is not supported"):
        optimizer.step()
    assert optimizer.state_dict()["state"] == {}
