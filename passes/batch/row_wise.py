"""Operators of users that are declared to work row by row: what nobody could know from their schema.

In: an operator of `torch.library`. Out: a mark on it, and the layout of its results. Terms: an operator is
*row-wise* if, for each number i, row i of every result is computed from row i of those arguments that hold
rows of the batch, and from the arguments that hold none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rannc_backend.passes.batch.layouts import Layout, RowCount, Rows
from rannc_backend.passes.batch.operator_call import Call

_MARK = "_rannc_row_wise"
Operator = TypeVar("Operator", bound=Callable[..., Any])


def row_wise(operator: Operator) -> Operator:
    """Declares that a custom operator works row by row over dimension 0. Also a decorator above
    ``torch.library.custom_op``.

    When a model is compiled, the operator is tried on a few generated rows, and refused if it mixes them.
    Declare an elementwise operator to torch itself instead, with ``tags=(torch.Tag.pointwise,)``.

    Args:
        operator: What ``custom_op`` or ``triton_op`` returns, ``torch.ops.library.name``, or one of its
            overloads.

    Returns:
        The operator.

    Raises:
        TypeError: It is not an operator of `torch.library`.
    """
    overloads = _overloads(operator)
    if not overloads:
        raise TypeError(
            f"{operator!r} is no operator of torch.library: give what custom_op returns, or "
            "torch.ops.library.name"
        )
    for overload in overloads:
        setattr(overload, _MARK, True)
    return operator


def is_row_wise(target: object) -> bool:
    """Whether an operator is declared so."""
    return getattr(target, _MARK, False) is True


def refuse_row_count(call: Call) -> None:
    """Refuse an operator of the user's that gets the batch size as a number: it would be that of a slice."""
    for item in call.node.all_input_nodes:
        if isinstance(call.layouts[item], RowCount):
            call.refuse("gets the batch size as a number, which differs between micro-batches")


def row_wise_rule(call: Call) -> Layout:
    """Rows stay where they are, in dimension 0, and are the same rows in all arguments."""
    found: Rows | None = None
    for argument in call.tensors():
        layout = call.rows(argument)
        if layout is not None and layout.dim != 0:
            call.refuse(
                f"is declared to work row by row, but gets rows of the batch in dimension {layout.dim}, not 0"
            )
        found = call.merge(found, layout)
    if found is None:
        call.refuse_mixing("it is declared to work row by row, and gets no rows")
    return found


def _overloads(operator: object) -> list[torch._ops.OpOverload]:
    packet = operator
    if not isinstance(operator, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        own = getattr(operator, "_opoverload", None)  # what torch.library.custom_op and triton_op return
        packet = own if own is not None else operator
    if isinstance(packet, torch._ops.OpOverload):
        return [packet]
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return [getattr(packet, name) for name in packet.overloads()]
    return []
