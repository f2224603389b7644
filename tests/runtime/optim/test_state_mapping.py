"""``optimizer.state`` reads and writes like torch's, element by element, or refuses by name."""

import gc
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_chunk import OneChunk, assert_same_params, make_model, make_pair, set_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from chunkc.errors import ChunkcError
from chunkc.runtime.optim.optimizers import AdamW

UNUSED = "3.bias"
Pair = tuple[nn.Sequential, AdamW, nn.Sequential, torch.optim.AdamW]


def trained(num_steps: int = 3, dtype: torch.dtype = torch.float32) -> Pair:
    model, _, plain = make_pair(dtype)
    pair = model, AdamW(model.parameters(), lr=1e-2), plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(pair, num_steps)
    return pair


def train(pair: Pair, num_steps: int, seed: int = 0) -> None:
    model, ours, plain, theirs = pair
    for step in range(num_steps):
        set_gradients([model, plain], seed + step, skip=(UNUSED,))
        ours.step()
        theirs.step()


def check(pair: Pair) -> None:
    model, ours, plain, theirs = pair
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        found, wanted = ours.state.get(p, {}), theirs.state.get(q, {})
        assert list(found) == list(wanted)
        for name in wanted:
            torch.testing.assert_close(found[name].clone(), wanted[name], rtol=2e-6, atol=2e-8)
    train(pair, 2, seed=70)
    model[0].weight.chunkc_store.drain()
    assert_same_params(model, plain)


def test_reads_as_torch_does() -> None:
    pair = model, ours, plain, theirs = trained()
    names = {p: name for m in (model, plain) for name, p in m.named_parameters()}
    assert [names[p] for p in ours.state] == [names[q] for q in theirs.state]
    assert [names[p] for p in ours.state.keys()] == [names[p] for p, _ in ours.state.items()]
    assert len(ours.state) == len(theirs.state) == len(ours.state.values()) == 5
    unused, weight = model.get_parameter(UNUSED), model[0].weight
    assert unused not in ours.state and weight in ours.state and "weight" not in ours.state
    assert ours.state.get(unused) is None and not ours.state[unused] and unused not in ours.state
    steps = [state["step"] for state in ours.state.values()]
    assert all(isinstance(s, torch.Tensor) and s.dtype is torch.float32 and s.shape == () for s in steps)
    assert [s.item() for s in steps] == [3.0] * 5 and f"{steps[0]:.1f} {steps[0]}" == "3.0 3.0"
    assert repr(steps[0]) == "tensor(3.)" and float(1 - 0.9 ** steps[0]) == pytest.approx(1 - 0.9**3)
    check(pair)
    assert steps[0].item() == 5.0, "as torch's, it is the count and no copy of it"


Write = Callable[[torch.optim.Optimizer, nn.Parameter], Any]
WRITES: dict[str, Write] = {
    "moment in place": lambda o, p: o.state[p]["exp_avg"].zero_(),
    "moment by an operator": lambda o, p: o.state[p]["exp_avg_sq"].mul_(0.5).add_(1e-3),
    "out=": lambda o, p: torch.add(o.state[p]["exp_avg"], 0.25, out=o.state[p]["exp_avg"]),
    "moment": lambda o, p: o.state[p].__setitem__("exp_avg", torch.full_like(p, 0.125).detach()),
    "step": lambda o, p: o.state[p].__setitem__("step", torch.tensor(7.0)),
    "step in place": lambda o, p: o.state[p]["step"].add_(4),
    "step by +=": lambda o, p: o.state[p].__setitem__("step", o.state[p]["step"] + 2),
    "whole state": lambda o, p: o.state.__setitem__(p, a_state(p)),
    "whole state of a parameter never stepped": lambda o, p: o.state.update({p: a_state(p)}),
    "parts": lambda o, p: o.state[p].update(a_state(p)),
    "empty state": lambda o, p: o.state.__setitem__(p, {}),
    "del": lambda o, p: o.state.__delitem__(p),
    "pop": lambda o, p: o.state.pop(p),
    "pop of nothing": lambda o, p: o.state.pop(p, None),
    "clear one": lambda o, p: o.state[p].clear(),
    "clear": lambda o, p: o.state.clear(),
    "new": lambda o, p: setattr(o, "state", defaultdict(dict)),
    "some": lambda o, p: setattr(o, "state", defaultdict(dict, {p: a_state(p)})),
    "|=": lambda o, p: setattr(o, "state", operator.ior(o.state, {p: a_state(p)})),
    "|": lambda o, p: setattr(o, "state", o.state | {p: a_state(p)}),
    "| from the left": lambda o, p: setattr(o, "state", {p: a_state(p)} | o.state),
    "pairs": lambda o, p: o.state.update([(p, a_state(p))]),
    "|= of parts": lambda o, p: o.state.__setitem__(p, operator.ior(o.state[p], {"step": torch.tensor(5.0)})),
    "| of parts": lambda o, p: o.state.__setitem__(p, o.state[p] | a_state(p)),
    "setdefault": lambda o, p: o.state.setdefault(p, a_state(p)),
    "setdefault of a parameter never stepped": lambda o, p: o.state.setdefault(p, a_state(p)),
    "setdefault of a part": lambda o, p: o.state[p].setdefault("exp_avg", p),
    "popitem": lambda o, p: o.state.popitem(),
    "pop of no part": lambda o, p: o.state[p].pop("max_exp_avg_sq", None),
    "itself": lambda o, p: setattr(o, "state", o.state),
    "moved": lambda o, p: move(o),
}


