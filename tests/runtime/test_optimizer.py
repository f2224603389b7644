"""chunkc.AdamW and chunkc.Adam against torch.optim, over a model runtime that keeps everything in one chunk."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkc.errors import ChunkcError
from chunkc.runtime.adam import ChunkUpdate, Hyper, Piece
from chunkc.runtime.optimizer import Adam, AdamW, find_runtime
from chunkc.runtime.optimizer_state import TORCH_OPTIONS

Adjust = Callable[[Hyper, int], tuple[Hyper, int]]
GAP = 5
PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)]
Optimizer = AdamW | Adam | torch.optim.Optimizer


class OneChunk:
    """An OptimizerRuntime whose updates wait until something looks, as those of a worker may."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32, adjust: Adjust | None = None) -> None:
        named = dict(model.named_parameters())
        self.names, self.params = list(named), list(named.values())
        self.owners: dict[int, object] = {}
        self.adjust = adjust
        self.is_sixteen_bit = dtype is not torch.float32
        self.pieces: list[Piece] = []
        at = 0
        for index, p in enumerate(self.params):
            self.pieces.append(Piece(index, at, at + p.numel()))
            at += p.numel() + GAP
            p._chunkc_runtime, p._chunkc_index = self, index  # type: ignore[attr-defined]
        self.payload = torch.zeros(at, dtype=dtype)
        self.triple = [torch.full((at,), float("nan")) for _ in range(3)]
        for piece, p in zip(self.pieces, self.params, strict=True):
            self.triple[0][piece.start : piece.end] = p.detach().float().flatten()
        self.chunk = ChunkUpdate(self.payload, *self.triple, self.pieces)
        self.pending: list[tuple[Mapping[int, Hyper], Mapping[int, int]]] = []

    def name_of(self, index: int) -> str:
        return self.names[index]

    def check_step(self, params: Mapping[int, nn.Parameter]) -> frozenset[int]:
        assert all(params[i] is self.params[i] for i in params)
        return frozenset(i for i, p in enumerate(self.params) if p.grad is not None)

    def step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> None:
        self.drain()
        for piece, p in zip(self.pieces, self.params, strict=True):
            if p.grad is not None:
                self.payload[piece.start : piece.end] = p.grad.flatten()
        hypers, steps = dict(hypers), dict(steps)
        for i in hypers if self.adjust else ():
            hypers[i], steps[i] = self.adjust(hypers[i], steps[i])
        self.pending.append((hypers, steps))

    def drain(self) -> None:
        for hypers, steps in self.pending:
            self.chunk.update(hypers, steps)
            self.write_back()
        self.pending.clear()

    @torch.no_grad()
    def write_back(self) -> None:
        for piece, p in zip(self.pieces, self.params, strict=True):
            p.copy_(self.payload[piece.start : piece.end].view(p.shape))

    def view(self, param: int, which: int) -> Tensor:
        piece = self.pieces[param]
        return self.triple[which][piece.start : piece.end].view(self.params[param].shape)

    def read_state(self, param: int) -> tuple[Tensor, Tensor, Tensor]:
        self.drain()
        return self.view(param, 1).clone(), self.view(param, 2).clone(), self.view(param, 0).clone()

    def write_state(self, param: int, exp_avg: Tensor, exp_avg_sq: Tensor, param32: Tensor | None) -> None:
        self.drain()
        for which, value in enumerate((param32, exp_avg, exp_avg_sq)):
            if value is not None:
                self.view(param, which).copy_(value)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 53), nn.LayerNorm(53), nn.Tanh(), nn.Linear(53, 3)).to(dtype)


def make_pair(
    dtype: torch.dtype = torch.float32, adjust: Adjust | None = None
) -> tuple[nn.Sequential, OneChunk, nn.Sequential]:
    """A model under a runtime, the runtime, and a plain model with the same values."""
    model = make_model(dtype)
    return model, OneChunk(model, dtype, adjust), make_model(dtype)


def set_gradients(models: list[nn.Sequential], seed: int, skip: tuple[str, ...] = ()) -> None:
    """The same random gradients for all models; drains first, as a forward would."""
    for model in models:
        found = find_runtime(next(model.parameters()))
        if found is not None and isinstance(found[0], OneChunk):
            found[0].drain()
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype) * 0.1
            p.grad = None if name in skip or not p.requires_grad else gradient


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    first, rest = list(model[0].parameters()), [p for part in model[1:] for p in part.parameters()]
    return [{"params": first, "lr": 3e-3, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]


def assert_same_params(model: nn.Sequential, plain: nn.Sequential, tolerance: float = 1e-6) -> None:
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=tolerance)


