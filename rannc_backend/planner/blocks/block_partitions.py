"""Forward and backward graphs of each distinct block, at each activation budget, reduced to what they cost.

In: an analysed graph and its blocks. Out: `BlockPartitions`, which gives a `BlockPartition`
(planner/cost/pricing.py) for any block and budget. Everything is traced on fake tensors, once per distinct
block and when it is first asked for; nothing is computed.

Terms. Each block is cut out as a stage of its own. *Fused*: the compiler computes elementwise operators
inside of the kernels that read them; such values are neither moved nor kept. What a block keeps of its inputs
is counted with the block that makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import sympy
from torch import fx

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import UnsupportedModelError
from rannc_backend.ir.block_graph import Block, BlockGraph, OperatorCost
from rannc_backend.log.progress import Progress
from rannc_backend.passes.batch.batch_split import RowsOutput
from rannc_backend.passes.stage.liveness import live_bytes, storage_bytes, storages, virtual_values
from rannc_backend.passes.stage.recompute import NOTHING_RECOMPUTED, Recomputed, mark_segments
from rannc_backend.passes.stage.split_stages import StageGraph, split_stages
from rannc_backend.planner.blocks.partitions import StagePartition, partitions_of
from rannc_backend.planner.cost.compute import (
    ATTENTION_BACKWARD_OPERATORS,
    ATTENTION_OPERATORS,
    MATRIX_OPERATORS,
    REDUCTION_OPERATORS,
    SEPARATE_OPERATORS,
    VIEW_OPERATORS,
    operator_cost,
    operator_name,
)
from rannc_backend.planner.cost.pricing import BUDGETS, BlockPartition
from rannc_backend.planner.cost.tensor_sizes import is_counted
from rannc_backend.settings.choices import SEGMENTS_BUDGET

logger = logging.getLogger(__name__)

_RECOMPUTE_SHARE = sympy.Rational(5, 4)
_EXTERN_OPERATORS = MATRIX_OPERATORS | ATTENTION_OPERATORS | ATTENTION_BACKWARD_OPERATORS | SEPARATE_OPERATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts:
    """What the graphs of a block or stage cost at one budget. `inner_bytes`: saved, and neither input nor
    output; `saved_inputs`,
    `saved_outputs`: positions; workspace: live bytes at each operator, less what is saved. `weights`: of a backward, the
    second part, for which `kept_bytes` are kept."""

    forward: tuple[OperatorCost, ...]
    backward: tuple[OperatorCost, ...]
    weights: tuple[OperatorCost, ...]
    kept_bytes: sympy.Expr
    inner_bytes: sympy.Expr
    saved_inputs: frozenset[int]
    saved_outputs: frozenset[int]
    output_bytes: tuple[sympy.Expr, ...]
    forward_workspace: tuple[sympy.Expr, ...]
    backward_workspace: tuple[sympy.Expr, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class BlockPartitions:
    """Partitions of the blocks of one graph; `stages` are the blocks as stages, by index."""

    graph: BlockGraph
    stages: tuple[StageGraph, ...]
    needs_grad: frozenset[str]
    trained: frozenset[str]
    rows_symbol: sympy.Symbol
    compiler: str
    rows: int
    budgets: tuple[float, ...] = BUDGETS
    least_elements: int = 0
    _parts: dict[str, dict[float, GraphCosts]] = field(init=False, default_factory=dict)
    _readers: dict[str, list[tuple[int, int]]] = field(
        init=False, default_factory=dict
    )  # value -> (block, position)

    # Values that later blocks of a stage compute again, and the blocks that make them.
    _again: frozenset[str] = field(init=False)
    _makes_again: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        again = [flow for flow in self.graph.flows if flow.is_again]
        self._again = frozenset(flow.name for flow in again)
        self._makes_again = frozenset(flow.producer for flow in again)
        for index, stage in enumerate(self.stages):
            for position, item in enumerate(stage.inputs):
                if item.kind == "boundary":
                    self._readers.setdefault(item.name, []).append((index, position))

    def trace(self, progress: Progress) -> None:
        """Trace the distinct blocks that are not traced yet, telling how far that is."""
        distinct = {block.structure: block for block in reversed(self.graph.blocks)}
        with progress.task("prices", len(distinct)) as task:
            for block in distinct.values():
                self._of_structure(block)
                task.advance()

    def partition(self, block: Block, budget: float) -> BlockPartition | None:
        """The block's partition; None if it cannot be traced alone."""
        parts = self._of_structure(block).get(budget)
        if parts is None:
            return None
        return BlockPartition(
            forward=parts.forward,
            backward=parts.backward,
            weights=parts.weights,
            kept_bytes=parts.kept_bytes,
            saved_bytes=self._saved_bytes(block, budget),
            workspace_bytes=self._workspace_bytes(block, budget),
        )

    def _workspace_bytes(self, block: Block, budget: float) -> tuple[sympy.Expr, ...]:
        """What the block needs itself, and what lies there for later blocks meanwhile: values and gradients
        of values.
        """
        parts = self._of_structure(block)[budget]
        values: sympy.Expr = sympy.Integer(0)
        gradients: sympy.Expr = sympy.Integer(0)
        again: sympy.Expr = sympy.Integer(0)
        for flow in self.graph.flows:
            if not 0 <= flow.producer < block.index <= flow.consumers[-1]:
                continue
            if not self._is_kept(flow.name, flow.producer, budget):
                values += flow.num_bytes
                again += flow.num_bytes if budget == SEGMENTS_BUDGET else 0
            if flow.needs_grad and block.index < flow.consumers[-1]:
                gradients += flow.num_bytes
        # What a stage computes again for several blocks may lie in memory at one time; blocks alone cannot
        # say how much. This allowance covers what was seen on small models.
        share = 1 if budget == 1.0 else _RECOMPUTE_SHARE
        forward = [sympy.expand(amount + values) for amount in parts.forward_workspace]
        return (
            *forward,
            *(sympy.expand(share * (amount + gradients + again)) for amount in parts.backward_workspace),
        )

    def _is_kept(self, name: str, producer: int, budget: float) -> bool:
        """Whether a value is among the saved bytes of the block that makes it."""
        if budget == SEGMENTS_BUDGET and name in self._again:
            return False
        parts = self._of_structure(self.graph.blocks[producer]).get(budget)
        names = [output.name for output in self.stages[producer].outputs]
        own = parts is not None and name in names and names.index(name) in parts.saved_outputs
        return own or self._is_saved_later(name, budget)

    def _saved_bytes(self, block: Block, budget: float) -> sympy.Expr:
        own = self._own_saved_bytes(block, budget)
        if budget == 1.0:
            return own
        # A stage has more ways to use a budget up than one of its blocks: it may save all that it is allowed
        # to.
        allowed = budget * self._own_saved_bytes(block, 1.0)
        exceeds = float((allowed - own).subs(self.rows_symbol, self.rows)) > 0
        return sympy.expand(allowed) if exceeds else own

    def _own_saved_bytes(self, block: Block, budget: float) -> sympy.Expr:
        parts = self._of_structure(block)[budget]
        saved = parts.inner_bytes
        names = [output.name for output in self.stages[block.index].outputs]
        for position, name in enumerate(names):
            if names.index(name) == position and self._is_kept(name, block.index, budget):
                saved += parts.output_bytes[position]
        return sympy.expand(saved)

    def _is_saved_later(self, name: str, budget: float) -> bool:
        for index, position in self._readers.get(name, ()):
            if budget == SEGMENTS_BUDGET and index in self._makes_again:
                return True
            parts = self._of_structure(self.graph.blocks[index]).get(budget)
            if parts is None or position in parts.saved_inputs:
                return True
        return False

    def _of_structure(self, block: Block) -> dict[float, GraphCosts]:
        if block.structure not in self._parts:
            try:
                found = partitions_of(
                    self.stages[block.index],
                    needs_grad=self.needs_grad,
                    requires_grad_parameters=self.trained,
                    rows_symbol=self.rows_symbol,
                    compiler=self.compiler,
                    budgets=self.budgets,
                    rows_hint=self.rows,
                    wide_sums=self.graph.wide_sums,
                )
                self._parts[block.structure] = {
                    item.budget: graph_costs(item, self.rows_symbol, least_elements=self.least_elements)
                    for item in found
                }
            except UnsupportedModelError as error:
                logger.info(
                    "block %d is priced by rules, as it cannot be traced alone: %s", block.index, error
                )
                self._parts[block.structure] = {}
        return self._parts[block.structure]


