"""States of random generators that forward saves for backward, which computes a random operator again.

PyTorch's partitioner lets forward save the state in front of every operator that *may* draw random numbers. Attention
without dropout may, by its tag, but draws nothing. Its state is given up here, so that the graphs show the operator
itself: its work is counted, and fused kernels are compiled as in any other graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from chunkc._torch_compat.partitioning import draws, replays_random_state, saves_random_state


def drop_idle_states(forward: GraphModule, backward: GraphModule) -> None:
    """Run operators that draw nothing as they are, in both graphs of a partition, in place.

    Others get the metadata of their results, in backward too, and both graphs know a saved state as one value, so that
    bytes count.
    """
    states = [n for n in forward.graph.find_nodes(op="output")[0].args[0] if _is_state(n)]
    replays = [n for n in backward.graph.nodes if replays_random_state(n)]
    of_input = {n.args[0]: n for n in replays}
    inputs = [n for n in backward.graph.find_nodes(op="placeholder") if n in of_input]
    for state, received in zip(states, inputs, strict=True):
        saving, replaying = state.args[0], of_input[received]
        results = [n for n in saving.users if n is not state]
        replaying.meta = {**(results[0] if results else saving).meta, **replaying.meta}
        saving.meta = {**replaying.meta, "val": (state.meta["val"], replaying.meta.get("val"))}
        received.meta["val"] = state.meta["val"]
        if not draws(saving.args[0], saving.args[1:], saving.kwargs):
            _run_plainly(forward.graph, state, saving, results)
            _replay_plainly(backward.graph, received, replaying)
    forward.recompile()
    backward.recompile()


def _is_state(node: object) -> bool:
    """Whether an output of forward is the state that one of its operators saved."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return False
    source, index = node.args
    return isinstance(source, Node) and bool(index == 0) and saves_random_state(source)


def _run_plainly(graph: Graph, state: Node, saving: Node, results: Sequence[Node]) -> None:
    """Put the operator itself in the place of ``saving``, whose ``results`` come apart from its state."""
    with graph.inserting_before(saving):
        plain = graph.call_function(saving.args[0], tuple(saving.args[1:]), dict(saving.kwargs))  # type: ignore[arg-type]
    plain.meta = dict((results[0] if results else saving).meta)
    for result in results:
        result.replace_all_uses_with(plain)
        graph.erase_node(result)
    output = graph.find_nodes(op="output")[0]
    output.args = (tuple(n for n in output.args[0] if n is not state),)
    graph.erase_node(state)
    graph.erase_node(saving)


def _replay_plainly(graph: Graph, received: Node, replaying: Node) -> None:
    op, args = replaying.args[1], tuple(replaying.args[2:])
    with graph.inserting_before(replaying):
        plain = graph.call_function(op, args, dict(replaying.kwargs))  # type: ignore[arg-type]
    plain.meta = dict(replaying.meta)
    replaying.replace_all_uses_with(plain)
    graph.erase_node(replaying)
    graph.erase_node(received)
