"""Put what a Python function does on tensors into a graph, in place of a node.

In: a node with fake values, and a function of its arguments. Out: the function's ATen operators, traced over
the same symbolic sizes, as an inner graph or inlined before the node with the node's own metadata.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.graph_queries import arguments_of, placeholders


@dataclass(frozen=True, slots=True)
class InnerGraph:
    """A traced function: `placeholders[i]` stands for the outer node `arguments[i]`; outputs are nodes,
    constants or None.
    """

    module: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    arguments: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


_ATEN: Mapping[Any, Any] = {
    torch.ops.prims.as_strided.default: torch.ops.aten.as_strided.default,
    torch.ops.prims.copy_to.default: torch.ops.aten.copy_.default,
    torch.ops.prims.resize.default: torch.ops.aten.resize_.default,
}


def trace_function(
    function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], *, mode: Any = None
) -> InnerGraph:
    """Trace `function(*args, **kwargs)`, in which FX nodes stand for their fake values. `mode`: of the graph, for
    arguments that are numbers alone.
    """
    found: dict[fx.Node, None] = {}
    fx.map_arg((tuple(args), dict(kwargs)), lambda node: found.setdefault(node))
    nodes = tuple(found)

    def run(*values: Any) -> Any:
        by_node = dict(zip(nodes, values))
        new_args, new_kwargs = fx.map_arg((tuple(args), dict(kwargs)), by_node.__getitem__)
        result = function(*new_args, **new_kwargs)
        # decompositions give named tuples, which the tracer would record as a call of their class
        return tuple(result) if isinstance(result, tuple) else result

    values = [node.meta["val"] for node in nodes]
    with symbolic_sizes(values, mode):
        module = make_fx(run, decomposition_table={})(*values)
        if any(map(_writes, module.graph.nodes)):
            _write_as_aten(module)
            module = make_fx(torch.func.functionalize(module), decomposition_table={})(*values)
            assert not any(map(_writes, module.graph.nodes)), "a graph without places has writes"
    output = module.graph.output_node().args[0]
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    return InnerGraph(module, tuple(placeholders(module.graph)), nodes, outputs)


def _writes(node: fx.Node) -> bool:
    """Whether a node writes into an argument: who reads that again would not be seen to need it."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _write_as_aten(module: fx.GraphModule) -> None:
    """What torch's references write with, in ATen's words: functionalization takes no other operator that returns its
    argument.
    """
    for node in module.graph.nodes:
        node.target = _ATEN.get(node.target, node.target)
    module.recompile()


@contextlib.contextmanager
def symbolic_sizes(values: Sequence[Any], mode: Any = None) -> Iterator[None]:
    """Run operators on fake values so that sizes stay symbolic; AssertionError if an operator fixed one to a
    number.

    Without the Python dispatcher some factories (arange) read the batch size as a number, for good and for
    all values.
    """
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), mode)
    environment = None if mode is None else mode.shape_env
    before = {} if environment is None else dict(environment.replacements)
    with mode or contextlib.nullcontext(), enable_python_dispatcher():
        yield
    if environment is not None:
        fixed = {symbol for symbol in environment.replacements if symbol not in before}
        assert not fixed, f"tracing fixed the symbolic sizes {fixed} to numbers"


def trace_decomposition(node: fx.Node) -> InnerGraph | None:
    """What an operator is made of, by torch's table of decompositions; None if it is not in there."""
    target: Any = node.target  # also what is no operator, and then not in the table
    function = decomposition_table.get(target)
    if function is None:
        return None
    return trace_function(function, node.args, node.kwargs)


def inline(node: fx.Node, inner: InnerGraph) -> list[fx.Node]:
    """Replace `node` by the nodes of `inner`; gives the new nodes. The node's elements are replaced one by
    one if it is a tuple.
    """
    graph = node.graph
    copies: dict[fx.Node, fx.Node] = dict(zip(inner.placeholders, inner.arguments))
    new_nodes: list[fx.Node] = []
    with graph.inserting_before(node):
        for item in inner.graph.nodes:
            if item.op in ("placeholder", "output"):
                continue
            if item.op == "get_attr":
                copies[item] = _copy_attribute(graph, inner.module, item)
            else:
                copies[item] = graph.node_copy(item, copies.__getitem__)
            _inherit(copies[item], node)
            new_nodes.append(copies[item])
    outputs = [copies[item] if isinstance(item, fx.Node) else item for item in inner.outputs]
    for item, output in zip(_taken(node), outputs, strict=False):
        if item is not None and item.meta.get("kept") and isinstance(output, fx.Node):
            output.meta["kept"] = True  # see passes/stage/recompute.py
    if not isinstance(node.meta["val"], (tuple, list)):
        node.replace_all_uses_with(outputs[0])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} uses the tuple {node} as a whole"
            user.replace_all_uses_with(outputs[arguments_of(user)[1]])
            graph.erase_node(user)
    graph.erase_node(node)
    # what nobody uses goes at once, so that no later pass refuses it
    kept = [item for item in reversed(new_nodes) if item.users or graph.erase_node(item)]
    return kept[::-1]


def _taken(node: fx.Node) -> list[fx.Node | None]:
    """The node, or what takes each element of its tuple."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return [node]
    takers = {arguments_of(user)[1]: user for user in node.users if user.target is operator.getitem}
    return [takers.get(place) for place in range(len(value))]


def inline_value(marker: fx.Node, inner: InnerGraph) -> fx.Node:
    """Inline a one-output graph at `marker`, which nobody uses yet; gives its value."""
    graph = marker.graph
    keeper = graph.call_function(operator.pos, (marker,))
    keeper_place = marker.next
    keeper_place.prepend(keeper)
    inline(marker, inner)
    value = keeper.args[0]
    graph.erase_node(keeper)
    assert isinstance(value, fx.Node)
    return value


def _inherit(node: fx.Node, origin: fx.Node) -> None:
    """Keep who asked for the node: the user's line and modules."""
    for key in ("stack_trace", "module_path", "module_stack"):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]


def _copy_attribute(graph: fx.Graph, module: fx.GraphModule, item: fx.Node) -> fx.Node:
    owner = graph.owning_module
    assert owner is not None, "a graph with constants needs its module"
    number = 0
    while hasattr(owner, f"_inlined_constant{number}"):
        number += 1
    name = f"_inlined_constant{number}"
    value = getattr(module, str(item.target))
    if isinstance(value, torch.Tensor):
        owner.register_buffer(name, value, persistent=False)
    else:
        setattr(owner, name, value)
    copy = graph.get_attr(name)
    copy.meta.update(item.meta)
    return copy
