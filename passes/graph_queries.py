"""Read-only questions about a graph that several passes ask.

In: an `fx.GraphModule` or its nodes. Out: tuples and sets of nodes, strings. Nothing here changes a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx


def placeholders(graph_module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """The inputs in order."""
    return tuple(graph_module.graph.find_nodes(op="placeholder"))


def output_values(graph_module: fx.GraphModule) -> tuple[Any, ...]:
    """The flat tuple that a captured graph gives back: nodes, None or numbers."""
    values = graph_module.graph.output_node().args[0]
    assert isinstance(values, (tuple, list)), "the output of a captured graph is one flat tuple"
    return tuple(values)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The given nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The given nodes and all that is computed from them."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.users)
    return found


def module_of(node: fx.Node) -> str:
    """Dotted path of the user's module that a node belongs to, "" if none."""
    return node.meta.get("module_path", "")
