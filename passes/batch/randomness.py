"""Make random operators pure functions of seed, row of the global batch and element within the row.

In: a graph with layouts. Out: the same graph, changed in place: random operators (dropout, rand, bernoulli,
fused attention with dropout, ...) are replaced by arithmetic on two new placeholders, "rng_seed" and
"first_row" (0-dim int64; the global number of the slice's first row). So the numbers that a row gets do not
depend on stages, replicas, micro-batches or recompute, nor on the dtype of the model. Values without rows get
the same numbers everywhere.

How: 32-bit hashes in int64, where no product overflows (multipliers < 2**31), so that every compiler computes
the same.
    row key      = mix(mix(seed) ^ mix(row))              one per row, shared by all operators
    element key  = mix(number of the element in its row)  shared by operators of the same shape
    random bits  = finish(mix(row key ^ operator key) ^ element key)
The last line alone is computed per element: 10 passes, about the time that aten.bernoulli takes on a CPU.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, fx

from rannc_backend.passes.batch.batch_axis import KnownRows, Meeting, extend_analysis, is_random
from rannc_backend.passes.batch.batch_split import FIRST_ROW, RNG_SEED
from rannc_backend.passes.batch.layouts import (
    Choice,
    Constant,
    Layout,
    Ordered,
    OrderIndex,
    Origin,
    RowCount,
    RowIndex,
    Rows,
    Several,
    Whole,
)
from rannc_backend.passes.batch.operator_call import Call, product, rows_multiple
from rannc_backend.passes.graph_queries import fake_mode_of, placeholders, size_expression
from rannc_backend.passes.pipeline import Pass, PassError
from rannc_backend.passes.size_nodes import Size, length_placeholders, size_node
from rannc_backend.passes.tracing import InnerGraph, inline, inline_value, trace_function

LOW32 = 0xFFFFFFFF
SIZE32 = 2.0**32
STAND_IN = 2**31 - 1  # operator number used while tracing
MAX_DRAWS = 2


def mix(h: Any) -> Any:
    """A bijection of 32-bit numbers that changes half of the bits when one bit changes; on ints and int64
    tensors.
    """
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & LOW32
    h = ((h ^ (h >> 15)) * 0x735A2D97) & LOW32
    return h ^ (h >> 15)


def finish(h: Tensor) -> Tensor:
    """A shorter bijection, for numbers that are a hash already."""
    h = (h * 0x2C1B3C6D) & LOW32
    h = ((h ^ (h >> 15)) * 0x297A2D39) & LOW32
    return h ^ (h >> 16)


def seed_key(seed: Tensor) -> Tensor:
    return mix(mix(seed & LOW32) ^ ((seed >> 32) & LOW32))


def row_keys(seed: Tensor, first_row: Tensor, num_rows: Any, device: torch.device) -> Tensor:
    """[rows]"""
    rows = torch.arange(num_rows, device=device) + first_row
    return mix(seed_key(seed) ^ mix(rows & LOW32))


def element_keys(count: int, device: torch.device) -> Tensor:
    """[count]"""
    return mix((torch.arange(count, device=device) + 0x5BD1E995) & LOW32)


def _keys_of_elements(count: Any, device: torch.device, seed: Tensor) -> Tensor:
    return element_keys(count, device)


def operator_key(number: int, draw: int = 0) -> int:
    """A key for the `draw`-th random numbers of the `number`-th random operator."""
    return mix(mix(number + 1) ^ (0x1B873593 * (draw + 1) & LOW32))


def random_bits(keys: Tensor, elements: Tensor, layout: Layout, shape: Any, key: int) -> Tensor:
    """Uniform numbers in [0, 2**32) of `shape`; `keys` are the row keys, or the 0-dim seed key without
    rows.
    """
    mixed = mix(keys ^ key)
    if not isinstance(layout, Rows):
        return finish(mixed ^ elements).view(shape)
    before, after = list(shape[: layout.dim]), list(shape[layout.dim + 1 :])
    ones_before, ones_after = [1] * (len(before) + 1), [1] * (len(after) + 1)
    # [before..., outer, rows, inner, after...]
    by_row = mixed.view([*ones_before, keys.shape[0], *ones_after])
    outer, inner = (number if isinstance(number, int) else -1 for number in (layout.outer, layout.inner))
    by_element = elements.view([*before, outer, 1, inner, *after])
    return finish(by_row ^ by_element).view(shape)


@dataclass(frozen=True, slots=True)
class PureRandomness(Pass[KnownRows]):
    """See the module docstring; `layouts` are those of the graph that it runs on."""

    name: ClassVar[str] = "randomness"
    requires: ClassVar[frozenset[str]] = frozenset({"rows_known"})
    provides: ClassVar[frozenset[str]] = frozenset({"pure_randomness"})
    layouts: Mapping[str, Layout]
    rows_symbol: sympy.Symbol
    meeting: Meeting | None = None

    def run(self, graph_module: fx.GraphModule) -> KnownRows:
        layouts = make_random_ops_pure(graph_module, self.layouts, self.rows_symbol, self.meeting)
        return KnownRows(graph_module, layouts, self.meeting)


def make_random_ops_pure(
    graph_module: fx.GraphModule,
    layouts: Mapping[str, Layout],
    rows_symbol: sympy.Symbol,
    meeting: Meeting | None = None,
) -> dict[str, Layout]:
    """Rewrite the random operators of the graph in place; gives the layouts of all nodes after it. The caller
    recompiles.

    Raises PassError for random operators that cannot be rewritten.
    """
    rewriter = _Rewriter(graph_module, dict(layouts), rows_symbol, meeting)
    for node in list(graph_module.graph.nodes):
        if is_random(node) and not _is_off(Call.of(node, rows_symbol, {})):
            rewriter.rewrite(node)
    graph_module.graph.eliminate_dead_code(lambda node: node.op == "output" or node.op == "placeholder")
    return {
        node.name: rewriter.layouts[node.name] for node in graph_module.graph.nodes if node.op != "output"
    }


def _is_off(call: Call) -> bool:
    """Whether a call that might draw random numbers does not: dropout off, or attention without dropout."""
    name = call.name.removeprefix("aten.")
    if name in ("native_dropout", "dropout"):
        return not call["train"] and call["train"] is not None or call["p"] == 0
    return "dropout_p" in call.arguments and not call["dropout_p"]


class _Rewriter:
    def __init__(
        self,
        graph_module: fx.GraphModule,
        layouts: dict[str, Layout],
        symbol: sympy.Symbol,
        meeting: Meeting | None = None,
    ) -> None:
        self.meeting = meeting
        self.graph = graph_module.graph
        self.layouts = layouts
        self.symbol = symbol
        self.num_operators = 0
        self.shared: dict[Any, fx.Node] = {}
        self.traced: dict[Any, InnerGraph] = {}  # operators that differ in their number alone are traced once
        self.row_numbers: set[str] = set()  # nodes made from the numbers of global rows

    def rewrite(self, node: fx.Node) -> None:
        call = Call.of(node, self.symbol, {})
        name = call.name.removeprefix("aten.")
        function = RANDOM_OPERATORS.get(name)
        if function is None:
            raise PassError(
                node,
                f"unknown random operator {call.name}: its numbers would differ from slice to slice of the "
                "batch",
            )
        value = call.value[0] if isinstance(call.value, (tuple, list)) else call.value
        layout = self.layouts[node.name]
        layout = layout.elements[0] if isinstance(layout, Several) else layout
        number, self.num_operators = self.num_operators, self.num_operators + 1
        shape_of = _attention_shape if function is attention else _value_shape
        if isinstance(layout, Whole):
            raise PassError(
                node, f"random operator {call.name} gives a number to pairs of rows or to a choice of rows"
            )
        if isinstance(layout, Rows) and not (isinstance(layout.outer, int) or isinstance(layout.inner, int)):
            raise PassError(node, f"random operator {call.name} works on rows in pieces of two lengths")
        # What is in an order draws the numbers of its elements.
        if isinstance(layout, Ordered) and (isinstance(layout.origin, Choice) or layout.each != 1):
            raise PassError(node, f"random operator {call.name} draws for parts of rows that an index names")
        order = self._index_of(layout.origin) if isinstance(layout, Ordered) else None
        if isinstance(layout, Ordered):
            layout = Rows(layout.dim, layout.origin.outer, layout.origin.inner)
        rows = layout
        keys = self._keys(rows, value.device)
        elements = self._elements(product(_row_shape(shape_of(call.arguments, value), rows)), value.device)

        def run(arguments: dict[str, Any], keys: Tensor, elements: Tensor, order: Tensor | None) -> Any:
            shape = shape_of(arguments, value)

            def bits(draw: int = 0) -> Tensor:
                found = random_bits(keys, elements, rows, shape, operator_key(STAND_IN, draw))
                return found if order is None else found.index_select(rows.dim, order)  # type: ignore[union-attr]

            return function(bits, value.dtype, arguments)

        arguments = dict(call.arguments)
        if function is not attention:
            arguments["_shape"] = [self._size(node, dim) for dim in range(value.ndim)]
        args = (arguments, keys, elements, order)
        signature = (name, value.dtype, layout, _signature(args))
        if signature not in self.traced:
            self.traced[signature] = trace_function(run, args, {})
        inner = dataclasses.replace(self.traced[signature], arguments=tuple(_nodes_in(args)))
        new_nodes = inline(node, inner)
        for new_node in new_nodes:
            new_node.args = tuple(_with_key(item, number) for item in new_node.args)
        extend_analysis(
            self.layouts, new_nodes, self.symbol, row_numbers=self.row_numbers, meeting=self.meeting
        )

    def _index_of(self, origin: Origin) -> fx.Node:
        """The node of an order's index."""
        return next(node for node in self.graph.nodes if self.layouts.get(node.name) == OrderIndex(0, origin))

    def _size(self, node: fx.Node, dim: int) -> Any:
        """A size of the node's value; those with rows as nodes."""
        value = node.meta["val"][0] if isinstance(node.meta["val"], (tuple, list)) else node.meta["val"]
        multiple = rows_multiple(value.shape[dim], self.symbol)
        if not multiple:
            return self._number(value.shape[dim])
        return (
            self._num_rows()
            if multiple == 1
            else self._make(operator.mul, (self._num_rows(), self._number(multiple)), RowCount())
        )

    def _number(self, size: Any) -> fx.Node | int:
        """A size without rows, as a node where it depends on lengths."""
        if isinstance(size, int):
            return size
        expression = size_expression(size)
        if expression not in self.shared:
            before = set(self.graph.nodes)
            with self.graph.inserting_before(placeholders(self.graph)[-1].next):
                made = size_node(self.graph, expression, length_placeholders(self.graph))
            assert isinstance(made, fx.Node), f"a size {expression} that no input has"
            self.layouts |= {node.name: Constant() for node in self.graph.nodes if node not in before}
            self.shared[expression] = made
        return self.shared[expression]

    # --- keys, made once per graph
    # ----------------------------------------------------------------------------------------

    def _keys(self, layout: Layout, device: torch.device) -> fx.Node:
        seed = self._placeholder(RNG_SEED)
        if not isinstance(layout, Rows):
            return self._shared("seed", seed_key, (seed,), Constant())
        first = self._placeholder(FIRST_ROW)
        # `RowIndex`: made from the numbers of rows alone, recomputed wherever used
        return self._shared(("rows", device), row_keys, (seed, first, self._num_rows(), device), RowIndex(0))

    def _elements(self, count: Size, device: torch.device) -> fx.Node:
        key = ("elements", count, device)
        if isinstance(count, int):
            return self._shared(key, element_keys, (count, device), Constant())
        # A trace is one over symbolic sizes if there is a fake tensor in it.
        args = (self._number(count), device, self._placeholder(RNG_SEED))
        return self._shared(key, _keys_of_elements, args, Constant())

    def _num_rows(self) -> fx.Node:
        if "num_rows" not in self.shared:
            source = next(
                node for node in placeholders(self.graph) if isinstance(self.layouts[node.name], Rows)
            )
            last = placeholders(self.graph)[-1]
            with self.graph.inserting_after(last):
                size = self.graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
            size.meta["val"] = source.meta["val"].shape[0]
            self.layouts[size.name] = RowCount()
            self.shared["num_rows"] = size
        return self.shared["num_rows"]

    def _shared(
        self, key: Any, function: Callable[..., Any], args: tuple[Any, ...], layout: Layout
    ) -> fx.Node:
        if key not in self.shared:
            self.shared[key] = self._make(function, args, layout)
        return self.shared[key]

    def _make(self, function: Callable[..., Any], args: tuple[Any, ...], layout: Layout) -> fx.Node:
        """New nodes right after what they need, so that every operator may use them."""
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        needed = [item for item in args if isinstance(item, fx.Node)]
        last = max([*needed, placeholders(self.graph)[-1]], key=order.__getitem__)
        inner = trace_function(function, args, {})
        before = set(self.graph.nodes)
        with self.graph.inserting_after(last):
            marker = self.graph.call_function(torch.ops.aten.alias.default, tuple(needed[:1]))
        marker.meta["val"] = inner.outputs[0].meta["val"]
        result = inline_value(marker, inner)
        for node in self.graph.nodes:
            if node not in before:
                rows = (
                    isinstance(node.meta["val"], Tensor)
                    and isinstance(layout, RowIndex)
                    and node.meta["val"].ndim == 1
                )
                self.layouts[node.name] = layout if rows or isinstance(layout, RowCount) else Constant()
                if rows:
                    self.row_numbers.add(node.name)
        return result

    def _placeholder(self, name: str) -> fx.Node:
        if name not in self.shared:
            self.shared[name] = self._find_or_add_placeholder(name)
        return self.shared[name]

    def _find_or_add_placeholder(self, name: str) -> fx.Node:
        existing = placeholders(self.graph)
        for node in existing:
            if node.name == name:
                return node
        with self.graph.inserting_after(existing[-1]):
            node = self.graph.placeholder(name)
        with fake_mode_of(existing):
            node.meta["val"] = torch.empty((), dtype=torch.int64)
        self.layouts[name] = Constant()
        return node


