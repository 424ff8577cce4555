"""Rows with an origin: values that hold the elements of rows in an order that an index gives, as a mixture of
experts has its tokens sorted by expert.

In: an operator_call.Call with an argument that is sorted, an index that sorts, or keys that are counted. Out: the
layout of the result (layouts.Ordered and its kin), or None where the rule of the operator itself says it.

Proof sketch. Let a sort give the index p of a slice, so that place i of an ordered value belongs to element p(i).
By induction over the operators, an ordered value at place i is a function of element p(i) alone: what is looked up
by p is; an operator that keeps a dimension as it is, and treats each of its places alone, keeps it so, if its
other arguments are in the same order or the same for all places; a product of segments at place i takes the
weights of the key of p(i), since the keys rise along the order, none is negative, and the ends of segments are sums
of their counts. What is put back by p, or looked up by the inverse of p, is then a value whose element e is a
function of element e alone: rows again, whatever the slice. A sum over all places is one over all elements, as p
names each once. Whatever else touches an ordered value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from rannc_backend.passes.batch.batch_axis_indexing import rows_of_mask
from rannc_backend.passes.batch.batch_axis_views import COPIES, VIEW_RULES, Rule, moves_integers
from rannc_backend.passes.batch.counted_keys import EXACT, key_counts, root_of
from rannc_backend.passes.batch.layouts import (
    Choice,
    Constant,
    InverseIndex,
    KeyCounts,
    Layout,
    Ordered,
    OrderIndex,
    Origin,
    PartialSum,
    RowIndex,
    Rows,
    SegmentEnds,
    Several,
    width_of,
)
from rannc_backend.passes.batch.operator_call import Call, Replaced, operator_name
from rannc_backend.passes.data_sizes import is_same_value
from rannc_backend.passes.pipeline import PassError
from rannc_backend.passes.plain_numbers import without_modes
from rannc_backend.passes.size_nodes import Size, exact_quotient

ORDERS = (Ordered, OrderIndex, InverseIndex)
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")


def sorted_rows(call: Call) -> Layout:
    """sort along the one dimension of rows: their elements in an order, and the index (argsort is a sort too)."""
    layout = call.rows(call["self"])
    if layout is None or call.ndim(call["self"]) != 1:
        call.refuse_mixing("it sorts rows")
    origin = Origin(root_of(call["self"]), layout.outer, layout.inner, rising=not call["descending"])
    return Several((Ordered(0, origin, is_key=True), OrderIndex(0, origin)))


def ends_of_segments(node: fx.Node, layouts: Mapping[fx.Node, Layout]) -> Layout | None:
    """What counts of keys become on their way to a product of segments; None for everything else."""
    inputs = [layouts[item] for item in node.all_input_nodes]
    if len(inputs) != 1 or not isinstance(inputs[0], (KeyCounts, SegmentEnds)):
        return None
    name = operator_name(node.target).removeprefix("aten.")
    value = node.meta["val"]
    exact = isinstance(value, torch.Tensor) and value.dtype in EXACT
    if name in (*COPIES, "detach", "alias") and exact:
        return inputs[0]
    if name == "cumsum" and exact and isinstance(inputs[0], KeyCounts) and inputs[0].keys is not None:
        return SegmentEnds(inputs[0].keys)
    return None


def in_order(call: Call, rule: Rule | None) -> Layout | None:
    """The layout of a call with sorted arguments; None where its decomposition has to say it."""
    name = call.name.removeprefix("aten.")
    if any(isinstance(call.layout(item), SegmentEnds) for item in call.tensors()):
        return _product_of_segments(call)
    special = _SPECIAL.get(name)
    layout = special(call) if special is not None else None
    if layout is not None or rule is None:
        return layout
    return _place_by_place(call, rule)


def of_choices(node: fx.Node, layout: Layout, layouts: Mapping[fx.Node, Layout]) -> Layout:
    """What is made for elements that a mask chooses (`ones_like` of them, say) is one value for each of them."""
    if not isinstance(layout, Rows) or isinstance(width := width_of(layout), int):
        return layout
    origins = {given.origin for given in layouts.values() if isinstance(given, Ordered)}
    for origin in origins:
        if isinstance(origin, Choice) and origin.inner in width.free_symbols:
            each = exact_quotient(width, origin.inner)
            if each is None or layout.outer != 1 or not layout.uniform:
                raise PassError(node, f"operator {operator_name(node.target)} takes chosen rows apart")
            return Ordered(layout.dim, origin, each)
    return layout


# --- operators that begin and end an order
# ---------------------------------------------------------------------------------------------


def _like(call: Call) -> Layout:
    layout = call.layout(call["self"])
    assert isinstance(layout, ORDERS), f"{call.node} is like {layout}"
    return Rows(layout.dim, 1, width_of(layout), uniform=True)


def _only_index(call: Call) -> fx.Node | None:
    """The index of `self[index]`, where there is one, of the first dimension."""
    indices = list(call["indices"])
    return indices[0] if len(indices) == 1 else None


def _looked_up(call: Call) -> Layout | None:
    """`self[index]`, and `self[index // k, index % k]`."""
    first, *others = list(call["indices"])
    order = call.layout(first)
    if others and not (
        isinstance(order, OrderIndex) and all(_same_places(call, item, order) for item in others)
    ):
        return None
    return _taken(call, call["self"], first, 0)


def _same_places(call: Call, index: fx.Node | None, order: OrderIndex) -> bool:
    return index is not None and call.ndim(index) == 1 and call.layout(index) == Ordered(0, order.origin)


def _selected(call: Call) -> Layout | None:
    return _taken(call, call["self"], call["index"], call.dim("dim", call.ndim(call["self"])))


def _gathered(call: Call) -> Layout | None:
    """An index that is the same along all other dimensions selects whole places, as layouts say."""
    dim = call.dim("dim", call.ndim(call["self"]))
    if dim != 0 or call.value.shape[1:] != call["self"].meta["val"].shape[1:]:
        return None
    return _taken(call, call["self"], call["index"], dim)


def _taken(call: Call, source: fx.Node, index: fx.Node | None, dim: int) -> Layout | None:
    """`source` at the places of `index` along `dim`."""
    order, layout = call.layout(index), call.layout(source)
    if index is None or not isinstance(order, (OrderIndex, InverseIndex)):
        return None
    is_line = order.dim == 0 and (call.ndim(index) == 1 or call.name == "aten.gather")
    if isinstance(order, InverseIndex) and isinstance(layout, Ordered) and is_line:
        if order.origin is layout.origin and layout.dim == dim and layout.each == 1:
            return Rows(dim, order.origin.outer, order.origin.inner)
    if isinstance(order, OrderIndex) and is_line:
        origin = order.origin
        if isinstance(layout, Rows) and layout.dim == dim and _fits(layout, order):
            return Ordered(dim, origin)
        if isinstance(layout, RowIndex) and call.ndim(source) == call.ndim(index) == 1:
            if origin.outer == 1 and order.divisor == 1 and width_of(layout) == origin.inner:
                return OrderIndex(0, origin, layout.each)
    call.refuse_mixing("it looks up other rows than those that were sorted")


def _fits(layout: Rows, order: OrderIndex) -> bool:
    """Whether an index names the elements of the rows of a value."""
    origin = order.origin
    return layout.outer == origin.outer and layout.inner * order.divisor == origin.inner


def _divided(call: Call) -> Layout | None:
    """`index // k`: the token of each of its k choices."""
    order, divisor = call.layout(call["self"]), call["other"]
    rounded = call.name == "aten.floor_divide" or call.arguments.get("rounding_mode") == "floor"
    if not isinstance(order, OrderIndex) or not rounded or not isinstance(divisor, int) or divisor < 1:
        return None
    if exact_quotient(order.origin.inner, order.divisor * divisor) is None:
        call.refuse_mixing("it divides the number of a place by what its row does not hold")
    return OrderIndex(order.dim, order.origin, order.divisor * divisor)


def _remainder(call: Call) -> Layout | None:
    """`index % k`: which of its token's k choices an element is."""
    order, divisor = call.layout(call["self"]), call["other"]
    if not isinstance(order, OrderIndex) or not isinstance(divisor, int) or divisor < 1:
        return None
    if order.divisor != 1 or exact_quotient(order.origin.inner, divisor) is None:
        call.refuse_mixing("it divides the number of a place by what its row does not hold")
    return Ordered(order.dim, order.origin)


