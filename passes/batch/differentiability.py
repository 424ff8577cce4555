"""Which values of a graph take part in differentiation.

In: a functional ATen graph with fake values, and the names of the placeholders that require a gradient. Out:
names of nodes.
Exact: the graph is interpreted on fake tensors with autograd on, so that every operator answers for itself;
at one batch size, as the answer is the same for all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.graph_queries import placeholders
from rannc_backend.passes.plain_numbers import at_hint, plain_mode


def values_needing_grad(
    graph_module: fx.GraphModule, requires_grad_inputs: Collection[str]
) -> frozenset[str]:
    """Names of the nodes (placeholders included) whose value, or an element of it, requires grad."""
    interpreter = _GradInterpreter(graph_module, requires_grad_inputs)
    with interpreter.mode, torch.enable_grad():
        interpreter.run(
            *(at_hint(node.meta["val"], interpreter.mode) for node in placeholders(graph_module.graph))
        )
    return frozenset(interpreter.found)


def values_reached_by_grad(
    graph_module: fx.GraphModule, requires_grad_inputs: Collection[str]
) -> frozenset[str]:
    """A quick answer from the graph alone, never too few names: floating-point values that depend on those
    inputs.
    """
    found: set[str] = set()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            reached = node.name in requires_grad_inputs
        else:
            reached = node.target is not torch.ops.aten.detach.default and any(
                item.name in found for item in node.all_input_nodes
            )
        if reached and _may_carry_grad(node.meta.get("val")):
            found.add(node.name)
    return frozenset(found)


def _may_carry_grad(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_may_carry_grad(item) for item in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class _GradInterpreter(fx.Interpreter):
    """Runs the nodes that a gradient may reach; the others' values are taken from the graph."""

    def __init__(self, graph_module: fx.GraphModule, requires_grad_inputs: Collection[str]) -> None:
        super().__init__(graph_module, garbage_collect_values=True)
        self.requires_grad_inputs = requires_grad_inputs
        self.reached = values_reached_by_grad(graph_module, requires_grad_inputs)
        self.found: set[str] = set()
        self.mode = plain_mode()

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.name not in self.reached:
            value = n.meta.get("val")
            if isinstance(value, torch.SymInt) and has_data_sizes(value):
                return super().run_node(n)  # of the bounds that stand for it in other values
            # A value that the trace left behind may itself require a gradient; nobody asks for those that
            # nothing reached reads.
            used = any(
                user.name in self.reached or isinstance(user.meta.get("val"), torch.SymInt)
                for user in n.users
            )
            return at_hint(value, self.mode) if used else None
        value = super().run_node(n)
        if has_data_sizes(value):
            # Of other symbols in each run: the graph's own values have bounds in their place.
            value = _with_grad_of(at_hint(n.meta["val"], self.mode), value)
        if n.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            value = value.detach()
            if n.name in self.requires_grad_inputs:
                assert value.is_floating_point() or value.is_complex(), (
                    f"input {n.name} of dtype {value.dtype} has no gradient"
                )
                value.requires_grad_(True)
        if n.op != "output" and _requires_grad(value):
            self.found.add(n.name)
        return value


def _with_grad_of(value: Any, other: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_with_grad_of(*pair) for pair in zip(value, other, strict=True))
    return value.requires_grad_() if _requires_grad(other) else value


def _requires_grad(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_requires_grad(item) for item in value)
    return isinstance(value, torch.Tensor) and value.requires_grad