def partition_blocks(
    analysis: GraphAnalysis,
    graph: BlockGraph,
    *,
    compiler: str,
    rows: int,
    budgets: tuple[float, ...] = BUDGETS,
    recomputed: Recomputed = NOTHING_RECOMPUTED,
    progress: Progress | None = None,
    least_elements: int = 0,
) -> BlockPartitions:
    """Cut each block out as a stage; with `progress`, trace them all now.

    Args:
        budgets: activation budgets, 1.0 first.
        recomputed: what is computed again at SEGMENTS_BUDGET.
        compiler: "eager" or "inductor", as stages will be compiled.
        rows: about how many rows a replica will compute; the partitioner weighs sizes with it.
        least_elements: what has fewer is left out of what is saved.
    """
    stages = block_stages(analysis, graph)
    for stage in stages:
        mark_segments(stage.graph_module, recomputed)
    partitions = BlockPartitions(
        graph=graph,
        stages=stages,
        needs_grad=needs_grad_in_training(analysis),
        trained=frozenset(analysis.trained_parameters),
        rows_symbol=analysis.captured.rows_symbol,
        compiler=compiler,
        rows=max(2, rows),
        budgets=budgets,
        least_elements=least_elements,
    )
    if progress is not None:
        partitions.trace(progress)
    return partitions