def _inverted(call: Call) -> Layout | None:
    """The index sorted: where each element went."""
    order = call.layout(call["self"])
    if not isinstance(order, OrderIndex) or order.divisor != 1 or call.ndim(call["self"]) != 1:
        return None
    if call["descending"]:
        call.refuse_mixing("it sorts rows")
    return Several((RowIndex(0, order.origin.inner), InverseIndex(0, order.origin)))


def _written(call: Call) -> Layout | None:
    """index_put and scatter: what an index puts at the places of elements, or a mask at those it has chosen."""
    if call.name.endswith("index_put"):
        if layout := _put_at_mask(call):
            return layout
        index, values, adds = _only_index(call), call["values"], bool(call["accumulate"])
    else:
        index, values, adds = call["index"], call.arguments.get("src"), call.name == "aten.scatter_add"
        if call.dim("dim", call.value.ndim) != 0 or "reduce" in call.arguments:
            return None
    return _put_back(call, index, values, adds=adds)


def _put_at_mask(call: Call) -> Layout | None:
    mask, source = _only_index(call), call.layout(call["values"])
    if mask is None or not isinstance(source, Ordered) or not isinstance(source.origin, Choice):
        return None
    if source != Ordered(0, source.origin) or not is_same_value(source.origin.keys, mask):
        call.refuse_mixing("it puts back other rows than those that were chosen")
    if call.ndim(call["values"]) != call.value.ndim - call.ndim(mask) + 1:
        call.refuse_mixing("it puts back rows in another shape")
    return rows_of_mask(call, call.layout(mask), call.layout(call["self"]))


