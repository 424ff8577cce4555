"""Operators that ask for a certain layout in memory, in forms that take any.

In: a graph that will run on other layouts than it was traced on: a boundary value has become contiguous, or
an operator lays its result out in another way than torch's own shape function said (batch normalisation and
some derivatives on the CPU). Out: the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from rannc_backend.passes.pipeline import GraphPass

aten = torch.ops.aten

_RESHAPED = frozenset({aten.view.default, aten._unsafe_view.default})
_OF_CONTIGUOUS = frozenset({aten.view_as_complex.default, aten.view.dtype})


@dataclass(frozen=True, slots=True)
class TakeAnyLayout(GraphPass):
    """See the module docstring. In place, so only on a graph that is nobody else's: the copy without
    constants.
    """

    name: ClassVar[str] = "any_layout"
    requires: ClassVar[frozenset[str]] = frozenset({"constants_lifted"})
    provides: ClassVar[frozenset[str]] = frozenset({"any_layout"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        take_any_layout(graph_module.graph)
        return graph_module


def take_any_layout(graph: fx.Graph) -> None:
    """Change the graph in place. The caller recompiles."""
    for node in list(graph.nodes):
        if node.target in _RESHAPED:
            node.target = aten.reshape.default
        elif node.target in _OF_CONTIGUOUS:
            with graph.inserting_before(node):
                operand = graph.call_function(aten.contiguous.default, (node.args[0],))
                operand.meta.update(node.args[0].meta)
            node.args = (operand, *node.args[1:])
        elif node.target is aten.as_strided.default:
            _restride(graph, node)


def restrided(value: Tensor, strides: list[int]) -> Tensor:
    """The tensor itself where it has these strides (those of dimensions of one element mean nothing), else a
    copy that has them.
    """
    if all(
        size == 1 or have == want
        for size, have, want in zip(value.shape, value.stride(), strides, strict=True)
    ):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _restride(graph: fx.Graph, node: fx.Node) -> None:
    """`aten.as_strided` counts in the memory of its operand, which must lie as it did in the trace."""
    source = node.args[0]
    assert isinstance(source, fx.Node), node.format_node()
    fake = source.meta.get("val")
    if isinstance(fake, Tensor) and all(isinstance(stride, int) for stride in fake.stride()):
        with graph.inserting_before(node):
            operand = graph.call_function(restrided, (source, list(fake.stride())))
            operand.meta.update(source.meta)
        node.args = (operand, *node.args[1:])
