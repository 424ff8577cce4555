"""Cut a row-wise graph into one graph per pipeline stage, along a map from nodes to stages.

In: the `rowwise` graph (functional ATen ops, ``meta["val"]`` fakes, every batch size an expression of one
symbol ``rows``), what each of its outputs is, the layout of its nodes, and the stage of every node that
depends on the batch.
Out: one `StageGraph` per stage.

Terms. A *staged* node has a stage. A *cloned* node has none: it does not depend on the batch, or on nothing
but its size (see `free_nodes`), and is computed again in every stage that uses it. A *size* is a SymInt (the
batch size, a length, or arithmetic on them): it is rebuilt in each stage from a tensor that the stage receives
and from lengths, which every stage has as inputs that uses them. A
*boundary* value is made in one stage and used in a later one, be it the next or not. A value keeps its name
(the node's name in the row-wise graph) in the inputs and outputs of all stages; names inside a stage graph
are canonical (``p0``, ``n0``, ...), so that stages with the same layers have the same text.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import sympy
import torch
from torch import fx

from rannc_backend.passes.batch.batch_split import BufferOutput, GraphOutput, RowsOutput, RowwiseOutput
from rannc_backend.passes.batch.layouts import Layout, RowIndex, Rows
from rannc_backend.passes.batch.operator_call import has_rows
from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.graph_queries import nearest_node, nodes_behind, output_values, size_expression
from rannc_backend.passes.pipeline import Pass, PassError, run_pass
from rannc_backend.passes.size_nodes import is_size, length_placeholders, size_node, size_symbols

InputKind = Literal[
    "parameter",
    "buffer",
    "batch",
    "replicated",
    "boundary",
    "rng_seed",
    "first_row",
    "global_rows",
    "prologue",
    "length",
]
INPUT_KINDS = get_args(InputKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """One placeholder of a stage graph: the row-wise graph's node of that name, and where it comes from."""

    name: str
    kind: str

    def __post_init__(self) -> None:
        assert self.kind in INPUT_KINDS, f"stage input {self.name} has unknown kind {self.kind!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryOutput(GraphOutput):
    """A value that later stages use."""

    kind: ClassVar[str] = "boundary"


