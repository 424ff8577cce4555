"""Which values of a graph take part in differentiation, and whether the scalar part after the sums is linear in
the sums.

In: a functional ATen graph with fake values, and the names of the placeholders that require a gradient, or are
partials. Out: names of nodes; yes or no.
Exact: the graph is interpreted on fake tensors with autograd on, so that every operator answers for itself;
at one batch size, as the answer is the same for all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.batch.operator_call import operator_name
from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.graph_queries import nodes_behind, placeholders
from rannc_backend.passes.kept_functions import operator_code, runs_whole
from rannc_backend.passes.plain_numbers import at_hint, plain_mode
from rannc_backend.passes.tracing import symbolic_sizes

#: only the shape of the argument matters
SHAPE_ONLY = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "sym_size",
)


class Argument(NamedTuple):
    """A tensor that is given to an operator that runs code as written: its node's name, and the tensor's number."""

    call: str
    number: int


@dataclass(frozen=True, slots=True)
class GradientSources:
    """Where the gradients of values come from: by node (placeholders included) whose value, or an element of it,
    requires grad and gets one. What only gives its shape to others (`new_zeros`), or is nobody's, has none.

    Attributes:
        outputs: the outputs, by name.
        nearest: outputs, and arguments in place of those that are reached by way of them.
    """

    outputs: Mapping[str, frozenset[str]]
    nearest: Mapping[str, frozenset[str | Argument]]


def outputs_by_value(
    graph_module: fx.GraphModule, requires_grad_inputs: Collection[str]
) -> Mapping[str, frozenset[str]]:
    """See `GradientSources`."""
    return gradient_sources(graph_module, requires_grad_inputs).outputs


def gradient_sources(graph_module: fx.GraphModule, requires_grad_inputs: Collection[str]) -> GradientSources:
    """Which outputs, by whichever way, bring their gradient to each value."""
    interpreter = _GradInterpreter(graph_module, requires_grad_inputs)
    with interpreter.mode, torch.enable_grad():
        interpreter.run(
            *(at_hint(node.meta["val"], interpreter.mode) for node in placeholders(graph_module.graph))
        )
    return GradientSources(
        outputs=_brought_back(graph_module.graph, interpreter, stop=False),
        nearest=_brought_back(graph_module.graph, interpreter, stop=True),
    )


def _brought_back(graph: fx.Graph, interpreter: _GradInterpreter, *, stop: bool) -> dict[str, frozenset[Any]]:
    """What each value's gradient comes from: the outputs, or with `stop` also arguments of operators that run code as
    written, where the way through these ends.
    """
    origins: list[str | Argument] = [node.name for node in graph.output_node().all_input_nodes]
    reached = {str(name): 1 << place for place, name in enumerate(origins)}  # sets of origins, as bits
    for node in reversed(graph.nodes):
        if not (bits := reached.get(node.name, 0)):
            continue
        if stop and runs_whole(node):
            code: Any = operator_code(node.target)
            for number, tensor in enumerate(node.args[0]):
                if code.has_gradient[number]:
                    reached[tensor.name] = reached.get(tensor.name, 0) | 1 << len(origins)
                    origins.append(Argument(node.name, number))
            continue
        for source in interpreter.sources.get(node.name, ()):
            reached[source] = reached.get(source, 0) | bits
    by_bits = {
        bits: frozenset(origin for place, origin in enumerate(origins) if bits >> place & 1)
        for bits in set(reached.values())
    }
    return {name: by_bits[bits] for name, bits in reached.items() if name in interpreter.found}


def values_reached_by_grad(graph: fx.Graph, requires_grad_inputs: Collection[str]) -> frozenset[str]:
    """A quick answer from the graph alone, never too few names: floating-point values that depend on those
    inputs.
    """
    found: set[str] = set()
    for node in graph.nodes:
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
        self.reached = values_reached_by_grad(graph_module.graph, requires_grad_inputs)
        self.found: set[str] = set()
        self.sources: dict[str, frozenset[str]] = {}  # of a node: those whose gradient its own goes into
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
        if n.op != "output" and _with_gradient(value):
            self.sources[n.name] = self._sources_of(n, value)
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
        if n.op != "output" and _with_gradient(value):
            self.found.add(n.name)
        return value

    def _sources_of(self, node: fx.Node, value: Any) -> frozenset[str]:
        """By autograd's graph, from what made the value back to what made its operands."""
        operands: dict[Any, set[str]] = {}
        for item in node.all_input_nodes:
            for tensor in _with_gradient(self.env[item]):
                operands.setdefault(get_gradient_edge(tensor).node, set()).add(item.name)
        found: set[str] = set()
        waiting = [get_gradient_edge(tensor).node for tensor in _with_gradient(value)]
        seen = set(waiting)
        while waiting:
            behind = waiting.pop()
            if behind in operands:
                found |= operands[behind]
                continue
            following = {each for each, _ in behind.next_functions if each is not None} - seen
            seen |= following
            waiting += following
        return frozenset(found)


def _with_gradient(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _with_gradient(item)]
    return [value] if isinstance(value, torch.Tensor) and value.requires_grad else []


def _with_grad_of(value: Any, other: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_with_grad_of(*pair) for pair in zip(value, other, strict=True))
    return value.requires_grad_() if _with_gradient(other) else value


def is_linear(epilogue: fx.GraphModule, differentiated: Collection[str], partials: Collection[str]) -> bool:
    """Whether no gradient of an epilogue's outputs with respect to a partial depends on a partial: then a slice's
    backward may start before all sums are known. Traces d(outputs)/d(differentiated partials).
    """
    inputs = placeholders(epilogue.graph)
    values = [node.meta["val"] for node in inputs]
    wanted = [
        place
        for place, node in enumerate(inputs)
        if node.name in differentiated
        and (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    ]
    if not wanted:
        return True

    def gradients(*inputs: torch.Tensor) -> list[Any]:
        leaves = [
            item.detach().requires_grad_(place in wanted) if isinstance(item, torch.Tensor) else item
            for place, item in enumerate(inputs)
        ]
        with torch.enable_grad():
            outputs = fx.Interpreter(epilogue).run(*leaves)
            results: list[Any] = []
            for output in outputs:
                if output.requires_grad:
                    sources = [leaves[place] for place in wanted]
                    seed = torch.ones(output.shape, dtype=output.dtype, device=output.device)
                    results += torch.autograd.grad(
                        output, sources, seed, retain_graph=True, allow_unused=True
                    )
        return results

    with symbolic_sizes(values):
        traced = make_fx(gradients, decomposition_table={})(*values)
    by_name = {node.name: inner for node, inner in zip(inputs, placeholders(traced.graph))}
    forbidden = {by_name[name] for name in partials}
    read = nodes_behind(traced.graph.output_node().all_input_nodes, stop=_reads_no_values)
    return not read & forbidden


def _reads_no_values(node: fx.Node) -> bool:
    return operator_name(node.target).removeprefix("aten.") in SHAPE_ONLY
