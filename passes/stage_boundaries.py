"""What a stage hands on is safe to send and to keep: contiguous, in its own memory, not an input's.

In: a stage graph with fake values. Out: the graph returning each value once, copied where it must be.

Terms. A value is *loose* if sending or keeping it as it is would be wrong or wasteful: it shares memory with an input of
the stage (a receive buffer is used again), is not contiguous, or is a small part of a larger tensor. Two outputs that are
views of the same memory are not copied; `aten._unsafe_view` tells autograd that they are separate values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from .plain_numbers import at_hint, plain_mode

aten = torch.ops.aten


def secure_outputs(
    graph_module: fx.GraphModule, fakes: Sequence[Any], fake_mode: AbstractContextManager[Any]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Copy of the graph whose outputs are distinct, contiguous and own their memory, and where each output is found.

    `fakes` are values of the placeholders as the stage will get them; the outputs' ``meta["val"]`` are in the given graph, and those of
    the result are new ones under `fake_mode`. Element i of the second result is the position, among the outputs of the new graph, of
    output i of the given one.
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


def _at_one_batch_size(graph_module: fx.GraphModule, fakes: Sequence[Any]) -> tuple[set[int], Mapping[fx.Node, torch.Tensor]]:
    """The storages of the inputs, and the tensors that the graph returns, with their layout in memory."""
    mode = plain_mode()
    inputs = [at_hint(value, mode) for value in fakes]
    with mode, torch.no_grad():
        results = fx.Interpreter(graph_module).run(*inputs)
    (output,) = graph_module.graph.find_nodes(op="output")
    values = {node: value for node, value in zip(output.args[0], results, strict=True) if isinstance(value, torch.Tensor)}
    return {_storage(value) for value in inputs if isinstance(value, torch.Tensor)}, values


def _secure(graph: fx.Graph, node: fx.Node, value: torch.Tensor, inputs: set[int], shared: Counter[int]) -> fx.Node:
    owns_memory = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    if _storage(value) in inputs or not value.is_contiguous() or not owns_memory:
        new = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    elif shared[_storage(value)] > 1:
        # The sizes come from the value itself, which costs no kernel.
        shape = node.meta["val"].shape
        sizes = [size if isinstance(size, int) else _size_node(graph, node, dim) for dim, size in enumerate(shape)]
        new = graph.call_function(aten._unsafe_view.default, (node, sizes))
    else:
        return node
    new.meta.update({key: node.meta[key] for key in ("val", "stack_trace", "module_path", "value_name") if key in node.meta})
    return new


def _size_node(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = node.meta["val"].shape[dim]
    return size


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
