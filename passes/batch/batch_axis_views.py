"""Batch-axis rules for operators that move, select, repeat or create elements without computing on them.

In: an operator_call.Call with at least one argument or result that holds rows. Out: the layout of the result.
Terms as in layouts.py: dimension `dim` holds outer * rows * inner elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import sympy

from rannc_backend.passes.batch.layouts import Constant, Layout, RowIndex, Rows, Several
from rannc_backend.passes.batch.operator_call import (
    Call,
    has_rows,
    product,
    rows_dims,
    rows_multiple,
    wrap_dim,
    wrap_dims,
)
from rannc_backend.passes.graph_queries import is_one, size_expression
from rannc_backend.passes.size_nodes import Size, exact_quotient

Rule = Callable[[Call], Layout]


def _source(call: Call, name: str = "self") -> Rows:
    layout = call.rows(call[name])
    if layout is None:
        call.refuse("makes rows out of a value that has none")
    return layout


def _moved(layout: Rows, dim: int) -> Rows:
    return Rows(dim, layout.outer, layout.inner, uniform=layout.uniform)


def created(call: Call) -> Layout:
    """Factories, and expansion of a constant: every row is the same."""
    dims = rows_dims(call.value, call.symbol)
    if not dims:
        return Constant()
    if len(dims) != 1:
        call.refuse("makes a value with two dimensions of the batch's size")
    multiple = rows_multiple(call.value.shape[dims[0]], call.symbol)
    if multiple is None:
        call.refuse(
            f"makes a value of size {call.value.shape[dims[0]]}, which is no multiple of the batch size"
        )
    return Rows(dims[0], multiple, 1, uniform=not call.name.startswith("aten.rand"))


def arange(call: Call) -> Layout:
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    multiple = rows_multiple(call.number("end"), call.symbol)
    if start == 0 and step == 1 and multiple:
        return RowIndex(0, multiple)
    call.refuse("numbers something else than the rows of the batch from 0 up")


def reshape(call: Call) -> Layout:
    layout, source = _source(call), call["self"].meta["val"]
    dims = rows_dims(call.value, call.symbol)
    if len(dims) != 1:
        call.refuse("splits the batch dimension")
    dim = dims[0]
    before = product(source.shape[: layout.dim]) * layout.outer
    after = product(source.shape[layout.dim + 1 :]) * layout.inner
    new_before, new_after = product(call.value.shape[:dim]), product(call.value.shape[dim + 1 :])
    outer, inner = exact_quotient(before, new_before), exact_quotient(after, new_after)
    if outer is None or inner is None:
        call.refuse_mixing("the new shape cuts across rows")
    # Still uniform only if no other dimension was merged into this one.
    uniform = layout.uniform and exact_quotient(layout.outer * layout.inner, outer * inner) is not None
    return Rows(dim, outer, inner, uniform=uniform)


def expand(call: Call) -> Layout:
    layout = call.rows(call["self"])
    if layout is None:
        return created(call)
    return _moved(layout, layout.dim + call.value.ndim - call.ndim(call["self"]))


def repeat(call: Call) -> Layout:
    layout, ndim = call.rows(call["self"]), call.ndim(call["self"])
    shift = call.value.ndim - ndim
    if layout is None:
        dims = rows_dims(call.value, call.symbol)
        if len(dims) != 1:
            call.refuse("makes a value with two dimensions of the batch's size")
        size = 1 if dims[0] < shift else call["self"].meta["val"].shape[dims[0] - shift]
        multiple = rows_multiple(call.value.shape[dims[0]], call.symbol)
        if multiple is None:
            call.refuse(
                f"makes a value of size {call.value.shape[dims[0]]}, which is no multiple of the batch size"
            )
        return Rows(dims[0], 1, multiple, uniform=is_one(size))
    times = call["repeats"][layout.dim + shift]
    if not isinstance(times, int):
        call.refuse("repeats the batch as often as it has rows")
    return Rows(layout.dim + shift, layout.outer * times, layout.inner, uniform=layout.uniform)


def transpose(call: Call) -> Layout:
    layout, ndim = _source(call), call.ndim(call["self"])
    order = list(range(ndim))
    if call.name == "aten.t":
        order.reverse()
    elif call.name == "aten.permute":
        order = [wrap_dim(dim, ndim) for dim in call["dims"]]
    else:
        first, second = call.dim("dim0", ndim), call.dim("dim1", ndim)
        order[first], order[second] = second, first
    return _moved(layout, order.index(layout.dim))


def squeeze(call: Call) -> Layout:
    layout, value = _source(call), call["self"].meta["val"]
    named = wrap_dims(call.arguments.get("dim"), value.ndim)
    removed = [dim for dim in named if not has_rows(value.shape[dim], call.symbol) and value.shape[dim] == 1]
    return _moved(layout, layout.dim - sum(dim < layout.dim for dim in removed))


def unsqueeze(call: Call) -> Layout:
    layout = _source(call)
    dim = call.dim("dim", call.value.ndim)
    return _moved(layout, layout.dim + (dim <= layout.dim))


def select(call: Call) -> Layout:
    layout = _source(call)
    dim = call.dim("dim", call.ndim(call["self"]))
    if dim == layout.dim:
        call.refuse_mixing("it takes one row for all")
    if has_rows(call.number("index"), call.symbol):
        call.refuse("selects by the size of the batch")
    return _moved(layout, layout.dim - (dim < layout.dim))


def unbind(call: Call) -> Layout:
    layout = _source(call)
    dim = call.dim("dim", call.ndim(call["self"]))
    if dim == layout.dim:
        call.refuse_mixing("it takes the rows apart")
    return Several(tuple(_moved(layout, layout.dim - (dim < layout.dim)) for _ in call.value))


def _bounds(call: Call, size: Any) -> tuple[sympy.Expr, sympy.Expr]:
    """Start and end of a slice as expressions in rows, negative ones counted from the end."""
    start, end = call.number("start"), call.number("end")
    full = size_expression(size)
    first = sympy.Integer(0) if start is None else size_expression(start)
    last = full if end is None or (isinstance(end, int) and end >= sys.maxsize) else size_expression(end)
    first, last = (full + edge if edge.could_extract_minus_sign() else edge for edge in (first, last))
    return first, last


def _blocks(call: Call, layout: Rows, dim: int) -> Size:
    """How many whole outer blocks the slice of `dim` takes; refuses a slice that cuts through rows."""
    first, last = _bounds(call, call["self"].meta["val"].shape[dim])
    if call["step"] == 1 and first == 0 and last == size_expression(call["self"].meta["val"].shape[dim]):
        return layout.outer
    block = call.symbol * layout.inner
    first, last = sympy.simplify(first / block), sympy.simplify(last / block)
    if (
        call["step"] != 1
        or not (first.is_Integer and last.is_Integer)
        or not isinstance(layout.outer, int)
        or last > layout.outer
    ):
        call.refuse_mixing("it takes some of the rows")
    return int(last - first)


def slice_(call: Call) -> Layout:
    layout = _source(call)
    dim = call.dim("dim", call.ndim(call["self"]))
    if dim == layout.dim:
        return Rows(dim, _blocks(call, layout, dim), layout.inner, uniform=layout.uniform)
    if has_rows(call.number("start"), call.symbol) or has_rows(call.number("end"), call.symbol):
        call.refuse("cuts by the size of the batch")
    return layout


def slice_scatter(call: Call) -> Layout:
    target, source = call.rows(call["self"]), call.rows(call["src"])
    dim = call.dim("dim", call.value.ndim)
    layout = call.merge(target, source)
    if layout is not None and layout.dim == dim:
        if target is None or source is None or _blocks(call, target, dim) != target.outer:
            call.refuse_mixing("it writes some of the rows")
        return source
    assert layout is not None
    return layout


def select_scatter(call: Call) -> Layout:
    target, source = call.rows(call["self"]), call.rows(call["src"])
    dim = call.dim("dim", call.value.ndim)
    if source is not None:
        source = Rows(source.dim + (dim <= source.dim), source.outer, source.inner, uniform=source.uniform)
    layout = call.merge(target, source)
    if layout is None or layout.dim == dim:
        call.refuse_mixing("it writes one row")
    return layout


def split(call: Call) -> Layout:
    layout = _source(call)
    dim = call.dim("dim", call.ndim(call["self"]))
    if dim != layout.dim:
        return Several(tuple(layout for _ in call.value))
    parts = []
    for part in call.value:
        multiple = rows_multiple(part.shape[dim], call.symbol)
        outer = exact_quotient(multiple, layout.inner) if multiple else None
        if outer is None:
            call.refuse_mixing("it takes the rows apart")
        parts.append(Rows(dim, outer, layout.inner, uniform=layout.uniform))
    if sum(part.outer for part in parts) != layout.outer:
        call.refuse_mixing("it takes the rows apart")
    return Several(tuple(parts))


def cat(call: Call) -> Layout:
    tensors = [node for node in call["tensors"] if node.meta["val"].numel() != 0 or node.meta["val"].ndim > 1]
    layouts = [call.rows(node) for node in tensors]
    dim = call.dim("dim", call.value.ndim)
    if parts := [layout for layout in layouts if layout is not None and layout.dim == dim]:
        # Blocks of all rows one after the other are a longer outer part; anything else shifts rows.
        if len(parts) != len(layouts) or any(part.inner != parts[0].inner for part in parts):
            call.refuse_mixing("it appends something to the batch dimension")
        return Rows(dim, sum(part.outer for part in parts), parts[0].inner)
    merged = None
    for layout in layouts:
        merged = call.merge(merged, layout)
    assert merged is not None
    return Rows(
        merged.dim, merged.outer, merged.inner, uniform=all(layout and layout.uniform for layout in layouts)
    )


def stack(call: Call) -> Layout:
    merged = None
    for node in call["tensors"]:
        merged = call.merge(merged, call.rows(node))
    assert merged is not None
    return _moved(merged, merged.dim + (call.dim("dim", call.value.ndim) <= merged.dim))


def diagonal(call: Call) -> Layout:
    layout, ndim = _source(call), call.ndim(call["self"])
    first, second = call.dim("dim1", ndim), call.dim("dim2", ndim)
    if layout.dim in (first, second):
        call.refuse_mixing("it pairs the rows with another dimension")
    return _moved(layout, layout.dim - (first < layout.dim) - (second < layout.dim))


def diagonal_scatter(call: Call) -> Layout:
    target, source = call.rows(call["self"]), call.rows(call["src"])
    ndim = call.value.ndim
    diagonal_dims = [call.dim("dim1", ndim), call.dim("dim2", ndim)]
    if source is not None:
        # The diagonal is the last dimension of what is written.
        places = [dim for dim in range(ndim) if dim not in diagonal_dims] + diagonal_dims[:1]
        source = _moved(source, places[source.dim])
    layout = call.merge(target, source)
    if layout is None or layout.dim in diagonal_dims:
        call.refuse_mixing("it pairs the rows with another dimension")
    return layout


def pad(call: Call) -> Layout:
    layout, ndim = _source(call), call.ndim(call["self"])
    from_end = ndim - 1 - layout.dim
    if any(edge != 0 for edge in call["pad"][2 * from_end : 2 * from_end + 2]):
        call.refuse_mixing("it pads the batch dimension")
    return Rows(layout.dim, layout.outer, layout.inner)


def unchanged(call: Call) -> Layout:
    return _source(call)


#: operators whose result holds the elements of the argument themselves: row numbers stay row numbers
VIEW_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "flatten", "view_copy", "_reshape_copy", "_reshape_alias"),
        reshape,
    ),
    **dict.fromkeys(("expand", "expand_copy"), expand),
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes", "numpy_T"), transpose),
    **dict.fromkeys(("squeeze", "squeeze_copy"), squeeze),
    **dict.fromkeys(("unsqueeze", "unsqueeze_copy"), unsqueeze),
    **dict.fromkeys(("alias", "detach", "lift", "lift_fresh", "lift_fresh_copy", "contiguous"), unchanged),
    "select": select,
    "slice": slice_,
    "unbind": unbind,
    **dict.fromkeys(("split", "split_with_sizes", "split_with_sizes_copy", "chunk"), split),
    "repeat": repeat,
}

COPIES = ("clone", "_to_copy")


def moves_integers(call: Call) -> bool:
    """Whether an operator gives integers of its argument as they are: views, copies, casts to integers."""
    name = call.name.removeprefix("aten.")
    return name in VIEW_RULES or (name in COPIES and not call.value.is_floating_point())


STRUCTURE_RULES: dict[str, Rule] = {
    **VIEW_RULES,
    **dict.fromkeys(
        ("unfold", "view_as_real", "view_as_complex", "_conj", "_neg_view", "_conj_physical"), unchanged
    ),
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    "cat": cat,
    "stack": stack,
    "diagonal": diagonal,
    "diagonal_scatter": diagonal_scatter,
    "constant_pad_nd": pad,
    "arange": arange,
    **dict.fromkeys(
        ("full", "zeros", "ones", "empty", "empty_strided", "empty_permuted", "rand", "randn", "randint"),
        created,
    ),
    # the other factories with a tensor are gone by now, see loss_decompositions.py
    "new_empty_strided": created,
}
