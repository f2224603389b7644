"""ACCEPTANCE 19, continued: writes, conversions, foreign optimizers, penalties, hooks and swaps on managed parameters.

Whatever is done is done to the plain twin as well; both must train on alike, element by element. What is refused is
refused by name and leaves the model as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import PHASES, TOLERANCE, Small, Twins, twins_at
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, vector_to_parameters

import chunkc
from chunkc import ChunkcError


@pytest.fixture(params=PHASES)
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Twins:
    """Twins of the test's own; on the compiled side every stream is late, so that pending updates are still pending."""
    monkeypatch.setenv("CHUNKC_EMULATED", "poison,delay=2,seed=5")
    return twins_at(request.param)


def weights(twins: Twins) -> tuple[nn.Parameter, nn.Parameter]:
    """One trained weight on both sides."""
    return twins.model.get_parameter("second.weight"), twins.plain.get_parameter("second.weight")


def close(found: Any, expected: Any) -> None:
    """Equal within what two correct updates differ by."""
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_a_view_kept_while_its_parameter_changes_says_so(own: Twins) -> None:
    """It is a view of a copy: after a write or a step it raises instead of showing the old value."""
    p, q = weights(own)
    views = [p.t(), p.view(-1)[3:], p.data[0]]
    close(views[1] + 0, q.view(-1)[3:])
    with torch.no_grad():
        for side in (p, q):
            side.mul_(2)
    for view in views:
        with pytest.raises(ChunkcError, match=r"second\.weight.*taken before the parameter changed"):
            view.sum()
    view = p.t()
    close(view + 0, q.t())
    if p.grad is None:
        own.backward()
    own.step()
    with pytest.raises(ChunkcError, match="taken before"):
        view.sum()


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p)),
    "add_": lambda p: p.add_(p * 0.5, alpha=2),
    "data": lambda p: p.data.mul_(-2),
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p.data),
    "init": lambda p: nn.init.constant_(p, 0.25),
    "foreach": lambda p: torch._foreach_mul_([p, p.data], 0.5),
    "setitem through data": lambda p: p.data.fill_(0.1),
}


