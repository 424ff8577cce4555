"""Which nodes of a row-wise graph get a stage, and which parameters each of them reads.

In: the row-wise graph and its layouts. Out: `StagedGraph`. Terms as in passes/stage/split_stages.py: a
*staged* node depends on the rows of the batch and runs in one stage; a *cloned* node does not (or on their
number alone, see `free_nodes` there) and is computed again in every stage that uses it; a getitem goes with
the tuple it takes from, together they are an *atom*. A staged node reads a parameter also through cloned
nodes (a transposed weight). Only row-wise values (layout Rows) may cross between stages.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from rannc_backend.ir.graph_input import GraphInput, ParameterInput, StateInput
from rannc_backend.passes.batch.layouts import Constant, Layout, Reduced, RowCount, RowIndex, Rows, Several
from rannc_backend.passes.graph_queries import nearest_node, nodes_behind, output_values
from rannc_backend.passes.stage.split_stages import free_nodes, is_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedGraph:
    """`atoms`: staged nodes in topological order, each with its getitems. `reads`: of every staged node the
    placeholders of parameters and buffers that reach it directly or through cloned nodes, in graph order.
    `cloned`: of every staged node the cloned call_function nodes that reach it. `fixed`: staged values that
    must not cross between stages."""

    rowwise: fx.GraphModule
    atoms: tuple[tuple[fx.Node, ...], ...]
    reads: Mapping[fx.Node, tuple[fx.Node, ...]]
    cloned: Mapping[fx.Node, tuple[fx.Node, ...]]
    fixed: frozenset[fx.Node]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for atom in self.atoms for node in atom)


def find_staged_nodes(
    rowwise: fx.GraphModule, layouts: Mapping[str, Layout], inputs: Sequence[GraphInput]
) -> StagedGraph:
    """Sort the nodes of a row-wise graph into staged and cloned ones."""
    stored = {item.name for item in inputs if isinstance(item, StateInput)}
    number = {node: position for position, node in enumerate(rowwise.graph.nodes)}
    free = free_nodes(rowwise, layouts, {item.name: item.kind for item in inputs})
    atoms: dict[fx.Node, list[fx.Node]] = {}
    atom_of: dict[fx.Node, fx.Node] = {}
    reach: dict[
        fx.Node, frozenset[fx.Node]
    ] = {}  # placeholders and cloned nodes behind a node that is not staged
    behind: dict[fx.Node, frozenset[fx.Node]] = {}  # the same for a staged node
    for node in rowwise.graph.nodes:
        if node.op == "placeholder":
            reach[node] = frozenset([node]) if node.name in stored else frozenset()
        # Without users it is a check of metadata, which was made at capture.
        if node.op != "call_function" or is_size(node) or not node.users:
            continue
        found = frozenset[fx.Node]().union(
            *(reach.get(argument, frozenset()) for argument in node.all_input_nodes)
        )
        if node.target is operator.getitem and node.args[0] in atom_of:
            head = atom_of[node.args[0]]
        elif node not in free and not _is_cloned(layouts[node.name]):
            head = node
        else:
            reach[node] = found | {node}
            continue
        atom_of[node] = head
        atoms.setdefault(head, []).append(node)
        behind[node] = found
    ordered = {node: sorted(items, key=number.__getitem__) for node, items in behind.items()}
    return StagedGraph(
        rowwise=rowwise,
        atoms=tuple(tuple(atom) for atom in atoms.values()),
        reads={
            node: tuple(item for item in items if item.op == "placeholder") for node, items in ordered.items()
        },
        cloned={
            node: tuple(item for item in items if item.op != "placeholder") for node, items in ordered.items()
        },
        fixed=frozenset(node for node in atom_of if not isinstance(layouts[node.name], Rows)),
    )


def _is_cloned(layout: Layout) -> bool:
    if isinstance(layout, Several):
        return all(_is_cloned(element) for element in layout.elements)
    return isinstance(layout, Constant | RowIndex | RowCount | Reduced)


def output_nodes(rowwise: fx.GraphModule) -> list[fx.Node]:
    """The nodes in the flat output tuple, in order."""
    return [value for value in output_values(rowwise.graph) if isinstance(value, fx.Node)]


def home_of_cloned(staged: StagedGraph, node: fx.Node) -> fx.Node | None:
    """The staged node next to which an output that is not staged itself is returned; None: the first stage.

    The rule of passes/stage/split_stages.py, which must find the parameters behind the output where this
    says.
    """
    return nearest_node(node, lambda other: other in staged.reads)


def parameters_read(
    staged: StagedGraph,
    inputs: Sequence[GraphInput],
    place_of: Mapping[str, int],
    changed: Sequence[Collection[str]],
) -> list[set[str]]:
    """By block or stage, whose numbers ``place_of`` has by node: the dotted names of the parameters that it reads, or whose
    new values it makes (of ``changed``, which has those of buffers, too). A cloned output counts where it is returned.
    """
    names = {item.name: item.fqn for item in inputs if isinstance(item, ParameterInput)}
    found = [set(own).intersection(names.values()) for own in changed]

    def add(place: int, read: Iterable[fx.Node]) -> None:
        found[place].update(names[item.name] for item in read if item.name in names)

    for node in staged.nodes:
        add(place_of[node.name], staged.reads[node])
    for output in output_nodes(staged.rowwise):
        if output not in staged.reads:
            home = home_of_cloned(staged, output)
            add(place_of[home.name] if home is not None else 0, placeholders_behind(output))
    return found


def placeholders_behind(node: fx.Node) -> set[fx.Node]:
    """Placeholders that reach `node`, itself included."""
    return {item for item in nodes_behind([node]) if item.op == "placeholder"}
