"""From a row-wise graph to at most k blocks in a line, cut where little crosses and so that blocks cost about the same.

In: the staged nodes of a row-wise graph, what its outputs are, which values need gradients. Out: a `BlockGraph`.
Terms: an *atom* is a staged node with the getitems that take from it; a *cut* is a place between two atoms; what *crosses*
a cut is made before and read after it. A cut is forbidden where something crosses that is not row-wise (a sum, a batch
statistic). Blocks are found by an exact dynamic programme over the allowed cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import sympy
from numpy.typing import NDArray
from torch import fx

from rannc_backend.cost.cluster import Device
from rannc_backend.cost.compute import operator_cost, operator_seconds
from rannc_backend.cost.expressions import evaluate, value_bytes
from rannc_backend.cost.memory import saved_values
from rannc_backend.ir.block_graph import INPUT_BLOCK, Block, BlockGraph, Flow, OperatorCost, ParameterUse
from rannc_backend.partition.staged_nodes import (
    Input,
    Output,
    StagedGraph,
    home_of_cloned,
    output_nodes,
    placeholders_behind,
)

DEFAULT_MAX_BLOCKS = 64
_MAX_CUTS = 400  # the programme is quadratic in it
_CROSSING_WEIGHT = 0.5  # cost, in mean blocks, of a cut that twice as much crosses as crosses a good one
_MAX_CROSSING_RATIO = 8.0
_IN_MODULE_WEIGHT = 0.1  # cost, in mean blocks, of a cut inside of a module


def build_block_graph(
    staged: StagedGraph,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    needs_grad: Collection[str],
    *,
    device: Device,
    rows: int,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    keep_rows_outputs: bool = True,
) -> BlockGraph:
    """Cut the graph into at most `max_blocks` blocks. A graph with no more allowed cuts than that is cut at all of them.

    Args:
        device, rows: on which, and at how many rows, operators are priced to balance the blocks.
        keep_rows_outputs: whether outputs with rows are returned to the user.
    """
    atoms = staged.atoms
    assert atoms, "a graph without a node that depends on the batch has no blocks"
    costs = _atom_costs(staged, needs_grad)
    operators = [operator for atom in costs for operator in atom]
    forward, backward = operator_seconds(operators, device, [rows])
    owner = np.repeat(np.arange(len(atoms)), [len(atom) for atom in costs])
    seconds = np.bincount(owner, weights=(forward + backward)[:, 0], minlength=len(atoms))
    bounds = choose_cuts(seconds, *_cut_costs(staged, rows), max_blocks=max_blocks)
    return _Builder(staged, inputs, outputs, needs_grad, keep_rows_outputs).build(bounds, costs)


def choose_cuts(
    seconds: NDArray[np.float64],
    crossing_bytes: NDArray[np.float64],
    in_module: NDArray[np.bool_],
    allowed: NDArray[np.bool_],
    *,
    max_blocks: int,
) -> list[int]:
    """Bounds [0, ..., number of atoms] of the blocks: as many as allowed, balanced, and cut where little crosses.

    Args:
        seconds: cost of each atom. The rest is per cut; cut c is before atom c, cut 0 is not used.
    """
    num_atoms = len(seconds)
    cuts = np.flatnonzero(allowed)
    cuts = cuts[cuts > 0]
    if len(cuts) < max_blocks:
        return [0, *cuts.tolist(), num_atoms]
    positive = crossing_bytes[cuts][crossing_bytes[cuts] > 0]
    good = float(np.quantile(positive, 0.1)) if len(positive) else 1.0
    penalty = _CROSSING_WEIGHT * np.minimum(crossing_bytes / good, _MAX_CROSSING_RATIO) + _IN_MODULE_WEIGHT * in_module
    if len(cuts) > _MAX_CUTS:
        windows = np.array_split(cuts, _MAX_CUTS)
        cuts = np.array([int(window[np.argmin(penalty[window])]) for window in windows])
    places = np.array([0, *cuts.tolist(), num_atoms])
    done = np.concatenate([[0.0], np.cumsum(seconds)])[places]
    mean = max(done[-1] / max_blocks, 1e-30)
    weights = (done[None, :] - done[:, None]) / mean
    price = weights**2 + np.append(penalty[places[:-1]], 0.0)[None, :]
    price[np.tril_indices(len(places))] = np.inf
    best = price[0].copy()
    choices = []
    for _ in range(max_blocks - 1):
        total = best[:, None] + price
        choices.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    bounds = [len(places) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return [0, *(int(places[bound]) for bound in reversed(bounds))]


def _atom_costs(staged: StagedGraph, needs_grad: Collection[str]) -> list[list[OperatorCost]]:
    """Costs of the nodes of each atom; cloned nodes are counted with the first atom that uses them."""
    counted: set[fx.Node] = set()
    costs: list[list[OperatorCost]] = []
    for atom in staged.atoms:
        cloned = dict.fromkeys(item for node in atom for item in staged.cloned[node] if item not in counted)
        counted.update(cloned)
        costs.append([operator_cost(node, needs_grad) for node in [*cloned, *atom]])
    return costs


def _cut_costs(
    staged: StagedGraph, rows: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Per cut: bytes that cross it, whether it is inside a module, whether it is allowed."""
    num_atoms = len(staged.atoms)
    atom_of = {node: index for index, atom in enumerate(staged.atoms) for node in atom}
    spans = []
    for node, first in atom_of.items():
        last = max((atom_of[user] for user in node.users if user in atom_of), default=first)
        if last > first:
            spans.append((node, first, last))
    sizes = evaluate([value_bytes(node.meta.get("val")) for node, _, _ in spans], [rows])[:, 0] if spans else []
    change = np.zeros(num_atoms + 1)
    forbidden = np.zeros(num_atoms + 1)
    for (node, first, last), size in zip(spans, sizes, strict=True):
        change[first + 1] += size
        change[last + 1] -= size
        if node in staged.fixed:
            forbidden[first + 1] += 1
            forbidden[last + 1] -= 1
    modules = [_module_path(atom[0]) for atom in staged.atoms]
    in_module = np.array([False] + [before == after for before, after in zip(modules, modules[1:], strict=False)])
    return np.cumsum(change)[:num_atoms], in_module, np.cumsum(forbidden)[:num_atoms] == 0


