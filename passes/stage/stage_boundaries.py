"""What a stage hands on is safe to send and to keep: contiguous, in its own memory, not an input's.

In: a stage graph with fake values. Out: the graph returning each value once, copied where it must be.
`SecureGradients` does the same to what a backward graph returns, as far as it is contiguous.

Terms. A value is *loose* if sending or keeping it as it is would be wrong or wasteful: it shares memory with
an input of the stage (a receive buffer is used again), is not contiguous, or is a small part of a larger
tensor. Two outputs that are views of the same memory are not copied; `aten._unsafe_view` tells autograd that
they are separate values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from rannc_backend.passes.pipeline import Pass
from rannc_backend.passes.plain_numbers import at_hint, plain_mode

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SecuredStage:
    """A stage graph that returns each value once; output i of the graph before is at `output_index[i]`."""

    graph_module: fx.GraphModule
    output_index: tuple[int, ...]

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"": self.graph_module}


@dataclass(frozen=True, slots=True)
class SecureOutputs(Pass[SecuredStage]):
    """The pass of `secure_outputs`; fields as its arguments."""

    name: ClassVar[str] = "secure_outputs"
    requires: ClassVar[frozenset[str]] = frozenset({"any_layout"})
    provides: ClassVar[frozenset[str]] = frozenset({"safe_outputs"})
    fakes: Sequence[Any]
    fake_mode: AbstractContextManager[Any]

    def run(self, graph_module: fx.GraphModule) -> SecuredStage:
        return SecuredStage(*secure_outputs(graph_module, self.fakes, self.fake_mode))


@dataclass(frozen=True, slots=True)
class SafeGradients:
    """A backward graph whose gradients of `indices` are contiguous; those of `borrowed` share memory with an
    input or another output still.
    """

    graph_module: fx.GraphModule
    borrowed: tuple[int, ...]

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"": self.graph_module}


@dataclass(frozen=True, slots=True)
class SecureGradients(Pass[SafeGradients]):
    """Make the outputs at `indices` of a backward graph contiguous, in place."""

    name: ClassVar[str] = "secure_gradients"
    requires: ClassVar[frozenset[str]] = frozenset({"partitioned", "all_outputs"})
    provides: ClassVar[frozenset[str]] = frozenset({"safe_gradients"})
    indices: tuple[int, ...]

    def run(self, graph_module: fx.GraphModule) -> SafeGradients:
        (output,) = graph_module.graph.find_nodes(op="output")
        results = list(output.args[0])
        taken = {
            node.meta["val"].untyped_storage()._cdata
            for node in graph_module.graph.find_nodes(op="placeholder")
            if isinstance(node.meta["val"], torch.Tensor)
        }
        borrowed = []
        for index in self.indices:
            value = results[index].meta["val"]
            if not value.is_contiguous():
                with graph_module.graph.inserting_before(output):
                    results[index] = graph_module.graph.call_function(
                        aten.clone.default, (results[index],), {"memory_format": torch.contiguous_format}
                    )
                value = torch.empty_like(value, memory_format=torch.contiguous_format)
                results[index].meta.update(val=value, autograd_backward=True)
            if value.untyped_storage()._cdata in taken:
                borrowed.append(index)
            taken.add(value.untyped_storage()._cdata)
        output.args = (tuple(results),)
        return SafeGradients(graph_module, tuple(borrowed))


def secure_outputs(
    graph_module: fx.GraphModule, fakes: Sequence[Any], fake_mode: AbstractContextManager[Any]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Copy of the graph whose outputs are distinct, contiguous and own their memory, and where each output is
    found.

    `fakes` are values of the placeholders as the stage will get them; the outputs' ``meta["val"]`` are in the
    given graph, and those of the result are new ones under `fake_mode`. Element i of the second result is the
    position, among the outputs of the new graph, of output i of the given one.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(graph_module.graph, copies)
    assert isinstance(results, (tuple, list)), "a stage graph returns a tuple"
    unique = list(dict.fromkeys(results))
    output = graph.output(tuple(unique))
    secured = fx.GraphModule(graph_module, graph)
    inputs, values = _at_one_batch_size(secured, fakes)
    shared = Counter(map(_storage, values.values()))
    secure = []
    for node in unique:
        if node in values:
            old = node.meta["val"]
            with fake_mode, torch.no_grad():
                node.meta["val"] = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            with graph.inserting_before(output):
                secure.append(_secure(graph, node, values[node], inputs, shared))
        else:
            secure.append(node)
    output.args = (tuple(secure),)
    secured.recompile()
    return secured, tuple(unique.index(node) for node in results)


def _at_one_batch_size(
    graph_module: fx.GraphModule, fakes: Sequence[Any]
) -> tuple[set[int], Mapping[fx.Node, torch.Tensor]]:
    """The storages of the inputs, and the tensors that the graph returns, with their layout in memory."""
    mode = plain_mode()
    inputs = [at_hint(value, mode) for value in fakes]
    with mode, torch.no_grad():
        results = fx.Interpreter(graph_module).run(*inputs)
    (output,) = graph_module.graph.find_nodes(op="output")
    values = {
        node: value
        for node, value in zip(output.args[0], results, strict=True)
        if isinstance(value, torch.Tensor)
    }
    return {_storage(value) for value in inputs if isinstance(value, torch.Tensor)}, values


def _secure(
    graph: fx.Graph, node: fx.Node, value: torch.Tensor, inputs: set[int], shared: Counter[int]
) -> fx.Node:
    owns_memory = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    if _storage(value) in inputs or not value.is_contiguous() or not owns_memory:
        new = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    elif shared[_storage(value)] > 1:
        # The sizes come from the value itself, which costs no kernel.
        shape = node.meta["val"].shape
        sizes = [
            size if isinstance(size, int) else _size_node(graph, node, dim) for dim, size in enumerate(shape)
        ]
        new = graph.call_function(aten._unsafe_view.default, (node, sizes))
    else:
        return node
    new.meta.update(
        {
            key: node.meta[key]
            for key in ("val", "stack_trace", "module_path", "value_name")
            if key in node.meta
        }
    )
    return new


def _size_node(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = node.meta["val"].shape[dim]
    return size


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
