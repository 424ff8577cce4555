"""Sizes that depend on data (`x[mask]`, `nonzero`, the tokens of an expert): what they are counted as.

In: a graph in which such sizes are symbols of their own, which torch makes without a value. Out: the same
operators, whose fake values have an upper bound in place of each such size: as many elements as the operator
that has found it looks at. Everything that prices, counts memory, or asks for the gradient of a value sees the
bound; the operators themselves give what they give. (Torch's own: unbacked symbols, seen on 2.13.0.)

Proof sketch. `nonzero` gives at most one index per element of its operand, `masked_select`, `unique` and their
kind at most its elements, and a number that is read out of a tensor and used as a size is one of a part of
another tensor, or the operator would fail. An index into a value of that many elements gives no more.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rannc_backend.passes.fixed_sizes import with_sizes
from rannc_backend.passes.graph_queries import num_elements


def has_data_sizes(value: Any) -> bool:
    """Whether a size of a value, or of one in it, depends on data."""
    return any(bool(free_unbacked_symbols(item)) for item in _parts(value))


def bound_data_sizes(graph_module: fx.GraphModule) -> frozenset[str]:
    """Put the bounds in the place of such sizes, in the fake tensors of all nodes; gives the names of the nodes
    whose sizes, or whose number, depended on data.
    """
    bounds: dict[sympy.Symbol, sympy.Expr] = {}
    found = set()
    originals = {node: node.meta.get("val") for node in graph_module.graph.nodes}
    for node, value in originals.items():
        if not has_data_sizes(value):
            continue
        found.add(node.name)
        looked_at = list(node.all_input_nodes)
        if node.target is torch.ops.aten.index.Tensor:
            masks = [item for item in looked_at if getattr(originals[item], "dtype", None) is torch.bool]
            looked_at = [item for item in masks if item is not node.args[0]] or looked_at
        operands = [originals[item] for item in looked_at]
        most = max((_numel(item, bounds) for item in _parts(operands)), key=_at_ten, default=sympy.Integer(1))
        for item in _parts(value):
            for symbol in free_unbacked_symbols(item):
                bounds.setdefault(symbol, most)
        if not isinstance(value, torch.SymInt):
            node.meta["val"] = with_sizes(value, bounds)
    return frozenset(found)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in _parts(item)]
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return [value] if isinstance(value, kinds) else []


def _numel(value: Any, bounds: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    """Of a number 1."""
    return num_elements(value).xreplace(bounds) if isinstance(value, torch.Tensor) else sympy.Integer(1)


def _at_ten(expression: sympy.Expr) -> float:
    """To tell the larger of two numbers of elements."""
    return float(expression.xreplace({symbol: sympy.Integer(10) for symbol in expression.free_symbols}))