def _nodes_in(args: Any) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    fx.map_arg(args, lambda node: found.setdefault(node))
    return found


def _signature(args: Any) -> str:
    """Calls with the same text differ only in which nodes they work on."""
    place = {node: number for number, node in enumerate(_nodes_in(args))}
    described = fx.map_arg(args, lambda node: f"node {place[node]}: {_described(node.meta['val'])}")
    return repr(described)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value.node.expr)
    sizes = [[size_expression(size) for size in sizes] for sizes in (value.shape, value.stride())]
    return f"{value.dtype} {value.device} {sizes}"


def _with_key(item: Any, number: int) -> Any:
    """A constant of a traced operator: the keys of the stand-in become those of the operator itself."""
    for draw in range(MAX_DRAWS):
        if type(item) is int and item == operator_key(STAND_IN, draw):
            return operator_key(number, draw)
    return item


def _value_shape(arguments: Mapping[str, Any], value: Tensor) -> list[Any]:
    return list(arguments.get("_shape", value.shape))


def _attention_shape(arguments: Mapping[str, Any], value: Tensor) -> list[Any]:
    """[batch, heads, query length, key length] of the attention weights."""
    query, key = (
        item.meta["val"] if isinstance(item, fx.Node) else item
        for item in (arguments["query"], arguments["key"])
    )
    return [*query.shape[:-1], key.shape[-2]]


