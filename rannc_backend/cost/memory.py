"""What lies in a device's memory: saved activations by simple rules, and the sum for a stage.

In: fx nodes, the names of values that need a gradient; sizes as numbers or arrays. Out: names of saved values; bytes.

Terms. A *root* is a value from which others are recomputed by elementwise operators alone: the min-cut partitioner keeps
the root and recomputes the rest, so roots are what counts as saved. A value computed from two different roots is a root
itself. In flight: micro-batches whose forward has run in a stage and whose backward has not.
The exact number comes from compiling the stage; this one is made to be near it, before there are stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import torch
from torch import fx

from rannc_backend.cost.compute import (
    ATTENTION_OPERATORS,
    LOOKUP_OPERATORS,
    MATRIX_OPERATORS,
    VIEW_OPERATORS,
    operator_name,
)

_SAVE_NOTHING = frozenset(
    "add arange bitwise_and bitwise_not bitwise_or cat clone constant_pad_nd cumsum empty eq fill flip full full_like ge gt "
    "le logical_and logical_not logical_or lt masked_fill mean ne neg new_full new_zeros ones ones_like pad "
    "repeat roll rsub scalar_tensor stack sub sum zeros zeros_like _to_copy copysign".split()
)
_SAVE_RESULT = frozenset("exp reciprocal relu rsqrt sigmoid sqrt tanh _log_softmax _softmax expm1".split())
# Elementwise: cheap enough to be computed again in backward.
_RECOMPUTED = frozenset(
    "abs add bitwise_and bitwise_not bitwise_or clamp clamp_max clamp_min clone constant_pad_nd cos copysign div elu eq erf exp "
    "expm1 floor full_like ge gelu gt hardsigmoid hardswish hardtanh le leaky_relu log log1p logical_and logical_not logical_or "
    "lt masked_fill maximum minimum mish mul ne neg pow reciprocal relu round rsqrt rsub sigmoid sign silu sin softplus sqrt "
    "square sub tanh threshold where _to_copy".split()
)


def saved_values(nodes: Iterable[fx.Node], needs_grad: Collection[str]) -> list[fx.Node]:
    """The values that backward keeps, without repeats, in graph order of the operators that want them.

    Args:
        nodes: nodes that depend on the batch, in topological order; anything else (parameters, constants) is there anyway.
        needs_grad: names of nodes whose value gets a gradient.
    """
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    saved: dict[fx.Node, None] = {}
    for node in nodes:
        roots[node] = _roots(node, roots)
        for value in _wanted_by_backward(node, needs_grad):
            for root in sorted(roots.get(value, frozenset()), key=lambda item: item.name):
                saved[root] = None
    return list(saved)


def _roots(node: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    name = operator_name(node)
    if name in VIEW_OPERATORS or name in _RECOMPUTED:
        if name == "getitem" and operator_name(node.all_input_nodes[0]) not in VIEW_OPERATORS:
            return frozenset([node])
        found = frozenset[fx.Node]().union(*(roots.get(argument, frozenset()) for argument in node.all_input_nodes))
        if len(found) <= 1 or name in VIEW_OPERATORS:
            return found
    return frozenset([node])


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
        # The gradient of one factor is a product with the other.
        return [argument for argument in arguments if any(other is not argument for other in wanting) or len(arguments) == 1]
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
    if name in _RECOMPUTED:
        return arguments
    return [*arguments, *(taken[1:] if taken else [node])]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def num_in_flight(schedule: Literal["1f1b", "fill_drain"], num_micro_batches: int, num_stages_to_end: int) -> int:
    """Most micro-batches that a stage keeps at one time; `num_stages_to_end` counts the stage itself and those after it."""
    assert num_stages_to_end >= 1, "a stage counts itself"
    return num_micro_batches if schedule == "fill_drain" else min(num_micro_batches, num_stages_to_end)
