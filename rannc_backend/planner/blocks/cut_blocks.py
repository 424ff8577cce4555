"""From a row-wise graph to at most k blocks in a line, of which every run of neighbours is a legal stage.

In: the staged nodes of a row-wise graph, its outputs, which values need gradients, pins. Out: a `BlockGraph`.
Terms: an *atom* is a staged node with the getitems that take from it. Steps: atoms that must stay together
become *items* (atom_graph.py), the items a line (the order of the graph, or coarsening.py's where that is
clearly better), the line is cut (line_cuts.py), alike in equal layers (repeats.py). Nodes of one kind
(structures.py) are priced once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import sympy
import torch
from torch import fx

from rannc_backend.ir.block_graph import (
    INPUT_BLOCK,
    Block,
    BlockGraph,
    Flow,
    OperatorCost,
    Output,
    ParameterUse,
    StageConstraints,
)
from rannc_backend.ir.graph_input import BatchInput, GraphInput, ParameterInput, StateInput
from rannc_backend.kernels.gradient_writes import sum_dtype
from rannc_backend.passes.batch.batch_split import (
    BatchSplit,
    BufferOutput,
    RowsOutput,
    RowwiseOutput,
)
from rannc_backend.passes.stage.recompute import NOTHING_RECOMPUTED, Recomputed
from rannc_backend.planner.blocks.atom_graph import AtomGraph, AtomValue, contract, reorder
from rannc_backend.planner.blocks.coarsening import line_order
from rannc_backend.planner.blocks.formats import in_formats
from rannc_backend.planner.blocks.line_cuts import crossing_bytes, cut_line, good_crossing
from rannc_backend.planner.blocks.pins import FoundPins, StagePins, find_pins
from rannc_backend.planner.blocks.staged_nodes import (
    StagedGraph,
    find_staged_nodes,
    home_of_cloned,
    output_nodes,
    parameters_read,
)
from rannc_backend.planner.blocks.structures import Kinds, block_structure
from rannc_backend.planner.cluster.cluster import Cluster, Device
from rannc_backend.planner.cost.compute import operator_cost
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.memory import saved_values
from rannc_backend.planner.cost.pricing import operator_seconds
from rannc_backend.planner.cost.tensor_sizes import counted_bytes, value_bytes
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

DEFAULT_MAX_BLOCKS = 160
# what another order may have of the bytes and the price at most: the model's own keeps equal layers equal
_BETTER = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLine:
    """`atoms`: of each block the numbers of its atoms. Blocks are in a topological order."""

    atoms: tuple[tuple[int, ...], ...]
    constraints: StageConstraints


def block_graph(
    split: BatchSplit,
    inputs: Sequence[GraphInput],
    needs_grad: Collection[str],
    config: Config,
    *,
    cluster: Cluster,
    batch_rows: int,
    rows_symbol: sympy.Symbol | None = None,
    like: BlockGraph | None = None,
    recomputed: Recomputed = NOTHING_RECOMPUTED,
) -> BlockGraph:
    """The blocks to plan a split graph with, balanced for batches of about `batch_rows` rows; none where
    nothing depends on the batch.

    Args:
        rows_symbol: if given, all sizes must be over it.
        like: blocks of the same graph at other lengths, whose nodes these blocks have too.
        recomputed: what the user wants computed again.
    """
    staged = find_staged_nodes(split.rowwise, split.layouts, inputs)
    whole_batch = split.whole_batch is not None
    if not staged.atoms:
        return BlockGraph(blocks=(), flows=(), parameters=(), whole_batch=whole_batch)
    graph = build_block_graph(
        staged,
        inputs,
        split.outputs,
        needs_grad,
        device=cluster.device,
        rows=batch_rows if whole_batch else max(1, batch_rows // cluster.num_devices),
        max_blocks=config.max_partition_num,
        num_clusters=config.min_partition_num or None,
        by_time=config.coarsen_by_time,
        pins=StagePins.from_config(config),
        like=like,
        wide_sums=config.wide_sums,
        least_elements=config.small_tensor_elements,
        recomputed=recomputed,
    )
    if rows_symbol is not None:  # sizes that come from a graph are expressions
        free = set().union(*(cast("sympy.Expr", flow.num_bytes).free_symbols for flow in graph.flows), set())
        assert free <= {rows_symbol}, f"sizes depend on {free - {rows_symbol}}, not only on the batch size"
    nodes = {node.name: node.meta.get("val") for node in staged.rowwise.graph.nodes}
    values = {
        item.fqn if isinstance(item, StateInput) else item.name: nodes.get(item.name) for item in inputs
    } | nodes
    dtypes = {name: value.dtype for name, value in values.items() if isinstance(value, torch.Tensor)}
    graph = in_formats(graph, dtypes, config)
    return replace(graph, whole_batch=whole_batch, has_loss=split.has_loss(needs_grad))


def parameter_use(
    name: str, value: torch.Tensor, *, trainable: bool, wide_sums: bool, least_elements: int = 0
) -> ParameterUse:
    """A parameter as plans count it. `wide_sums`: gradients of 16 bits are summed in 32. `least_elements`: smaller ones
    take no memory.
    """
    return ParameterUse(
        name=name,
        num_bytes=int(counted_bytes(value, least_elements)),
        trainable=trainable,
        has_wide_sum=sum_dtype(value.dtype, wide=wide_sums) != value.dtype,
    )


def build_block_graph(
    staged: StagedGraph,
    inputs: Sequence[GraphInput],
    outputs: Sequence[RowwiseOutput],
    needs_grad: Collection[str],
    *,
    device: Device,
    rows: int,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    pins: StagePins | None = None,
    num_clusters: int | None = None,
    by_time: bool = True,
    like: BlockGraph | None = None,
    wide_sums: bool = False,
    least_elements: int = 0,
    recomputed: Recomputed = NOTHING_RECOMPUTED,
) -> BlockGraph:
    """Cut the graph into at most `max_blocks` blocks. A graph with no more possible cuts than that is cut at
    all of them.

    Args:
        device, rows: on which, and at how many rows, operators are priced to balance the blocks.
        pins: what the user asked of the stages; more of them than `max_blocks` allows give more blocks.
        num_clusters: as `choose_blocks`.
        by_time: make blocks alike in time; False: in the bytes that they keep for backward.
        like, recomputed: as `block_graph`.
        wide_sums: gradients of 16 bits are summed in 32.
        least_elements: what has fewer is left out of account.

    Raises UnknownModuleError, StagePinError.
    """
    assert staged.atoms, "a graph without a node that depends on the batch has no blocks"
    kinds = Kinds(needs_grad)
    costs = _atom_costs(staged, kinds, needs_grad)
    builder = _Builder(
        staged,
        inputs,
        outputs,
        needs_grad,
        kinds,
        recomputed,
        wide_sums=wide_sums,
        least_elements=least_elements,
    )
    if like is not None:
        return builder.build(_line_of(like, staged), costs)
    atoms, fixed_groups = _atom_graph(staged, kinds, costs, device, rows)
    if not by_time:
        atoms = replace(atoms, seconds=_kept_bytes(staged, needs_grad, rows))
    found = find_pins(pins or StagePins(), atoms.modules)
    line = choose_blocks(atoms, fixed_groups, found, max_blocks=max_blocks, num_clusters=num_clusters)
    return builder.build(line, costs)


def _line_of(graph: BlockGraph, staged: StagedGraph) -> BlockLine:
    """The line in which blocks have the nodes of those of `graph`."""
    block_of = {name: block.index for block in graph.blocks for name in block.nodes}
    atoms: list[list[int]] = [[] for _ in graph.blocks]
    for number, atom in enumerate(staged.atoms):
        atoms[block_of[atom[0].name]].append(number)
    return BlockLine(atoms=tuple(map(tuple, atoms)), constraints=graph.constraints)


def choose_blocks(
    atoms: AtomGraph,
    fixed_groups: Sequence[Sequence[int]],
    pins: FoundPins,
    *,
    max_blocks: int,
    num_clusters: int | None = None,
) -> BlockLine:
    """The blocks of a graph of atoms. `fixed_groups`: atoms that must not be parted. Raises StagePinError.

    `num_clusters`: at how many the coarsening for the other order stops; None: at twice `max_blocks`.
    """
    items = contract(atoms, [*fixed_groups, *pins.groups()])
    floors = pins.stage_floors(items)
    own, other = (
        reorder(items, sorted(order, key=floors.__getitem__))
        for order in (range(items.num_atoms), line_order(items, num_clusters=num_clusters or 2 * max_blocks))
    )
    good_bytes = min(good_crossing(own), good_crossing(other))
    line, (bounds, price) = own, cut_line(own, pins.cuts(own), max_blocks=max_blocks, good_bytes=good_bytes)
    if crossing_bytes(other).sum() < _BETTER * crossing_bytes(own).sum():
        other_bounds, other_price = cut_line(
            other, pins.cuts(other), max_blocks=max_blocks, good_bytes=good_bytes
        )
        if other_price < _BETTER * price:
            line, bounds = other, other_bounds
    logger.debug(
        "%d atoms, %d items in a line (%s order): %d blocks, of at most %d",
        atoms.num_atoms,
        items.num_atoms,
        "the model's own" if line is own else "the coarsened",
        len(bounds) - 1,
        max_blocks,
    )
    pairs = zip(bounds, bounds[1:], strict=False)
    return BlockLine(
        atoms=tuple(
            tuple(sorted(atom for members in line.members[a:b] for atom in members)) for a, b in pairs
        ),
        constraints=pins.constraints(line, bounds),
    )


def _atom_costs(staged: StagedGraph, kinds: Kinds, needs_grad: Collection[str]) -> list[list[OperatorCost]]:
    """Costs of the nodes of each atom; cloned nodes are counted with the first atom that uses them."""
    counted: set[fx.Node] = set()
    known: dict[int, OperatorCost] = {}
    costs: list[list[OperatorCost]] = []
    for atom in staged.atoms:
        cloned = dict.fromkeys(item for node in atom for item in staged.cloned[node] if item not in counted)
        counted.update(cloned)
        costs.append([])
        for node in [*cloned, *atom]:
            kind = kinds.of(node)
            if kind not in known:
                known[kind] = operator_cost(node, needs_grad)
            costs[-1].append(replace(known[kind], name=node.name))
    return costs


def _atom_graph(
    staged: StagedGraph, kinds: Kinds, costs: Sequence[Sequence[OperatorCost]], device: Device, rows: int
) -> tuple[AtomGraph, list[list[int]]]:
    """The atoms, and groups of them that must not be parted because a value that is not one per row would
    cross.
    """
    operators = [operator for atom in costs for operator in atom]
    forward, backward = operator_seconds(operators, device, [rows])
    owner = np.repeat(np.arange(len(costs)), [len(atom) for atom in costs])
    atom_of = {node: index for index, atom in enumerate(staged.atoms) for node in atom}
    fixed, crossing = [], []
    for node, producer in atom_of.items():
        readers = sorted({atom_of[user] for user in node.users if user in atom_of} - {producer})
        if readers and node in staged.fixed:
            fixed.append([producer, *readers])
        if readers:
            crossing.append((node, producer, tuple(readers)))
    sizes = evaluate([value_bytes(node.meta.get("val")) for node, _, _ in crossing], [rows])
    values = (
        AtomValue(producer=producer, readers=readers, num_bytes=float(size))
        for (_, producer, readers), (size,) in zip(crossing, sizes, strict=True)
    )
    numbers: dict[tuple[int, ...], int] = {}
    graph = AtomGraph(
        seconds=np.bincount(owner, weights=(forward + backward)[:, 0], minlength=len(costs)).astype(
            np.float64
        ),
        values=tuple(values),
        kinds=tuple(
            numbers.setdefault(tuple(kinds.of(node) for node in atom), len(numbers)) for atom in staged.atoms
        ),
        modules=tuple(_module_path(atom[0]) for atom in staged.atoms),
        members=tuple((index,) for index in range(len(costs))),
    )
    return graph, fixed


def _kept_bytes(staged: StagedGraph, needs_grad: Collection[str], rows: int) -> np.ndarray:
    """Per atom, the bytes of its values that backward needs; of those that it reads, if no atom makes
    them.
    """
    atom_of = {node: index for index, atom in enumerate(staged.atoms) for node in atom}
    nodes = [node for node in staged.rowwise.graph.nodes if node in staged.reads]
    saved = [
        (atom_of[value if value in atom_of else reader], value)
        for value, reader in saved_values(nodes, needs_grad)
    ]
    sizes = evaluate([value_bytes(value.meta.get("val")) for _, value in saved], [rows])
    kept = np.bincount(
        [atom for atom, _ in saved], weights=[float(size) for (size,) in sizes], minlength=len(staged.atoms)
    )
    # Where nothing is kept, as in evaluation, all atoms weigh the same.
    return kept + max(kept.sum(), 1.0) * 1e-6


def _module_path(node: fx.Node) -> str:
    return str(node.meta.get("module_path", ""))


@dataclass(slots=True)
class _Builder:
    """Turns a line of atoms into blocks and flows."""

    staged: StagedGraph
    inputs: Sequence[GraphInput]
    outputs: Sequence[RowwiseOutput]
    needs_grad: Collection[str]
    kinds: Kinds
    recomputed: Recomputed
    wide_sums: bool = False
    least_elements: int = 0
    _workspaces: dict[tuple[object, ...], sympy.Expr] = field(default_factory=dict)

    def build(self, line: BlockLine, costs: Sequence[Sequence[OperatorCost]]) -> BlockGraph:
        groups = [tuple(node for atom in atoms for node in self.staged.atoms[atom]) for atoms in line.atoms]
        block_of = {node: index for index, nodes in enumerate(groups) for node in nodes}
        saved: list[list[sympy.Expr]] = [[] for _ in groups]
        for value, reader in saved_values(self._nodes_with_rows(), self.needs_grad):
            size = counted_bytes(value.meta.get("val"), self.least_elements)
            saved[block_of[value if value in block_of else reader]].append(size)
        outputs, buffers = self._returned(block_of, len(groups))
        place_of = {node.name: index for node, index in block_of.items()}
        parameters = parameters_read(self.staged, self.inputs, place_of, buffers)
        input_kind = {item.name: item.kind for item in self.inputs}
        blocks = []
        first_of: dict[int, int] = {}  # what is computed again together -> its first block
        for index, nodes in enumerate(groups):
            operators = tuple(cost for atom in line.atoms[index] for cost in costs[atom])
            saved_bytes = sympy.Add(*saved[index])
            blocks.append(
                Block(
                    index=index,
                    structure=self._structure(nodes, block_of, input_kind, (len(operators), saved_bytes)),
                    nodes=tuple(node.name for node in nodes),
                    modules=tuple(dict.fromkeys(path for node in nodes if (path := _module_path(node)))),
                    parameters=tuple(sorted(parameters[index])),
                    updated_buffers=tuple(sorted(buffers[index])),
                    operators=operators,
                    saved_bytes=saved_bytes,
                    workspace_bytes=tuple(
                        size
                        for size, number in Counter(map(self._workspace, nodes)).items()
                        for _ in range(min(number, 2))
                    ),
                    again_from=min(
                        (first_of.setdefault(part, index) for part in self.recomputed.parts_of(nodes)),
                        default=-1,
                    ),
                )
            )
        return BlockGraph(
            blocks=tuple(blocks),
            flows=self._flows(block_of),
            parameters=self._parameter_uses(parameters),
            outputs=outputs,
            constraints=line.constraints,
        )

    def _structure(
        self,
        nodes: Sequence[fx.Node],
        block_of: Mapping[fx.Node, int],
        input_kind: Mapping[str, str],
        numbers: Sequence[object],
    ) -> str:
        block = block_of[nodes[0]]
        again = self.recomputed.marks_of(nodes)
        return block_structure(
            self.staged,
            self.kinds,
            nodes,
            input_kind=input_kind,
            is_kept=lambda node: any(
                block_of.get(user) != block for user in node.users if user in block_of or user.op == "output"
            ),
            numbers=(*numbers, again) if again else numbers,
        )

    def _nodes_with_rows(self) -> list[fx.Node]:
        """Staged nodes, and cloned ones that are as large as the batch (random masks), in graph order."""
        cloned = {
            node
            for items in self.staged.cloned.values()
            for node in items
            if value_bytes(node.meta.get("val")).free_symbols
        }
        return [
            node for node in self.staged.rowwise.graph.nodes if node in self.staged.reads or node in cloned
        ]

    def _home(self, output: fx.Node, block_of: dict[fx.Node, int]) -> int:
        """The block with which an output is returned."""
        node = output if output in block_of else home_of_cloned(self.staged, output)
        return block_of[node] if node is not None else 0

    def _parameter_uses(self, parameters: Sequence[set[str]]) -> tuple[ParameterUse, ...]:
        used = set().union(*parameters)
        values = {
            node.name: node.meta["val"] for node in self.staged.rowwise.graph.find_nodes(op="placeholder")
        }
        uses = [
            parameter_use(
                item.fqn,
                values[item.name],
                trainable=item.requires_grad,
                wide_sums=self.wide_sums,
                least_elements=self.least_elements,
            )
            for item in self.inputs
            if isinstance(item, ParameterInput) and item.fqn in used
        ]
        return tuple(sorted(uses, key=lambda use: use.name))

    def _returned(
        self, block_of: dict[fx.Node, int], num_blocks: int
    ) -> tuple[tuple[Output, ...], list[set[str]]]:
        """The outputs with rows, and per block the names of the buffers whose new value is returned."""
        nodes = {node.name: node for node in output_nodes(self.staged.rowwise)}
        rows: dict[str, Output] = {}
        buffers: list[set[str]] = [set() for _ in range(num_blocks)]
        for item in self.outputs:
            if isinstance(item, BufferOutput):
                buffers[self._home(nodes[item.name], block_of)].add(item.fqn)
            elif isinstance(item, RowsOutput):
                node = nodes[item.name]
                rows[item.name] = Output(
                    name=item.name,
                    module=_module_path(node),
                    block=self._home(node, block_of),
                    num_bytes=value_bytes(node.meta.get("val")),
                )
        return tuple(rows.values()), buffers

    def _workspace(self, node: fx.Node) -> sympy.Expr:
        values = [node, *(argument for argument in node.all_input_nodes if argument in self.staged.reads)]
        key = tuple(self.kinds.value(value) for value in values)
        if key not in self._workspaces:
            self._workspaces[key] = sympy.Add(*(value_bytes(value.meta.get("val")) for value in values))
        return self._workspaces[key]

    def _flows(self, block_of: dict[fx.Node, int]) -> tuple[Flow, ...]:
        batch = {item.name for item in self.inputs if isinstance(item, BatchInput)}
        flows = []
        for node in self.staged.rowwise.graph.nodes:
            producer = INPUT_BLOCK if node.op == "placeholder" and node.name in batch else block_of.get(node)
            if producer is None:
                continue
            consumers = sorted({block_of[user] for user in node.users if user in block_of} - {producer})
            if consumers:
                flows.append(
                    Flow(
                        name=node.name,
                        producer=producer,
                        consumers=tuple(consumers),
                        num_bytes=value_bytes(node.meta.get("val")),
                        needs_grad=node.name in self.needs_grad,
                        is_again=self.recomputed.is_again(node),
                    )
                )
        return tuple(flows)