def _row_shape(shape: list[Any], layout: Layout) -> list[Any]:
    """The shape with the batch dimension reduced to one row's part."""
    if not isinstance(layout, Rows):
        return shape
    return [*shape[: layout.dim], layout.outer * layout.inner, *shape[layout.dim + 1 :]]


# --- the operators: (bits, dtype of the result, arguments by name) -> result
# ----------------------------------------------

Bits = Callable[..., Tensor]


def _keep_threshold(drop: float) -> int:
    return round((1.0 - drop) * SIZE32)


def _unit(bits: Tensor) -> Tensor:
    """[0, 1) in steps of 2**-24, exact in every dtype from float32 up; float64."""
    return (bits >> 8).to(torch.float64) * 2.0**-24


def _open_unit(bits: Tensor) -> Tensor:
    """(0, 1)"""
    return ((bits >> 8).to(torch.float64) + 0.5) * 2.0**-24


def _normal(bits: Bits) -> Tensor:
    return torch.sqrt(-2.0 * torch.log(_open_unit(bits(0)))) * torch.cos(2.0 * math.pi * _unit(bits(1)))


def dropout(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    x, drop = arguments["input"], arguments["p"]
    mask = bits() < _keep_threshold(drop)
    scale = 0.0 if drop == 1 else 1.0 / (1.0 - drop)
    return x * mask * scale, mask


def bernoulli(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tensor:
    chance = arguments.get("p", arguments["self"])
    limit = chance.to(torch.float64) * SIZE32 if isinstance(chance, Tensor) else round(chance * SIZE32)
    return (bits() < limit).to(dtype)


def rand(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tensor:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return (low + (high - low) * _unit(bits())).to(dtype)


def randn(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tensor:
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    return (mean + std * _normal(bits)).to(dtype)


def exponential(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tensor:
    return (-torch.log(_open_unit(bits())) / arguments["lambd"]).to(dtype)


def randint(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tensor:
    low, high = arguments.get("low", 0) or 0, arguments["high"]
    assert isinstance(low, int) and isinstance(high, int) and high - low < 2**31, (
        "randint with a range of 2**31 or more"
    )
    return (low + ((bits() * (high - low)) >> 32)).to(dtype)


def randperm(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tensor:
    return torch.argsort(bits()).to(dtype)


def attention(bits: Bits, dtype: torch.dtype, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Attention written out, with dropout on its weights; only the first result of the fused operator is
    given.
    """
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    scale = arguments.get("scale")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(-2, -1) * scale
    if arguments.get("is_causal"):
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    bias = arguments.get("attn_bias", arguments.get("attn_mask"))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    weights = torch.softmax(
        scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores, -1
    ).to(query.dtype)
    drop = arguments["dropout_p"]
    return (weights * (bits() < _keep_threshold(drop)) * (1.0 / (1.0 - drop)) @ value,)


RANDOM_OPERATORS: dict[str, Callable[..., Any]] = {
    "native_dropout": dropout,
    "bernoulli": bernoulli,
    **dict.fromkeys(("rand", "rand_like", "uniform"), rand),
    **dict.fromkeys(("randn", "randn_like", "normal_functional"), randn),
    "exponential": exponential,
    **dict.fromkeys(("randint", "randint_like"), randint),
    "randperm": randperm,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        attention,
    ),
}  # fmt: skip