def _added(call: Call) -> Layout | None:
    if call.dim("dim", call.value.ndim) != 0 or call["alpha"] != 1:
        return None
    return _put_back(call, call["index"], call["source"], adds=True)


def _put_back(call: Call, index: Any, values: Any, *, adds: bool) -> Layout | None:
    """What is written into `self` along dimension 0; an index of all elements leaves nothing of it, or adds."""
    order, target, source = call.layout(index), call.layout(call["self"]), call.layout(values)
    if not isinstance(order, OrderIndex) or order.dim != 0:
        return None
    origin, is_plain = order.origin, order.divisor == 1 and not adds
    if (
        isinstance(source, RowIndex)
        and is_plain
        and source == RowIndex(0, origin.inner)
        and origin.outer == 1
    ):
        return InverseIndex(0, origin) if call.value.ndim == 1 else None
    fits = source == Ordered(0, origin) and call.value.shape[1:] == values.meta["val"].shape[1:]
    if fits and isinstance(target, Rows) and target.dim == 0 and (is_plain or adds):
        return call.merge(Rows(0, origin.outer, _per_token(order)), target)
    call.refuse_mixing("it puts back other rows than those that were sorted")


def _per_token(order: OrderIndex) -> Size:
    inner = exact_quotient(order.origin.inner, order.divisor)
    assert inner is not None, "a divisor divides what its rows hold"
    return inner


_SPECIAL: dict[str, Callable[[Call], Layout | None]] = {
    **dict.fromkeys(_LIKE, _like),
    **dict.fromkeys(("index", "_unsafe_index"), _looked_up),
    "index_select": _selected,
    "gather": _gathered,
    **dict.fromkeys(("floor_divide", "div"), _divided),
    "sort": _inverted,
    **dict.fromkeys(("index_put", "_unsafe_index_put", "scatter", "scatter_add"), _written),
    "index_add": _added,
    "remainder": _remainder,
    "histc": key_counts,
}


# --- operators that keep it
# ------------------------------------------------------------------------------------------------------


def _place_by_place(call: Call, rule: Rule) -> Layout:
    """As if each place were a row: the operator's rule says whether it treats places alone."""
    orders = {item: layout for item in call.tensors() if isinstance(layout := call.layout(item), ORDERS)}
    if len({(type(layout), layout.origin, width_of(layout)) for layout in orders.values()}) > 1:
        call.refuse_mixing("it combines rows in different orders")
    for item in call.tensors():
        layout = call.layout(item)
        if isinstance(layout, RowIndex) or (isinstance(layout, Rows) and not layout.uniform):
            call.refuse_mixing("it combines sorted rows with rows that are not")
    first = next(iter(orders.values()))
    name = call.name.removeprefix("aten.")
    if not isinstance(first, Ordered) and not moves_integers(call):
        call.refuse_mixing("it computes with the numbers of rows")
    width = width_of(first)
    as_rows = {item: Rows(layout.dim, 1, width) for item, layout in orders.items()}
    found = rule(Call.of(call.node, call.symbol, Replaced(call.layouts, as_rows)))
    # Casts of keys that their counts are taken of hold them as they are.
    is_exact = getattr(call.value, "dtype", None) in EXACT
    return _in_same_order(call, found, first, keeps_keys=name in (*VIEW_RULES, *COPIES) and is_exact)


