"""How many elements of a slice have each key: what the ends of segments are made of.

In: a call of `histc` on rows, or the node of keys. Out: `KeyCounts` where count number k is proved to be the
number of elements whose key is k, else a sum over rows like any other.

Proof sketch. The bins of a histogram rise with the values. Where the numbers 0 to n - 1 fall into n bins, one into
each, number k falls into bin k. Larger keys are last in a rising order, wherever they are counted; smaller ones,
which would be first and not be counted, are excluded by what the keys are made of.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rannc_backend.passes.batch.layouts import KeyCounts, Layout, Ordered, PartialSum
from rannc_backend.passes.batch.operator_call import Call, operator_name
from rannc_backend.passes.graph_queries import arguments_of
from rannc_backend.passes.plain_numbers import without_modes

#: dtypes that hold every number of a key as it is
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
_REARRANGED = {
    "view", "_unsafe_view", "reshape", "flatten", "alias", "detach", "clone", "contiguous", "transpose", "permute",
    "t", "squeeze", "unsqueeze", "_to_copy",
}  # fmt: skip
_PARTS = {"index", "select", "slice", "gather", "index_select", "expand", "repeat", "cat"}
_PLACES = {"argmax", "argmin"}
_PAIRS_WITH_PLACES = {"topk", "sort", "max", "min", "kthvalue", "mode"}


def root_of(keys: fx.Node) -> fx.Node:
    """The value of which the node holds all elements, perhaps in another shape or dtype that holds them as well."""
    while _name(keys) in _REARRANGED and keys.meta["val"].dtype in EXACT:
        keys = arguments_of(keys)[0]
    return keys


def key_counts(call: Call) -> Layout:
    """A histogram over rows, whose bins must not depend on them."""
    values, low, high = call["self"], call["min"], call["max"]
    layout = call.layout(values)
    if not isinstance(layout, Ordered):
        call.rows(values)
    if not all(isinstance(item, (int, float)) for item in (low, high, call["bins"])) or not low < high:
        call.refuse_mixing("its bins depend on all rows")
    if isinstance(layout, Ordered):
        root = layout.origin.keys if layout.is_key else None
    else:
        root = root_of(values)
    if root is None or not _is_key(root) or not _one_bin_each(call["bins"], low, high):
        return PartialSum()
    return KeyCounts(keys=root)


def _is_key(node: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return dtype in (torch.int32, torch.int64) and _is_never_negative(node)


def _one_bin_each(num_bins: int, low: float, high: float) -> bool:
    with without_modes():
        counts = torch.histc(torch.arange(num_bins, dtype=torch.float32), num_bins, low, high)
        return bool((counts == 1).all())


def _is_never_negative(item: Any, depth: int = 0) -> bool:
    """Whether a number, or what a node holds, is proved to be 0 or more."""
    if isinstance(item, (bool, int, float)):
        return item >= 0
    if not isinstance(item, fx.Node) or depth > 40:
        return False
    arguments = arguments_of(item)

    def holds(*places: int) -> bool:
        return all(_is_never_negative(arguments[place], depth + 1) for place in places)

    if item.target is operator.getitem:
        return _name(arguments[0]) in _PAIRS_WITH_PLACES and arguments[1] == 1
    name = _name(item)
    if name in _PLACES:
        return True
    if name in ("remainder", "clamp", "clamp_min", "bitwise_and"):
        return (
            len(arguments) > 1
            and isinstance(arguments[1], int)
            and holds(1)
            and (name != "remainder" or arguments[1] > 0)
        )
    if name == "where":
        return holds(1, 2)
    if name == "scalar_tensor":
        return holds(0)
    if name in ("full", "full_like"):
        return holds(1)
    if name == "masked_fill":
        return holds(0, 2)
    if name in ("add", "mul", "floor_divide"):
        return not item.kwargs and holds(0, 1)
    if name == "cat":
        return all(_is_never_negative(part, depth + 1) for part in arguments[0])
    return name in _REARRANGED | _PARTS and holds(0)


def _name(item: Any) -> str:
    if not isinstance(item, fx.Node) or not isinstance(item.target, torch._ops.OpOverload):
        return ""
    return operator_name(item.target).removeprefix("aten.")
