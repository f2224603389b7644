"""Sparse adjacency matrices as inputs: graphs of any number of edges, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from pair import Pair
from torch import nn

import chunkc

NUM_NODES, WIDTH = 12, 16


class GraphConvolutions(nn.Module):
    """Two layers of neighbours' sums, ``adjacency`` sparse ``[NUM_NODES, NUM_NODES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.sparse.mm(adjacency, self.first(x)))
        return (adjacency @ self.last(hidden)).square().mean()


def adjacency(seed: int, layout: torch.layout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    density = (0.2, 0.5, 0.8)[seed % 3]
    dense = torch.rand(NUM_NODES, NUM_NODES, generator=generator)
    return torch.where(dense < density, dense, torch.zeros(())).to_sparse(layout=layout)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_edges_change_from_call_to_call(layout: torch.layout, backend: str) -> None:
    pair = Pair("emulated-84k-16m", GraphConvolutions(), backend=backend, chunk_size=512)
    for seed in range(5):
        edges = adjacency(seed, layout)
        x = torch.randn(NUM_NODES, WIDTH, generator=torch.Generator().manual_seed(seed))
        pair.step_on(lambda model, edges=edges, x=x: model(edges, x))
        pair.check()
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0
