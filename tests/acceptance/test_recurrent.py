"""nn.LSTM, nn.GRU and nn.RNN train as in plain PyTorch, step by step in the plan; packed sequences outside of it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from pair import Pair
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.torch_version import TorchVersion

import chunkc

VOCABULARY, WIDTH, LENGTH = 40, 24, 5
Hidden = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LanguageModel(nn.Module):
    """Two layers that carry their state from batch to batch."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, bidirectional=bidirectional)
        self.head = nn.Linear(WIDTH * (1 + bidirectional), VOCABULARY)

    def forward(self, tokens: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        outputs, hidden = self.recurrent(self.embed(tokens[:-1]), hidden)
        return nn.functional.cross_entropy(self.head(outputs).flatten(0, 1), tokens[1:].flatten()), hidden

    def start(self, batch_size: int = 3) -> Hidden:
        zeros = torch.zeros(2 * (1 + self.recurrent.bidirectional), batch_size, WIDTH)
        return (zeros, zeros.clone()) if isinstance(self.recurrent, nn.LSTM) else zeros


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (LENGTH + 1, 3), generator=torch.Generator().manual_seed(seed))


KINDS = [
    (nn.LSTM, False, "eager", "emulated-180k-16m"),
    (nn.RNN, False, "eager", "emulated-96k-16m"),
    (nn.GRU, True, "eager", "emulated-240k-16m"),
    pytest.param(nn.RNN, False, "inductor", "emulated-96k-16m", marks=pytest.mark.slow),
    pytest.param(nn.LSTM, True, "inductor", "emulated-240k-16m", marks=pytest.mark.slow),
]


def _skip_where_torch_fails(kind: type[nn.RNNBase]) -> None:
    if kind is nn.LSTM and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("torch.compile itself fails on nn.LSTM with a state or packed sequences before torch 2.13")


@pytest.mark.long(but="RNN-False-eager-emulated-96k-16m")
@pytest.mark.parametrize(("kind", "bidirectional", "backend", "hw"), KINDS)
def test_state_is_carried_from_batch_to_batch(
    kind: type[nn.RNNBase], bidirectional: bool, backend: str, hw: str
) -> None:
    _skip_where_torch_fails(kind)
    pair = Pair(hw, LanguageModel(kind, bidirectional), backend=backend, chunk_size=512)
    names, hidden = list(pair.plain.state_dict()), [pair.plain.start(), pair.plain.start()]  # type: ignore[operator]
    for seed in range(4):

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, which: int, seed: int = seed) -> float:
            loss, after = model(tokens_of(seed), hidden[which])
            hidden[which] = after.detach() if isinstance(after, torch.Tensor) else tuple(h.detach() for h in after)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        ours, plain = step(pair.model, pair.optimizer, 0), step(pair.plain, pair.plain_optimizer, 1)
        assert ours == pytest.approx(plain, rel=1e-5)
        pair.check()
    assert list(pair.model.state_dict()) == names
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0


class Classifier(nn.Module):
    """Reads sequences of different lengths, packed."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return nn.functional.cross_entropy(self.head(outputs.mean(1)), labels)


@pytest.mark.long
@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    _skip_where_torch_fails(kind)
    pair = Pair("emulated-300k-16m", Classifier(kind), chunk_size=512)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 7, (5,), generator=generator)
        tokens = torch.randint(0, VOCABULARY, (5, int(lengths.max())), generator=generator)
        pair.step_on(lambda model, tokens=tokens, lengths=lengths: model(tokens, lengths, torch.arange(5) % 4))
        pair.check()


def test_a_refused_model_keeps_its_weights_as_they_were() -> None:
    model = LanguageModel(nn.LSTM)
    held = weakref.ref(model.head.weight)
    with pytest.raises(chunkc.ChunkcError, match=r"head\.weight cannot be managed"):
        chunkc.compile(model, "emulated-64m-64m", dtype=torch.float32)
    assert held() is model.head.weight
    again = copy.deepcopy(model)
    tokens, hidden = tokens_of(0), model.start()
    torch.testing.assert_close(model(tokens, hidden)[0], again(tokens, hidden)[0], rtol=0, atol=0)
