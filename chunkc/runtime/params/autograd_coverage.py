"""Nodes that tell whether autograd's engine runs the whole backward of a compiled forward.

Gradients land in chunks and never reach autograd, so ``backward(inputs=...)`` and ``torch.autograd.grad`` cannot pick
some of them: the nodes that would have accumulated the others notice both inside the backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.graph import Node

from chunkc._torch_compat.core import pytree


def find_accumulators(outputs: Any, params: Mapping[int, torch.Tensor]) -> dict[int, Node]:
    """Find the nodes behind ``outputs`` that accumulate gradients of ``params``, by their key there."""
    key_of = {id(param): key for key, param in params.items()}
    todo = deque(t.grad_fn for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn)
    seen, accumulators = set(todo), dict[int, Node]()
    while todo and len(accumulators) < len(params):
        for node, _ in todo.popleft().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            key = key_of.get(id(getattr(node, "variable", None)))
            if key is not None:
                accumulators[key] = node
            else:
                todo.append(node)
    return accumulators
