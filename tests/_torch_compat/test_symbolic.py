"""Marks by which Dynamo captures a dimension for any size: for one call, beside the caller's own."""

from __future__ import annotations

import pytest
import torch

from chunkc._torch_compat.symbolic import changing


def num_captures(*calls: tuple[torch.Tensor, tuple[int, ...]]) -> int:
    """How often a function is captured that is called with tensors of which some dimensions are changing."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda x: x.sin() + x.shape[0], backend=backend, dynamic=False, fullgraph=True)
    for tensor, dimensions in calls:
        with changing((tensor, dimension) for dimension in dimensions):
            assert torch.equal(compiled(tensor), tensor.sin() + tensor.shape[0])
    return len(graphs)


def test_a_changing_dimension_is_captured_once() -> None:
    x = [torch.ones(n, 3) for n in (4, 5, 6, 7)]
    assert num_captures(*((t, (0,)) for t in x)) == 1
    assert num_captures(*((t, ()) for t in x)) == 4
    assert num_captures((torch.ones(4, 3), (0,)), (torch.ones(5, 4), (0, 1)), (torch.ones(9, 9), (0, 1))) == 2


def test_marks_go_when_the_call_has_ended() -> None:
    x = torch.ones(4, 3)
    before = dict(x.__dict__)
    with pytest.raises(ValueError, match="in the call"), changing([(x, 0), (x, 1)]):
        assert x.__dict__ != before
        raise ValueError("in the call")
    assert x.__dict__ == before


def test_marks_of_the_caller_stay() -> None:
    x = torch.ones(4, 3)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    before = {name: value.copy() if isinstance(value, set) else value for name, value in x.__dict__.items()}
    with changing([(x, 0)]):
        pass
    assert x.__dict__ == before
