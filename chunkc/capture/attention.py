"""Attention with dropout as a GPU computes it: in one kernel, which draws its mask inside.

PyTorch's fused attention for CPU tensors takes no dropout. With dropout it is traced as its operators, which keep
matrices of queries x keys for backward, several for each head; kernels of GPUs keep one number for each query. What is
planned for a GPU is therefore traced without that dropout. Nothing runs by such a graph.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import GraphModule, Node

_DROPOUT = "dropout_p"
_DROPOUT_POSITION = 4


def drop_attention_dropout(module: GraphModule) -> None:
    """Set attention dropout in a Dynamo graph to zero, in place, also in checkpointed regions."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                _drop(node)


def _drop(node: Node) -> None:
    if _DROPOUT in node.kwargs:
        node.update_kwarg(_DROPOUT, 0.0)
    elif len(node.args) > _DROPOUT_POSITION:
        node.update_arg(_DROPOUT_POSITION, 0.0)
