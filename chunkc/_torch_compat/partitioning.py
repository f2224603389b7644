"""Torch's partitioner of joint graphs, tags of what it must keep or compute again, random operators."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._prims.rng_prims
import torch.fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy

_NUMBER = re.compile(r"_\d+$")


def min_cut_partition(
    joint: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Partition a graph that `merge_equal` has prepared by PyTorch's min-cut rematerialisation.

    Random operators that backward computes again replay the forward state of their device's generator, which seeds and
    checkpoints reach, where torch would give those of a GPU generators of their own.
    """
    import torch._functorch.config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    settings = {"graphsafe_rng_functionalization": False, "cse": False}
    with torch._functorch.config.patch(settings), _use_lazy_graph_module(True):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    return forward, backward


def merge_equal(joint: torch.fx.GraphModule) -> None:
    """Leave out of a joint graph what nothing needs and what is computed twice; number the rest anew."""
    import torch._functorch.config
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    merged = fx_graph_cse(joint.graph) if torch._functorch.config.cse else joint.graph
    joint.graph = _numbered_anew(merged)
    joint.recompile()


def _numbered_anew(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy with names in the order of the calls: ``mm``, ``mm_1``; equal graphs have equal names.

    Tracing gives numbers also to calls that are left out later. How many those are may depend on what the process has
    traced before: DTensor of torch 2.11 traces an operator when it first shards it.
    """
    copy, made = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = (torch.fx.map_arg(given, made.__getitem__) for given in (node.args, node.kwargs))
            name = _NUMBER.sub("", node.name)
            made[node] = copy.create_node(node.op, node.target, args, kwargs, name, node.type)
            made[node].meta = node.meta
        else:
            made[node] = copy.node_copy(node, made.__getitem__)
    return copy


def uncompiled(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a module of ``graph`` with attributes of ``root``; its Python code is made once it runs."""
    return _LazyGraphModule(root, graph)


def saves_random_state(node: torch.fx.Node) -> bool:
    """Whether ``node`` runs the operator ``args[0]``, and returns the generator's state before it too."""
    return node.target is torch._prims.rng_prims.run_and_save_rng_state


def replays_random_state(node: torch.fx.Node) -> bool:
    """Whether ``node`` runs the operator ``args[1]`` with the generator in the state ``args[0]``."""
    return node.target is torch._prims.rng_prims.run_with_rng_state


def operator_of(node: torch.fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return operator and arguments of ``node``; of one with a random state, those inside of it."""
    first = 1 if saves_random_state(node) else 2 if replays_random_state(node) else 0
    return node.args[first - 1] if first else node.target, node.args[first:], dict(node.kwargs)


def result_of(node: torch.fx.Node) -> Any:
    """Return the fake value of the operator that ``node`` runs, without the random state that it saves."""
    value = node.meta.get("val")
    return value[1] if saves_random_state(node) and value is not None else value


def decides_recomputation(node: torch.fx.Node) -> bool:
    """Whether the model itself says if ``node`` is kept or computed again (activation checkpointing)."""
    return isinstance(node.meta.get("recompute"), CheckpointPolicy)


def _default(op: torch._ops.OpOverload, name: str) -> Any:
    return next((a.default_value for a in op._schema.arguments if a.name == name), None)


def draws(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``op`` draws random numbers. Attention may, but without dropout it does not."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    values = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    return bool({**values, **kwargs}.get("dropout_p", _default(op, "dropout_p")) != 0.0)


def tag_must_recompute(node: torch.fx.Node, region: int | None = None) -> None:
    """Tell the partitioner never to save ``node``; without ``region`` not at a region's border either."""
    node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": region}
    if region is None:
        del node.meta["ac_graph_id"]


def set_region(node: torch.fx.Node, region: int) -> None:
    """Number the region of a ``node`` that is computed again; a later region has a larger number."""
    node.meta["ac_graph_id"] = region


def recomputed_region(node: torch.fx.Node) -> int | None:
    """Return the region that recomputes ``node`` in backward, -1 without a number; None if there is none."""
    is_again = node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return int(node.meta.get("ac_graph_id", -1)) if is_again else None


def tag_must_save(node: torch.fx.Node) -> None:
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
