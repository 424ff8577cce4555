"""Split a graph at its reductions over the batch: row-wise part, sums of inputs before it, scalar part after
it.

In: a functional ATen graph after loss_decompositions.py, and the layouts of its values from batch_axis.py.
Out: a BatchSplit (batch_split.py).

Terms. A *partial* is a sum over the rows of a slice; the sums over all slices go to the *epilogue*, which
computes what follows them (division by counts, sums of losses, weights). A *prologue sum* is a partial that
depends on gradient-free inputs alone: every rank computes it on its own rows before the step, so row-wise
operators may use it as well. A value without rows that the epilogue needs and that depends on parameters or
inputs (a weight penalty) becomes a partial too: value * rows of the slice, divided by the global rows in the
epilogue, so that both the value and its gradient are right however the batch is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rannc_backend.passes.batch.batch_axis import FindRows, Meeting, is_statistic
from rannc_backend.passes.batch.batch_split import (
    FIRST_ROW,
    GLOBAL_ROWS,
    RNG_SEED,
    BatchSplit,
    BufferOutput,
    PartialOutput,
    ReplicatedOutput,
    RowsOutput,
    RowwiseOutput,
    UserConstant,
    UserOutput,
    UserReplicated,
    UserRows,
    UserScalar,
    UserUnavailable,
    WholeBatch,
)
from rannc_backend.passes.batch.differentiability import is_linear, values_reached_by_grad
from rannc_backend.passes.batch.layouts import (
    Choice,
    Constant,
    Layout,
    Ordered,
    PartialSum,
    Reduced,
    RowCount,
    Rows,
    Several,
    SliceStatistic,
    Whole,
)
from rannc_backend.passes.batch.loss_decompositions import HALF, DecomposeReductions
from rannc_backend.passes.batch.operator_call import ADVICE, operator_name, rows_multiple
from rannc_backend.passes.batch.randomness import PureRandomness
from rannc_backend.passes.data_sizes import ChosenSizes, chosen_sizes
from rannc_backend.passes.graph_copy import GraphBuilder, depends_on_inputs, is_number
from rannc_backend.passes.graph_queries import nodes_behind, output_values, placeholders, size_expression
from rannc_backend.passes.pipeline import Pass, PassError, run_pass
from rannc_backend.passes.tracing import inline_value, trace_function

__all__ = [
    "FIRST_ROW", "GLOBAL_ROWS", "RNG_SEED", "BatchSplit", "RowwiseOutput",
    "SplitReductions", "UserOutput", "split_batch", "split_reductions",
]  # fmt: skip


def split_batch(
    graph_module: fx.GraphModule,
    *,
    batch_inputs: Collection[str],
    replicated_inputs: Collection[str] = (),
    gradient_inputs: Collection[str] = (),
    num_user_outputs: int,
    buffer_updates: Sequence[str] = (),
    rows_symbol: sympy.Symbol,
    together: bool = False,
    choices: bool = True,
) -> BatchSplit:
    """All batch passes in their order: decompose, analyse, make random operators pure, split. Works on a
    copy.

    `together`: where rows meet, or statistics are taken of a slice, the graph is one for the whole batch
    (`whole_batch` of the result) instead of refused. `choices`: elements that a mask chooses are followed
    (`has_choices` of the result); they cannot be sent, and keep what computes with them in one stage.

    The graph is canonical. `gradient_inputs`: placeholders that require a gradient, parameters and inputs.
    `buffer_updates`: dotted name of the buffer for each trailing output. Raises PassError.
    """
    copy = GraphBuilder.copy_of(graph_module)
    free = (set(batch_inputs) | set(replicated_inputs)) - set(gradient_inputs)

    def split() -> BatchSplit:
        sums = run_pass(DecomposeReductions(rows_symbol, together), copy)
        found = run_pass(FindRows(batch_inputs, rows_symbol, free, together), sums)
        pure = run_pass(PureRandomness(found.layouts, rows_symbol, found.meeting), found.graph_module)
        parts = SplitReductions(
            layouts=pure.layouts,
            num_user_outputs=num_user_outputs,
            rows_symbol=rows_symbol,
            buffer_updates=buffer_updates,
            gradient_inputs=gradient_inputs,
            meeting=pure.meeting,
        )
        return run_pass(parts, pure.graph_module)

    chosen = chosen_sizes(copy, rows_symbol) if choices and not together else None
    return split() if chosen is None or not chosen.sizes else _with_choices(copy, chosen, split)


def _with_choices(
    graph_module: fx.GraphModule, chosen: ChosenSizes, split: Callable[[], BatchSplit]
) -> BatchSplit:
    """Split a graph in which masks choose elements of rows, as many of each row as far as sizes go."""
    chosen.follow(graph_module)
    try:
        result = split()
    except PassError:
        raise
    except Exception as error:  # of torch's traces: two choices have met as equal in number
        raise PassError(
            None, f"the number of chosen elements leads to {type(error).__name__}: {error}"
        ) from error
    if taken := chosen.taken_for_another(graph_module):
        raise PassError(None, f"the number of elements that a mask chooses was taken for {taken}")
    for part in result.named_graphs().values():
        chosen.restore(part)
    return dataclasses.replace(result, has_choices=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReductions(Pass[BatchSplit]):
    """See the module docstring; fields as arguments of `split_reductions`."""

    name: ClassVar[str] = "split_reductions"
    requires: ClassVar[frozenset[str]] = frozenset({"rows_known", "pure_randomness"})
    provides: ClassVar[frozenset[str]] = frozenset({"split_at_sums"})
    layouts: Mapping[str, Layout]
    num_user_outputs: int
    rows_symbol: sympy.Symbol
    buffer_updates: Sequence[str]
    gradient_inputs: Collection[str]
    meeting: Meeting | None = None

    def run(self, graph_module: fx.GraphModule) -> BatchSplit:
        return split_reductions(
            graph_module,
            self.layouts,
            self.num_user_outputs,
            rows_symbol=self.rows_symbol,
            buffer_updates=self.buffer_updates,
            gradient_inputs=self.gradient_inputs,
            meeting=self.meeting,
        )


def split_reductions(
    graph_module: fx.GraphModule,
    layouts: Mapping[str, Layout],
    num_user_outputs: int,
    *,
    rows_symbol: sympy.Symbol,
    buffer_updates: Sequence[str] = (),
    gradient_inputs: Collection[str] = (),
    meeting: Meeting | None = None,
) -> BatchSplit:
    """Split at the reductions. Raises PassError for outputs that no slice and no sum can give."""
    needs_grad = values_reached_by_grad(graph_module.graph, gradient_inputs)
    splitter = _Splitter(graph_module, dict(layouts), rows_symbol, needs_grad, meeting)
    return splitter.split(num_user_outputs, buffer_updates)


class _Splitter:
    def __init__(
        self,
        graph_module: fx.GraphModule,
        layouts: dict[str, Layout],
        symbol: sympy.Symbol,
        needs_grad: Collection[str],
        meeting: Meeting | None = None,
    ) -> None:
        self.meeting = meeting
        self.graph_module = graph_module
        self.layouts = layouts
        self.symbol = symbol
        self.needs_grad = needs_grad
        self.epilogue = GraphBuilder(graph_module)
        self.scalars: list[fx.Node] = []  # of the given graph, outputs of the epilogue
        self.partials: list[fx.Node] = []
        self.prologue_sums: dict[fx.Node, None] = {}
        self.scaled: dict[
            fx.Node, tuple[fx.Node, fx.Node]
        ] = {}  # value -> (its partial, value in the epilogue)

    def layout(self, node: fx.Node) -> Layout:
        return self.layouts[node.name]

    def split(self, num_user_outputs: int, buffer_updates: Sequence[str]) -> BatchSplit:
        leaves = list(output_values(self.graph_module.graph))
        buffers = leaves[num_user_outputs:]
        assert len(buffers) == len(buffer_updates), (
            f"{len(buffers)} outputs after the user's, {len(buffer_updates)} buffers"
        )
        user_outputs = tuple(self._user_output(leaf) for leaf in leaves[:num_user_outputs])
        for node in self.scalars:
            self._epilogue_value(node)
        outputs = self._outputs(user_outputs, buffers, buffer_updates)
        rowwise = self._rowwise(outputs)
        epilogue = self._finish_epilogue()
        partial_names = [item.name for item in outputs if isinstance(item, PartialOutput)]
        differentiated = self._differentiated(rowwise, partial_names)
        return BatchSplit(
            rowwise=rowwise,
            outputs=outputs,
            layouts={
                node.name: self._rowwise_layout(node) for node in rowwise.graph.nodes if node.op != "output"
            },
            prologue=self._prologue(),
            prologue_sums=tuple(node.name for node in self.prologue_sums),
            epilogue=epilogue,
            user_outputs=user_outputs,
            linear=epilogue is None or is_linear(epilogue, differentiated, partial_names),
            whole_batch=self._whole_batch(),
        )

    def _whole_batch(self) -> WholeBatch | None:
        if self.meeting is None:
            return None
        node, reason = None, "its statistics are those of the whole batch"
        if self.meeting.first is not None:
            node, reason = self.meeting.first.node, self.meeting.first.reason
        for item in self.graph_module.graph.nodes:
            if node is None and is_statistic(self.layouts.get(item.name)):
                node = item
        # Whether or not anything is found: layouts were given that slices do not have.
        return WholeBatch(
            operator="" if node is None else operator_name(node.target),
            reason=reason,
            stack_trace="" if node is None else str(node.meta.get("stack_trace") or ""),
        )

    def _differentiated(self, rowwise: fx.GraphModule, partial_names: Sequence[str]) -> list[str]:
        """Partials through which gradients go back into the row-wise part; some were made after `needs_grad`
        was.
        """
        inputs = [node.name for node in placeholders(rowwise.graph) if node.name in self.needs_grad]
        found = values_reached_by_grad(rowwise.graph, inputs)
        return [name for name in partial_names if name in found]

    # --- outputs
    # ----------------------------------------------------------------------------------------------------------

    def _user_output(self, leaf: Any) -> UserOutput:
        if not isinstance(leaf, fx.Node):
            return UserConstant(value=leaf)
        layout = self.layout(leaf)
        if is_number(leaf) and isinstance(layout, Constant):
            return UserConstant(value=size_expression(leaf.meta["val"]))
        if self.meeting is not None and isinstance(layout, (Whole, SliceStatistic)):
            return self._whole_output(leaf)
        if isinstance(layout, Rows):
            if layout.outer * layout.inner > 1 and self.meeting and leaf.name in self.meeting.names:
                return self._unavailable(leaf, "its rows have met, and which belong to a sample is not known")
            return UserRows(name=leaf.name)
        if isinstance(layout, Ordered) and isinstance(layout.origin, Choice):
            return self._unavailable(leaf, "it holds what a mask chooses of the rows", unknown_dim=layout.dim)
        if isinstance(layout, Constant) and leaf.name not in self.needs_grad:
            return UserReplicated(name=leaf.name)
        # A value of parameters alone that is differentiated counts once, not once per slice: it goes through
        # the epilogue.
        if isinstance(layout, (PartialSum, Reduced, Constant)):
            if leaf not in self.scalars:
                self.scalars.append(leaf)
            return UserScalar(index=self.scalars.index(leaf))
        if isinstance(layout, RowCount) and _is_known_before_the_step(leaf.meta["val"]):
            return UserConstant(value=size_expression(leaf.meta["val"]))
        raise PassError(
            leaf,
            f"the model returns numbers of rows or statistics of one micro-batch ({leaf.name}), which differ from "
            "slice to slice of the batch",
        )

    def _whole_output(self, leaf: fx.Node) -> UserOutput:
        """A value of the whole batch that is not one per row: the same for everybody, if its sizes are
        known.
        """
        if not all(isinstance(size, int) for size in leaf.meta["val"].shape):
            return self._unavailable(
                leaf, "its sizes are not known before the step, or are several batch sizes"
            )
        if leaf.name in self.needs_grad:
            return self._unavailable(leaf, "it is computed from rows that have met")
        return UserReplicated(name=leaf.name)

    def _unavailable(self, leaf: fx.Node, why: str, *, unknown_dim: int | None = None) -> UserUnavailable:
        sizes = enumerate(leaf.meta["val"].shape)
        shape = ", ".join("?" if dim == unknown_dim else str(size) for dim, size in sizes)
        return UserUnavailable(why=f"{leaf.name} of shape ({shape}) cannot be taken apart: {why}")

    def _outputs(
        self, user_outputs: Sequence[UserOutput], buffers: Sequence[fx.Node], buffer_updates: Sequence[str]
    ) -> tuple[RowwiseOutput, ...]:
        rows = dict.fromkeys(item.name for item in user_outputs if isinstance(item, UserRows))
        replicated = dict.fromkeys(item.name for item in user_outputs if isinstance(item, UserReplicated))
        result: list[RowwiseOutput] = [RowsOutput(name=name) for name in rows]
        result += [PartialOutput(name=node.name) for node in self.partials]
        for node, fqn in zip(buffers, buffer_updates):
            if not isinstance(self.layout(node), (Constant, SliceStatistic)):
                reason = f"buffer {fqn} is set from rows of the batch or sums over them; only normalisation statistics may be. {ADVICE}"
                error = PassError(node, reason)
                if self.meeting is None or not all(isinstance(size, int) for size in node.meta["val"].shape):
                    raise error
                self.meeting.first = self.meeting.first or error
            result.append(BufferOutput(name=node.name, fqn=fqn))
        return (*result, *(ReplicatedOutput(name=name) for name in replicated))

    # --- epilogue
    # ---------------------------------------------------------------------------------------------------------

    def _epilogue_value(self, node: fx.Node) -> fx.Node:
        """The node's value in the epilogue, which grows as needed."""
        made = self.epilogue.find(node)
        if made is not None:
            return made
        layout = self.layout(node)
        if isinstance(layout, PartialSum):
            if layout.input_only:
                self.prologue_sums[node] = None
            elif node not in self.partials:
                self.partials.append(node)
            return self.epilogue.placeholder(node)
        if node.op == "placeholder" and (node.name == GLOBAL_ROWS or is_number(node)):
            return self.epilogue.placeholder(node)
        if isinstance(layout, Constant) and depends_on_inputs(node):
            return self._scaled_constant(node)
        assert isinstance(layout, (Constant, Reduced, Several)), (
            f"{node} with layout {layout} in the epilogue"
        )
        for item in node.all_input_nodes:
            self._epilogue_value(item)
        return self.epilogue.copy(node)

    def _scaled_constant(self, node: fx.Node) -> fx.Node:
        """A value of parameters as a partial: value * rows of the slice; in the epilogue their sum / global
        rows.
        """
        value = node.meta["val"]
        exact = value.is_floating_point() or value.is_complex()
        wide = (torch.float32 if value.dtype in HALF else value.dtype) if exact else torch.int64
        partial = self._insert_partial(node, wide)
        self.partials.append(partial)
        total = self.epilogue.placeholder(partial)
        rows = self.epilogue.find_placeholder(GLOBAL_ROWS) or self.epilogue.new_placeholder(
            GLOBAL_ROWS, _scalar_like(value)
        )

        def undo(total: Tensor, rows: Tensor) -> Tensor:
            divided = total / rows if exact else torch.div(total, rows, rounding_mode="floor")
            return divided.to(value.dtype)

        return self.epilogue.trace(node, undo, (total, rows))

    def _insert_partial(self, node: fx.Node, wide: torch.dtype) -> fx.Node:
        graph = self.graph_module.graph
        size = self._slice_rows()
        with graph.inserting_before(graph.output_node()):
            marker = graph.call_function(torch.ops.aten.mul.Tensor, (node, size))
        inner = trace_function(lambda x, rows: x.to(wide) * rows, (node, size), {})
        marker.meta = {**node.meta, "val": inner.outputs[0].meta["val"]}
        before = set(graph.nodes)
        partial = inline_value(marker, inner)
        for item in graph.nodes:
            if item not in before:
                self.layouts[item.name] = Constant()
        self.layouts[partial.name] = PartialSum()
        return partial

    def _slice_rows(self) -> fx.Node:
        graph = self.graph_module.graph
        for node in graph.nodes:
            if (
                node.target is torch.ops.aten.sym_size.int
                and rows_multiple(node.meta["val"], self.symbol) == 1
            ):
                return node
        source = next(node for node in placeholders(graph) if isinstance(self.layouts.get(node.name), Rows))
        with graph.inserting_before(graph.output_node()):
            size = graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
        size.meta["val"] = source.meta["val"].shape[0]
        self.layouts[size.name] = RowCount()
        return size

    def _finish_epilogue(self) -> fx.GraphModule | None:
        if not self.scalars:
            return None
        return self.epilogue.finish([self._epilogue_value(node) for node in self.scalars])

    # --- row-wise part and prologue
    # ---------------------------------------------------------------------------------------

    def _rowwise(self, outputs: Sequence[RowwiseOutput]) -> fx.GraphModule:
        builder = GraphBuilder(self.graph_module)
        by_name = {node.name: node for node in self.graph_module.graph.nodes}
        wanted = [by_name[item.name] for item in outputs]
        needed = nodes_behind(wanted, stop=self._is_prologue_sum)
        fed_back = [
            node for node in self.graph_module.graph.nodes if node in needed and self._is_prologue_sum(node)
        ]
        for node in self.graph_module.graph.nodes:
            added = node.name in (GLOBAL_ROWS, RNG_SEED, FIRST_ROW)
            if node.op == "placeholder" and (not added or node in needed):
                builder.placeholder(node)
        for node in fed_back:
            self.prologue_sums[node] = None
            builder.placeholder(node)
        for node in self.graph_module.graph.nodes:
            if node in needed and builder.find(node) is None:
                builder.copy(node)
        return builder.finish([builder.find(node) for node in wanted])

    def _is_prologue_sum(self, node: fx.Node) -> bool:
        layout = self.layouts.get(node.name)
        return isinstance(layout, PartialSum) and layout.input_only

    def _prologue(self) -> fx.GraphModule | None:
        if not self.prologue_sums:
            return None
        builder = GraphBuilder(self.graph_module)
        needed = nodes_behind(self.prologue_sums)
        for node in self.graph_module.graph.nodes:
            if node in needed:
                builder.placeholder(node) if node.op == "placeholder" else builder.copy(node)
        return builder.finish([builder.find(node) for node in self.prologue_sums])

    def _rowwise_layout(self, node: fx.Node) -> Layout:
        """Sums known before the step are constants of the row-wise graph."""
        layout = self.layouts[node.name]
        if self.meeting is not None and isinstance(layout, Reduced) and not layout.input_only:
            return Whole()  # computed where it is used again, from what is a sum of one slice
        known = isinstance(layout, Reduced) or (isinstance(layout, PartialSum) and layout.input_only)
        if isinstance(layout, Several):
            return dataclasses.replace(
                layout, elements=tuple(Constant() if isinstance(x, Reduced) else x for x in layout.elements)
            )
        return Constant() if known else layout


def _scalar_like(value: Tensor) -> Tensor:
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty((), dtype=torch.int64)


def _is_known_before_the_step(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not free_unbacked_symbols(size)
