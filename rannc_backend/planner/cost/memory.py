"""What lies in a device's memory: saved activations by simple rules, and micro-batches in flight.

In: fx nodes and the names of values that need a gradient. Out: the values that backward keeps.

Terms. A *root* is a value from which others are recomputed by cheap elementwise operators alone: the min-cut
partitioner keeps the root and recomputes the rest. A value computed from two different roots is a root
itself; so is a comparison (a mask is one byte per element) and whatever a matrix product reads (the
partitioner does not recompute what it would have to write out). In flight: micro-batches whose forward has
run in a stage and whose backward has not. The exact number comes from compiling the stage; this one is made
to be near it, before there are stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from rannc_backend.planner.cost.compute import (
    ATTENTION_OPERATORS,
    LOOKUP_OPERATORS,
    MATRIX_OPERATORS,
    VIEW_OPERATORS,
    operator_name,
)

_SAVE_NOTHING = frozenset(
    "add arange bitwise_and bitwise_not bitwise_or cat clone constant_pad_nd copysign cumsum empty eq fill "
    "flip full full_like ge gt le logical_and logical_not logical_or lt masked_fill mean ne neg new_full "
    "new_zeros ones ones_like pad repeat roll rsub scalar_tensor stack sub sum zeros zeros_like "
    "_to_copy".split()
)
_SAVE_RESULT = frozenset("exp expm1 reciprocal relu rsqrt sigmoid sqrt tanh _log_softmax _softmax".split())
# Elementwise and cheap enough to be computed again in backward.
_RECOMPUTED = frozenset(
    "abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone "
    "constant_pad_nd copysign div floor full_like masked_fill maximum minimum mul neg pow reciprocal round "
    "rsqrt rsub sign sqrt square sub threshold where _to_copy __and__ __lshift__ __or__ __rshift__ __xor__ "
    "bitwise_left_shift bitwise_right_shift".split()
)
_ELEMENTWISE = _RECOMPUTED | frozenset(
    "cos elu erf gelu hardsigmoid hardswish hardtanh leaky_relu log log1p mish silu sin softplus tan".split()
)


def saved_values(nodes: Iterable[fx.Node], needs_grad: Collection[str]) -> list[tuple[fx.Node, fx.Node]]:
    """The values that backward keeps, each with the first operator that wants it, in graph order of those.

    Args:
        nodes: nodes that depend on the rows, in topological order; anything else (parameters, inputs) is
        there anyway.
        needs_grad: names of nodes whose value gets a gradient.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    saved: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        roots[node] = _roots(node, roots)
        written_out = operator_name(node) in MATRIX_OPERATORS or operator_name(node) in ATTENTION_OPERATORS
        for value in _wanted_by_backward(node, needs_grad):
            base = _before_views(value)
            if written_out and base in roots:
                saved.setdefault(base, node)
            elif not written_out:
                for root in sorted(roots.get(value, frozenset()), key=lambda item: item.name):
                    saved.setdefault(root, node)
    return list(saved.items())


def _roots(node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    name = operator_name(node)
    if name == "getitem" and operator_name(node.all_input_nodes[0]) not in VIEW_OPERATORS:
        return frozenset([node])
    if name in VIEW_OPERATORS or name in _RECOMPUTED:
        found = frozenset[fx.Node]().union(
            *(roots.get(argument, frozenset()) for argument in node.all_input_nodes)
        )
        if len(found) <= 1 or name in VIEW_OPERATORS:
            return found
    return frozenset([node])


def _before_views(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while operator_name(node) in VIEW_OPERATORS and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if operator_name(node) == "getitem" and operator_name(source) not in VIEW_OPERATORS:
            break
        node = source
    return node


def _wanted_by_backward(node: fx.Node, needs_grad: Collection[str]) -> list[fx.Node]:
    """Inputs and results of one operator that its derivative reads."""
    name = operator_name(node)
    taken = [user for user in node.users if operator_name(user) == "getitem"]
    if not (node.name in needs_grad or any(user.name in needs_grad for user in taken)):
        return []
    if name in VIEW_OPERATORS or name in _SAVE_NOTHING:
        return []
    arguments = [argument for argument in node.all_input_nodes if _is_float(argument)]
    wanting = [argument for argument in arguments if argument.name in needs_grad]
    if name in MATRIX_OPERATORS or name == "mul":
        # The gradient of one factor is a product with the other, which may be the same, or a mask of another
        # dtype.
        factors = node.all_input_nodes
        twice = len(factors) == 1 and list(node.args).count(factors[0]) == 2
        return factors if twice else [a for a in factors if any(other is not a for other in wanting)]
    if name in _SAVE_RESULT:
        return [node]
    if name in LOOKUP_OPERATORS or name == "where":
        return [argument for argument in node.all_input_nodes if not _is_float(argument)]
    if name == "native_dropout":
        return [user for user in taken if not _is_float(user)]
    if name in ATTENTION_OPERATORS:
        return [*arguments, *taken]
    if name == "div":
        return arguments[1:]
    if name in _ELEMENTWISE:
        return arguments
    return [*arguments, *(taken[1:] if taken else [node])]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