StageOutput = BoundaryOutput | RowwiseOutput
"""One output of a stage graph: the row-wise graph's node of that name, and what it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """One stage: `graph_module`'s placeholder i is `inputs[i]`, element i of its output tuple is
    `outputs[i]`.

    A value that serves several purposes (a boundary value that is a user output too) is listed once per kind.
    """

    index: int
    graph_module: fx.GraphModule
    inputs: tuple[StageInput, ...]
    outputs: tuple[StageOutput, ...]

    @property
    def updated_buffers(self) -> tuple[str, ...]:
        """Dotted names of the buffers whose new values the stage makes."""
        return tuple(item.fqn for item in self.outputs if isinstance(item, BufferOutput))

    @property
    def outputs_for_the_user_alone(self) -> frozenset[str]:
        """Names of outputs with rows that no later stage uses: where the loss alone is differentiated, they
        get no gradient.
        """
        boundary = {item.name for item in self.outputs if isinstance(item, BoundaryOutput)}
        return frozenset(item.name for item in self.outputs if isinstance(item, RowsOutput)) - boundary


def split_stages(
    rowwise: fx.GraphModule,
    outputs: Sequence[RowwiseOutput],
    layouts: Mapping[str, Layout],
    stage_of: Mapping[str, int],
    num_stages: int,
    *,
    input_kinds: Mapping[str, str],
    rows_symbol: sympy.Symbol,
) -> tuple[StageGraph, ...]:
    """Give one graph per stage, which together compute what `rowwise` computes.

    Args:
        rowwise: the graph; its output is one flat tuple, element i described by `outputs[i]`.
        layouts: layout of each node of `rowwise` by name, see `batch_axis`; nodes with a RowIndex are cloned.
        stage_of: stage by node name, at least of every node that depends on the batch, numbered from 0. Of a
        getitem the
            entry is ignored: it goes with the tuple it takes from.
        input_kinds: kind (see `StageInput`) by placeholder name.
        rows_symbol: the batch size.

    Raises PassError if a node uses a value of a later stage, a node that needs a stage has none, a value that
    crosses a boundary is not row-wise, or a size cannot be rebuilt.
    """
    split = SplitStages(outputs, layouts, stage_of, num_stages, input_kinds, rows_symbol)
    return run_pass(split, rowwise).stages


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """All stages in order."""

    stages: tuple[StageGraph, ...]

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {f"stage{stage.index}": stage.graph_module for stage in self.stages}


@dataclass(frozen=True, slots=True)
class SplitStages(Pass[StageGraphs]):
    """The pass of `split_stages`; fields as its arguments."""

    name: ClassVar[str] = "split_stages"
    requires: ClassVar[frozenset[str]] = frozenset({"split_at_sums"})
    provides: ClassVar[frozenset[str]] = frozenset({"one_stage"})
    outputs: Sequence[RowwiseOutput]
    layouts: Mapping[str, Layout]
    stage_of: Mapping[str, int]
    num_stages: int
    input_kinds: Mapping[str, str]
    rows_symbol: sympy.Symbol

    def run(self, graph_module: fx.GraphModule) -> StageGraphs:
        assignment = _Assignment(graph_module, self.layouts, self.stage_of, self.num_stages, self.input_kinds)
        by_stage: list[list[tuple[fx.Node, StageOutput]]] = [[] for _ in range(self.num_stages)]
        for node in _crossing_values(assignment):
            by_stage[assignment.staged[node]].append((node, BoundaryOutput(name=node.name)))
        _place_outputs(assignment, self.outputs, by_stage)
        built = (
            _StageBuilder(assignment, i, self.rows_symbol).build(by_stage[i]) for i in range(self.num_stages)
        )
        return StageGraphs(tuple(built))


def free_nodes(
    rowwise: fx.GraphModule, layouts: Mapping[str, Layout], input_kinds: Mapping[str, str]
) -> frozenset[fx.Node]:
    """Nodes that are cloned even if they have a stage: they depend on no parameter, buffer or batch input
    (but maybe on the batch size), so they are cheaper to make again than to send. Masks and numbers of local
    rows are among them."""
    owned = ("parameter", "buffer", "batch")
    free: set[fx.Node] = set()
    for node in rowwise.graph.nodes:
        if node.op == "placeholder":
            is_free = input_kinds.get(node.name, "prologue") not in owned
        else:
            is_free = is_size(node) or all(argument in free for argument in node.all_input_nodes)
        # The number of a local row would mean nothing to ranks with other rows.
        if is_free or isinstance(layouts.get(node.name), RowIndex):
            free.add(node)
    return frozenset(free)


class _Assignment:
    """Which nodes of the row-wise graph are staged where; the rest are placeholders, sizes or cloned."""

    def __init__(
        self,
        rowwise: fx.GraphModule,
        layouts: Mapping[str, Layout],
        stage_of: Mapping[str, int],
        num_stages: int,
        input_kinds: Mapping[str, str],
    ) -> None:
        self.rowwise = rowwise
        self.layouts = layouts
        self.input_kinds = input_kinds
        self.stage_of = stage_of
        self.staged: dict[fx.Node, int] = {}
        free = free_nodes(rowwise, layouts, input_kinds)
        for node in rowwise.graph.nodes:
            # Without users it is a check of metadata, which was made at capture.
            if node.op in ("placeholder", "output", "get_attr") or is_size(node) or not node.users:
                continue
            if node.target is operator.getitem and node.args[0] in self.staged:
                self.staged[node] = self.staged[node.args[0]]
            elif node.name in stage_of and node not in free:
                stage = stage_of[node.name]
                if not 0 <= stage < num_stages:
                    raise PassError(node, f"stage {stage} is not one of {num_stages} stages")
                self.staged[node] = stage
            else:
                self._check_clonable(node)

    def _check_clonable(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if argument in self.staged:
                raise PassError(
                    node, f"no stage is given for it, though it depends on {argument.name}, which has one"
                )


def _crossing_values(assignment: _Assignment) -> list[fx.Node]:
    """Staged values with a user in a later stage, in graph order."""
    crossing = []
    for node, stage in assignment.staged.items():
        later = False
        for user in node.users:
            user_stage = assignment.staged.get(user, stage)
            if user_stage < stage:
                raise PassError(
                    user, f"stage {user_stage} uses {node.name}, which is made in the later stage {stage}"
                )
            later = later or user_stage > stage
        if not later:
            continue
        if not isinstance(node.meta["val"], torch.Tensor):
            raise PassError(node, "a tuple of tensors would cross a stage boundary")
        layout = assignment.layouts[node.name]
        if not isinstance(layout, Rows):
            raise PassError(
                node, f"a value of layout {layout} would cross a stage boundary; only row-wise values can"
            )
        crossing.append(node)
    return crossing


def _place_outputs(
    assignment: _Assignment,
    outputs: Sequence[RowwiseOutput],
    by_stage: list[list[tuple[fx.Node, StageOutput]]],
) -> None:
    """Append each output of the row-wise graph to the stage that makes it."""
    values = output_values(assignment.rowwise.graph)
    assert len(values) == len(outputs), f"{len(values)} outputs, {len(outputs)} descriptions"
    pairs = [
        (node, output) for node, output in zip(values, outputs, strict=True) if isinstance(node, fx.Node)
    ]
    updates = {output.fqn: node for node, output in pairs if isinstance(output, BufferOutput)}
    once = _set_once(updates, assignment.input_kinds)
    for node, output in pairs:
        if isinstance(output, BufferOutput):
            output = replace(output, once=output.fqn in once)
        by_stage[_home_stage(assignment, node)].append((node, output))


def _set_once(updates: Mapping[str, fx.Node], input_kinds: Mapping[str, str]) -> set[str]:
    """The buffers that advance once per step: those whose new values are made of parameters and buffers alone. A
    counter beside statistics of slices in its module (BatchNorm's) counts with them.
    """
    once = {fqn for fqn, update in updates.items() if _has_no_rows(update, input_kinds)}
    modules = {_module_of(fqn) for fqn in updates.keys() - once}
    return {
        fqn for fqn in once if updates[fqn].meta["val"].is_floating_point() or _module_of(fqn) not in modules
    }


def _module_of(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _has_no_rows(update: fx.Node, input_kinds: Mapping[str, str]) -> bool:
    kinds = {
        input_kinds.get(node.name, "prologue") for node in nodes_behind([update]) if node.op == "placeholder"
    }
    return not kinds & {"batch", "rng_seed", "first_row"}


def _home_stage(assignment: _Assignment, node: fx.Node) -> int:
    """The stage that returns an output: where it is made, or for a cloned one where its inputs are used
    anyway.
    """
    if node in assignment.staged:
        return assignment.staged[node]
    # The new value of a counter such as BatchNorm's num_batches_tracked belongs where its module computes.
    nearest = nearest_node(node, lambda other: other.name in assignment.stage_of)
    return 0 if nearest is None else assignment.stage_of[nearest.name]


class _StageBuilder:
    """Builds the graph of one stage. Its members map nodes of the row-wise graph to nodes of the stage
    graph.
    """

    def __init__(self, assignment: _Assignment, index: int, rows_symbol: sympy.Symbol) -> None:
        self.assignment = assignment
        self.index = index
        self.rows_symbol = rows_symbol
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.inputs: list[StageInput] = []
        self.copies: dict[fx.Node, fx.Node] = {}
        self.rows: fx.Node | None = None
        self.lengths = length_placeholders(assignment.rowwise.graph)
        self.num_sizes = 0

    def build(self, outputs: Sequence[tuple[fx.Node, StageOutput]]) -> StageGraph:
        nodes = self._nodes_to_compute([node for node, _ in outputs])
        received = self._received(nodes, [node for node, _ in outputs])
        for node in received:
            self._add_input(node)
        used = {argument for node in nodes for argument in node.all_input_nodes if is_size(argument)}
        sizes = filter(is_size, nodes_behind(used, stop=lambda node: not is_size(node)))
        if any(has_rows(node.meta["val"], self.rows_symbol) for node in sizes):
            self._add_rows(received)
        for number, node in enumerate(nodes):
            self._copy(node, f"n{number}")
        self.graph.output(tuple(self.copies[node] for node, _ in outputs))
        graph_module = fx.GraphModule(self.attributes, self.graph, class_name=f"Stage{self.index}")
        return StageGraph(
            index=self.index,
            graph_module=graph_module,
            inputs=tuple(self.inputs),
            outputs=tuple(output for _, output in outputs),
        )

    def _nodes_to_compute(self, outputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Staged nodes of this stage and cloned nodes they or the outputs use, in graph order; sizes left
        out.
        """
        staged = self.assignment.staged
        needed: set[fx.Node] = {node for node, stage in staged.items() if stage == self.index}
        pending = [*needed, *outputs]
        while pending:
            node = pending.pop()
            own = node not in staged and node.op != "placeholder" and not is_size(node)
            if own:
                needed.add(node)
            if own or staged.get(node) == self.index:
                pending.extend(a for a in node.all_input_nodes if a not in needed and a not in staged)
        return [node for node in self.assignment.rowwise.graph.nodes if node in needed]

    def _received(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Placeholders and boundary values in the order of their first use, so that equal stages number them
        alike.
        """
        computed = set(nodes)
        received: dict[fx.Node, None] = {}
        for node in nodes:
            for argument in node.all_input_nodes:
                if argument not in computed and not is_size(argument):
                    received[argument] = None
        for node in outputs:
            if node not in computed:
                received[node] = None
        used = {symbol for node in (*computed, *received) for symbol in size_symbols(node)}
        lengths = [node for symbol, node in self.lengths.items() if symbol in used]
        return [*lengths, *(node for node in received if node not in lengths)]

    def _add_input(self, node: fx.Node) -> fx.Node:
        kind = (
            self.assignment.input_kinds.get(node.name, "prologue") if node.op == "placeholder" else "boundary"
        )
        name = f"p{len(self.inputs)}"
        copy = self.graph.create_node("placeholder", name, name=name)
        copy.meta.update(_kept_meta(node))
        self.inputs.append(StageInput(name=node.name, kind=kind))
        self.copies[node] = copy
        return copy

    def _add_rows(self, received: Sequence[fx.Node]) -> None:
        """Make the batch size from the first input that has it in a dimension; a batch input is added if none
        has.
        """
        carriers = [*received, *(n for n in self.assignment.rowwise.graph.find_nodes(op="placeholder"))]
        for node in carriers:
            found = rows_dimension(node.meta["val"], self.rows_symbol)
            if found is None:
                continue
            dim, factor = found
            source = self.copies[node] if node in self.copies else self._add_input(node)
            self.rows = self.graph.create_node(
                "call_function", torch.ops.aten.sym_size.int, (source, dim), name="size0"
            )
            size = source.meta["val"].shape[dim]
            self.rows.meta["val"] = size
            if factor != 1:
                self.rows = self.graph.create_node(
                    "call_function", operator.floordiv, (self.rows, factor), name="rows"
                )
                self.rows.meta["val"] = size // factor
            return
        raise PassError(
            None, f"stage {self.index} computes with the batch size, but no input of the model has it"
        )

    def _copy(self, node: fx.Node, name: str) -> None:
        if node.op == "get_attr":
            target = f"c{len(self.attributes)}"
            self.attributes[target] = _attribute(self.assignment.rowwise, str(node.target))
            copy = self.graph.create_node("get_attr", target, name=name)
        else:
            copy = self.graph.node_copy(node, self._argument)
            copy._rename(name)
        copy.meta = _kept_meta(node)
        self.copies[node] = copy

    def _argument(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            assert is_size(node), (
                f"{node.name} is used in stage {self.index} but is neither made nor received there"
            )
            self.copies[node] = self._size(node)
        return self.copies[node]

    def _size(self, node: fx.Node) -> fx.Node:
        """Rebuild a size in this stage; sizes of intermediate tensors become arithmetic on the batch size and on
        lengths.
        """
        value = node.meta["val"]
        # What depends on data is a size of a value that does, and which no boundary cuts off.
        if node.target is not torch.ops.aten.sym_size.int or has_data_sizes(value):
            copy = self.graph.node_copy(node, self._argument)
            self._name_size(copy)
            copy.meta = _kept_meta(node)
            return copy
        known = {
            symbol: self.copies[length] for symbol, length in self.lengths.items() if length in self.copies
        }
        if self.rows is not None:
            known[self.rows_symbol] = self.rows
        before = set(self.graph.nodes)
        made = size_node(self.graph, value, known)
        if not isinstance(made, fx.Node):
            expression = size_expression(value)
            raise PassError(node, f"its size {expression} is none that a stage can rebuild")
        for copy in self.graph.nodes:
            if copy not in before:
                self._name_size(copy)
        return made

    def _name_size(self, node: fx.Node) -> None:
        self.num_sizes += 1
        node._rename(f"size{self.num_sizes}")


def rows_dimension(value: object, rows_symbol: sympy.Symbol) -> tuple[int, int] | None:
    """First dimension of a tensor whose size is factor * rows, as (dim, factor); None if there is none."""
    if not isinstance(value, torch.Tensor):
        return None
    for dim, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            factor = expression.coeff(rows_symbol, 1)
            if factor.is_Integer and factor > 0 and expression == factor * rows_symbol:
                return dim, int(factor)
    return None


def _kept_meta(node: fx.Node) -> dict[str, Any]:
    kept: dict[str, Any] = {
        key: node.meta[key] for key in ("val", "stack_trace", "module_path") if key in node.meta
    }
    kept["value_name"] = node.name
    return kept


def _attribute(graph_module: fx.GraphModule, target: str) -> Any:
    value: Any = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    return value
