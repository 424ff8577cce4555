"""Stages for the nodes of a graph, once a plan says who owns which parameter.

In: a plan and a row-wise graph. Out: a stage for every staged node, `dict[node name, stage]`, for
passes/stage/split_stages.py. `stage_of_plan` is for the graph that was planned: the plan names its nodes, and
is checked. `project_plan` is for another graph of the same module (evaluation, no_grad, another dtype), which
has other nodes but the same parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType

from torch import fx

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import PlanError, UnsupportedModelError, user_location
from rannc_backend.ir.graph_input import GraphInput, ParameterInput, StateInput
from rannc_backend.ir.plan import Plan
from rannc_backend.kernels.kept_rows import KEEP_ROWS
from rannc_backend.passes.batch.batch_split import BatchSplit
from rannc_backend.passes.batch.layouts import Layout
from rannc_backend.passes.stage.recompute import NOTHING_RECOMPUTED, Recomputed
from rannc_backend.planner.blocks.staged_nodes import (
    StagedGraph,
    find_staged_nodes,
    parameters_read,
)
from rannc_backend.planner.blocks.told_recompute import told_recompute
from rannc_backend.settings.choices import SEGMENTS_BUDGET

_CURE = "correct the plan, or let the planner write it again."


def stage_of_plan(
    plan: Plan, rowwise: fx.GraphModule, layouts: Mapping[str, Layout], inputs: Sequence[GraphInput]
) -> dict[str, int]:
    """The stage of every staged node of the planned graph.

    Raises `PlanError`: a node that the graph does not have or the plan does not place, a value that would
    flow from a later stage to an earlier one, a value that cannot cross between stages, parameters listed
    with another stage than their readers.
    """
    staged = find_staged_nodes(rowwise, layouts, inputs)
    planned = {name: stage.index for stage in plan.stages for name in stage.nodes}
    known = {node.name for node in staged.nodes}
    if unknown := sorted(set(planned) - known):
        raise PlanError(f"the plan places node {unknown[0]!r}, which the graph does not have", cure=_CURE)
    if missing := sorted(known - set(planned)):
        raise PlanError(f"the plan places node {missing[0]!r} in no stage", cure=_CURE)
    for node in staged.nodes:
        _check_users(node, planned, staged)
    _check_parameters(plan, staged, inputs, planned)
    return {node.name: planned[node.name] for node in staged.nodes}


def _check_users(node: fx.Node, planned: Mapping[str, int], staged: StagedGraph) -> None:
    stage = planned[node.name]
    for user in node.users:
        if user not in staged.reads:
            continue
        other = planned[user.name]
        if other < stage:
            raise PlanError(
                f"the cut is not acyclic: node {user.name!r} of stage {other} reads {node.name!r} of the "
                f"later stage {stage}",
                cure=_CURE,
            )
        if other > stage and node in staged.fixed:
            raise PlanError(
                f"node {user.name!r} of stage {other} reads {node.name!r} of stage {stage}, which is not a "
                "value per row and cannot be sent",
                cure=_CURE,
            )


def _check_parameters(
    plan: Plan, staged: StagedGraph, inputs: Sequence[GraphInput], planned: Mapping[str, int]
) -> None:
    read = parameters_read(staged, inputs, planned, [stage.updated_buffers for stage in plan.stages])
    for stage, wanted in zip(plan.stages, read, strict=True):
        if extra := sorted(set(stage.parameters) - wanted):
            raise PlanError(
                f"stage {stage.index} lists parameter {extra[0]!r}, which none of its nodes reads", cure=_CURE
            )
        if absent := sorted(wanted - set(stage.parameters)):
            raise PlanError(
                f"stage {stage.index} does not list parameter {absent[0]!r}, which its nodes read", cure=_CURE
            )


def note_kept(homes: MutableMapping[int, int], split: BatchSplit, stage_of: Mapping[str, int]) -> None:
    """Note in ``homes``, slot -> stage, where a graph that is deployed keeps rows from step to step."""
    for node, slot in _kept_slots(split.rowwise.graph.nodes):
        homes.setdefault(slot, stage_of[node.name])


def project_plan(
    plan: Plan,
    split: BatchSplit,
    inputs: Sequence[GraphInput],
    homes: Mapping[int, int] = MappingProxyType({}),
) -> dict[str, int]:
    """A stage for every staged node of another graph of the module that was planned; parameters keep their
    owners.

    A node goes to the first stage, not before those of its inputs, that owns all its parameters and, where
    there is such a stage, makes the new values of the buffers that it reads; what is computed from batch
    inputs alone goes where it is first read, and so does what cannot be sent (a mean over rows). A parameter that
    the plan does not know (the planned graph did not use it) may be read anywhere, as every rank still holds it, and
    so may a buffer: all stages that read one are given its new values. What is kept from step to step (``homes``) is
    read and written on one stage by all graphs.

    Raises `UnsupportedModelError` naming the parameter that only an earlier stage owns, or parameters that no
    stage owns together.
    """
    staged = find_staged_nodes(split.rowwise, split.layouts, inputs)
    owners = _owners(plan, inputs)
    parameters = {item.fqn for item in inputs if isinstance(item, ParameterInput)}
    stages: dict[fx.Node, int] = {}
    from_inputs: set[fx.Node] = set()
    owning_none: set[fx.Node] = set()
    for atom in staged.atoms:
        members = set(atom)
        sources = [argument for node in atom for argument in node.all_input_nodes if argument in stages]
        sources = [argument for argument in sources if argument not in members]
        stored = dict.fromkeys(item for node in atom for item in staged.reads[node] if item.name in owners)
        earliest = max((stages[source] for source in sources), default=0)
        kept = [
            (f"kept rows {slot}", frozenset({homes[slot]})) for _, slot in _kept_slots(atom) if slot in homes
        ]
        stage = _first_stage_owning(
            atom[0],
            earliest,
            [*(owners[item.name] for item in stored), *kept],
            parameters.union(name for name, _ in kept),
            plan,
        )
        stages.update(dict.fromkeys(atom, stage))
        if not stored and not kept:
            owning_none.update(atom)
            if all(source in from_inputs for source in sources):
                from_inputs.update(atom)
    _move_to_readers(staged, stages, from_inputs, owning_none)
    return {node.name: stage for node, stage in stages.items()}


def _kept_slots(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    for node in nodes:
        if node.target is KEEP_ROWS:
            yield node, int(node.args[3])  # type: ignore[arg-type]


def recomputed_nodes(plan: Plan, analysis: GraphAnalysis) -> Recomputed:
    """What stages of the plan compute again that do so by segments; nothing where none does.

    A node of another graph than the planned one goes to the first segment, not before those of its inputs, that reads
    one of its parameters. Which one it is decides about memory alone.
    """
    if all(stage.recompute != SEGMENTS_BUDGET for stage in plan.stages):
        return NOTHING_RECOMPUTED
    if plan.told_recompute:
        return told_recompute(plan.told_recompute, analysis)
    split, inputs = analysis.split, analysis.captured.inputs
    staged = find_staged_nodes(split.rowwise, split.layouts, inputs)
    planned = {name: block.segment for block in plan.blocks for name in block.nodes}
    if all(node.name in planned for node in staged.nodes):
        return Recomputed(segment_of=planned)
    fqns = {item.name: item.fqn for item in inputs if isinstance(item, ParameterInput)}
    readers: dict[str, list[int]] = {}
    for block in plan.blocks:
        for name in block.parameters:
            readers.setdefault(name, []).append(block.segment)
    found: dict[str, int] = {}
    for node in staged.nodes:
        number = max(
            (found[argument.name] for argument in node.all_input_nodes if argument.name in found), default=0
        )
        for item in staged.reads[node]:
            later = [place for place in readers.get(fqns.get(item.name, ""), ()) if place >= number]
            number = min(later, default=number)
        found[node.name] = number
    return Recomputed(segment_of=found)


def _owners(plan: Plan, inputs: Sequence[GraphInput]) -> dict[str, tuple[str, frozenset[int]]]:
    """Placeholder -> (dotted name, stages that own it or make its new value), for what the plan knows."""
    owners: dict[str, tuple[str, frozenset[int]]] = {}
    for item in inputs:
        if not isinstance(item, StateInput):
            continue
        # A parameter that the forward changes is a buffer while it is frozen.
        where = frozenset(
            stage.index for stage in plan.stages if item.fqn in (*stage.parameters, *stage.updated_buffers)
        )
        if where:
            owners[item.name] = (item.fqn, where)
    return owners


def _first_stage_owning(
    node: fx.Node,
    earliest: int,
    stored: Sequence[tuple[str, frozenset[int]]],
    parameters: Collection[str],
    plan: Plan,
) -> int:
    required = [(name, where) for name, where in stored if name in parameters]
    for wanted in (stored, required):
        for stage in range(earliest, plan.num_stages):
            if all(stage in where for _, where in wanted):
                return stage
    stored = required
    location = user_location(node.meta.get("stack_trace"))
    late = [(name, max(where)) for name, where in stored if max(where) < earliest]
    if late:
        name, last = late[0]
        raise UnsupportedModelError(
            f"this graph reads parameter {name!r} after values of stage {earliest}, but only stage {last} "
            "owns it; the graph that was planned read it earlier",
            location=location,
            cure="run the modules in the same order in training and evaluation, or compile the other mode as "
            "a model of its own.",
        )
    names = ", ".join(repr(name) for name, _ in stored)
    raise UnsupportedModelError(
        f"this graph reads {names} in one operator ({node.name}), and no stage of the plan owns them all",
        location=location,
        cure="compile this mode as a model of its own, or plan with fewer stages (partition_num).",
    )


def _move_to_readers(
    staged: StagedGraph, stages: dict[fx.Node, int], from_inputs: set[fx.Node], owning_none: set[fx.Node]
) -> None:
    """Compute what depends on batch inputs alone where it is first read: inputs reach every stage, others
    would carry it. And what reads nothing that a stage owns, if it is no value per row: the rows before it are sent.
    """
    for atom in reversed(staged.atoms):
        is_movable = atom[0] in from_inputs or (
            atom[0] in owning_none and any(node in staged.fixed for node in atom)
        )
        if not is_movable or any(user.op == "output" for node in atom for user in node.users):
            continue
        readers = [
            stages[user] for node in atom for user in node.users if user in stages and user not in atom
        ]
        if readers:
            stages.update(dict.fromkeys(atom, min(readers)))
