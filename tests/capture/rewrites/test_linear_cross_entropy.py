"""Losses in pieces: found in the forms in which models write them, with the values and gradients of the whole."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from chunkc.capture.rewrites import PieceSize, rewrite
from chunkc.capture.rewrites.cross_entropy_in_pieces import linear_cross_entropy

CLASSES, WIDTH, BATCH, TOKENS = 200, 24, 3, 10
SIZE = PieceSize(nbytes=4 * CLASSES * 4, min_num=2)
Forward = Callable[[nn.Linear, torch.Tensor, torch.Tensor], Any]


class Headed(nn.Module):
    """A layer before a head, and a loss in the form of ``loss``."""

    def __init__(self, loss: Forward, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss
        self.to(dtype)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head, torch.tanh(self.body(x)), labels)


@pytest.fixture(autouse=True)
def without_other_graphs() -> None:
    """Dynamo compiles one code only a few times."""
    torch._dynamo.reset_code(Headed.forward.__code__)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    labels[0, 2:5] = -100
    return x.to(dtype), labels


class Rewriting:
    """A backend that rewrites Dynamo's graph and runs it as it is; ``num_losses`` counts losses in pieces."""

    def __init__(self, size: PieceSize = SIZE) -> None:
        self.size, self.num_losses = size, 0

    def __call__(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        rewrite(module, self.size)
        self.num_losses += len(module.graph.find_nodes(op="call_function", target=linear_cross_entropy))
        return module.forward


def results(model: Headed, run: Callable[..., Any], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Outputs, gradients of parameters and of the input, of a loss that weights all outputs."""
    x, labels = batch(dtype)
    x.requires_grad_()
    outputs = run(x, labels)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(0.5, 1.5, o.numel()).view_as(o) for o in outputs]
    total = torch.stack([(o * w).sum() for o, w in zip(outputs, weights, strict=True) if o.requires_grad]).sum()
    return [*(o.detach() for o in outputs), *torch.autograd.grad(total, [*model.parameters(), x])]


def flat(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).flatten(0, 1), labels.flatten())


def padded_labels(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), shifted.view(-1), ignore_index=-100), logits


def sliced(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x)
    return nn.CrossEntropyLoss()(logits[:, :-1].contiguous().view(-1, CLASSES).float(), labels[:, 1:].reshape(-1))


def sliced_and_returned(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x).float()
    last = logits[..., 1::2, :]
    loss = F.cross_entropy(last.reshape(-1, CLASSES), labels[:, :5].reshape(-1), reduction="sum")
    return loss / 7, logits, last


def one_by_one(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x)[:2, 1:].flatten(0, 1), labels[:2, 1:].flatten(), reduction="none")


def other_ignored(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    labels = torch.where(labels < 0, 7, labels)
    return F.cross_entropy(head(x).view(-1, CLASSES), labels.view(-1), None, None, 7), head.weight.sum()


def best_returned(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x)
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), logits.argmax(-1).float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "loss", [flat, padded_labels, sliced, sliced_and_returned, one_by_one, other_ignored, best_returned]
)
def test_values_and_gradients_are_those_of_the_whole(loss: Forward, bias: bool) -> None:
    model, backend = Headed(loss, bias=bias), Rewriting()
    expected = results(model, model)
    found = results(model, torch.compile(model, backend=backend, fullgraph=True))
    assert backend.num_losses == 1
    for value, right in zip(found, expected, strict=True):
        assert value.dtype is right.dtype and value.shape == right.shape
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6 * float(right.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [flat, padded_labels])
def test_in_16_bits_errors_are_those_of_the_whole(loss: Forward, dtype: torch.dtype) -> None:
    model, precise = Headed(loss, bias=True, dtype=dtype), Headed(loss, bias=True, dtype=dtype).double()
    right = results(precise, precise, torch.float64)
    plain, found = results(model, model, dtype), results(model, torch.compile(model, backend=Rewriting()), dtype)
    for value, whole, exact in zip(found, plain, right, strict=True):
        assert value.dtype is whole.dtype
        errors, of_whole = ((v.double() - exact).abs() for v in (value, whole))
        assert errors.square().mean() <= 1.5**2 * of_whole.square().mean()
        assert errors.max() <= 2 * of_whole.max()


@pytest.mark.parametrize("returns_logits", [False, True])
def test_a_loss_scale_multiplies_before_gradients_are_rounded(returns_logits: bool) -> None:
    model = Headed(padded_labels if returns_logits else flat, dtype=torch.float16)
    x, labels = batch(torch.float16)
    scale = 2.0**15
    compiled = torch.compile(model, backend=Rewriting())
    for share, lost in ((1e-5, False), (1e-5 / scale, True)):  # a share of the loss far below what fp16 resolves
        outputs = compiled(x, labels)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        (gradient,) = torch.autograd.grad(loss.float() * share * scale, [model.head.weight])
        assert bool(gradient.count_nonzero() < gradient.numel() // 2) is lost


def weighted(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), torch.ones(CLASSES))


def smoothed(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def soft(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).flatten(0, 1), F.one_hot(labels.flatten().relu(), CLASSES).float())


def capped(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(torch.tanh(head(x)).flatten(0, 1), labels.flatten())


def detached(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).detach().flatten(0, 1), labels.flatten()) + x.sum() + head.weight.sum()


def by_class(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).transpose(1, 2), labels)


def fewer_classes(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x)[..., :150].flatten(0, 1), labels.flatten().clamp(max=149))


def overwritten(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x)
    logits[..., 3] = -10.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def overwritten_view(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x).flatten(0, 1)
    logits[:, :2].mul_(2)
    return F.cross_entropy(logits, labels.flatten())


def overwritten_input(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    hidden = x.detach() * 2
    with torch.no_grad():
        logits = head(hidden)
    hidden.add_(1)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + x.sum() + head.weight.sum()


def labelled_by_logits(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = head(x).flatten(0, 1)
    return F.cross_entropy(logits, logits.argmax(-1))


def rounded(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    return F.cross_entropy(head(x).bfloat16().flatten(0, 1), labels.flatten())


def cast_by_context(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "loss",
    [
        *(weighted, smoothed, soft, capped, detached, by_class, fewer_classes, overwritten, overwritten_view),
        *(overwritten_input, labelled_by_logits, rounded, cast_by_context),
    ],
)
def test_other_losses_stay_as_they_are(loss: Forward) -> None:
    model, backend = Headed(loss), Rewriting()
    expected = results(model, model)
    found = results(model, torch.compile(model, backend=backend, fullgraph=True))
    assert backend.num_losses == 0
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right)


def test_a_small_loss_stays_as_it_is() -> None:
    model, backend = Headed(flat), Rewriting(PieceSize())
    torch.compile(model, backend=backend)(*batch())
    assert backend.num_losses == 0


def test_symbolic_sizes_stay_as_they_are() -> None:
    model, backend = Headed(flat), Rewriting()
    torch.compile(model, backend=backend, dynamic=True)(*batch())
    assert backend.num_losses == 0


def test_a_frozen_head_gets_no_gradient_and_its_input_does() -> None:
    model = Headed(flat, bias=True)
    model.head.requires_grad_(False)
    expected = torch.autograd.grad(model(*batch()), list(model.body.parameters()))
    found = torch.autograd.grad(torch.compile(model, backend=Rewriting())(*batch()), list(model.body.parameters()))
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right)


def test_rows_without_any_label_give_what_the_whole_gives() -> None:
    model, (x, labels) = Headed(flat), batch()
    compiled = torch.compile(model, backend=Rewriting())
    assert compiled(x, torch.full_like(labels, -100)).isnan() == model(x, torch.full_like(labels, -100)).isnan()