@pytest.mark.parametrize("phase", PHASES)
def test_writes_in_place_are_kept_and_trained_on(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What any in-place operator writes is read back, and the next steps start from it exactly."""
    monkeypatch.setenv("CHUNKC_EMULATED", "poison,delay=2,seed=5")
    twins = twins_at(phase)
    for write in WRITES.values():
        for side in (twins.model, twins.plain):
            with torch.no_grad():
                write(side.second.weight)
                write(side.scale)
        twins.check_params()
    twins.check_training()


def test_what_cannot_be_kept_is_refused_and_changes_nothing(own: Twins) -> None:
    """Writes to views, replaced data, other shapes and dtypes; afterwards training goes on as the twin's."""
    p = weights(own)[0]
    refused: dict[str, Callable[[], Any]] = {
        "index": lambda: p.__setitem__(0, 1.0),
        "view": lambda: p.view(-1).mul_(2),
        "transpose": lambda: p.t().copy_(torch.zeros(16, 16)),
        "row": lambda: p.data[1].zero_(),
        "set data": lambda: setattr(p, "data", torch.zeros(16, 16)),
        "set_": lambda: p.set_(torch.zeros(3)),
        "resize_": lambda: p.data.resize_(3),
        "vector": lambda: vector_to_parameters(torch.zeros(1000), own.model.parameters()),
    }
    for what, write in refused.items():
        with torch.no_grad(), pytest.raises(ChunkcError, match=r"second|scale"):
            write()
            pytest.fail(f"{what} was silent")
    own.check_params()
    own.check_training()


def test_conversions_that_change_nothing_work_and_others_are_refused_whole(own: Twins) -> None:
    """HF's Trainer calls ``model.to(device)`` whenever it likes; ``half`` may not leave half a model behind."""
    model = own.model
    for convert in (lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to(torch.float32)):
        assert convert(model) is model and convert(model.second) is model.second
    changes = [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.to("meta"), lambda m: m.bfloat16()]
    changes += [lambda m: m.to_empty(device="cpu"), lambda m: m.type(torch.float16), lambda m: m.share_memory()]
    for change in changes:
        for part in (model, model.second):
            with pytest.raises(ChunkcError, match=r"weight|scale"):
                change(part)
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            model.cuda()
    assert model.offset.dtype is torch.float32, "buffers wait for the parameters' verdict"
    own.check_params()
    own.check_training()


def test_state_dicts_load_in_place_or_are_refused(own: Twins) -> None:
    """From plain PyTorch, strict and not; a wrong shape changes nothing; ``assign=True`` is refused before training."""
    source = Small().state_dict()
    for side in (own.model, own.plain):
        side.load_state_dict(source)
    own.check_params()
    wrong = {**source, "second.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        own.model.load_state_dict({"second.weight": wrong["second.weight"]}, strict=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        own.model.load_state_dict({})
    own.check_params()
    own.check_training()
    own.model.load_state_dict(source, assign=True)
    with pytest.raises(ChunkcError, match=r"second\.weight.*assign=True"):
        own.model(own.x)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4, fused=True),
        lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-4, foreach=False),
    ],
    ids=["sgd", "adamw-foreach", "adamw-fused", "adam-single"],
)
@pytest.mark.parametrize("made", ["before", "after"])
def test_foreign_optimizers_step_on_true_values(make: Any, made: str) -> None:
    """torch's own optimizers over managed parameters equal themselves over plain ones, chunkc.AdamW in between."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        plain, x = Small(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    foreign = make(model.parameters()) if made == "before" else None
    chunkc.compile(model, "emulated-96k-64m", dtype=torch.float32, backend="eager")
    foreign = foreign or make(model.parameters())
    twins = Twins(model, plain, foreign, make(plain.parameters()), x)
    for _ in range(3):
        twins.backward()
        twins.check_gradients()
        twins.step()
        twins.check_params()


def test_a_foreign_step_and_ours_may_alternate(own: Twins) -> None:
    """A plain SGD step writes the master copy, and our own next step starts from it."""
    for side in (own.model, own.plain):
        torch.optim.SGD(side.parameters(), lr=0.1).step()
    own.check_params()
    own.check_training()


@pytest.mark.parametrize("bound", [1e-3, 0.5, 1e3])
def test_torch_clipping_sees_true_norms_and_its_changes_reach_the_update(bound: float) -> None:
    """``clip_grad_norm_`` and ``clip_grad_value_`` between backward and step."""
    twins = twins_at("graded")
    norms = [clip_grad_norm_(side.parameters(), bound) for side in (twins.model, twins.plain)]
    close(*norms)
    twins.check_gradients()
    for side in (twins.model, twins.plain):
        clip_grad_value_(side.parameters(), bound / 30)
    twins.check_gradients()
    twins.check_training()


def test_gradients_written_in_place_or_assigned_reach_the_update() -> None:
    """``p.grad.copy_(g)`` writes to the chunk; the plain tensor of ``p.grad = g`` gets there with the step."""
    for assigned in (False, True):
        twins = twins_at("graded")
        p, q = weights(twins)
        for side in (p, q):
            assert side.grad is not None
            value = torch.linspace(-1, 1, 256).view(16, 16)
            if assigned:
                side.grad = value
            else:
                side.grad.copy_(value)
        twins.check_gradients()
        if not assigned:
            with pytest.raises(ChunkcError, match=r"second\.weight"):
                p.grad.view(-1)[0] = 1.0
        twins.check_training()


def test_a_kept_gradient_never_shows_another_backward() -> None:
    """After step it says so, and also while the next backward's gradient stands in its place."""
    twins = twins_at("graded")
    kept = weights(twins)[0].grad
    assert kept is not None
    views = (kept, kept.detach())
    twins.optimizer.step()
    for view in views:
        with pytest.raises(ChunkcError, match=r"second\.weight was consumed by step"):
            view.sum()
        with pytest.raises(ChunkcError, match=r"second\.weight"):
            view.mul_(2)
    twins.plain_optimizer.step()
    for _, optimizer in twins.sides():
        optimizer.zero_grad()
    twins.backward()
    for view in views:
        for use in (torch.Tensor.sum, torch.Tensor.zero_):
            with pytest.raises(ChunkcError, match=r"second\.weight of an earlier backward"):
                use(view)
    twins.check_training()


TRAINED = ("first.weight", "first.bias", "second.weight", "second.bias", "last.weight", "last.bias")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("names", [TRAINED, ("second.weight",), (*TRAINED, "scale")], ids=["all", "one", "frozen"])
def test_a_penalty_outside_the_compiled_call_arrives(names: tuple[str, ...], when: str) -> None:
    """Its gradient is added elementwise to the compiled one, before or after the forward was called."""
    twins = twins_at("staged")
    for _ in range(4):
        for side, _ in twins.sides():

            def penalty(side: nn.Module = side) -> torch.Tensor:
                return sum((side.get_parameter(n).pow(2).sum() for n in names), torch.zeros(()))

            early = penalty() if when == "before" else None
            loss = side(twins.x)
            (loss + 0.1 * (penalty() if early is None else early)).backward()
        twins.check_gradients()
        twins.step()
        twins.check_params()


