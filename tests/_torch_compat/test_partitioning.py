"""Joint graphs made ready to be partitioned."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc._torch_compat.partitioning import merge_equal


def names_of(num_left_out: int, num_equal: int) -> tuple[list[str], Tensor]:
    """Operators' names of one computation, traced beside others that are left out; and what it computes."""

    def forward(value: Tensor) -> Tensor:
        for _ in range(num_left_out):
            torch.mm(value, value)
        sums = [value + 1 for _ in range(1 + num_equal)]
        return torch.mm(torch.mm(sums[0], value), sums[-1]).view(-1)

    module = make_fx(forward)(torch.ones(2, 2))
    merge_equal(module)
    return [node.name for node in module.graph.nodes], module(torch.eye(2))


def test_names_follow_from_what_is_left() -> None:
    names, value = names_of(0, 0)
    assert names[1:-1] == ["add", "mm", "mm_1", "view"]
    for others in ((1, 0), (0, 2), (5, 1)):
        found, other = names_of(*others)
        assert found == names and torch.equal(value, other)
