"""One call of an ATen operator as the batch-axis rules see it.

In: an FX node, the layouts of its arguments and the symbol of the batch size. Out: arguments by name, sizes,
refusals.
Terms: *sizes* are sympy expressions or ints; the *rows dimension* of a value is the one whose size is a
multiple of the symbol.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, overload

import sympy
import torch
from torch import fx

from rannc_backend.passes.batch.layouts import (
    Constant,
    InverseIndex,
    Layout,
    Ordered,
    OrderIndex,
    PartialSum,
    Reduced,
    RowIndex,
    Rows,
    SegmentEnds,
)
from rannc_backend.passes.graph_queries import size_expression
from rannc_backend.passes.pipeline import PassError
from rannc_backend.passes.size_nodes import Size, plain

ADVICE = (
    "Each row of the batch must be computed from that row alone, apart from sums, means and losses over the "
    "batch that lead to scalar outputs. Compute this outside of the compiled model, or over another "
    "dimension."
)


def operator_name(target: Any) -> str:
    """`aten.mm` for every overload of mm; other callables by their own name."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".", 1)
    return getattr(target, "__name__", str(target))


def has_rows(value: Any, symbol: sympy.Symbol) -> bool:
    """Whether a number depends on the batch size."""
    return (
        isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        and symbol in value.node.expr.free_symbols
    )


def rows_multiple(size: Any, symbol: sympy.Symbol) -> Size | None:
    """k if size == k * rows, where k may depend on lengths (0 if it does not depend on rows); None for any other
    expression, such as rows + 1.
    """
    expression = size_expression(size)
    if symbol not in expression.free_symbols:
        return 0
    if expression == symbol:
        return 1
    expanded = sympy.expand(expression)
    ratio = expanded.coeff(symbol, 1)
    if symbol in ratio.free_symbols or sympy.expand(ratio * symbol) != expanded:
        return None
    return plain(ratio)


def rows_dims(value: Any, symbol: sympy.Symbol) -> list[int]:
    """Dimensions of a tensor whose size depends on the batch size."""
    if not isinstance(value, torch.Tensor):
        return []
    return [dim for dim, size in enumerate(value.shape) if has_rows(size, symbol)]


class Early(Mapping[fx.Node, Layout]):
    """Layouts in which what is known before the step counts as a constant."""

    def __init__(self, layouts: Mapping[fx.Node, Layout]) -> None:
        self._layouts = layouts

    def __getitem__(self, node: fx.Node) -> Layout:
        layout = self._layouts[node]
        return Constant() if isinstance(layout, (PartialSum, Reduced)) else layout

    def __iter__(self) -> Any:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)


class Replaced(Early):
    """Layouts with some replaced."""

    def __init__(self, layouts: Mapping[fx.Node, Layout], replaced: Mapping[fx.Node, Layout]) -> None:
        super().__init__(layouts)
        self._replaced = replaced

    def __getitem__(self, node: fx.Node) -> Layout:
        return self._replaced.get(node) or super().__getitem__(node)


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its arguments by schema name, defaults filled in."""

    node: fx.Node
    symbol: sympy.Symbol
    layouts: Mapping[fx.Node, Layout]
    arguments: Mapping[str, Any]

    @staticmethod
    def of(node: fx.Node, symbol: sympy.Symbol, layouts: Mapping[fx.Node, Layout]) -> Call:
        arguments: dict[str, Any] = {}
        operator: Any = node.target
        for position, argument in enumerate(operator._schema.arguments):
            if position < len(node.args) and not argument.kwarg_only:
                arguments[argument.name] = node.args[position]
            elif argument.name in node.kwargs:
                arguments[argument.name] = node.kwargs[argument.name]
            else:
                arguments[argument.name] = argument.default_value if argument.has_default_value() else None
        return Call(node, symbol, layouts, arguments)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def name(self) -> str:
        return operator_name(self.node.target)

    @property
    def value(self) -> Any:
        """The fake result."""
        return self.node.meta["val"]

    def number(self, name: str) -> Any:
        """An int argument, with a SymInt node resolved to its value."""
        argument = self.arguments[name]
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    def layout(self, argument: Any) -> Layout:
        return self.layouts[argument] if isinstance(argument, fx.Node) else Constant()

    def rows(self, argument: Any) -> Rows | None:
        """The layout of an argument that holds rows; None for one that does not. Refuses row numbers."""
        layout = self.layout(argument)
        if isinstance(layout, RowIndex):
            self.refuse("uses the number of a row in the batch as a value, which differs from slice to slice")
        if isinstance(layout, Rows):
            return layout
        if isinstance(layout, (Ordered, OrderIndex, InverseIndex, SegmentEnds)):
            self.refuse(f"uses {argument}, which is in an order of the rows, in a way that is not known")
        assert isinstance(layout, (Constant, Reduced)), (
            f"{self.node}: argument {argument} has layout {layout}"
        )
        return None

    def tensors(self) -> Iterator[fx.Node]:
        """All tensor arguments, those in lists included."""
        for argument in self.node.all_input_nodes:
            if isinstance(argument.meta.get("val"), torch.Tensor):
                yield argument

    def constant(self, *names: str) -> None:
        """Refuse if one of the named arguments holds rows."""
        for name in names:
            argument = self[name]
            for item in argument if isinstance(argument, (list, tuple)) else (argument,):
                if self.rows(item) is not None:
                    self.refuse(f"gets rows of the batch as its argument {name!r}")

    def ndim(self, argument: fx.Node) -> int:
        return argument.meta["val"].ndim

    def dim(self, name: str, ndim: int) -> int:
        """A dimension argument, counted from 0."""
        return wrap_dim(self[name], ndim)

    def refuse(self, reason: str, *, is_known: bool = True) -> NoReturn:
        raise PassError(self.node, f"operator {self.name} {reason}. {ADVICE}", is_known=is_known)

    def refuse_mixing(self, what: str) -> NoReturn:
        self.refuse(f"mixes rows of the batch ({what})")

    @overload
    def merge(self, first: Rows | None, second: Rows) -> Rows: ...

    @overload
    def merge(self, first: Rows | None, second: Rows | None) -> Rows | None: ...

    def merge(self, first: Rows | None, second: Rows | None) -> Rows | None:
        """The layout of something elementwise over two layouts of the same result. Refuses if rows do not
        meet themselves.
        """
        if first is None or second is None:
            return first or second
        if first == second:
            return Rows(first.dim, first.outer, first.inner, uniform=first.uniform and second.uniform)
        if first.dim == second.dim and first.outer * first.inner == second.outer * second.inner:
            if first.uniform:
                return second
            if second.uniform:
                return first
        self.refuse_mixing("it combines different rows with each other")


def wrap_dim(dim: Any, ndim: int) -> int:
    return dim % ndim if ndim > 0 else 0


def wrap_dims(dims: Any, ndim: int) -> list[int]:
    """A dim argument (None or [] for all, an int or a list), counted from 0."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim))
    return [wrap_dim(dim, ndim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def product(sizes: Any) -> Size:
    """Product of sizes without rows."""
    return plain(math.prod(size_expression(size) for size in sizes))