def block_stages(analysis: GraphAnalysis, graph: BlockGraph) -> tuple[StageGraph, ...]:
    """Every block as a stage of its own."""
    split = analysis.split
    return split_stages(
        split.rowwise,
        split.outputs,
        split.layouts,
        {name: block.index for block in graph.blocks for name in block.nodes},
        len(graph.blocks),
        input_kinds=analysis.input_kinds,
        rows_symbol=analysis.captured.rows_symbol,
    )


def needs_grad_in_training(analysis: GraphAnalysis) -> frozenset[str]:
    """Values through which gradients flow in a training step: where the loss alone is differentiated, outputs
    with rows get none.
    """
    split, needs_grad = analysis.split, analysis.needs_grad
    if not _trains_a_loss(analysis):
        return needs_grad
    (output,) = split.rowwise.graph.find_nodes(op="output")
    rows = {item.name for item in split.outputs if isinstance(item, RowsOutput)}
    ends = {node.name for node in output.args[0] if isinstance(node, fx.Node) and set(node.users) == {output}}
    return needs_grad - (rows & ends)


def stage_needs_grad(analysis: GraphAnalysis, stage: StageGraph) -> frozenset[str]:
    """The same for one stage that is compiled alone: an output that its own loss uses too gets no gradient
    from outside.
    """
    return analysis.needs_grad - (
        stage.outputs_for_the_user_alone if _trains_a_loss(analysis) else frozenset()
    )


def _trains_a_loss(analysis: GraphAnalysis) -> bool:
    """Whether a training step differentiates a loss of the model's own, and that alone."""
    return analysis.split.linear and analysis.split.has_loss(analysis.needs_grad)


