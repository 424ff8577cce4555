"""What forward keeps for backward, and how many bytes that is.

In: the forward graph of a stage after the forward/backward split. Out: bytes as an expression in the batch
size.

Terms. *Saved* values are the forward graph's outputs after the stage's own. Saved bytes count each distinct
storage once, whole (a view keeps its base alive). Parameters, buffers and other inputs that live as long as
the stage count nothing; a saved batch input or boundary input counts, since only backward still needs it, and
so does a saved output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import sympy
import torch
from torch import fx


def saved_bytes(forward: fx.GraphModule, num_outputs: int, kept_anyway: Collection[str]) -> sympy.Expr:
    """Bytes of the saved values of one micro-batch, as an expression in the batch size.

    `kept_anyway` are the names of placeholders that live as long as the stage (parameters, buffers,
    constants).
    """
    placeholders = forward.graph.find_nodes(op="placeholder")
    kept = [node for node in placeholders if node.name in kept_anyway]
    (output,) = forward.graph.find_nodes(op="output")
    return bytes_beside(output.args[0][num_outputs:], kept)


def bytes_beside(nodes: Iterable[fx.Node], free: Iterable[fx.Node]) -> sympy.Expr:
    """Bytes of the distinct storages of `nodes` that are no storage of a node of `free`; numbers count nothing."""
    seen = {_storage(node.meta["val"]) for node in free if isinstance(node.meta["val"], torch.Tensor)}
    total: sympy.Expr = sympy.Integer(0)
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and _storage(value) not in seen:
            seen.add(_storage(value))
            total = total + _expression(value.untyped_storage().nbytes())
    return sympy.expand(total)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else sympy.sympify(size.node.expr)
