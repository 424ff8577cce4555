"""Build one graph out of nodes of another, under the same names.

In: a graph module. Out: new graph modules with copies of some of its nodes; constants (get_attr) come along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rannc_backend.passes.graph_queries import nodes_behind, output_values
from rannc_backend.passes.pipeline import facts_of, with_facts
from rannc_backend.passes.tracing import inline_value, trace_function


class GraphBuilder:
    """A graph in the making. A copied node keeps its metadata, and its name as long as nothing was traced
    into the graph.
    """

    def __init__(self, source: torch.nn.Module) -> None:
        self.source = source
        self.module = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self.graph = self.module.graph
        self._copies: dict[fx.Node, fx.Node] = {}
        self._placeholders: dict[str, fx.Node] = {}
        self._has_traced = False

    @staticmethod
    def copy_of(source: fx.GraphModule) -> fx.GraphModule:
        """A copy of the whole graph: same names, same metadata, same facts, constants shared."""
        builder = GraphBuilder(source)
        for node in source.graph.nodes:
            if node.op == "placeholder":
                builder.placeholder(node)
            elif node.op != "output":
                builder.copy(node)
        outputs = output_values(source.graph)
        copy = builder.finish([builder.find(item) if isinstance(item, fx.Node) else item for item in outputs])
        return with_facts(copy, facts_of(source))

    def find(self, node: fx.Node) -> fx.Node | None:
        return self._copies.get(node)

    def find_placeholder(self, name: str) -> fx.Node | None:
        return self._placeholders.get(name)

    def placeholder(self, node: fx.Node) -> fx.Node:
        """A placeholder that stands for `node`."""
        made = self.find_placeholder(node.name) or self.new_placeholder(node.name, node.meta["val"])
        made.meta = dict(node.meta)
        self._copies[node] = made
        return made

    def new_placeholder(self, name: str, value: Any) -> fx.Node:
        last = next(reversed(self._placeholders.values()), None)
        with self.graph.inserting_after(last):
            made = self.graph.create_node("placeholder", name, name=name)
        self._placeholders[name] = made
        made.meta["val"] = value
        assert made.name == name, f"name {name} is taken"
        return made

    def copy(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            name = str(node.target)
            _set_attribute(self.module, name, getattr(self.source, name))
        made = self.graph.node_copy(node, self._copies.__getitem__)
        assert made.name == node.name or self._has_traced, f"name {node.name} is taken"
        self._copies[node] = made
        return made

    def trace(self, node: fx.Node, function: Callable[..., Any], args: tuple[fx.Node, ...]) -> fx.Node:
        """The operators of `function(*args)`, with `args` in this graph, as the copy of `node`."""
        self._has_traced = True
        inner = trace_function(function, args, {})
        marker = self.graph.call_function(torch.ops.aten.alias.default, args[:1])
        marker.meta = {**node.meta, "val": inner.outputs[0].meta["val"]}
        self._copies[node] = inline_value(marker, inner)
        return self._copies[node]

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        self.module.recompile()
        return self.module


def depends_on_inputs(node: fx.Node) -> bool:
    """Whether a value depends on any placeholder that holds a tensor."""
    return any(item.op == "placeholder" and not is_number(item) for item in nodes_behind([node]))


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a symbolic number: a length, or arithmetic on sizes."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def _set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    assert "." not in name, f"constant {name} is not at the top of its graph module"
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)