def graph_costs(
    stage: StagePartition, rows_symbol: sympy.Symbol, *, holds_tangents: bool = False, least_elements: int = 0
) -> GraphCosts:
    """What a partition costs, in terms of `rows_symbol`. `holds_tangents`: the gradients of outputs stay
    until backward ends. `least_elements`: what has fewer is not among what is saved.
    """
    translate = {stage.rows_symbol: rows_symbol}
    fused = stage.gradients_at_end
    inputs = stage.forward.graph.find_nodes(op="placeholder")
    results = stage.forward.graph.find_nodes(op="output")[0].args[0]
    outputs, saved = results[: stage.num_outputs], results[stage.num_outputs :]
    kept = {key for node in inputs if node.name in stage.kept_anyway for key in storages(node)}
    # Placeholder 0 is the batch size.
    input_of = {key: place - 1 for place, node in enumerate(inputs) for key in storages(node)}
    output_of = {key: place for place, node in enumerate(outputs) for key in storages(node)}
    inner: sympy.Expr = sympy.Integer(0)
    all_saved: sympy.Expr = sympy.Integer(0)
    saved_inputs, distinct_outputs, seen = set(), set(), set(kept)
    for node in saved:
        for key, storage in storages(node).items():
            if key in seen:
                continue
            seen.add(key)
            all_saved += storage_bytes(storage)
            if key in input_of:
                saved_inputs.add(input_of[key])
            elif key in output_of:
                distinct_outputs.add(output_of[key])
            elif _is_counted(node, storage_bytes(storage), least_elements):
                inner += storage_bytes(storage)
    made_saved = all_saved - sum(
        (storage_bytes(s) for place in saved_inputs for s in storages(inputs[place + 1]).values()),
        sympy.Integer(0),
    )
    virtual = [_virtual(graph) if fused else frozenset() for graph in (stage.forward, stage.backward)]
    forward_workspace = [amount - made_saved for amount in _forward_live(stage, virtual[0])]
    backward_workspace = [amount - all_saved for amount in _backward_live(stage, virtual[1], holds_tangents)]
    sizes = [sum(map(storage_bytes, storages(node).values()), sympy.Integer(0)) for node in outputs]
    sizes = [
        size * int(_is_counted(node, size, least_elements)) for node, size in zip(outputs, sizes, strict=True)
    ]
    return GraphCosts(
        forward=_costs(stage.forward, virtual[0], fused, translate),
        backward=_costs(stage.backward, virtual[1], fused, translate),
        weights=_costs(stage.second, _virtual(stage.second) if fused else frozenset(), fused, translate),
        kept_bytes=stage.kept_bytes.xreplace(translate),
        inner_bytes=inner.xreplace(translate),
        saved_inputs=frozenset(saved_inputs),
        saved_outputs=frozenset(i for i, place in enumerate(stage.output_index) if place in distinct_outputs),
        output_bytes=tuple(sizes[place].xreplace(translate) for place in stage.output_index),
        forward_workspace=tuple(sympy.expand(amount).xreplace(translate) for amount in forward_workspace),
        backward_workspace=tuple(sympy.expand(amount).xreplace(translate) for amount in backward_workspace),
    )


def _is_counted(node: fx.Node, size: sympy.Expr, least_elements: int) -> bool:
    value = node.meta.get("val")
    return not least_elements or is_counted(size, getattr(value, "itemsize", 1), least_elements)


def _forward_live(stage: StagePartition, virtual: Collection[str]) -> Sequence[sympy.Expr]:
    graph = stage.forward.graph
    # What is received is counted where it was made, or with the message that brought it.
    ignored = {node.name for node in graph.find_nodes(op="placeholder")}
    return live_bytes(graph, ignored=ignored, virtual=virtual, rows_symbol=stage.rows_symbol)


def _backward_live(
    stage: StagePartition, virtual: Collection[str], holds_tangents: bool
) -> Sequence[sympy.Expr]:
    if stage.backward is None:
        return ()
    graph = stage.backward.graph
    nowhere = {*virtual, *stage.written_in_place}
    tangents = (
        [node.name for node in graph.find_nodes(op="placeholder")][-stage.num_tangents :]
        if holds_tangents
        else ()
    )
    return live_bytes(
        graph, ignored=stage.kept_anyway, held=tangents, virtual=nowhere, rows_symbol=stage.rows_symbol
    )


def _virtual(graph_module: fx.GraphModule | None) -> frozenset[str]:
    if graph_module is None:
        return frozenset()
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    reading = {node for node in nodes if operator_name(node) not in _EXTERN_OPERATORS}
    computing = {node for node in reading if operator_name(node) not in REDUCTION_OPERATORS}
    return virtual_values(graph_module.graph, computes_inline=computing, reads_inline=reading)


def _costs(
    graph_module: fx.GraphModule | None,
    virtual: Collection[str],
    fused: bool,
    translate: Mapping[sympy.Symbol, sympy.Symbol],
) -> tuple[OperatorCost, ...]:
    if graph_module is None:
        return ()
    costs = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or operator_name(node) in VIEW_OPERATORS or not storages(node):
            continue
        cost = operator_cost(node, (), unwritten=virtual)
        if fused and node.name in virtual:
            cost = replace(cost, num_forward_launches=0)
        costs.append(
            replace(
                cost,
                # Sizes that come from a graph are expressions.
                forward_flops=cast("sympy.Expr", cost.forward_flops).xreplace(translate),
                forward_bytes=cast("sympy.Expr", cost.forward_bytes).xreplace(translate),
            )
        )
    return tuple(costs)
