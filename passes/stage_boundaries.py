"""What a stage hands on is safe to send and to keep: contiguous, in its own memory, not an input's.

In: a stage graph and fake values of its inputs. Out: the graph returning each value once, copied where it must be.

Terms. A value is *loose* if sending or keeping it as it is would be wrong or wasteful: it shares memory with an input of
the stage (a receive buffer is used again), is not contiguous, or is a small part of a larger tensor. Two outputs that are
views of the same memory are not copied; `aten._unsafe_view` tells autograd that they are separate values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

aten = torch.ops.aten


def secure_outputs(graph_module: fx.GraphModule, fakes: Sequence[Any], fake_mode: Any) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Copy of the graph whose outputs are distinct, contiguous and own their memory, and where each output is found.

    `fakes` are values of the placeholders under `fake_mode`; ``meta["val"]`` of the result is computed from them. Element
    i of the second result is the position, among the outputs of the new graph, of output i of the given one.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(graph_module.graph, copies)
    assert isinstance(results, (tuple, list)), "a stage graph returns a tuple"
    unique = list(dict.fromkeys(results))
    graph.output(tuple(unique))
    secured = fx.GraphModule(graph_module, graph)
    # Without it some operators (constant_pad_nd) run as written in C++, which takes the batch size for a number.
    with enable_python_dispatcher():
        FakeTensorProp(secured, fake_mode).propagate_dont_convert_inputs(*fakes)
    inputs = {_storage(node) for node in graph.find_nodes(op="placeholder") if _is_tensor(node)}
    shared = Counter(_storage(node) for node in unique if _is_tensor(node))
    (output,) = graph.find_nodes(op="output")
    values = []
    for node in unique:
        with graph.inserting_before(output):
            values.append(_secure(graph, node, inputs, shared) if _is_tensor(node) else node)
    output.args = (tuple(values),)
    secured.recompile()
    return secured, tuple(unique.index(node) for node in results)


def _secure(graph: fx.Graph, node: fx.Node, inputs: set[int], shared: Counter[int]) -> fx.Node:
    value = node.meta["val"]
    contiguous = value.is_contiguous()
    if _storage(node) in inputs or not contiguous or not owns_memory(value):
        new = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        new.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    elif shared[_storage(node)] > 1:
        # The sizes come from the value itself, which costs no kernel.
        sizes = [size if isinstance(size, int) else _size_node(graph, node, dim) for dim, size in enumerate(value.shape)]
        new = graph.call_function(aten._unsafe_view.default, (node, sizes))
        new.meta["val"] = value
    else:
        return node
    new.meta.update({key: node.meta[key] for key in ("stack_trace", "module_path", "value_name") if key in node.meta})
    return new


def _size_node(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = node.meta["val"].shape[dim]
    return size


def owns_memory(value: torch.Tensor) -> bool:
    """Whether a contiguous tensor is the whole of its storage."""
    total = value.untyped_storage().nbytes()
    own = value.numel() * value.element_size()
    expressions = [getattr(getattr(size, "node", None), "expr", size) for size in (total, own)]
    return bool(expressions[0] == expressions[1])


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _storage(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata
