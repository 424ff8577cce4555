"""A graph whose sizes are those of one call in part: expressions in place of symbols, numbers in place of
lengths.

In: a graph and what each of some symbols is. Out: fake values, and a graph, that say so. Only what is priced and
counted is made here; what runs keeps its symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from rannc_backend.passes.graph_queries import output_values, size_expression, symbols_in
from rannc_backend.passes.pipeline import facts_of, with_facts
from rannc_backend.passes.plain_numbers import hints_in

Known = Mapping[sympy.Symbol, sympy.Expr]


def with_sizes(value: Any, known: Known) -> Any:
    """A fake value whose sizes have these expressions in place of symbols."""
    if isinstance(value, (tuple, list)):
        return type(value)(with_sizes(item, known) for item in value)
    if isinstance(value, torch.SymInt):
        before = size_expression(value)
        expression = before.xreplace(known)
        if expression.is_number:
            return int(expression)
        return value if expression == before else _size(value.node.shape_env, expression)
    if not isinstance(value, torch.Tensor) or not symbols_in(value) & known.keys():
        return value
    mode: Any = value.fake_mode  # type: ignore[attr-defined]

    def number(size: Any) -> Any:
        expression = size_expression(size).xreplace(known)
        return int(expression) if expression.is_number else _size(mode.shape_env, expression)

    with mode, torch.no_grad():
        return torch.empty_strided(
            [number(size) for size in value.shape],
            [number(stride) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )


def _size(shape_env: Any, expression: sympy.Expr) -> torch.SymInt:
    """A number of an environment, with an example where its symbols have some."""
    example = expression.xreplace(hints_in(shape_env))
    return shape_env.create_symintnode(expression, hint=int(example) if example.is_number else None)


def at_numbers(graph_module: fx.GraphModule, known: Known) -> fx.GraphModule:
    """A copy with the same names without the placeholders and sizes that are numbers then."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        fixed = with_sizes(value, known)
        if isinstance(value, torch.SymInt) and isinstance(fixed, int):
            copies[node] = fixed
        elif node.op != "output":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
            assert copy.name == node.name, f"name {node.name} is taken"
            copy.meta = {**node.meta, "val": fixed}
            copies[node] = copy
    outputs = output_values(graph_module.graph)
    graph.output(tuple(copies[item] if isinstance(item, fx.Node) else item for item in outputs))
    return with_facts(fx.GraphModule(graph_module, graph), facts_of(graph_module))
