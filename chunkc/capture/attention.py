"""Attention with dropout as a GPU computes it: in one kernel, which draws its mask inside.

PyTorch's fused attention for CPU tensors takes no dropout, and is traced with it as operators that keep matrices of
queries x keys for backward. What is planned for a GPU is therefore traced without that dropout, and never run.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import GraphModule

_DROPOUT = "dropout_p"
_DROPOUT_POSITION = 4


def drop_attention_dropout(module: GraphModule) -> None:
    """Set attention dropout in a Dynamo graph to zero, in place, also in checkpointed regions."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                if _DROPOUT in node.kwargs:
                    node.update_kwarg(_DROPOUT, 0.0)
                elif len(node.args) > _DROPOUT_POSITION:
                    node.update_arg(_DROPOUT_POSITION, 0.0)
