"""From a captured graph to everything that planning and deployment ask about it.

In: a `CapturedGraph`. Out: a `GraphAnalysis`: the row-wise graph with its layouts, prologue and epilogue,
random operators made pure, and which values carry gradients. The same on every rank, computed by each for
itself, of nodes in an order that their arguments alone decide: ranks whose forward goes through a set of strings capture
the same nodes in orders of their own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from rannc_backend.capture.graph import CapturedGraph, in_order_of_use
from rannc_backend.errors import BatchMixedError, ModelError, UnsupportedModelError, user_location
from rannc_backend.ir.exchange import Value
from rannc_backend.ir.graph_input import BatchInput, LengthInput, ParameterInput, ReplicatedInput, UserInput
from rannc_backend.ir.reach import Reach, Sources, WrittenCall
from rannc_backend.kernels.kept_rows import KEEP_ROWS
from rannc_backend.passes.batch.batch_axis import Rows, is_statistic
from rannc_backend.passes.batch.differentiability import Argument, gradient_sources, outputs_by_value
from rannc_backend.passes.batch.layouts import KeyCounts
from rannc_backend.passes.batch.split_reductions import BatchSplit, UserRows, UserScalar, split_batch
from rannc_backend.passes.data_sizes import bound_data_sizes
from rannc_backend.passes.fixed_sizes import at_numbers
from rannc_backend.passes.graph_queries import is_one, output_values, placeholders, size_expression
from rannc_backend.passes.kept_functions import runs_whole
from rannc_backend.passes.pipeline import PassError
from rannc_backend.passes.size_nodes import Size, plain_at

EXTRA_INPUTS = ("rng_seed", "first_row", "global_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """A captured graph, split at its reductions over the batch.

    differentiable_outputs: places of the user's outputs whose gradient comes to a value that needs one.
    reach: those whose gradient comes to each parameter (by dotted name) and input, and by way of which modules that run as
        written.
    """

    captured: CapturedGraph
    split: BatchSplit
    needs_grad: frozenset[str]
    input_kinds: dict[str, str]
    differentiable_outputs: frozenset[int] = frozenset()
    reach: Reach = field(default_factory=Reach)

    @property
    def trained_parameters(self) -> Mapping[str, str]:
        """Of the parameters that require gradients: the dotted names, by placeholder."""
        inputs = self.captured.inputs
        return {
            spec.name: spec.fqn for spec in inputs if isinstance(spec, ParameterInput) and spec.requires_grad
        }

    @property
    def rows_per_slice(self) -> int:
        """The fewest rows that a slice of the batch may have: two where batch normalization has one value of each channel in
        a row, and would have no variance of one.
        """
        layouts = self.split.layouts
        normed = [
            node.args[0] for node in self.split.rowwise.graph.nodes if is_statistic(layouts.get(node.name))
        ]
        shapes = [item.meta["val"].shape[2:] for item in normed if isinstance(item, fx.Node)]
        return 1 + any(all(map(is_one, shape)) for shape in shapes)

    @property
    def parameters_with_gradient(self) -> Mapping[str, str]:
        """Those of `trained_parameters` that a gradient of an output reaches; `p.grad` of the others stays as it is, as
        in one process.
        """
        return {name: fqn for name, fqn in self.trained_parameters.items() if name in self.needs_grad}

    @property
    def has_narrow_range(self) -> bool:
        """Whether some value is of a dtype whose largest number a scaled gradient may pass, such as float16."""
        values = [node.meta.get("val") for node in self.split.rowwise.graph.nodes]
        dtypes = {
            value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        return any(torch.finfo(dtype).max < torch.finfo(torch.bfloat16).max for dtype in dtypes)

    def micro_batches_of(self, planned: int, most_replicas: int) -> int:
        """Number of micro-batches of a step with enough rows, where ``planned`` is that of the call that was planned.

        A step that continues rows by one token computes little for each, and each micro-batch reads all parameters
        again, so it is one. Replicas keep rows of theirs by micro-batches, so there it stays.
        """
        new = [node.args[0] for node in self.split.rowwise.graph.nodes if node.target is KEEP_ROWS]
        continues = bool(new) and all(node.meta["val"].shape[-2] == 1 for node in new)
        return 1 if continues and most_replicas == 1 else planned

    @property
    def differentiable_scalars(self) -> frozenset[int]:
        """Epilogue outputs whose gradient goes to a sum that needs one."""
        outputs = (self.split.user_outputs[place] for place in self.differentiable_outputs)
        return frozenset(output.index for output in outputs if isinstance(output, UserScalar))

    def node(self, name: str) -> fx.Node:
        """Node of the row-wise graph by name."""
        return next(node for node in self.split.rowwise.graph.nodes if node.name == name)

    def value(self, name: str, lengths: tuple[int, ...] | None = None) -> Value:
        """What travels when the value of node ``name`` does, at these lengths (those of the capture if not given).
        AssertionError when it is not row-wise.
        """
        layout = self.split.layouts[name]
        assert isinstance(layout, Rows), f"{name} has no rows: {layout}"
        fake = self.node(name).meta["val"]
        sizes = [-1 if dim == layout.dim else size for dim, size in enumerate(fake.shape)]
        *shape, outer, inner = self.sizes_at([*sizes, layout.outer, layout.inner], lengths)
        return Value(
            name=name, dtype=fake.dtype, shape=tuple(shape), dim=layout.dim, outer=outer, inner=inner
        )

    def size_at(self, size: sympy.Expr, lengths: tuple[int, ...] | None) -> Size:
        """A size with numbers in place of lengths."""
        return plain_at(size, self.captured.numbers_at(lengths))

    def sizes_at(self, sizes: Iterable[Any], lengths: tuple[int, ...] | None) -> tuple[int, ...]:
        """Sizes without rows as numbers."""
        found = [self.size_at(size_expression(size), lengths) for size in sizes]
        assert all(isinstance(size, int) for size in found), f"sizes {found} are no numbers"
        return tuple(map(int, found))

    def at_numbers(self, lengths: tuple[int, ...]) -> GraphAnalysis:
        """The same for steps of these lengths alone, which are numbers in it: as plans are made."""
        captured, split = self.captured, self.split
        if not captured.lengths:
            return self
        known = captured.numbers_at(lengths)
        rowwise = at_numbers(split.rowwise, known)
        names = {node.name for node in rowwise.graph.nodes}
        layouts = {
            name: replace(layout, outer=plain_at(layout.outer, known), inner=plain_at(layout.inner, known))
            if isinstance(layout, Rows)
            else layout
            for name, layout in split.layouts.items()
            if name in names
        }
        return GraphAnalysis(
            captured=_without_lengths(captured),
            split=replace(split, rowwise=rowwise, layouts=layouts),
            needs_grad=self.needs_grad,
            differentiable_outputs=self.differentiable_outputs,
            reach=self.reach,
            input_kinds={name: kind for name, kind in self.input_kinds.items() if kind != "length"},
        )

    def named_lengths(self, lengths: tuple[int, ...]) -> dict[str, int]:
        """Lengths by the names of their inputs."""
        return {length.name: size for length, size in zip(self.captured.lengths, lengths, strict=True)}


def analyze(
    captured: CapturedGraph,
    *,
    whole_batch: str = "auto",
    batch_norm: str = "micro_batch",
    choices: bool = True,
    where_rows_meet: Callable[[PassError], None] = lambda error: None,
) -> GraphAnalysis:
    """Run the passes that need no plan.

    Args:
        whole_batch: the option; "never" refuses graphs whose rows meet.
        batch_norm: the option; with "global" a graph that takes statistics of a batch runs on the whole batch.
        choices: whether elements that a mask chooses are followed; else they are rows that meet.
        where_rows_meet: called with what a pass says of them, before the graph becomes one of the whole batch; and
            where sums over rows are more than one number, as means over a sequence are.

    Raises:
        BatchMixedError: an operator mixes samples; names it and the user's line.
        UnsupportedModelError: the graph has lengths, and is better captured without.
    """
    try:
        return _analyzed(captured, whole_batch, batch_norm, choices, where_rows_meet)
    except ModelError:
        raise
    except Exception as error:
        if not captured.lengths:
            raise
        raise UnsupportedModelError(f"lengths lead to {type(error).__name__}: {error}") from error


def _analyzed(
    captured: CapturedGraph,
    whole_batch: str,
    batch_norm: str,
    choices: bool,
    where_rows_meet: Callable[[PassError], None],
) -> GraphAnalysis:
    trained = {spec.name for spec in captured.inputs if spec.requires_grad}
    try:
        split = _split(captured, trained, together=False, choices=choices)
        if batch_norm == "global" and any(map(is_statistic, split.layouts.values())):
            split = _split(captured, trained, together=True)
        if (sums := _sums_of_several(split)) is not None:
            where_rows_meet(sums)
    except PassError as error:
        if whole_batch == "never":
            raise mixed_batch_error(error) from error
        if _is_split_by(captured, trained, choices=choices):
            raise UnsupportedModelError(f"rows are not known to be apart at every length: {error}") from error
        if choices or not keeps_rows_apart(captured):
            where_rows_meet(error)
        try:
            split = _split(captured, trained, together=True)
        except PassError as remaining:
            raise mixed_batch_error(remaining) from error
    bound_data_sizes(split.rowwise)
    shape_env = captured.fake_mode.shape_env
    assert shape_env is not None, "captures have symbols"
    if fixed := [length.name for length in captured.lengths if length.symbol in shape_env.replacements]:
        raise UnsupportedModelError(f"the analysis has taken {fixed[0]} for a number")
    sources = _gradient_sources(split, trained)
    return GraphAnalysis(
        captured=captured,
        split=split,
        needs_grad=frozenset(sources),
        input_kinds=_input_kinds(captured, split),
        # What comes by way of a module that runs as written comes to its result itself.
        differentiable_outputs=frozenset[int]().union(*(each.outputs for each in sources.values())),
        reach=_reach(captured, split, sources),
    )


def _reach(captured: CapturedGraph, split: BatchSplit, sources: Mapping[str, Sources]) -> Reach:
    trained = [spec for spec in captured.inputs if spec.requires_grad]
    calls = [
        WrittenCall(
            node.name,
            str(node.target),
            {int(user.args[1]): sources[user.name] for user in node.users if user.name in sources},
        )
        for node in reversed(split.rowwise.graph.nodes)
        if runs_whole(node)
    ]
    return Reach(
        parameters={
            spec.fqn: sources[spec.name]
            for spec in trained
            if isinstance(spec, ParameterInput) and spec.name in sources
        },
        inputs={
            spec.name: sources.get(spec.name, Sources()) for spec in trained if isinstance(spec, UserInput)
        },
        calls=tuple(calls),
    )


def _gradient_sources(split: BatchSplit, trained: Collection[str]) -> dict[str, Sources]:
    """Of each value that needs a gradient. It comes to rows from the user, and to sums by way of the scalar part."""
    in_rows = gradient_sources(split.rowwise, trained)
    places: dict[str, set[int]] = defaultdict(set)  # of the user's outputs, by output of the row-wise part
    of_scalars: dict[str, set[int]] = defaultdict(set)  # the same, by output of the scalar part
    scalars = [] if split.epilogue is None else output_values(split.epilogue.graph)
    for place, output in enumerate(split.user_outputs):
        if isinstance(output, UserRows):
            places[output.name].add(place)
        elif isinstance(output, UserScalar):
            of_scalars[scalars[output.index].name].add(place)
    if split.epilogue is not None:
        sums = {node.name: str(node.target) for node in placeholders(split.epilogue.graph)}
        inputs = [name for name, made in sums.items() if made in in_rows.outputs]
        for name, outputs in outputs_by_value(split.epilogue, inputs).items():
            places[sums.get(name, "")].update(*(of_scalars[output] for output in outputs))
    union = functools.cache(lambda names: frozenset[int]().union(*(places[name] for name in names)))
    found = {}
    for value in (value for value, names in in_rows.outputs.items() if union(names)):
        origins = in_rows.nearest.get(value, frozenset())
        arguments = frozenset(item for item in origins if isinstance(item, Argument))
        found[value] = Sources(union(origins - arguments), arguments)
    return found


class SumsError(PassError):
    """Sums over rows are more than one number."""


def _sums_of_several(split: BatchSplit) -> SumsError | None:
    """Names a sum over rows that is more than one number: as losses are not, and means over a sequence are."""
    names, prologue = set(split.partial_names), split.prologue
    sums = [node for node in split.rowwise.graph.nodes if node.name in names]
    sums += (
        []
        if prologue is None
        else [node for node in output_values(prologue.graph) if isinstance(node, fx.Node)]
    )
    for node in sums:
        value = node.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and value.dim()
            and not isinstance(split.layouts.get(node.name), KeyCounts)
        ):
            return SumsError(node, f"a sum over it has the shape {list(value.shape)}")
    return None


def keeps_rows_apart(captured: CapturedGraph, *, with_sums: bool = True) -> bool:
    """Whether each sample of a captured graph is computed by itself, sums over all of them apart; without `with_sums`,
    apart from sums that are one number.
    """
    trained = {spec.name for spec in captured.inputs if spec.requires_grad}
    try:
        split = _split(captured, trained, together=False)
    except PassError:
        return False
    return with_sums or _sums_of_several(split) is None


def _without_lengths(captured: CapturedGraph) -> CapturedGraph:
    """Described as a graph is whose lengths have become numbers."""
    inputs = tuple(item for item in captured.inputs if not isinstance(item, LengthInput))
    return replace(captured, inputs=inputs, lengths=())


def _is_split_by(captured: CapturedGraph, trained: Collection[str], *, choices: bool) -> bool:
    """Whether a graph whose rows meet, as far as is known of its lengths, keeps them apart at those of the
    capture.
    """
    if not captured.lengths:
        return False
    graph_module = at_numbers(captured.graph_module, captured.numbers_at())
    try:
        fixed = replace(_without_lengths(captured), graph_module=graph_module)
        _split(fixed, trained, together=False, choices=choices)
    except PassError:
        return False
    return True


def _split(
    captured: CapturedGraph, trained: Collection[str], *, together: bool, choices: bool = True
) -> BatchSplit:
    inputs = captured.inputs
    return split_batch(
        captured.graph_module,
        batch_inputs=[spec.name for spec in inputs if isinstance(spec, BatchInput)],
        replicated_inputs=[spec.name for spec in inputs if isinstance(spec, ReplicatedInput)],
        gradient_inputs=trained,
        num_user_outputs=captured.num_user_outputs,
        buffer_updates=captured.buffer_updates,
        rows_symbol=captured.rows_symbol,
        together=together,
        choices=choices,
    )


def mixed_batch_error(error: PassError) -> BatchMixedError:
    """The user's error for what a pass refuses: operator, reason, and the line of the user's model."""
    node = error.node
    operator = "" if node is None else str(node.target)
    frames = "" if node is None else str(node.meta.get("stack_trace") or "")
    return BatchMixedError(operator, reason=error.reason, location=user_location(frames))


def _input_kinds(captured: CapturedGraph, split: BatchSplit) -> dict[str, str]:
    kinds = {spec.name: spec.kind for spec in captured.inputs}
    for node in split.rowwise.graph.nodes:
        if node.op == "placeholder" and node.name not in kinds:
            kinds[node.name] = node.name if node.name in EXTRA_INPUTS else "prologue"
    return kinds


def sizes_of_call(captured: CapturedGraph, values: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
    """Rows and lengths of a call with these values."""
    batch = next(spec.position for spec in captured.inputs if isinstance(spec, BatchInput))
    position_of = {spec.name: spec.position for spec in captured.inputs}
    lengths = (values[position_of[length.carrier]].shape[length.dim] for length in captured.lengths)
    return int(values[batch].shape[0]), tuple(map(int, lengths))


def with_fixed_inputs(
    captured: CapturedGraph, values: Sequence[Any], digest: Callable[[Any], list[float]]
) -> CapturedGraph:
    """With those inputs of which it is not known whether they have rows: dimension 0 is as long as the batch of this
    call, and the model's code has made a number of it. ``digest``: numbers that differ where values do.
    """
    rows, _ = sizes_of_call(captured, values)
    found = {
        spec.name: digest(values[spec.position])
        for spec in captured.inputs
        if isinstance(spec, ReplicatedInput) and tuple(values[spec.position].shape[:1]) == (rows,)
    }
    return replace(captured, fixed_inputs=found)


def in_order_of_arguments(captured: CapturedGraph) -> CapturedGraph:
    """Each node behind its arguments, depth first from the outputs.

    The walk sees arguments and outputs alone, in the order in which they are written, so that two graphs which differ
    in the order of their nodes come out equal. A captured graph changes nothing in place, so that any such order
    computes the same. What no output needs is left out, but for the user's inputs.
    """
    source = captured.graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    constants: dict[str, object] = {}
    for node in source.graph.find_nodes(op="placeholder"):
        # Unlike `placeholder`, which makes letters small.
        copies[node] = graph.create_node(node.op, node.target, name=node.name)
        copies[node].meta = dict(node.meta)
    for node in _from_outputs(source.graph):
        if node in copies:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        target = node.target
        if node.op == "get_attr":
            target = f"constant_{len(constants)}"
            constants[target] = getattr(source, str(node.target))
        copies[node] = graph.create_node(node.op, target, args, kwargs)
        copies[node].meta = dict(node.meta)
    graph_module = fx.GraphModule(constants, graph)
    graph_module.meta = dict(source.meta)
    inputs = in_order_of_use(graph_module, captured.inputs)
    return replace(captured, graph_module=graph_module, inputs=inputs).with_fingerprints()


def _from_outputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that outputs need, each behind its arguments, without recursion: a chain may have thousands."""
    seen: set[fx.Node] = set()
    for output in graph.find_nodes(op="output"):
        seen.add(output)
        stack: list[tuple[fx.Node, Iterator[fx.Node]]] = [(output, iter(output.all_input_nodes))]
        while stack:
            node, arguments = stack[-1]
            following = next((item for item in arguments if item not in seen), None)
            if following is None:
                stack.pop()
                yield node
            else:
                seen.add(following)
                stack.append((following, iter(following.all_input_nodes)))
