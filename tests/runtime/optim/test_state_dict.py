"""Optimizer states are exchanged with torch both ways, and refused before anything changes where they do not fit."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_chunk import (
    PAIRS,
    OneChunk,
    assert_same_params,
    assert_same_states,
    groups_of,
    make_model,
    make_pair,
    set_gradients,
)

from chunkc.errors import ChunkcError
from chunkc.runtime.optim.optimizers import AdamW


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_states_are_exchanged_with_torch(pair: tuple[type, type], direction: str) -> None:
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
        runtime.lists["param32"][piece.start : piece.end] = p.detach().flatten()
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
    kept = ("params", "lr", "betas", "eps", "weight_decay")
    old = {"state": {}, "param_groups": [{k: ours["param_groups"][0][k] for k in kept}]}
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
        assert torch.equal(state[i]["master_param"], runtime.view(i, "param32"))
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
    refused(lambda s: s["state"][2].update(exp_avg=torch.zeros(54)), r"exp_avg of '1\.weight'.*\(53,\).*\(54,\)")
    refused(lambda s: s["state"][5].pop("exp_avg_sq"), r"'3\.bias' is not Adam's")
    for count in (2.5, -3.0, float("nan"), float("inf")):
        refused(lambda s, count=count: s["state"][5].update(step=torch.tensor(count)), rf"'3\.bias'.*found {count}")
    refused(lambda s: s["state"][5].update(step=torch.tensor(0.0)), r"'3\.bias' has moments, and a step count of 0")
    refused(lambda s: s["state"].update({77: s["state"][0]}), r"states of \[77\]")
    refused(lambda s: s["param_groups"][0]["params"].pop(), "doesn't match the size", ValueError)
    refused(lambda s: s["param_groups"].append({"params": []}), "different number", ValueError)
    assert_same_states(optimizer.state_dict(), before)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert optimizer.param_groups[0]["params"] == runtime.params


def test_states_of_zeros_with_step_0_are_loaded() -> None:
    model, runtime, plain = make_pair()
    ours, theirs = AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        set_gradients([model, plain], step)
        ours.step()
        theirs.step()
        if step == 0:
            for optimizer in (ours, theirs):
                state_dict = copy.deepcopy(optimizer.state_dict())
                for value in state_dict["state"][2].values():
                    value.zero_()
                optimizer.load_state_dict(state_dict)
    runtime.drain()
    assert_same_params(model, plain)
    assert_same_states(ours.state_dict(), theirs.state_dict())


def test_copies_are_refused() -> None:
    model, _, _ = make_pair()
    optimizer = AdamW(model.parameters())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ChunkcError, match="cannot be copied or pickled"):
            attempt(optimizer)
