"""Which values Inductor computes in a kernel of its own, so that storing them somewhere else costs nothing.

In: a node of an ATen graph. Out: whether its producer is such a kernel (pointwise, or a sum) or a library
call with memory of its own. A wrong answer costs a copy, never a wrong number.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_FUSED = frozenset(
    {
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.mean.dim,
        aten.mean.default,
        aten.amax.default,
        aten.amin.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.full.default,
        aten.full_like.default,
        torch.ops.prims.convert_element_type.default,
    }
)


def is_fused(node: fx.Node) -> bool:
    """Whether the value of `node`, or the one that it is a view of, is made by a kernel that Inductor
    writes.
    """
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function":
        return False
    return node.target in _FUSED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_cheap(node: fx.Node) -> bool:
    """Whether a call takes no time of its own beside what makes its operands: a view, a number, an element of a
    tuple, or what Inductor computes in the kernel of another.
    """
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return False
    if not isinstance(value, torch.Tensor) or node.target in _VIEWS:
        return True
    return getattr(node.target, "__name__", "") == "getitem" or is_fused(node)