def _module_path(node: fx.Node) -> str:
    return str(node.meta.get("module_path", ""))


@dataclass(slots=True)
class _Builder:
    """Turns bounds into blocks and flows."""

    staged: StagedGraph
    inputs: Sequence[Input]
    outputs: Sequence[Output]
    needs_grad: Collection[str]
    keep_rows_outputs: bool

    def build(self, bounds: Sequence[int], costs: Sequence[Sequence[OperatorCost]]) -> BlockGraph:
        atoms = self.staged.atoms
        groups = [tuple(node for atom in atoms[a:b] for node in atom) for a, b in zip(bounds, bounds[1:], strict=False)]
        block_of = {node: index for index, nodes in enumerate(groups) for node in nodes}
        saved: list[list[sympy.Expr]] = [[] for _ in groups]
        for value, reader in saved_values(self._nodes_with_rows(), self.needs_grad):
            saved[block_of[value if value in block_of else reader]].append(value_bytes(value.meta.get("val")))
        parameters = self._parameters(groups, block_of)
        returned, buffers = self._returned(block_of, len(groups))
        blocks = []
        for index, nodes in enumerate(groups):
            blocks.append(
                Block(
                    index=index,
                    structure=str(index),
                    nodes=tuple(node.name for node in nodes),
                    modules=tuple(dict.fromkeys(path for node in nodes if (path := _module_path(node)))),
                    parameters=tuple(sorted(parameters[index])),
                    updated_buffers=tuple(sorted(buffers[index])),
                    operators=tuple(cost for atom in costs[bounds[index] : bounds[index + 1]] for cost in atom),
                    saved_bytes=sympy.Add(*saved[index]),
                    output_bytes=sympy.Add(*(value_bytes(node.meta.get("val")) for node in returned[index])),
                    workspace_bytes=tuple(dict.fromkeys(self._workspace(node) for node in nodes)),
                )
            )
        return BlockGraph(blocks=tuple(blocks), flows=self._flows(block_of), parameters=self._parameter_uses(parameters))

    def _nodes_with_rows(self) -> list[fx.Node]:
        """Staged nodes, and cloned ones that are as large as the batch (random masks), in graph order."""
        cloned = {node for items in self.staged.cloned.values() for node in items if value_bytes(node.meta.get("val")).free_symbols}
        return [node for node in self.staged.rowwise.graph.nodes if node in self.staged.reads or node in cloned]

    def _home(self, output: fx.Node, block_of: dict[fx.Node, int]) -> int:
        """The block with which an output is returned."""
        node = output if output in block_of else home_of_cloned(self.staged, output)
        return block_of[node] if node is not None else 0

    def _parameters(self, groups: Sequence[Sequence[fx.Node]], block_of: dict[fx.Node, int]) -> list[set[str]]:
        names = {item.name: item.fqn for item in self.inputs if item.kind == "parameter" and item.fqn is not None}
        found = [
            {names[item.name] for node in nodes for item in self.staged.reads[node] if item.name in names} for nodes in groups
        ]
        for output in output_nodes(self.staged.rowwise):
            if output not in block_of:
                behind = {names[item.name] for item in placeholders_behind(output) if item.name in names}
                found[self._home(output, block_of)].update(behind)
        return found

    def _parameter_uses(self, parameters: Sequence[set[str]]) -> tuple[ParameterUse, ...]:
        used = set().union(*parameters)
        values = {node.name: node.meta["val"] for node in self.staged.rowwise.graph.find_nodes(op="placeholder")}
        uses = [
            ParameterUse(name=item.fqn, num_bytes=int(value_bytes(values[item.name])), trainable=item.requires_grad)
            for item in self.inputs
            if item.kind == "parameter" and item.fqn in used
        ]
        return tuple(sorted(uses, key=lambda use: use.name))

    def _returned(self, block_of: dict[fx.Node, int], num_blocks: int) -> tuple[list[set[fx.Node]], list[set[str]]]:
        """Per block: the nodes returned as outputs with rows, and the names of the buffers whose new value is returned."""
        nodes = {node.name: node for node in output_nodes(self.staged.rowwise)}
        rows: list[set[fx.Node]] = [set() for _ in range(num_blocks)]
        buffers: list[set[str]] = [set() for _ in range(num_blocks)]
        for item in self.outputs:
            if item.kind == "buffer" and item.fqn is not None:
                buffers[self._home(nodes[item.name], block_of)].add(item.fqn)
            elif item.kind == "rows" and self.keep_rows_outputs:
                rows[self._home(nodes[item.name], block_of)].add(nodes[item.name])
        return rows, buffers

    def _workspace(self, node: fx.Node) -> sympy.Expr:
        values = [node, *(argument for argument in node.all_input_nodes if argument in self.staged.reads)]
        return sympy.Add(*(value_bytes(value.meta.get("val")) for value in values))

    def _flows(self, block_of: dict[fx.Node, int]) -> tuple[Flow, ...]:
        batch = {item.name for item in self.inputs if item.kind == "batch"}
        flows = []
        for node in self.staged.rowwise.graph.nodes:
            if node.op == "placeholder" and node.name in batch:
                producer = INPUT_BLOCK
            elif node in block_of:
                producer = block_of[node]
            else:
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
                    )
                )
        return tuple(flows)
