"""Cut the backward graph of a stage in two: first the gradients of its inputs, which other stages wait for, then
those of its parameters, which nobody waits for (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

In: a backward graph (inputs: sizes, saved values, incoming gradients; outputs: gradients, as one flat tuple), and
which outputs are gradients of parameters. Out: two graphs and what the first keeps for the second.

Terms. The *first part* computes what the gradients of inputs are computed from. The *second part* computes the rest,
from what is *kept*: saved values, incoming gradients, and values of the first part.

Every call of the given graph is in one of the two, so nothing is computed twice. A gradient of a parameter is left to
the second part if some call of its own takes time (`is_cheap`); the others, such as those of a normalization, come
out of kernels that the first part runs anyway, and keeping their operands would cost more memory than they take. An
operator that computes several gradients as it is told to (`output_mask`: a convolution) becomes two calls, one in each
part. Where no gradient of an input is wanted, the first part computes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rannc_backend.passes.graph_queries import (
    nodes_behind,
    output_values,
    placeholders,
    size_expression,
    symbols_in,
)
from rannc_backend.passes.pipeline import Pass
from rannc_backend.passes.stage.fused_operators import is_cheap
from rannc_backend.passes.stage.recompute import bytes_beside

_MASK = "output_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardParts:
    """`first`: the inputs of the given graph to (*its `num_returned` gradients of inputs, *kept). `second`: (*kept) to
    the gradients of parameters, in the order of their outputs. Numbers are kept first, then tensors.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    num_returned: int

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"first": self.first, "second": self.second}

    @property
    def kept(self) -> Sequence[fx.Node]:
        """What the first part gives to the second, as its nodes."""
        return output_values(self.first.graph)[self.num_returned :]

    def kept_bytes(self, kept_anyway: Collection[str]) -> sympy.Expr:
        """Bytes of what is kept, as an expression in the batch size. `kept_anyway`: names of inputs that live as long
        as the stage.
        """
        inputs = placeholders(self.first.graph)
        return bytes_beside(self.kept, [node for node in inputs if node.name in kept_anyway])


@dataclass(frozen=True, slots=True)
class SplitBackward(Pass[BackwardParts]):
    """The pass of `split_backward`; `parameters`: places of gradients of parameters among the outputs."""

    name: ClassVar[str] = "split_backward"
    requires: ClassVar[frozenset[str]] = frozenset({"safe_gradients", "all_outputs", "all_gradients"})
    parameters: Collection[int]

    def run(self, graph_module: fx.GraphModule) -> BackwardParts:
        return split_backward(graph_module, self.parameters)


def split_backward(backward: fx.GraphModule, parameters: Collection[int]) -> BackwardParts:
    """See the module docstring; `backward` is left as it is."""
    graph = fx.Graph()
    copied = graph.graph_copy(backward.graph, {})
    assert isinstance(copied, (tuple, list)), "a backward graph returns a tuple"
    results: list[fx.Node] = list(copied)
    graph.output(tuple(results))
    returned = [node for place, node in enumerate(results) if place not in parameters]
    wanted = [node for place, node in enumerate(results) if place in parameters]
    _split_masked(graph, _behind(returned))
    first = _behind(returned)
    if returned:
        first |= _cheap(graph, wanted, first)
    kept, inputs = _kept(graph, wanted, first), placeholders(graph)
    return BackwardParts(
        first=_part(backward, graph, first, inputs, [*returned, *kept]),
        second=_part(backward, graph, {node for node in graph.nodes if _is_call(node)} - first, kept, wanted),
        num_returned=len(returned),
    )


def _is_call(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls that `nodes` are computed from, themselves included."""
    return {node for node in nodes_behind(nodes) if _is_call(node)}


def _cheap(graph: fx.Graph, wanted: Sequence[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """What the gradients are computed from that the first part computes too; and elements of its tuples, which cannot
    be kept.
    """
    found: set[fx.Node] = set()
    for gradient in wanted:
        own = _behind([gradient]) - first
        if all(map(is_cheap, own)):
            found |= own
    for node in graph.nodes:
        if _is_call(node) and any(
            _is_tuple(argument) for argument in node.all_input_nodes if argument in first
        ):
            found.add(node)
    return found


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _split_masked(graph: fx.Graph, first: set[fx.Node]) -> None:
    """Two calls in place of one whose results are wanted by both parts, where it is told by a mask which to compute,
    and each takes a product of its own: one that torch counts the FLOPs of.
    """
    for node in list(first):
        place = _mask_place(node)
        if place is None or getattr(node.target, "overloadpacket", None) not in flop_registry:
            continue
        others = [user for user in node.users if user not in first]
        mask: Sequence[bool] = node.args[place]  # type: ignore[assignment]
        theirs = {int(user.args[1]) for user in others if user.users}  # type: ignore[arg-type]
        if not theirs:
            continue
        with graph.inserting_after(node):
            second = graph.node_copy(node, lambda argument: argument)
        for call, own in ((second, theirs), (node, set(range(len(mask))) - theirs)):
            arguments = list(call.args)
            arguments[place] = [wants and index in own for index, wants in enumerate(mask)]
            call.args = tuple(arguments)
            call.meta = {**call.meta, "val": tuple(
                value if index in own else None for index, value in enumerate(node.meta["val"])
            )}  # fmt: skip
        for user in others:
            user.replace_input_with(node, second)


def _mask_place(node: fx.Node) -> int | None:
    """Where a call says which of its results it computes; None where it does not."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    place = names.index(_MASK) if _MASK in names else len(node.args)
    return place if place < len(node.args) else None


def _kept(graph: fx.Graph, wanted: Sequence[fx.Node], first: set[fx.Node]) -> list[fx.Node]:
    """What the second part needs of the first, and the numbers that its sizes are made of; adds to `first` what gives
    such a number.
    """
    second = [node for node in graph.nodes if _is_call(node) and node not in first]
    needed = dict.fromkeys([*(argument for node in second for argument in node.all_input_nodes), *wanted])
    kept = [node for node in needed if node in first or node.op == "placeholder"]
    tensors = [node for node in kept if isinstance(node.meta["val"], torch.Tensor)]
    numbers = [node for node in kept if not isinstance(node.meta["val"], torch.Tensor)]
    known = {size_expression(node.meta["val"]) for node in numbers}
    symbols = symbols_in([node.meta.get("val") for node in (*tensors, *second)])
    for symbol in sorted(symbols - known, key=str):
        number = _number_of(graph, symbol)
        if number is not None:
            numbers.append(number)
            first.update([number] if _is_call(number) else [])
    return numbers + tensors


def _number_of(graph: fx.Graph, symbol: sympy.Expr) -> fx.Node | None:
    """A node whose value is the symbol's."""
    inputs = placeholders(graph)
    for node in inputs:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and size_expression(value) == symbol:
            return node
    for node in inputs:
        value = node.meta["val"]
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if size_expression(size) == symbol:
                with graph.inserting_after(inputs[-1]):
                    number = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                number.meta["val"] = size
                return number
    return None


def _part(
    owner: fx.GraphModule,
    source: fx.Graph,
    calls: Collection[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    """A graph of some of the calls."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in source.nodes:
        if node in calls:
            copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copy_of(node) for node in results))
    return fx.GraphModule(owner, graph)
