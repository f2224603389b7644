"""Outputs of a forward that are views of one tensor are such views afterwards, and train as in plain PyTorch."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import chunkc
from chunkc.capture import backend as capture_backend

HW = "emulated-1m-16m"
KINDS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "slices": lambda h: (h[:, :3], h[:, 3:]),
    "shapes": lambda h: (h.view(-1), h.t()),
    "one detached": lambda h: (h[:, :3], h.detach()[:, 3:]),
    "views of parts": lambda h: tuple(part.t() for part in h.chunk(2, 1)),
    "part and view": lambda h: (h.chunk(2, 1)[0], h.t()),
    "one twice": lambda h: (v := h[:, :3], v, h.t()),
    "two tensors": lambda h: (h[:, :3], (2 * h).t(), h.t(), (g := 3 * h)[0], g[1]),
    "parts": lambda h: h.chunk(2, 1),
    "base and view": lambda h: (h, h[0]),
}


class Views(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.first(x))
        return (self.second(hidden), *KINDS[self.kind](hidden))


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        plain = Views(kind)
    return chunkc.compile(copy.deepcopy(plain), HW, dtype=torch.float32, backend="eager"), plain


@pytest.mark.parametrize(
    ("kind", "uses"), [*((k, "all") for k in KINDS), *product(("slices", "two tensors"), ("last view", "no view"))]
)
def test_views_of_one_tensor_train_as_in_plain_pytorch(kind: str, uses: str) -> None:
    models = pair(kind)
    optimizers = chunkc.AdamW(models[0].parameters(), lr=0.1), torch.optim.AdamW(models[1].parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        shown = []
        for model, optimizer in zip(models, optimizers, strict=True):
            head, *views = model(x)
            differentiable = [v for v in views if v.requires_grad]
            chosen = {"all": differentiable, "last view": differentiable[-1:]}
            terms = [v.square().mean() for v in chosen.get(uses, [])]
            sum(terms, head.sum() if uses in ("all", "no view") else torch.zeros(())).backward()
            shown.append([v.detach().clone() for v in (head, *views)])
            shown[-1] += [torch.tensor(p.grad is None) for p in model.parameters()]
            shown[-1] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*shown, rtol=1e-5, atol=1e-6)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["shapes", "two tensors"])
def test_a_write_to_one_view_shows_in_the_other(kind: str) -> None:
    outputs = []
    for model in pair(kind):
        _, *views = model(torch.ones(2, 4))
        with torch.no_grad():
            views[0].fill_(7.0)
        outputs.append(views)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    assert any(bool((v == 7).any()) for v in outputs[0][1:])


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        left, right = hidden[:, :3], hidden[:, 3:]
        torch._dynamo.graph_break()
        return (self.second(left) * right).square().sum()


def test_views_go_from_one_graph_of_a_broken_forward_to_the_next() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        plain = Broken()
    model = chunkc.compile(copy.deepcopy(plain), HW, dtype=torch.float32, backend="eager")
    optimizers = chunkc.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        for side, optimizer in zip((model, plain), optimizers, strict=True):
            side(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=1e-5, atol=1e-6)


def test_a_plan_ahead_is_the_plan_of_the_run() -> None:
    model, plain = pair("slices")
    ahead = chunkc.plan(plain, HW, example_inputs=(torch.ones(2, 4),), dtype=torch.float32, backend="eager")
    sum(v.sum() for v in model(torch.ones(2, 4))).backward()
    assert chunkc.plan_of(model).digest() == ahead.digest()


def test_an_evaluation_has_no_output_more() -> None:
    model, plain = pair("shapes")
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


def test_views_of_a_tensor_that_is_not_found_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_backend, "return_bases", lambda module: 0)
    model, _ = pair("slices")
    with pytest.raises(chunkc.CaptureError, match=r"several views of one tensor.*return that tensor too, or a clone"):
        model(torch.ones(2, 4))
