"""Give the backward graph of a stage the calling convention of the runtime: parameter gradients leave as they
are made.

In: a backward graph (inputs: sizes, saved values, incoming gradients; outputs: gradients). Out: the same
graph with one more input in front, the *sink*; each parameter gradient is handed to the sink right after the
node that makes it and is then dropped, the other gradients are returned.

Terms. *Boxed*: the graph's function takes one list and empties it, so that each value can be freed after its
last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx
from torch.fx.graph import CodeGen

from rannc_backend.passes.pipeline import GraphPass
from rannc_backend.passes.stage.any_layout import take_any_layout


def deliver(sink: Callable[[int, Tensor], None], position: int, gradient: Tensor) -> None:
    """Hand one parameter gradient to the sink; the graph calls this."""
    sink(position, gradient)


@dataclass(frozen=True, slots=True)
class DeliverEarly(GraphPass):
    """The pass of `deliver_early`; fields as its arguments."""

    name: ClassVar[str] = "deliver_early"
    requires: ClassVar[frozenset[str]] = frozenset({"partitioned", "all_outputs", "all_gradients"})
    ends: ClassVar[frozenset[str]] = frozenset({"all_gradients"})
    parameters: Mapping[int, int]
    num_outputs: int

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return deliver_early(graph_module, self.parameters, self.num_outputs)


@dataclass(frozen=True, slots=True)
class Box(GraphPass):
    """The pass of `boxed`: a graph whose function takes one list."""

    name: ClassVar[str] = "box"
    requires: ClassVar[frozenset[str]] = frozenset({"safe_outputs"})
    provides: ClassVar[frozenset[str]] = frozenset({"boxed"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return _boxed(graph_module)


def deliver_early(
    backward: fx.GraphModule, parameters: Mapping[int, int], num_outputs: int
) -> fx.GraphModule:
    """Copy of `backward` with the sink as its first input.

    Args:
        backward: its output is a flat tuple of `num_outputs` gradients.
        parameters: for each output that is a parameter's gradient, the position that the sink is told.

    The new graph returns the other outputs in their order.
    """
    graph = fx.Graph()
    sink = graph.placeholder("sink")
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(backward.graph, copies)
    assert isinstance(results, (tuple, list)) and len(results) == num_outputs
    # Reversed, because each call is put right behind the node: the first position is delivered first.
    for index in sorted(parameters, reverse=True):
        gradient = results[index]
        place = gradient
        if gradient.op == "placeholder":
            place = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(place):
            graph.call_function(deliver, (sink, parameters[index], gradient))
    graph.output(tuple(result for index, result in enumerate(results) if index not in parameters))
    return fx.GraphModule(backward, graph)


class _BoxedCodeGen(CodeGen):
    """Generates a function of one list, which it empties before it computes."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        del options
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {self._func_name}(self, arguments){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = arguments")
        lines.append("    arguments.clear()")
        return "\n".join(lines)


def boxed(graph_module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph as a function of one list of its inputs; the list is empty afterwards.

    Operators run one by one, and lay their results out as they like.
    """
    return _boxed(graph_module).forward


def _boxed(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    take_any_layout(graph)
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(graph_module, graph)