def assert_same_states(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for key, state in wanted["state"].items():
        assert found["state"][key]["step"] == state["step"]
        assert found["state"][key]["step"].dtype == state["step"].dtype
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found["state"][key][name], state[name], rtol=2e-6, atol=1e-9)


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


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_states_are_exchanged_with_torch(pair: tuple[type, type], direction: str) -> None:
    """Ten steps by one, ten more by the other, against twenty by torch."""
    ours, theirs = pair
    first_model, second_model, plain = make_model(), make_model(), make_model()
    managed_model = second_model if direction == "from torch" else first_model
    runtime = OneChunk(managed_model)
    makes = (theirs, ours) if direction == "from torch" else (ours, theirs)
    first, reference = (make(groups_of(m), lr=1e-2) for make, m in ((makes[0], first_model), (theirs, plain)))
    for step in range(10):
        set_gradients([first_model, plain], step, skip=("1.weight",) if step < 9 else ("1.weight", "3.bias"))
        first.step()
        reference.step()
    runtime.drain()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = makes[1](groups_of(second_model), lr=0.5)
    with torch.no_grad():
        for p, q in zip(second_model.parameters(), first_model.parameters(), strict=True):
            p.copy_(q)
    for piece, p in zip(runtime.pieces, managed_model.parameters(), strict=True):
        runtime.triple[0][piece.start : piece.end] = p.detach().flatten()
    second.load_state_dict(torch.load(buffer))
    assert_same_states(second.state_dict(), first.state_dict())
    for step in range(10, 20):
        set_gradients([second_model, plain], step)
        second.step()
        reference.step()
    runtime.drain()
    assert_same_params(second_model, plain)
    assert_same_states(second.state_dict(), reference.state_dict())
    assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in reference.param_groups]


def test_groups_carry_torch_options() -> None:
    model, _, plain = make_pair()
    ours, theirs = AdamW(model.parameters()).state_dict(), torch.optim.AdamW(plain.parameters()).state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    old = {"state": {}, "param_groups": [{k: v for k, v in ours["param_groups"][0].items() if k not in TORCH_OPTIONS}]}
    optimizer = AdamW(model.parameters(), lr=7.0)
    optimizer.load_state_dict(old)
    assert optimizer.state_dict() == ours


def test_sixteen_bit_state_carries_the_master_parameter() -> None:
    model, runtime, _ = make_pair(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        set_gradients([model], step)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for i, p in enumerate(model.parameters()):
        assert all(state[i][name].dtype is torch.float32 for name in ("exp_avg", "exp_avg_sq", "master_param"))
        assert torch.equal(state[i]["master_param"].bfloat16(), p.detach())
        assert torch.equal(state[i]["master_param"], runtime.view(i, 0))
    assert not torch.equal(state[0]["master_param"].bfloat16().float(), state[0]["master_param"])
    other = make_model(torch.bfloat16)
    other_runtime = OneChunk(other, torch.bfloat16)
    copied = AdamW(other.parameters(), lr=1e-2)
    copied.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, copied)):
        set_gradients([m], 9)
        o.step()
    for i in range(len(runtime.params)):
        pairs = zip(runtime.read_state(i), other_runtime.read_state(i), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_state_dict_and_load_hooks_see_the_states() -> None:
    model, _, _ = make_pair()
    optimizer = AdamW(model.parameters())
    set_gradients([model], 0)
    optimizer.step()
    seen: list[list[int]] = []
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append(sorted(d["state"])))
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(sorted(d["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(sorted(o.state_dict()["state"])))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [list(range(6))] * 4


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
    with pytest.raises(ChunkcError, match="clipping is not built yet"):
        AdamW(params, max_grad_norm=1.0)
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


def test_bad_states_are_refused_before_anything_changes() -> None:
    model, runtime, plain = make_pair()
    optimizer = AdamW(model.parameters(), lr=0.25)
    set_gradients([model, plain], 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    reference = torch.optim.AdamW(plain.parameters())
    reference.step()

    def refused(change: Callable[[dict[str, Any]], object], match: str, error: type[Exception] = ChunkcError) -> None:
        state = copy.deepcopy(reference.state_dict())
        change(state)
        with pytest.raises(error, match=match):
            optimizer.load_state_dict(state)

    refused(lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad=True")
    refused(lambda s: s["param_groups"][0].update(maximize=True), "maximize=True")
    refused(lambda s: s["param_groups"][0].update(decoupled_weight_decay=False), r"one of Adam, .*use chunkc\.Adam$")
    refused(lambda s: s["state"][2].update(exp_avg=torch.zeros(54)), r"exp_avg of '1\.weight' has shape \(54,\)")
    refused(lambda s: s["state"][5].pop("exp_avg_sq"), r"'3\.bias' is not Adam's")
    refused(lambda s: s["state"].update({77: s["state"][0]}), r"states of \[77\]")
    refused(lambda s: s["param_groups"][0]["params"].pop(), "doesn't match the size", ValueError)
    refused(lambda s: s["param_groups"].append({"params": []}), "different number", ValueError)
    assert_same_states(optimizer.state_dict(), before)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert optimizer.param_groups[0]["params"] == runtime.params


def test_copies_are_refused() -> None:
    model, _, _ = make_pair()
    optimizer = AdamW(model.parameters())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ChunkcError, match="cannot be copied or pickled"):
            attempt(optimizer)