def a_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(11.0),
        "exp_avg": torch.linspace(-1, 1, p.numel()).view(p.shape),
        "exp_avg_sq": torch.linspace(1, 2, p.numel()).view(p.shape),
    }


def move(optimizer: torch.optim.Optimizer) -> None:
    """What scripts do after they load a state dict."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu")


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_trained_on_as_torch_does(write: str) -> None:
    pair = model, ours, plain, theirs = trained()
    name = UNUSED if write.endswith(("never stepped", "of nothing")) else "0.weight"
    WRITES[write](ours, model.get_parameter(name))
    WRITES[write](theirs, plain.get_parameter(name))
    check(pair)


REFUSED: dict[str, tuple[Write, str]] = {
    "part of nothing": (lambda o, p: o.state[unused(o)].__setitem__("exp_avg", torch.zeros(3)), "never stepped.*all"),
    "unknown part": (lambda o, p: o.state[p].__setitem__("momentum_buffer", p), "no 'momentum_buffer'"),
    "unknown part of a state": (lambda o, p: o.state.update({p: {**a_state(p), "x": p}}), r"0\.weight.*no \['x'\]"),
    "missing part": (lambda o, p: o.state.update({p: {"step": 1}}), r"'0\.weight'.*missing"),
    "shape": (lambda o, p: o.state[p].__setitem__("exp_avg", torch.zeros(3)), r"0\.weight.*\(53, 7\).*\(3,\)"),
    "shape of a state": (lambda o, p: o.state.update({p: {**a_state(p), "exp_avg": p[0]}}), r"0\.weight.*shape"),
    "step 0": (lambda o, p: o.state[p]["step"].zero_(), "clear"),
    "step 0 of a state": (lambda o, p: o.state.update({p: {**a_state(p), "step": 0}}), "clear"),
    "half a step": (lambda o, p: o.state[p].__setitem__("step", 1.5), "whole number.*1.5"),
    "negative step": (lambda o, p: o.state[p]["step"].neg_(), "whole number.*-3"),
    "NaN step": (lambda o, p: o.state[p].__setitem__("step", float("nan")), "whole number.*nan"),
    "infinite step": (lambda o, p: o.state[p].__setitem__("step", float("inf")), "whole number.*inf"),
    "del of a part": (lambda o, p: o.state[p].__delitem__("exp_avg"), r"0\.weight.*cannot be removed"),
    "late part": (lambda o, p: o.state[p].update({**a_state(p), "exp_avg_sq": torch.zeros(3)}), r"\(53, 7\).*\(3,\)"),
    "late step": (lambda o, p: o.state[p].update({"exp_avg": p.detach(), "step": 2.5}), "whole number.*2.5"),
    "late state": (
        lambda o, p: o.state.update({p: a_state(p), unused(o): {**a_state(unused(o)), "step": 2.5}}),
        "whole number.*2.5",
    ),
    "late state by |=": (
        lambda o, p: setattr(o, "state", operator.ior(o.state, {p: a_state(p), unused(o): {"step": 1}})),
        "missing",
    ),
    "late key": (lambda o, p: o.state.update({p: a_state(p), "x": a_state(p)}), "parameters and nothing else"),
    "late keyword": (lambda o, p: o.state.update({p: a_state(p)}, x={}), "parameters and nothing else"),
    "late tensor on meta": (
        lambda o, p: o.state.update({p: a_state(p), unused(o): on_meta(a_state(unused(o)))}),
        "exp_avg of '3.bias' is a dense tensor.*meta",
    ),
    "late value that is no tensor": (
        lambda o, p: o.state.update({p: a_state(p), unused(o): {"step": 1, "exp_avg": 0.0, "exp_avg_sq": 0.0}}),
        "exp_avg of '3.bias' is a tensor, found float",
    ),
    "late value that is no state": (lambda o, p: o.state.update({p: a_state(p), unused(o): 3}), "mapping.*found int"),
    "sparse": (lambda o, p: o.state[p].update(a_state(p), exp_avg=a_state(p)["exp_avg"].to_sparse()), "dense"),
    "complex": (lambda o, p: o.state[p].__setitem__("exp_avg", torch.zeros(p.shape, dtype=torch.cfloat)), "real"),
    "step in words": (lambda o, p: o.state[p].update({**a_state(p), "step": "seven"}), "whole number.*'seven'"),
    "steps": (lambda o, p: o.state.update({p: {**a_state(p), "step": torch.ones(2)}}), "whole number.*1., 1."),
    "pop of a part": (lambda o, p: o.state[p].pop("exp_avg"), r"0\.weight.*cannot be removed"),
    "popitem of a part": (lambda o, p: o.state[p].popitem(), r"0\.weight.*cannot be removed"),
    "setdefault of an unknown part": (lambda o, p: o.state[p].setdefault("x", 1), "no 'x'"),
    "view": (lambda o, p: o.state[p]["exp_avg"][0].zero_(), r"exp_avg of 0\.weight.*\['exp_avg'\]\.copy_\(value\)`\)$"),
    "address": (lambda o, p: o.state[p]["exp_avg"].data_ptr(), r"exp_avg of 0\.weight.*Use `\.clone\(\)` for a copy$"),
    "data": (lambda o, p: setattr(o.state[p]["exp_avg"], "data", p), r"exp_avg of 0\.weight"),
    "other key": (lambda o, p: o.state.__setitem__("x", {}), "parameters and nothing else"),
    "other tensor": (lambda o, p: o.state.__setitem__(nn.Parameter(p.detach()), a_state(p)), "nothing else"),
    "other states": (lambda o, p: setattr(o, "state", {"x": {}}), "nothing else"),
}


def on_meta(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part if name == "step" else part.to("meta") for name, part in state.items()}


def unused(optimizer: torch.optim.Optimizer) -> nn.Parameter:
    return next(p for p in optimizer.param_groups[0]["params"] if p.shape == (3,))


@pytest.mark.parametrize("write", REFUSED)
def test_what_cannot_be_kept_is_refused_and_changes_nothing(write: str) -> None:
    pair = model, ours, _, _ = trained()
    change, match = REFUSED[write]
    with pytest.raises(ChunkcError, match=match):
        change(ours, model[0].weight)
    check(pair)


def test_a_foreign_key_is_no_key() -> None:
    ours = trained()[1]
    for key in (nn.Parameter(torch.zeros(3)), "x", make_model()[0].weight):
        assert key not in ours.state and ours.state.get(key, 5) == 5
        with pytest.raises(KeyError):
            ours.state[key]
        with pytest.raises(KeyError):
            del ours.state[key]
    with pytest.raises(KeyError, match="never stepped"):
        del ours.state[unused(ours)]


@pytest.mark.parametrize(
    "write", ["moment in place", "out=", "moment", "step in place", "step", "whole state", "parts", "some", "load"]
)
def test_a_view_says_that_its_state_was_written(write: str) -> None:
    """It is a view of a copy: it never shows the old value, and views of other states go on."""
    model, ours, _, _ = trained()
    weight, other = model[0].weight, ours.state[model[0].bias]["exp_avg"].clone()
    views = [ours.state[p][name].view(-1) for name in ("exp_avg", "step") for p in (weight, model[0].bias)]
    if write == "load":
        ours.load_state_dict(ours.state_dict())
    else:
        WRITES[write](ours, weight)
        assert torch.equal(views[1] + 0, other) and torch.equal(views[3] + 0, torch.tensor([3.0]))
    for view in views[::2]:
        with pytest.raises(ChunkcError, match=r"of 0\.weight.*taken before the optimizer state changed"):
            view.sum()
    assert torch.equal(ours.state[weight]["exp_avg"].view(-1) + 0, ours.state[weight]["exp_avg"].clone().view(-1))


def test_a_state_of_zeros_with_step_0_is_the_beginning() -> None:
    pair = model, ours, plain, theirs = trained(0)
    for m, o in ((model, ours), (plain, theirs)):
        for p in m.parameters():
            zeros = {key: torch.zeros_like(p).detach() for key in ("exp_avg", "exp_avg_sq")}
            o.state[p] = {"step": torch.tensor(0.0), **zeros}
    train(pair, 2)
    model[0].weight.chunkc_store.drain()
    assert_same_params(model, plain)


def test_sixteen_bit_states_have_the_master_parameter() -> None:
    model, ours, _, _ = trained(dtype=torch.bfloat16)
    weight, runtime = model[0].weight, model[0].weight.chunkc_store
    state = ours.state[weight]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
    assert torch.equal(state["master_param"].clone(), runtime.view(0, "param32"))
    assert all(state[name].dtype is torch.float32 for name in state)
    state["master_param"].fill_(1.001)
    assert torch.equal(runtime.view(0, "param32"), torch.full((53, 7), 1.001))
    assert ours.state[weight]["step"] == 3


def test_another_optimizer_takes_the_states_over() -> None:
    """Those of the first are refused from then on, also through tensors that were kept."""
    model, first, _, _ = trained()
    kept = first.state[model[0].weight]["exp_avg"]
    second = AdamW(model.parameters())
    assert len(second.state) == 0 and model[0].weight not in second.state
    set_gradients([model], 0)
    second.step()
    assert len(second.state) == 6
    reads = (kept.sum, kept.zero_, first.state.clear, lambda: len(first.state), lambda: list(first.state.values()))
    for read in reads:
        with pytest.raises(ChunkcError, match="another one has begun"):
            read()
    assert len(second.state) == 6


def test_a_cleared_state_is_gone() -> None:
    model, ours, _, _ = trained()
    state = ours.state[model[0].weight]
    kept = state["exp_avg"]
    ours.state.clear()
    assert len(state) == 0 and len(ours.state_dict()["state"]) == 0
    with pytest.raises(ChunkcError, match=r"exp_avg of 0\.weight is gone"):
        kept.sum()


def test_distributed_state_dicts_leave_a_trained_optimizer_alone() -> None:
    """torch's helpers step optimizers that look as if they had never been stepped."""
    pair = model, ours, plain, theirs = trained()
    for m, o in ((model, ours), (plain, theirs)):
        found = get_optimizer_state_dict(m, o)
        assert found["state"]["0.weight"]["step"] == 3
        set_optimizer_state_dict(m, o, found, options=StateDictOptions(strict=False))
    check(pair)


def test_a_state_holds_no_circle() -> None:
    """An optimizer goes when nobody holds it, without the garbage collector."""
    model, ours, _, _ = trained()
    states = ours.state, list(ours.state.values()), ours.state[model[0].weight]["exp_avg"]
    gone = weakref.ref(ours)
    gc.disable()
    try:
        del ours
        assert gone() is None
    finally:
        gc.enable()
    assert len(states[0]) == 5 and states[2].sum().isfinite()


def test_only_what_is_read_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours, _, _ = trained()
    runtime, asked = model[0].weight.chunkc_store, list[tuple[int, tuple[str, ...]]]()
    read_state = runtime.read_state
    monkeypatch.setattr(OneChunk, "read_state", lambda self, i, names: asked.append((i, names)) or read_state(i, names))
    for state in ours.state.values():
        assert state["step"].item() == 3 and list(state.items())
    assert not asked
    ours.state[model[0].weight]["exp_avg_sq"].clone()
    assert asked == [(0, ("exp_avg_sq",))]