def test_a_penalty_on_a_parameter_without_a_compiled_gradient_is_refused_by_name() -> None:
    """No chunk holds a gradient of a parameter that the forward does not use; dropping it would be silent."""
    twins = twins_at("staged")
    (twins.model(twins.x) + twins.model.unused.pow(2).sum()).backward()
    close(twins.model.unused.grad, 2 * twins.plain.unused.detach())
    with pytest.raises(
        ChunkcError, match="unused hold gradients, but the forward of the compiled model does not train"
    ):
        twins.optimizer.step()
    twins.model.unused.grad = None
    twins.plain(twins.x).backward()
    twins.check_training()


def test_partial_backwards_are_refused_by_name_before_anything_changes() -> None:
    """``autograd.grad`` and ``backward(inputs=...)`` would need gradients that went into chunks."""
    twins = twins_at("settled")
    model = twins.model
    for run in (
        lambda loss: torch.autograd.grad(loss, model.second.weight),
        lambda loss: torch.autograd.grad(loss, [model.first.bias, model.last.bias]),
        lambda loss: loss.backward(inputs=[model.second.weight]),
    ):
        with pytest.raises(ChunkcError, match=r"leaves out the gradients of .*first\.weight"):
            run(model(twins.x))
        assert all(p.grad is None for p in model.parameters())
    twins.check_training()


def test_hooks_on_parameters_are_refused_when_they_are_registered(own: Twins) -> None:
    """Before a forward, between forward and backward, and after; those from before ``compile`` too."""
    p = weights(own)[0]
    for register in (p.register_hook, p.register_post_accumulate_grad_hook):
        with pytest.raises(ChunkcError, match=r"second\.weight.*takes no gradient hooks"):
            register(lambda *_: None)
    own.check_training()
    loss = own.model(own.x)
    with pytest.raises(ChunkcError, match=r"second\.weight"):
        p.register_hook(lambda *_: None)
    loss.backward()
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        model = Small()
        getattr(model.second.weight, name)(lambda *_: None)
        with pytest.raises(ChunkcError, match=r"second\.weight .*have gradient hooks"):
            chunkc.compile(model, "emulated-96k-64m", dtype=torch.float32, backend="eager")


def test_a_module_hook_given_later_is_run() -> None:
    """Torch's default would ignore a forward hook that a module gets after capture."""
    twins = twins_at("settled")
    for side, _ in twins.sides():
        side.first.register_forward_hook(lambda module, args, output: output * 3)
    twins.check_training()


def test_freezing_later_is_honoured_before_the_first_forward_and_refused_after() -> None:
    """``requires_grad_`` decides at capture; layouts do not change after it."""
    twins = twins_at("staged")
    for side, _ in twins.sides():
        side.second.requires_grad_(False)
        side.scale.requires_grad_(True)
    twins.check_training()
    twins.model.second.requires_grad_(True)
    with pytest.raises(ChunkcError, match=r"second\.weight"):
        twins.model(twins.x).backward()


SWAPS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda m: setattr(m, "second", nn.Linear(16, 16)),
    "parameter": lambda m: setattr(m.second, "weight", nn.Parameter(torch.zeros(16, 16))),
    "added": lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(3))),
    "deleted": lambda m: delattr(m, "unused"),
    "tied": lambda m: setattr(m.second, "bias", m.first.bias),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("phase", ["staged", "settled"])
def test_other_parameters_than_the_compiled_ones_are_refused(swap: str, phase: str) -> None:
    """The layout is fixed: nothing is computed with parameters that it does not know."""
    twins = twins_at(phase)
    SWAPS[swap](twins.model)
    with pytest.raises(ChunkcError, match="replaced, added or removed"):
        twins.model(twins.x)
    with torch.no_grad(), pytest.raises(ChunkcError, match="replaced, added or removed"):
        twins.model(twins.x)


def test_swapped_insides_are_noticed() -> None:
    """``swap_tensors`` keeps the object and takes what made it managed."""
    twins = twins_at("staged")
    torch.utils.swap_tensors(twins.model.second.weight, nn.Parameter(torch.zeros(16, 16)))
    with pytest.raises(ChunkcError, match=r"second\.weight"):
        twins.model(twins.x)
