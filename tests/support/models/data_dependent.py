"""Forwards in which data tell the sizes of tensors, as programs write them; each takes (x, labels, mask) to a loss."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, NUM_EXPERTS, NUM_CLASSES, NUM_INPUTS = 32, 4, 10, 16


class Mixture(nn.Module):
    """An input layer, four experts with a gate, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(NUM_INPUTS, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(NUM_EXPERTS)
        )
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden values, the weight of each row's best expert, and which that is."""
        hidden = F.relu(self.embed(x))
        weight, best = self.gate(hidden).softmax(-1).max(-1)
        return hidden, weight.unsqueeze(-1), best

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), labels)


class MaskedLoss(Mixture):
    """The loss of the rows that a mask picks."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.embed(x))
        for expert in self.experts:
            hidden = hidden + expert(hidden)
        return F.cross_entropy(self.head(hidden)[mask], labels[mask])


class PickedRows(Mixture):
    """The rows that a mask picks, and no others, go through the experts."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.embed(x[mask]))
        for expert in self.experts:
            hidden = hidden + expert(hidden)
        return self.loss(hidden, labels[mask])


class PickedTwice(Mixture):
    """Rows picked by a mask go through the experts; the loss is of the first rows and of the rows of few labels."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.embed(x[mask]))
        for expert in self.experts:
            hidden = hidden + expert(hidden)
        few = labels < 3
        return self.loss(F.relu(self.embed(x[few])), labels[few]) + self.loss(hidden, labels[mask])


class ExpertsByMask(Mixture):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden, weight, best = self.routed(x)
        added = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = best == number
            added[rows] = weight[rows] * expert(hidden[rows])
        return self.loss(hidden + added, labels)


class ExpertsByIndex(Mixture):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden, weight, best = self.routed(x)
        added = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            added = added.index_add(0, rows, weight[rows] * expert(hidden[rows]))
        return self.loss(hidden + added, labels)


class ExpertsBySplit(Mixture):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden, weight, best = self.routed(x)
        order = best.argsort(stable=True)
        counts = torch.bincount(best, minlength=NUM_EXPERTS).tolist()
        parts = [expert(rows) for expert, rows in zip(self.experts, hidden[order].split(counts), strict=True)]
        added = torch.zeros_like(hidden).index_copy(0, order, torch.cat(parts) * weight[order])
        return self.loss(hidden + added, labels)


class PooledByLabel(Mixture):
    """Rows of equal labels are summed: as many groups as there are labels in the batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.embed(x))
        groups, group_of = torch.unique(labels, return_inverse=True)
        pooled = torch.zeros(groups.numel(), WIDTH).index_add(0, group_of, hidden)
        for expert in self.experts:
            pooled = pooled + expert(pooled)
        return self.loss(pooled, groups)


class WithoutSelfLoops(Mixture):
    """A graph convolution over the edges whose ends differ."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        edges = torch.stack([labels, labels.roll(1)])
        edges = edges[:, edges[0] != edges[1]]
        hidden = F.relu(self.embed(x))
        for expert in self.experts:
            hidden = hidden + torch.zeros_like(hidden).index_add(0, edges[0], expert(hidden[edges[1]]))
        return self.loss(hidden, labels)


FORMS: list[type[Mixture]] = [
    MaskedLoss,
    PickedRows,
    ExpertsByMask,
    ExpertsByIndex,
    ExpertsBySplit,
    PooledByLabel,
    WithoutSelfLoops,
]


def batch(seed: int, num_rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, NUM_INPUTS, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (num_rows,), generator=generator)
    return x, labels, torch.rand(num_rows, generator=generator) < 0.5
