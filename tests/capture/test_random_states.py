"""What backward computes again replays masks where there are some, and is the operator itself where there are none."""

from collections import Counter

import torch
import torch.nn.functional as F
from captures import capture_once
from torch import nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc._torch_compat.partitioning import replays_random_state
from chunkc.capture.graphs import Captured

BATCH, HEADS, TOKENS, WIDTH = 2, 2, 32, 16
SAVE, REPLAY = "run_and_save_rng_state", "run_with_rng_state"
DROPOUT = "aten.native_dropout.default"


class Layer(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return x + self.dropout(attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


class Layers(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(p) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().sum()


def captured_with(p: float) -> Captured:
    return capture_once(Layers(p), torch.randn(BATCH, TOKENS, WIDTH))


def targets(captured: Captured) -> tuple[Counter[str], Counter[str]]:
    graphs = captured.schedule.forward, captured.schedule.backward
    first, second = (Counter(op.target for op in graph.operators) for graph in graphs)
    return first, second


def num_attentions(found: Counter[str]) -> int:
    return sum(n for name, n in found.items() if "attention" in name and "backward" not in name)


def test_attention_without_dropout_is_computed_again_as_it_is() -> None:
    captured = captured_with(0.0)
    forward, backward = targets(captured)
    assert num_attentions(forward) == 3 and num_attentions(backward) == 3
    assert not any("rng_state" in name for name in (*forward, *backward))
    received = [n.meta["val"] for n in captured.backward.module.graph.find_nodes(op="placeholder")]
    assert not any(value.dtype is torch.uint8 for value in received), "no state of a generator is kept"


def test_its_work_is_counted() -> None:
    captured = captured_with(0.0)
    again = [op for op in captured.schedule.backward.operators if "attention" in op.target]
    first = [op for op in captured.schedule.forward.operators if "attention" in op.target]
    assert [op.flops for op in again if "backward" not in op.target] == [op.flops for op in first]
    assert all(op.flops > 0 for op in first)


def test_masks_are_still_replayed() -> None:
    _, backward = targets(captured_with(0.3))
    assert num_attentions(backward) == 3, "attention beside dropout is still itself"
    assert backward[f"{REPLAY}({DROPOUT})"] == 3, "one state for each dropout"


def test_a_state_is_a_saved_value() -> None:
    captured = captured_with(0.3)
    saving = [op for op in captured.schedule.forward.operators if op.target == f"{SAVE}({DROPOUT})"]
    readers = [captured.schedule.backward.operators[op.read_by[0]].target for op in saving]
    assert [op.saved_nbytes for op in saving] == 3 * [torch.get_rng_state().numel()]
    assert readers == 3 * [f"{REPLAY}({DROPOUT})"]


def test_an_operator_with_a_state_moves_what_it_moves_alone_and_the_state() -> None:
    """Forward needs its result alone, and backward its mask, of a byte for each element; the loss needs both."""
    tokens_nbytes, state_nbytes = BATCH * TOKENS * WIDTH * 4, torch.get_rng_state().numel()
    results_nbytes = tokens_nbytes, tokens_nbytes // 4
    for graph, result_nbytes in zip(captured_with(0.3).schedule.graphs, results_nbytes, strict=True):
        found = [op for op in graph.operators if "rng_state" in op.target]
        nbytes = state_nbytes + tokens_nbytes + result_nbytes
        assert [(op.nbytes, op.dtype) for op in found[1:]] == 2 * [(nbytes, "float32")]


def test_gradients_are_those_of_plain_pytorch() -> None:
    """With dropout too, from one seed, operator by operator."""
    for p in (0.0, 0.3):
        x = torch.randn(BATCH, TOKENS, WIDTH)
        plain = Layers(p)
        torch.manual_seed(7)
        wanted = plain(x)
        wanted.backward()
        model = chunkc.compile(Layers(p), "emulated-64m-64m", dtype=torch.float32, backend="eager")
        torch.manual_seed(7)
        found = model(x)
        found.backward()
        torch.testing.assert_close(found.detach(), wanted.detach())
        for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert value.grad is not None and other.grad is not None
            torch.testing.assert_close(value.grad.clone(), other.grad, msg=name)


class Noisy(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x) + self.dropout.p


def test_what_is_drawn_again_counts_in_backward() -> None:
    model = Layers(0.3)
    model.layers = nn.ModuleList([Layer(0.0), Noisy(0.3)])
    captured = capture_once(model, torch.randn(BATCH, TOKENS, WIDTH))
    found = [n for n in captured.backward.module.graph.nodes if replays_random_state(n)]
    assert [n.meta["val"].shape for n in found] == [(BATCH, TOKENS, WIDTH)]
    (again,) = (op for op in captured.schedule.backward.operators if op.target.startswith(REPLAY))
    assert again.live_nbytes >= BATCH * TOKENS * WIDTH * 4
