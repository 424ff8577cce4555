"""Sizes that depend on data (`x[mask]`, `nonzero`, the tokens of an expert): what they are counted as, and how
those are followed that a mask of rows chooses.

In: a graph in which such sizes are symbols of their own, which torch makes without a value. Out: the same
operators, whose fake values have an upper bound in place of each such size: as many elements as the operator
that has found it looks at. Everything that prices, counts memory, or asks for the gradient of a value sees the
bound; the operators themselves give what they give. (Torch's own: unbacked symbols, seen on 2.13.0.)

While rows are followed, `value[mask]` has a size of its own kind: the batch size times a number that no other size
has, one for each mask. So its elements are told from all rows and from those of other masks, operators that treat
places alone are known to keep them, and where their number is used as a number it is the sum of the mask over the
batch.

Proof sketch. `nonzero` gives at most one index per element of its operand, `masked_select`, `unique` and their
kind at most its elements, and a number that is read out of a tensor and used as a size is one of a part of
another tensor, or the operator would fail. An index into a value of that many elements gives no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rannc_backend.passes.fixed_sizes import with_sizes
from rannc_backend.passes.graph_queries import (
    argument_key,
    arguments_of,
    fake_mode_of,
    gives_equal_values,
    num_elements,
    size_expression,
)
from rannc_backend.passes.plain_numbers import new_size


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


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """Sizes of what masks choose, by the symbol of each: `sizes` as they are followed, a number per row times the rows;
    `bounds` and `originals` what that number is replaced by afterwards, in tensors and in numbers.
    """

    sizes: dict[sympy.Symbol, sympy.Expr]
    bounds: dict[sympy.Symbol, sympy.Expr]
    originals: dict[sympy.Symbol, sympy.Expr]

    def follow(self, graph_module: fx.GraphModule) -> None:
        """Let the values of a graph say how many elements of a row are chosen, on the average."""
        for node in _valued(graph_module):
            node.meta["val"] = with_sizes(node.meta["val"], self.sizes)

    def taken_for_another(self, graph_module: fx.GraphModule) -> sympy.Expr | None:
        """What a trace since has taken one of these numbers for."""
        replaced = fake_mode_of(_valued(graph_module)).shape_env.replacements
        return next((replaced[symbol] for symbol in self.bounds if symbol in replaced), None)

    def restore(self, graph_module: fx.GraphModule) -> None:
        """Let them say what they are counted as, and sizes themselves that they depend on data."""
        for node in _valued(graph_module):
            value = node.meta["val"]
            known = self.originals if isinstance(value, torch.SymInt) else self.bounds
            node.meta["val"] = with_sizes(value, known)


def _valued(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if "val" in node.meta]


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of `value[mask]`, of the first dimensions."""
    if node.target is not torch.ops.aten.index.Tensor:
        return None
    first, *others = arguments_of(node)[1]
    is_mask = isinstance(first, fx.Node) and first.meta["val"].dtype is torch.bool
    return first if is_mask and all(item is None for item in others) else None


def chosen_sizes(graph_module: fx.GraphModule, rows_symbol: sympy.Symbol) -> ChosenSizes:
    """The sizes of a graph that depend on data, where each is one that a mask gives whose elements are a number of
    each row; none where there are others.
    """
    found = ChosenSizes({}, {}, {})
    masks = _masks_by_size(graph_module)
    bounds = {symbol: _per_row(mask, rows_symbol) for symbol, mask in masks.items()}
    if None in bounds.values():
        return found
    for number, (symbol, mask) in enumerate(masks.items()):
        assert mask is not None, "a mask without a bound"
        same = next((size for size in found.sizes if is_same_value(masks[size], mask)), None)
        if same is not None:
            found.sizes[symbol] = found.sizes[same]
            continue
        # No other size has this number, so that none is taken for it.
        hint = sympy.nextprime(10_000 + 100 * number)
        chosen = new_size(mask.meta["val"].fake_mode.shape_env, f"chosen{number}", hint).node.expr
        found.sizes[symbol] = chosen * rows_symbol
        found.bounds[chosen] = bounds[symbol]
        found.originals[chosen] = symbol / rows_symbol
    return found


def _masks_by_size(graph_module: fx.GraphModule) -> dict[sympy.Symbol, fx.Node | None]:
    """The mask that has made each size that depends on data; None where something else has, or another mask too."""
    masks: dict[sympy.Symbol, fx.Node | None] = {}
    for node in graph_module.graph.nodes:
        value, mask = node.meta.get("val"), mask_of(node)
        for symbol in {symbol for item in _parts(value) for symbol in free_unbacked_symbols(item)}:
            made = mask if mask is not None and size_expression(value.shape[0]) == symbol else None
            known = masks.setdefault(symbol, made)
            if made is not None and not is_same_value(known, made):
                masks[symbol] = None
    return masks


def is_same_value(one: fx.Node | None, other: fx.Node) -> bool:
    """Whether two values of a graph are surely equal: they are one, or computed alike (a mask that is written twice)."""
    return one is not None and _deep_key(one, 8) == _deep_key(other, 8)


def _deep_key(node: fx.Node, depth: int) -> object:
    """Equal for values that are computed alike in their last steps, and from the same values before."""
    if depth == 0 or not gives_equal_values(node):
        return node

    def inner(argument: fx.Node) -> object:
        return _deep_key(argument, depth - 1)

    return node.target, argument_key(node.args, inner), argument_key(node.kwargs, inner)


def _per_row(mask: fx.Node | None, rows_symbol: sympy.Symbol) -> sympy.Expr | None:
    if mask is None:
        return None
    ratio = sympy.cancel(num_elements(mask.meta["val"]) / rows_symbol)
    return None if rows_symbol in ratio.free_symbols else ratio


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


def log_sigmoid_backward(gradient: torch.Tensor, value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """As ``aten.log_sigmoid_backward``, without a look at how many elements there are: torch's own for traces takes
    the buffer where it has any, of which nobody knows here. Its values are those of the buffer.
    """
    del buffer
    exponential = torch.exp(-value.abs())
    share = exponential / (1 + exponential)
    return gradient * torch.where(value < 0, 1 - share, share)


#: What traces of graphs with such sizes have in the place of operators.
OF_ANY_SIZE: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.log_sigmoid_backward.default: log_sigmoid_backward
}
