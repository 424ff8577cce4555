"""A graph whose nodes are in an order that their arguments alone decide.

In: a captured graph. Out: the same graph in another order, with names and constants counted in it. Ranks whose
forward goes through a set of strings capture the same nodes in orders of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from rannc_backend.capture.graph import CapturedGraph, in_order_of_use


def in_order_of_arguments(captured: CapturedGraph) -> CapturedGraph:
    """Each node behind its arguments, depth first from the outputs.

    The walk sees arguments and outputs alone, in the order in which they are written, so that two graphs which differ
    in the order of their nodes come out equal. A captured graph changes nothing in place, so that any such order
    computes the same. What no output needs is left out, but for the user's inputs.
    """
    source = captured.graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    constants: dict[str, object] = {}
    for node in source.graph.find_nodes(op="placeholder"):
        # Unlike `placeholder`, which makes letters small.
        copies[node] = graph.create_node(node.op, node.target, name=node.name)
        copies[node].meta = dict(node.meta)
    for node in _from_outputs(source.graph):
        if node in copies:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        target = node.target
        if node.op == "get_attr":
            target = f"constant_{len(constants)}"
            constants[target] = getattr(source, str(node.target))
        copies[node] = graph.create_node(node.op, target, args, kwargs)
        copies[node].meta = dict(node.meta)
    graph_module = fx.GraphModule(constants, graph)
    graph_module.meta = dict(source.meta)
    inputs = in_order_of_use(graph_module, captured.inputs)
    return replace(captured, graph_module=graph_module, inputs=inputs).with_fingerprints()


def _from_outputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that outputs need, each behind its arguments, without recursion: a chain may have thousands."""
    seen: set[fx.Node] = set()
    for output in graph.find_nodes(op="output"):
        seen.add(output)
        stack: list[tuple[fx.Node, Iterator[fx.Node]]] = [(output, iter(output.all_input_nodes))]
        while stack:
            node, arguments = stack[-1]
            following = next((item for item in arguments if item not in seen), None)
            if following is None:
                stack.pop()
                yield node
            else:
                seen.add(following)
                stack.append((following, iter(following.all_input_nodes)))
