"""Batch-axis rules for operators that look elements up by index.

In: an operator_call.Call with at least one argument that holds rows. Out: the layout of the result.
Rows may be looked up in a table without rows (embedding), or other dimensions of rows by constant or row-wise
indices, or the batch dimension by the row's own number (`logits[arange(rows), lengths]`).
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from rannc_backend.passes.batch.batch_axis_views import Rule
from rannc_backend.passes.batch.layouts import Choice, Layout, Ordered, RowIndex, Rows, width_of
from rannc_backend.passes.batch.operator_call import Call, rows_multiple
from rannc_backend.passes.data_sizes import mask_of


def embedding(call: Call) -> Layout:
    call.constant("weight")
    if call["scale_grad_by_freq"]:
        call.refuse_mixing(
            "with scale_grad_by_freq gradients depend on how often all rows together name an entry"
        )
    layout = call.rows(call["indices"])
    assert layout is not None
    return layout


def gather(call: Call) -> Layout:
    """Element by element except along `dim`; or a table without rows, in which each row looks up along `dim`."""
    index, ndim = call.rows(call["index"]), call.ndim(call["self"])
    if ndim and index is not None and index.dim == call.dim("dim", ndim) and call.rows(call["self"]) is None:
        return Rows(index.dim, index.outer, index.inner)
    return scatter(call)


def scatter(call: Call) -> Layout:
    """scatter with its variants: element by element except along `dim`."""
    ndim = call.ndim(call["self"])
    if ndim == 0:
        call.refuse("indexes a scalar by rows")
    dim = call.dim("dim", ndim)
    merged = None
    for name in ("self", "index", "src", "value"):
        argument = call.arguments.get(name)
        if not isinstance(argument, fx.Node) or call.ndim(argument) == 0:
            continue
        layout = call.rows(argument)
        if layout is None:
            call.refuse(
                f"pairs rows of the batch with the positions of {name!r}, which has no batch dimension"
            )
        merged = call.merge(merged, layout)
    if merged is None or merged.dim == dim:
        call.refuse_mixing("it looks rows up in each other")
    return Rows(merged.dim, merged.outer, merged.inner)


def index_select(call: Call) -> Layout:
    table, ndim = call.rows(call["self"]), call.ndim(call["self"])
    dim = call.dim("dim", ndim)
    if isinstance(numbers := call.layout(call["index"]), RowIndex):
        return _by_row_number(call, table, dim, numbers)
    index = call.rows(call["index"])
    if index is None and table is not None and table.dim != dim:
        return table
    if index is not None and table is None:
        return Rows(dim, index.outer, index.inner)
    call.refuse_mixing("it looks rows up in each other")


def index_write(call: Call) -> Layout:
    """index_add, index_copy, index_fill: along `dim`, by constant indices."""
    call.constant("index")
    layout = call.rows(call["self"])
    for name in ("source", "value"):
        argument = call.arguments.get(name)
        if isinstance(argument, fx.Node):
            layout = call.merge(layout, call.rows(argument))
    if layout is None or layout.dim == call.dim("dim", call.value.ndim) or call.rows(call["self"]) is None:
        call.refuse_mixing("it writes rows into each other")
    return Rows(layout.dim, layout.outer, layout.inner)


def _by_row_number(call: Call, table: Rows | None, dim: int, numbers: RowIndex) -> Rows:
    """Every element by itself, or as often as the numbers repeat."""
    if table is None or table.dim != dim or table.outer != 1 or table.inner != numbers.inner:
        call.refuse("uses row numbers to index something else than the batch dimension")
    return Rows(dim, 1, width_of(numbers))


def _is_mask(node: fx.Node | None) -> bool:
    return node is not None and node.meta["val"].dtype in (torch.bool, torch.uint8)


def _broadcast_dim(call: Call, indices: list[fx.Node | None]) -> tuple[int, int]:
    """Where the broadcast dimensions of the indices go in the result, and how many they are."""
    places = [place for place, index in enumerate(indices) if index is not None]
    width = max(call.ndim(indices[place]) for place in places)  # type: ignore[arg-type]
    adjacent = places[-1] - places[0] == len(places) - 1
    return (places[0] if adjacent else 0), width


def _index_rows(call: Call, indices: list[fx.Node | None]) -> tuple[Rows | None, bool]:
    """Layout of the broadcast indices among themselves, and whether the batch dimension is indexed by row
    numbers.
    """
    table = call.rows(call["self"])
    merged: Rows | None = None
    layout: Rows | None
    width = max(call.ndim(index) for index in indices if index is not None)
    by_number = False
    for place, index in enumerate(indices):
        if index is None:
            continue
        numbers = call.layout(index)
        if isinstance(numbers, RowIndex):
            _by_row_number(call, table, place, numbers)
            layout, by_number = Rows(numbers.dim, 1, width_of(numbers)), True
        else:
            layout = call.rows(index)
            if table is not None and place == table.dim:
                call.refuse_mixing("it looks up other rows")
        if layout is not None:
            shift = width - call.ndim(index)
            merged = call.merge(
                merged, Rows(layout.dim + shift, layout.outer, layout.inner, uniform=layout.uniform)
            )
    return merged, by_number


def _result_dim(call: Call, indices: list[fx.Node | None]) -> Rows:
    """Layout of self[indices] for integer indices."""
    table = call.rows(call["self"])
    merged, by_number = _index_rows(call, indices)
    start, width = _broadcast_dim(call, indices)
    if merged is not None:
        if table is not None and not by_number:
            call.refuse_mixing(
                "indices with rows meet a batch dimension that is not indexed; index it with arange(rows)"
            )
        return Rows(start + merged.dim, merged.outer, merged.inner)
    assert table is not None
    indexed = [place for place, index in enumerate(indices) if index is not None]
    kept_before = table.dim - sum(place < table.dim for place in indexed)
    return Rows(kept_before + (width if start <= kept_before else 0), table.outer, table.inner)


def index(call: Call) -> Layout:
    indices = list(call["indices"])
    if any(_is_mask(item) for item in indices):
        return _chosen(call)
    return _result_dim(call, indices)


def _chosen(call: Call) -> Layout:
    """`self[mask]`, the mask one of the rows of self: elements of rows, each of them one place, in the order of the
    mask. How many they are is a size of their own (passes/data_sizes.py).
    """
    mask = mask_of(call.node)
    number = rows_multiple(call.value.shape[0], call.symbol)
    layout = None if mask is None else call.rows(mask)
    if mask is None or layout is None or not isinstance(number, sympy.Symbol):
        call.refuse("makes a value whose size depends on data", is_known=False)
    rows_of_mask(call, layout, call.rows(call["self"]))
    return Ordered(0, Choice(mask, 1, number, rising=False))


def rows_of_mask(call: Call, mask: Layout, table: Layout | None) -> Rows:
    """Of a table and a mask of its first dimensions, which must lie alike, whatever their values."""
    if not isinstance(mask, Rows) or not isinstance(table, Rows):
        call.refuse_mixing("it pairs a mask with other rows than its own")
    rows = Rows(table.dim, table.outer, table.inner)
    return call.merge(rows, Rows(mask.dim, mask.outer, mask.inner))


def index_put(call: Call) -> Layout:
    indices, values = list(call["indices"]), call["values"]
    target = call.rows(call["self"])
    if target is None:
        call.refuse("writes rows of the batch into a value that has none")
    if any(_is_mask(item) for item in indices):
        return _masked_put(call, indices, values, target)
    result = _result_dim(call, indices)
    written = call.rows(values)
    if written is not None:
        # `values` is broadcast to the shape of self[indices].
        start, width = _broadcast_dim(call, indices)
        num_indexed = sum(item is not None for item in indices)
        result_ndim = call.value.ndim - num_indexed + width
        call.merge(result, Rows(written.dim + result_ndim - call.ndim(values), written.outer, written.inner))
    return Rows(target.dim, target.outer, target.inner)


def _masked_put(call: Call, indices: list[fx.Node | None], values: fx.Node, target: Rows) -> Layout:
    """self[mask] = scalar, the mask covering dimensions of self from its place on."""
    if len([item for item in indices if item is not None]) != 1 or values.meta["val"].numel() != 1:
        call.refuse("writes a number of elements that depends on data", is_known=False)
    place, mask = next((place, item) for place, item in enumerate(indices) if item is not None)
    layout = call.rows(mask)
    if layout is not None:
        call.merge(target, Rows(layout.dim + place, layout.outer, layout.inner, uniform=layout.uniform))
    return Rows(target.dim, target.outer, target.inner)


INDEX_RULES: dict[str, Rule] = {
    "embedding": embedding,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    "index_select": index_select,
    **dict.fromkeys(("index_add", "index_copy", "index_fill"), index_write),
    **dict.fromkeys(("index", "_unsafe_index"), index),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), index_put),
}