def _in_same_order(call: Call, found: Layout, first: Any, *, keeps_keys: bool) -> Layout:
    if isinstance(found, Several):
        return Several(
            tuple(_in_same_order(call, item, first, keeps_keys=keeps_keys) for item in found.elements)
        )
    if isinstance(found, (PartialSum, Constant)):
        return found
    if not isinstance(found, Rows) or found.outer != 1:
        call.refuse_mixing("it takes the order of rows apart")
    each = exact_quotient(found.inner, first.origin.outer * first.origin.inner)
    if each is None or (each != 1 and not isinstance(first, Ordered)):
        call.refuse_mixing("it takes the order of rows apart")
    if isinstance(first, OrderIndex):
        return OrderIndex(found.dim, first.origin, first.divisor)
    if isinstance(first, InverseIndex):
        return InverseIndex(found.dim, first.origin)
    return Ordered(found.dim, first.origin, each, is_key=first.is_key and keeps_keys and each == 1)


# --- products of segments
# --------------------------------------------------------------------------------------------------------


def _product_of_segments(call: Call) -> Layout:
    """Rows in the order of keys by the weights of their key: torch's own operator, or one of a library that
    gives the same for numbers that are made up.
    """
    tensors = list(call.tensors())
    ordered = [item for item in tensors if isinstance(call.layout(item), Ordered)]
    ends = [item for item in tensors if isinstance(call.layout(item), SegmentEnds)]
    others = [item for item in tensors if item not in ordered and item not in ends]
    if len(ordered) != 1 or len(ends) != 1 or len(others) != 1:
        call.refuse_mixing("it takes the ends of segments for something else")
    order, end, weight = call.layout(ordered[0]), call.layout(ends[0]), others[0]
    assert isinstance(order, Ordered) and isinstance(end, SegmentEnds)
    fits = (
        call.rows(weight) is None
        and order.dim == 0
        and order.each == 1
        and call.ndim(ordered[0]) == 2
        and call.ndim(weight) == 3
        and order.origin.rising
        and order.origin.keys is end.keys
        and ends[0].meta["val"].shape == weight.meta["val"].shape[:1]
    )
    if not fits:
        call.refuse_mixing("it multiplies segments that are not those of its rows")
    if call.name != "aten._grouped_mm" and not _multiplies_segments(call, ordered[0], weight, ends[0]):
        call.refuse("gets the ends of segments, and does not multiply each segment by its weights")
    return Ordered(0, order.origin)


def _multiplies_segments(call: Call, rows: fx.Node, weight: fx.Node, ends: fx.Node) -> bool:
    """Whether an operator gives the products of segments, and their gradients, for numbers that are made up."""
    device, dtype = rows.meta["val"].device, rows.meta["val"].dtype
    with without_modes(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        x = torch.rand(24, 16, dtype=dtype, device=device, requires_grad=True)
        w = torch.rand(4, 16, 32, dtype=dtype, device=device, requires_grad=True)
        last = torch.tensor([8, 8, 11, 24], dtype=ends.meta["val"].dtype, device=device)
        numbers = {rows: x, weight: w, ends: last}
        operator: Any = call.node.target
        args: Any = fx.map_arg(call.node.args, numbers.get)
        kwargs: Any = fx.map_arg(call.node.kwargs, numbers.get)
        try:
            found = operator(*args, **kwargs)
            wanted = torch.cat([x[:8] @ w[0], x[8:11] @ w[2], x[11:] @ w[3]])
            weights = torch.rand(wanted.shape, dtype=dtype, device=device)
            pairs = [
                (found, wanted),
                *zip(
                    torch.autograd.grad(found, (x, w), weights), torch.autograd.grad(wanted, (x, w), weights)
                ),
            ]
            tolerance = 1e-9 if dtype == torch.float64 else 1e-2
            return all(torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in pairs)
        except Exception:  # whatever an operator of a library raises for numbers that are not the model's
            return False
