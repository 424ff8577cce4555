"""Build the functions of one stage: trace, split, let gradients and outputs be written in place, compile.

In: a `StageGraph`, its signature, the compiler. Out: `StageFunctions`, which know positions of inputs and
outputs only. Terms as in compile_stages.py; a *distinct* output is one of the graph's outputs after equal
ones have been put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from rannc_backend.kernels.gradient_writes import FIRST
from rannc_backend.passes.data_sizes import OF_ANY_SIZE
from rannc_backend.passes.pipeline import run_pass, with_dump_of_now
from rannc_backend.passes.plain_numbers import new_size
from rannc_backend.passes.stage.equal_values import ShareEqualValues
from rannc_backend.passes.stage.gradient_buckets import GROUP_BYTES, How, WriteIntoBuckets
from rannc_backend.passes.stage.partition_backward import Box
from rannc_backend.passes.stage.recompute import saved_bytes
from rannc_backend.passes.stage.send_slices import WriteToDestinations, storable
from rannc_backend.passes.stage.single_scatters import ChooseInsteadOfScatter
from rannc_backend.passes.stage.split_backward import SplitBackward
from rannc_backend.passes.stage.split_stages import StageGraph
from rannc_backend.passes.stage.stage_boundaries import SecureGradients, SecureOutputs
from rannc_backend.stages.joint_graph import (
    BoxedCallable,
    SplitJoint,
    SplitStage,
    TracedStage,
    TraceJoint,
    size_conditions,
)
from rannc_backend.stages.signature import Sizes, StageSignature


def begin_compiling(devices: Iterable[str]) -> None:
    """Begin, beside what this thread does, what every graph that Inductor compiles for devices of these types
    needs.
    """
    from rannc_backend.stages import inductor  # imports Inductor

    inductor.begin_compiling(devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What messages with several values hold, so that it may be written into them: positions of outputs, and
    of inputs' gradients.
    """

    outputs: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class Inference:
    """The function of a stage without backward: takes [rows, *inputs, *constants, *destinations of `stored`],
    gives the other outputs.
    """

    function: BoxedCallable
    stored: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class StageFunctions:
    """The compiled functions of all equal stages; knows positions only, no names.

    `forward` takes [rows, *inputs, *constants, *destinations of `stored_outputs`] and returns the other
    distinct outputs, then saved values. `backward` takes [*saved in `saved_order`, *tangents, accumulate,
    *views of the gradients of `delivered`, *destinations of `stored_gradients`] (accumulate only where
    something is delivered) and returns the gradients of `returned`, which are positions of inputs. Where there is a
    `backward_weights`, `backward` takes neither accumulate nor views and returns besides what is kept; that, accumulate
    and views are what `backward_weights` takes.
    `output_index[i]` is where output i is found among the distinct outputs, which `stored_outputs` counts
    too; `tangent_of[j]` is the distinct output that tangent j belongs to.
    """

    forward: BoxedCallable | None = None
    backward: BoxedCallable | None = None
    backward_weights: BoxedCallable | None = None
    infer: Inference | None = None
    make_infer: Callable[[], Inference]
    num_outputs: int
    output_index: tuple[int, ...]
    stored_outputs: tuple[int, ...] = ()
    tangent_of: tuple[int, ...] = ()
    tangent_dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    saved_order: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    stored_gradients: tuple[int, ...] = ()
    delivered: tuple[int, ...] = ()
    # How each term of the gradients of `delivered` gets into its bucket, and how many calls copy some.
    how: Mapping[int, tuple[How, ...]] = field(default_factory=dict)
    num_gradient_calls: int = 0
    # Of `returned`: gradients that are views of memory that the caller or `saved` owns, and are copied.
    borrowed: frozenset[int] = frozenset()
    saved_bytes: sympy.Expr = sympy.Integer(0)
    kept_bytes: sympy.Expr = sympy.Integer(0)  # between the two parts of a backward
    # What compilation assumed of the sizes, as a function so that it covers what was compiled last.
    size_conditions: Callable[[], tuple[sympy.Basic, ...]]
    symbols: tuple[sympy.Symbol, ...]

    def broken_condition(self, sizes: Sizes) -> sympy.Basic | None:
        """A condition that the sizes of a call break (index arithmetic in 32 bits has a limit); None when it may
        run.
        """
        known = dict(zip(self.symbols, map(sympy.Integer, sizes), strict=True))
        for condition in self.size_conditions():
            if condition.subs(known) == sympy.false:
                return condition
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What the outputs of a backward graph are: gradients of the stage's inputs, by place among the
    outputs.
    """

    parameters: Mapping[int, int]
    returned: Mapping[int, int]
    borrowed: frozenset[int]

    @property
    def num_gradients(self) -> int:
        """Outputs of the backward graph."""
        return len(self.parameters) + len(self.returned)


class StageBuilder:
    """Compiles one stage; holds what the steps share."""

    def __init__(
        self,
        stage: StageGraph,
        signature: StageSignature,
        fake_mode: FakeTensorMode,
        compiler: str,
        activation_budget: float,
        stored: Stored = Stored(),
        *,
        splits_backward: bool = False,
    ) -> None:
        self.splits_backward = splits_backward
        self.signature = signature
        self.fake_mode = fake_mode
        self.inductor = compiler == "inductor"
        self.activation_budget = activation_budget
        with fake_mode:
            fakes = signature.fakes(requires_grad=False)
        own = signature.lifted(stage.graph_module)
        secured = run_pass(SecureOutputs(fakes[1:], fake_mode), own)
        self.graph_module, self.output_index = secured.graph_module, secured.output_index
        needs = {self.output_index[position] for position in signature.grad_outputs}
        self.num_outputs = len(set(self.output_index))
        self.needs_grad = [index in needs for index in range(self.num_outputs)]
        # Operators that run one by one have memory of their own: a copy would be a copy.
        self._stored_gradients = stored.gradients if self.inductor else frozenset()
        self._may_store = (
            {self.output_index[position] for position in stored.outputs} if self.inductor else set()
        )

    def build(self, training: bool) -> StageFunctions:
        """Compile the stage, forward and backward or inference alone."""
        if self.inductor:
            begin_compiling(
                {
                    value.device.type
                    for value in (*self.signature.values, *self.signature.output_values)
                    if isinstance(value, torch.Tensor)
                }
            )
        functions = StageFunctions(
            make_infer=with_dump_of_now(self.make_infer),
            num_outputs=self.num_outputs,
            output_index=self.output_index,
            size_conditions=self._conditions,
            symbols=self.signature.symbols,
        )
        if not training:
            functions.infer = self.make_infer()
        else:
            traced = self.trace()
            if traced.tangent_of:
                self._add_training(functions, traced)
            else:
                # Nothing here is trained: forward saves nothing and backward has nothing to do.
                inference = self._forward_only(traced.joint) if self.inductor else self.make_infer()
                functions.forward, functions.stored_outputs = inference.function, inference.stored
        return functions

    def trace(self) -> TracedStage:
        """The joint graph; Inductor's simplified, once for all activation budgets at which it is split."""
        with self.fake_mode:
            fakes = self.signature.fakes(requires_grad=True)
        # Refuses a stage that fits one batch size only, before anything else meets its numbers in place of
        # symbols.
        self._conditions()
        traced = self._trace_joint(fakes, self.needs_grad)
        self._conditions()
        if self.inductor and traced.tangent_of:
            from rannc_backend.stages.inductor import simplify_joint

            simplify_joint(traced.joint, self.fake_mode)
        if traced.tangent_of:
            run_pass(ShareEqualValues(), traced.joint)
        if self.inductor and traced.tangent_of:
            run_pass(ChooseInsteadOfScatter(), traced.joint)
        return traced

    def _conditions(self) -> tuple[sympy.Basic, ...]:
        return size_conditions(self.fake_mode, self.signature.rows_symbol, self.signature.symbols)

    def kept_anyway(self, forward: fx.GraphModule) -> frozenset[str]:
        """Names of the placeholders of a joint or forward graph that live as long as the stage."""
        names = [node.name for node in forward.graph.find_nodes(op="placeholder")]
        return frozenset(names[index] for index in self.signature.long_lived)

    def make_infer(self) -> Inference:
        """Compile the graph without backward."""
        if not self.inductor:
            return Inference(function=_without_rows(run_pass(Box(), self.graph_module).forward), stored=())
        with self.fake_mode:
            fakes = self.signature.fakes(requires_grad=False)
        return self._forward_only(self._trace_joint(fakes, [False] * self.num_outputs).joint)

    def _trace_joint(self, fakes: Sequence[Any], needs_grad: Sequence[bool]) -> TracedStage:
        traces = TraceJoint(
            fakes=fakes,
            needs_grad=needs_grad,
            fake_mode=self.fake_mode,
            decompositions=self._decompositions(),
        )
        return run_pass(traces, self.graph_module)

    def _forward_only(self, graph_module: fx.GraphModule) -> Inference:
        from rannc_backend.stages.inductor import compile_forward_only

        stored = storable(graph_module, self._may_store)
        function = compile_forward_only(_writing_outputs(graph_module, stored), self.fake_mode)
        return Inference(function=function, stored=stored)

    def _decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        targets = {node.target for node in self.graph_module.graph.nodes}
        depends = any(torch.Tag.dynamic_output_shape in getattr(target, "tags", ()) for target in targets)
        of_any_size = OF_ANY_SIZE if depends else {}
        if not self.inductor:
            return of_any_size
        from rannc_backend.stages.inductor import inductor_decompositions

        return {**inductor_decompositions(), **of_any_size}

    def split_safely(self, traced: TracedStage) -> tuple[SplitStage, Gradients]:
        """The two graphs, with gradients that are safe to hand on, and what those are."""
        # Input 0 of the joint graph is the batch size.
        positions = [index - 1 for index in traced.gradient_of]
        parameters = {i: p for i, p in enumerate(positions) if p in self.signature.trained}
        returned = {i: p for i, p in enumerate(positions) if i not in parameters}
        splits = SplitJoint(
            traced=traced, activation_budget=self.activation_budget, long_lived=self.signature.long_lived
        )
        split = run_pass(splits, traced.joint)
        safe = run_pass(SecureGradients(tuple(returned)), split.backward)
        borrowed = frozenset(positions[i] for i in safe.borrowed)
        return split, Gradients(parameters=parameters, returned=returned, borrowed=borrowed)

    def _add_training(self, functions: StageFunctions, traced: TracedStage) -> None:
        split, gradients = self.split_safely(traced)
        functions.saved_bytes = saved_bytes(
            split.forward, traced.num_outputs, self.kept_anyway(split.forward)
        )
        functions.tangent_of = traced.tangent_of
        positions_of = {index: self.output_index.index(index) for index in traced.tangent_of}
        functions.tangent_dtypes = {i: self.signature.output_values[p].dtype for i, p in positions_of.items()}
        functions.saved_order = split.saved_order
        functions.returned = tuple(gradients.returned.values())
        functions.borrowed = gradients.borrowed
        functions.stored_outputs = storable(split.forward, self._may_store)
        forward = _writing_outputs(split.forward, functions.stored_outputs)
        if self.splits_backward and gradients.parameters:
            graphs: list[fx.GraphModule] = [forward, *self._parts(functions, split, gradients)]
        else:
            backward = self._writing(functions, split.backward, gradients)
            graphs = [forward, self._returning(functions, backward, gradients)]
        if self.inductor:
            from rannc_backend.stages.inductor import compile_chain

            orders = [split.saved_order, range(len(graphs[-1].graph.find_nodes(op="placeholder")))]
            num_visible = [self.num_outputs - len(functions.stored_outputs), len(functions.returned)]
            compiled = compile_chain(
                graphs, num_visible=[*num_visible, 0], orders=orders, fake_mode=self.fake_mode
            )
        else:
            compiled = [run_pass(Box(), graph).forward for graph in graphs]
        functions.forward, functions.backward, *others = compiled
        functions.backward_weights = others[0] if others else None

    def _parts(
        self, functions: StageFunctions, split: SplitStage, gradients: Gradients
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The two graphs of a backward: of the gradients of inputs, which returns besides what the other takes."""
        parts = run_pass(SplitBackward(tuple(gradients.parameters)), split.backward)
        functions.kept_bytes = parts.kept_bytes(self.kept_anyway(split.forward))
        first = self._returning(functions, parts.first, gradients)
        positions = dict(enumerate(gradients.parameters.values()))
        second = Gradients(parameters=positions, returned={}, borrowed=frozenset())
        return first, self._writing(functions, parts.second, second)

    def _accumulate(self) -> Any:
        """Whether gradients are added to what is in their buckets, as a graph takes it."""
        shape_env = self.fake_mode.shape_env
        assert shape_env is not None, "traces have symbols"
        return new_size(shape_env, "accumulate", FIRST) if self.inductor else FIRST

    def _writing(
        self, functions: StageFunctions, backward: fx.GraphModule, gradients: Gradients
    ) -> fx.GraphModule:
        """The backward graph that writes gradients of parameters into buckets."""
        if gradients.parameters:
            with self.fake_mode:
                slots = {
                    position: self.signature.gradient_sum(position)
                    for position in gradients.parameters.values()
                }
                accumulate = self._accumulate()
                # Operators that run one by one announce each gradient by itself, since its memory is better
                # freed than filled up.
                writes = WriteIntoBuckets(
                    parameters=gradients.parameters,
                    slots=slots,
                    sparse=self.signature.sparse,
                    accumulate=accumulate,
                    fuse=self.inductor,
                    group_bytes=GROUP_BYTES if self.inductor else 0,
                )
                written = run_pass(writes, backward)
            backward = written.graph_module
            functions.delivered, functions.how, functions.num_gradient_calls = (
                written.positions,
                written.how,
                written.num_calls,
            )
        return backward

    def _returning(
        self, functions: StageFunctions, backward: fx.GraphModule, gradients: Gradients
    ) -> fx.GraphModule:
        """The backward graph, which returns gradients of inputs first, that writes them into messages where that is
        free. What is kept besides stays apart from a message, as Inductor copies into its memory.
        """
        candidates = [
            i
            for i, p in enumerate(functions.returned)
            if p in self._stored_gradients and p not in gradients.borrowed
        ]
        indices = storable(backward, candidates)
        functions.stored_gradients = tuple(functions.returned[i] for i in indices)
        functions.returned = tuple(p for i, p in enumerate(functions.returned) if i not in indices)
        return _writing_outputs(backward, indices)


def _without_rows(function: BoxedCallable) -> BoxedCallable:
    """The stage's own graph reads the batch size from a tensor and does not take it as an input."""

    def run(arguments: list[Any]) -> Sequence[Any]:
        del arguments[0]
        return function(arguments)

    return run


def _writing_outputs(graph_module: fx.GraphModule, indices: tuple[int, ...]) -> fx.GraphModule:
    """The graph that writes these outputs where it is told, or the same graph where there are none."""
    return run_pass(WriteToDestinations(indices), graph_module) if indices else graph_module
