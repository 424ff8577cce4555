"""Follow the rows of the batch through a functional ATen graph.

In: a graph whose `node.meta["val"]` are fake tensors in which every batch-dependent size is an expression of
one symbol, and the names of the placeholders that hold the batch. Out: the layout of every value
(layouts.py), or a PassError that names the operator that mixes rows.

How: one rule per operator (batch_axis_rules.py), for operators that see rows; a value without rows needs
none. Every layout that a rule gives is held against the symbolic shape of the value. An operator without a
rule is looked at through its decomposition, and refused if it has none: nothing is guessed. Loss operators
and means must have been decomposed before (loss_decompositions.py), so that the only reductions over rows are
sums.

*Rows that meet.* A graph that mixes rows has no slices, but it has one: the whole batch, in one micro-batch
on one replica of every stage. There every operator computes what one process would, so `together` follows the
rows as far as the rules go and takes what they refuse for a value of the whole batch: `Rows` where one
dimension holds the batch (rows of such a value say how it is sent, and which rank gets which part of an
output), a sum where none does, else `Whole`. Nothing that depends on such a value is a sum of slices, so none
of it counts as known before the step.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from rannc_backend.passes.batch.batch_axis_rules import RULES
from rannc_backend.passes.batch.batch_axis_views import Rule, moves_integers
from rannc_backend.passes.batch.batch_split import GLOBAL_ROWS
from rannc_backend.passes.batch.layouts import (
    Constant,
    KeyCounts,
    Layout,
    Ordered,
    PartialSum,
    Reduced,
    RowCount,
    RowIndex,
    Rows,
    SegmentEnds,
    Several,
    SliceStatistic,
    Whole,
    width_of,
)
from rannc_backend.passes.batch.operator_call import (
    ADVICE,
    Call,
    Early,
    Replaced,
    has_rows,
    operator_name,
    rows_dims,
    rows_multiple,
)
from rannc_backend.passes.batch.orders import ORDERS, ends_of_segments, in_order, of_choices
from rannc_backend.passes.batch.row_wise import declared_rule, is_row_wise, pointwise_rule
from rannc_backend.passes.graph_queries import arguments_of, is_random
from rannc_backend.passes.kept_functions import KeptFunction, kept_function, operator_code
from rannc_backend.passes.pipeline import Pass, PassError
from rannc_backend.passes.size_nodes import exact_quotient, plain
from rannc_backend.passes.tracing import InnerGraph, trace_decomposition, trace_function

_DECLARE = (
    "If it works element by element, declare it with tags=(torch.Tag.pointwise,); if row by row, with "
    "rannc_backend.row_wise (docs/custom_operators.md). "
)
_NO_WRITING = "An operator that writes into its arguments (mutates_args) cannot be followed: let it return what it computes. "
_OF_ROWS = (Rows, RowIndex, *ORDERS)
_OWN = ("aten.", "rannc_recurrent.", "rannc_ctc.")  # with rules below
__all__ = [
    "Constant", "Layout", "PartialSum", "Reduced", "RowCount", "RowIndex", "Rows", "Several", "SliceStatistic", "Whole",
    "FindRows", "KnownRows", "Meeting", "analyze_batch_axis", "extend_analysis", "is_random",
]  # fmt: skip


@dataclass(slots=True)
class Meeting:
    """Where the rows of a graph meet: filled while it is followed.

    `first`: the first refusal; `names`: values that are none of one row each, and all that depend on them.
    """

    first: PassError | None = None
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class KnownRows:
    """A graph and the layouts of its values, by node name; `meeting` where its rows may meet."""

    graph_module: fx.GraphModule
    layouts: dict[str, Layout]
    meeting: Meeting | None = None

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"": self.graph_module}


@dataclass(frozen=True, slots=True)
class FindRows(Pass[KnownRows]):
    """The analysis as a pass; fields as arguments of `analyze_batch_axis`."""

    name: ClassVar[str] = "batch_axis"
    requires: ClassVar[frozenset[str]] = frozenset({"sums_only"})
    provides: ClassVar[frozenset[str]] = frozenset({"rows_known"})
    rewrites: ClassVar[bool] = False
    batch_inputs: Collection[str]
    rows_symbol: sympy.Symbol
    gradient_free_inputs: Collection[str]
    together: bool = False

    def run(self, graph_module: fx.GraphModule) -> KnownRows:
        meeting = Meeting() if self.together else None
        layouts = analyze_batch_axis(
            graph_module,
            self.batch_inputs,
            self.rows_symbol,
            gradient_free_inputs=self.gradient_free_inputs,
            meeting=meeting,
        )
        return KnownRows(graph_module, layouts, meeting)


def analyze_batch_axis(
    graph_module: fx.GraphModule,
    batch_inputs: Collection[str],
    rows_symbol: sympy.Symbol,
    *,
    gradient_free_inputs: Collection[str] | None = None,
    meeting: Meeting | None = None,
) -> dict[str, Layout]:
    """Layouts by node name.

    `gradient_free_inputs`: batch and replicated inputs that need no gradient (the batch inputs if not given);
    sums that depend on nothing else are `input_only`. Raises PassError when an operator mixes rows of the
    batch or is not known; with `meeting` that is noted there, and the layouts hold for the whole batch alone.
    """
    known = batch_inputs if gradient_free_inputs is None else gradient_free_inputs
    analysis = _Analysis(rows_symbol, depth=0, meeting=meeting)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            analysis.set_input(node, node.name in batch_inputs, node.name in known)
        else:
            analysis.visit(node)
    return {node.name: analysis.in_the_end(node) for node in analysis.layouts}


def extend_analysis(
    layouts: dict[str, Layout],
    new_nodes: Iterable[fx.Node],
    rows_symbol: sympy.Symbol,
    *,
    row_numbers: Collection[str] = (),
    meeting: Meeting | None = None,
) -> None:
    """Add the layouts of new nodes to `layouts`, in which those of their arguments are.

    `row_numbers`: nodes with a RowIndex that do not hold numbers within the slice but within the global
    batch, so that they may be used as values.
    """
    analysis = _Analysis(rows_symbol, depth=0, meeting=meeting)
    for node in new_nodes:
        for source in node.all_input_nodes:
            if source not in analysis.layouts:
                layout = layouts[source.name]
                if isinstance(layout, RowIndex) and source.name in row_numbers:
                    layout = Rows(layout.dim, 1, width_of(layout))
                analysis.layouts[source] = layout
        analysis.visit(node)
        layouts[node.name] = analysis.layouts[node]


def is_statistic(layout: Layout | None) -> bool:
    """Whether a value holds batch statistics of a slice."""
    return isinstance(layout, Several) and any(isinstance(item, SliceStatistic) for item in layout.elements)


class _Analysis:
    """Layouts of the nodes visited so far."""

    def __init__(self, symbol: sympy.Symbol, *, depth: int, meeting: Meeting | None = None) -> None:
        self.symbol = symbol
        self.depth = depth  # of decompositions within decompositions
        self.meeting = meeting
        self.layouts: dict[fx.Node, Layout] = {}
        self.before_step: set[fx.Node] = set()  # depend on gradient-free inputs alone

    def set_input(self, node: fx.Node, is_batch: bool, gradient_free: bool) -> None:
        value: Any = node.meta.get("val")
        dims = rows_dims(value, self.symbol)
        if gradient_free:
            self.before_step.add(node)
        if node.name == GLOBAL_ROWS:
            self.layouts[node] = Reduced(input_only=True)
        elif has_rows(value, self.symbol):
            self.layouts[node] = RowCount()
        elif is_batch and not dims:
            reason = f"the model works for one batch size only: its code turned the size of input {node.name} into a number. {ADVICE}"
            raise PassError(node, reason)
        elif not dims:
            self.layouts[node] = Constant()
        elif not is_batch or dims != [0] or rows_multiple(value.shape[0], self.symbol) != 1:
            raise PassError(
                node,
                f"input {node.name} has the batch size in its shape {tuple(value.shape)}, but not as "
                "dimension 0",
            )
        else:
            self.layouts[node] = Rows(0)

    def visit(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if node.op == "output":
            return
        # a size carries no gradient, whatever it is the size of
        is_size = isinstance(node.meta.get("val"), torch.SymInt)
        early = all(item in self.before_step or (is_size and item.op == "placeholder") for item in inputs)
        if early and not is_random(node):
            self.before_step.add(node)
        try:
            layout = self._layout(node, inputs)
        except PassError as error:
            layout = self._of_whole_batch(node, error)
        self.layouts[node] = layout
        if self.meeting is not None and any(item.name in self.meeting.names for item in inputs):
            self.meeting.names.add(node.name)
        if self.meeting is not None and node.name in self.meeting.names:
            self.before_step.discard(node)
        if isinstance(layout, (PartialSum, Reduced)):
            # A second sum on top of a first one cannot be had in the same round.
            self.before_step.discard(node)
        if isinstance(layout, Rows):
            if any(isinstance(self.layouts[item], (PartialSum, Reduced)) for item in inputs):
                self.before_step.discard(node)

    def in_the_end(self, node: fx.Node) -> Layout:
        """A value of the whole batch stands in no order that slices have."""
        layout = self.layouts[node]
        parts = layout.elements if isinstance(layout, Several) else (layout,)
        if self.meeting is None or not any(isinstance(part, (*ORDERS, SegmentEnds)) for part in parts):
            return layout
        self.meeting.names.add(node.name)
        values = _elements(node.meta["val"])
        found = tuple(self._of_whole_element(value) for value in values)
        return Several(found) if isinstance(layout, Several) else found[0]

    def _of_whole_batch(self, node: fx.Node, error: PassError) -> Layout:
        """The layout of a value that no rule gives one, in a graph that runs on the whole batch."""
        if self.meeting is None:
            raise error
        self.meeting.first = self.meeting.first or error
        self.meeting.names.add(node.name)
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return Several(tuple(self._of_whole_element(item) for item in value))
        return self._of_whole_element(value)

    def _of_whole_element(self, value: Any) -> Layout:
        if not isinstance(value, torch.Tensor):
            return Whole()
        sizes = {dim: size for dim, size in enumerate(value.shape) if not isinstance(size, int)}
        if not sizes and (value.is_floating_point() or value.is_complex()):
            return PartialSum()
        if len(sizes) != 1:
            return Whole()
        ((dim, size),) = sizes.items()
        multiple = rows_multiple(size, self.symbol)
        return Rows(dim, 1, multiple) if multiple else Whole()

    def _layout(self, node: fx.Node, inputs: list[fx.Node]) -> Layout:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return RowCount() if has_rows(value, self.symbol) else Constant()
        if node.target is operator.getitem and isinstance(source := self.layouts[inputs[0]], Several):
            return source.elements[arguments_of(node)[1]]
        if any(isinstance(self.layouts[item], SliceStatistic) for item in inputs):
            raise PassError(
                node,
                f"operator {operator_name(node.target)} uses the statistics of one micro-batch. {ADVICE}",
            )
        if any(_is_whole(self.layouts[item]) for item in inputs):
            raise PassError(node, f"operator {operator_name(node.target)} works on rows that have met")
        if ends := ends_of_segments(node, self.layouts):
            return ends
        if reduced := self._after_sum(node, inputs):
            return reduced
        holds_rows = any(isinstance(self.layouts[item], (*_OF_ROWS, SegmentEnds, Several)) for item in inputs)
        if not holds_rows and not any(rows_dims(item, self.symbol) for item in _elements(value)):
            return self._without_rows(node, inputs)
        return self._with_rows(node, value)

    def _after_sum(self, node: fx.Node, inputs: list[fx.Node]) -> Layout | None:
        """Reduced, if the node works on sums over the batch that are not known before the step."""
        late = [item for item in inputs if self._is_late(item)]
        if not late:
            return None
        name = operator_name(node.target)
        if any(isinstance(self.layouts[item], _OF_ROWS) for item in inputs):
            raise PassError(
                node,
                f"operator {name} mixes rows of the batch (it feeds {late[0].name}, a sum over the batch, "
                f"back to each row). {ADVICE}",
            )
        if any(rows_dims(item, self.symbol) for item in _elements(node.meta.get("val"))):
            raise PassError(
                node,
                f"operator {name} mixes rows of the batch (it spreads a sum over the batch to all rows). "
                f"{ADVICE}",
            )
        return Reduced()

    def _is_late(self, node: fx.Node) -> bool:
        layout = self.layouts[node]
        return isinstance(layout, (PartialSum, Reduced)) and not layout.input_only

    def _without_rows(self, node: fx.Node, inputs: list[fx.Node]) -> Layout:
        early = any(isinstance(self.layouts[item], (PartialSum, Reduced)) for item in inputs)
        if any(isinstance(self.layouts[item], RowCount) for item in inputs) and not early:
            raise PassError(
                node,
                f"operator {operator_name(node.target)} uses the batch size as a number in a way that is not "
                "known",
            )
        layout: Layout = Reduced(input_only=True) if early else Constant()
        value = node.meta.get("val")
        return Several(tuple(layout for _ in value)) if isinstance(value, (tuple, list)) else layout

    def _with_rows(self, node: fx.Node, value: Any) -> Layout:
        if not isinstance(node.target, torch._ops.OpOverload):
            more = _NO_WRITING if str(node.target).startswith("auto_functionalized") else ""
            raise PassError(
                node,
                f"unknown operator {operator_name(node.target)} on rows of the batch. {more}{ADVICE}",
                is_known=False,
            )
        call = Call.of(node, self.symbol, Early(self.layouts))
        name = call.name.removeprefix("aten.")
        if numbers := self._row_numbers(call):
            # The elements stay what they are: follow them as rows and say so again.
            moves = self._rule(node, name)
            assert moves is not None, f"no rule for {name}, which moves elements"
            result = moves(Call.of(node, self.symbol, Replaced(self.layouts, numbers)))
            (given,) = (self.layouts[item] for item in numbers)
            if isinstance(result, Rows) and isinstance(given, RowIndex) and result.outer == 1:
                if (times := exact_quotient(result.inner, width_of(given))) is not None:
                    found = RowIndex(result.dim, given.inner, given.each * times)
                    return self._checked(node, found, value)
            call.refuse("mixes the numbers of rows with other numbers")
        if (kept := kept_function(node.target)) is not None:
            return self._of_kept(node, kept)
        if (code := operator_code(node.target)) is not None and not is_row_wise(node.target):
            raise PassError(
                node,
                f"{code.runs_whole} runs as written, since its code decides by values or by its batch size, or has a backward of its "
                "own, and its class is not declared with rannc_backend.row_wise",
                is_known=False,
            )
        rule = self._rule(node, name)
        layout: Layout | None
        if any(isinstance(self.layouts[item], (*ORDERS, SegmentEnds)) for item in node.all_input_nodes):
            layout = in_order(call, rule)
        else:
            layout = rule(call) if rule else None
        if layout is None:
            layout = self._by_decomposition(node)
        if isinstance(layout, KeyCounts):
            return layout
        if isinstance(layout, PartialSum):
            return PartialSum(input_only=node in self.before_step)
        return self._checked(node, of_choices(node, layout, self.layouts), value)

    def _rule(self, node: fx.Node, name: str) -> Rule | None:
        """The rule of an operator: its own, or that of its kind."""
        target: Any = node.target
        rule = RULES.get(name) if operator_name(target).startswith(_OWN) else None
        if rule is None and is_row_wise(target):
            return declared_rule
        if rule is None and torch.Tag.pointwise in target.tags:
            return RULES["_to_copy"] if operator_name(target).startswith("aten.") else pointwise_rule
        return rule

    def _row_numbers(self, call: Call) -> dict[fx.Node, Layout]:
        """Row numbers that the node moves without change."""
        if not moves_integers(call):
            return {}
        return {
            item: Rows(layout.dim, 1, width_of(layout))
            for item in call.node.all_input_nodes
            if isinstance(layout := self.layouts[item], RowIndex)
        }

    def _by_decomposition(self, node: fx.Node) -> Layout:
        name = operator_name(node.target)
        # A factory has nothing to follow, and its decomposition may turn the batch size into a number.
        is_factory = not any(isinstance(item.meta.get("val"), torch.Tensor) for item in node.all_input_nodes)
        inner = trace_decomposition(node) if self.depth < 3 and not is_factory else None
        if inner is None:
            tag = "" if name.startswith("aten.") else _DECLARE
            raise PassError(
                node,
                f"unknown operator {name} on rows of the batch: no rule says what it does with them. "
                f"{tag}{ADVICE}",
                is_known=False,
            )
        results = self._inside(node, inner, Early(self.layouts))
        if any(isinstance(result, (PartialSum, Reduced)) for result in results):
            raise PassError(
                node, f"operator {name} reduces the batch dimension in a way that is not known. {ADVICE}"
            )
        return Several(tuple(results)) if isinstance(node.meta["val"], (tuple, list)) else results[0]

    def _inside(self, node: fx.Node, inner: InnerGraph, layouts: Mapping[fx.Node, Layout]) -> list[Layout]:
        """Layouts of what a traced function gives, from those of its arguments."""
        analysis = _Analysis(self.symbol, depth=self.depth + 1)
        for placeholder, outer in zip(inner.placeholders, inner.arguments):
            analysis.layouts[placeholder] = layouts[outer]
        try:
            for item in inner.graph.nodes:
                if item.op != "placeholder":
                    analysis.visit(item)
        except PassError as error:
            reason = f"operator {operator_name(node.target)} cannot be followed: inside it, {error.reason}"
            raise PassError(node, reason) from error
        return [
            analysis.layouts.get(item, Constant()) if isinstance(item, fx.Node) else Constant()
            for item in inner.outputs
        ]

    def _of_kept(self, node: fx.Node, kept: KeptFunction) -> Layout:
        """A function with a backward of its own works on rows if both its forward and its backward do: the
        gradient of what holds rows lies as that does, that of what holds none is a sum over them.
        """
        layouts: dict[fx.Node, Layout] = dict(Early(self.layouts))
        tensors, sizes = arguments_of(node)
        results = self._inside(node, trace_function(kept.forward, (tensors, sizes), {}), layouts)
        values = [self._checked_element(node, *pair) for pair in zip(results, node.meta["val"], strict=True)]
        if not any(kept.has_gradient):
            return Several(tuple(values))
        scratch = fx.Graph()
        grads = [scratch.placeholder(f"grad_{index}") for index in range(len(values))]
        for grad, value, layout in zip(grads, node.meta["val"], values, strict=True):
            grad.meta["val"] = value
            layouts[grad] = layout
        backward = trace_function(kept.backward, (grads, tensors, sizes), {})
        found = iter(self._inside(node, backward, layouts))
        for tensor, has_gradient in zip(tensors, kept.has_gradient, strict=True):
            if has_gradient:
                layout, own = next(found), layouts[tensor]
                right = layout == own if isinstance(own, (Rows, Ordered)) else isinstance(layout, PartialSum)
                if not right:
                    name = operator_name(node.target)
                    raise PassError(node, f"the backward of {name} mixes rows of the batch. {ADVICE}")
        return Several(tuple(values))

    def _checked(self, node: fx.Node, layout: Layout, value: Any) -> Layout:
        """The layout with one entry per element, after comparing it with the symbolic shape of the value."""
        if isinstance(value, (tuple, list)):
            given = layout.elements if isinstance(layout, Several) else (layout,) * len(value)
            return Several(
                tuple(self._checked_element(node, one, item) for one, item in zip(given, value, strict=True))
            )
        return self._checked_element(node, layout, value)

    def _checked_element(self, node: fx.Node, layout: Layout, value: Any) -> Layout:
        dims = rows_dims(value, self.symbol)
        if not dims:
            # Side results of fused operators (seeds, sizes): nobody may use them.
            return layout if isinstance(layout, (Constant, SliceStatistic)) else SliceStatistic()
        name = operator_name(node.target)
        if not isinstance(layout, _OF_ROWS) or dims != [layout.dim]:
            raise PassError(
                node, f"operator {name} mixes rows of the batch (shape {tuple(value.shape)}). {ADVICE}"
            )
        if rows_multiple(value.shape[layout.dim], self.symbol) != plain(width_of(layout)):
            what = f"size {value.shape[layout.dim]} of dimension {layout.dim}"
            raise PassError(node, f"operator {name} mixes rows of the batch ({what}). {ADVICE}")
        return layout


def _is_whole(layout: Layout) -> bool:
    """Also of a tuple whose elements are used together."""
    if isinstance(layout, Several):
        return any(_is_whole(element) or isinstance(element, PartialSum) for element in layout.elements)
    return isinstance(layout, Whole)


def _elements(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
