"""Small models as people write them by hand: graphs, recurrence, experts, towers, images, diffusion.

Each takes keyword inputs and returns an `Output` with the loss, as those of transformers do. Sizes are such that
parameters and optimizer states take several times the memory of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
WIDTH, NODES, VOCABULARY, LENGTH, SIZE, NUM_BATCHES = 96, 6, 64, 4, 8, 3


class Output(NamedTuple):
    loss: torch.Tensor


@dataclass(frozen=True, slots=True)
class Handwritten:
    """A model and what makes a batch of it from a generator."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def build(self) -> nn.Module:
        """A new model in training mode, with the same values every time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.make().train()

    def batches(self) -> list[Batch]:
        """Keyword inputs of forward, for several steps."""
        generator = torch.Generator().manual_seed(2)
        return [self.batch(generator) for _ in range(NUM_BATCHES)]


class GraphConvolution(nn.Module):
    """GCN (Kipf and Welling): sums over neighbours by a normalised adjacency ``[NODES, NODES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, target: torch.Tensor) -> Output:
        adjacency = torch.zeros(NODES, NODES, device=x.device).index_put((edges[0], edges[1]), torch.ones(()).to(x))
        adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            x = x + torch.relu(adjacency @ layer(x))
        return Output(F.mse_loss(x, target))


class GraphAttention(nn.Module):
    """GAT (Velickovic et al.): attention over edges, softmax by scatter."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.source, self.target = (nn.Parameter(torch.randn(heads, WIDTH // heads) / 5) for _ in range(2))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, target: torch.Tensor) -> Output:
        value = self.value(x).unflatten(-1, (self.heads, -1))
        score = F.leaky_relu((value * self.source).sum(-1)[edges[0]] + (value * self.target).sum(-1)[edges[1]], 0.2)
        weight = score.exp()
        total = torch.zeros(NODES, self.heads, device=x.device).index_add(0, edges[1], weight)
        message = value[edges[0]] * (weight / total[edges[1]])[..., None]
        mixed = torch.zeros_like(value).index_add(0, edges[1], message)
        return Output(F.mse_loss(self.out(F.elu(mixed.flatten(1))), target))


class Experts(nn.Module):
    """A layer of experts, each applied to all tokens and masked by the gate's two best."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.embed, self.gate, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, num),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(num)
        )

    def forward(self, tokens: torch.Tensor) -> Output:
        x = self.embed(tokens[:, :-1])
        best = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y + expert(x) * (best.values * (best.indices == number)).sum(-1, keepdim=True)
        return Output(F.cross_entropy(self.head(x + y).flatten(0, 1), tokens[:, 1:].flatten()))


class WordModel(nn.Module):
    """The word language model: an embedding, two recurrent layers, a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> Output:
        hidden, _ = self.recurrent(self.embed(tokens[:, :-1]))
        return Output(F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten()))


class TwoTowers(nn.Module):
    """Contrastive towers over two kinds of inputs, with a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Output:
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits, own = self.scale.exp() * a @ b.T, torch.arange(len(a), device=a.device)
        return Output((F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2)


class UNet(nn.Module):
    """Down, middle and up with skips, told a time by features; predicts noise ``[batch, 3, SIZE, SIZE]``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(2 * width, 3, 3, 1, 1)
        self.down, self.up = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.middle, self.norm = nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.GroupNorm(4, 2 * width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> Output:
        first = F.silu(self.enter(noisy))
        low = F.silu(self.down(first)) + self.time(time)[..., None, None]
        up = self.up(low + F.silu(self.norm(self.middle(low))))
        return Output(F.mse_loss(self.leave(torch.cat([up, first], 1)), noise))


class DiffusionTransformer(nn.Module):
    """DiT (Peebles and Xie): blocks whose norms are shifted and scaled by what they are told."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.enter, self.leave, self.tell = nn.Linear(12, width), nn.Linear(width, 12), nn.Linear(1, width)
        self.adapt = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(depth))
        self.attend = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))
        self.widen = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, patches: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> Output:
        x, told = self.enter(patches), F.silu(self.tell(time))
        for adapt, attend, widen in zip(self.adapt, self.attend, self.widen, strict=True):
            shift, scale, gate, shift2, scale2, gate2 = adapt(told)[:, None].chunk(6, -1)
            h = self.norm(x) * (1 + scale) + shift
            x = x + gate * attend(h, h, h, need_weights=False)[0]
            x = x + gate2 * widen(self.norm(x) * (1 + scale2) + shift2)
        return Output(F.mse_loss(self.leave(self.norm(x)), noise))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al.): tokens and channels mixed in turn."""

    def __init__(self, num_tokens: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Linear(num_tokens, num_tokens)
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        x = x + self.tokens(self.norm(x).mT).mT
        x = x + self.channels(self.norm(x))
        return Output(F.cross_entropy(self.head(x.mean(1)), labels))


class VariationalAutoencoder(nn.Module):
    """A VAE whose noise is handed in, so that two runs compare."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> Output:
        mean, log_variance = self.encode(torch.tanh(self.hidden(x))).chunk(2, -1)
        decoded = self.decode(mean + noise * (log_variance / 2).exp())
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        return Output(F.mse_loss(decoded, x) + 0.1 * divergence)


def _tokens(generator: torch.Generator) -> Batch:
    return {"tokens": torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)}


def _graph(generator: torch.Generator) -> Batch:
    x, target = torch.randn(2, NODES, WIDTH, generator=generator)
    others = torch.randint(0, NODES, (2, 10), generator=generator)
    return {"x": x, "edges": torch.cat([others, torch.arange(NODES).expand(2, -1)], 1), "target": target}


def _normal(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _labelled(generator: torch.Generator) -> Batch:
    labels: Any = torch.randint(0, 5, (2,), generator=generator)
    return {"x": torch.randn(2, 8, WIDTH, generator=generator), "labels": labels}


_IMAGE = (2, 3, SIZE, SIZE)
ALL: tuple[Handwritten, ...] = (
    Handwritten("gcn", GraphConvolution, _graph),
    Handwritten("gat", GraphAttention, _graph),
    Handwritten("experts by masks", Experts, _tokens),
    Handwritten("lstm", lambda: WordModel(nn.LSTM), _tokens),
    Handwritten("gru", lambda: WordModel(nn.GRU), _tokens),
    Handwritten("two towers", TwoTowers, _normal(left=(4, WIDTH), right=(4, WIDTH))),
    Handwritten("unet", UNet, _normal(noisy=_IMAGE, time=(2, 1), noise=_IMAGE)),
    Handwritten("dit", DiffusionTransformer, _normal(patches=(2, 4, 12), time=(2, 1), noise=(2, 4, 12))),
    Handwritten("mixer", Mixer, _labelled),
    Handwritten("vae", VariationalAutoencoder, _normal(x=(4, WIDTH), noise=(4, WIDTH))),
)
