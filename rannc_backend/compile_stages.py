"""Compile one stage graph into callables for forward, backward and inference.

In: a `StageGraph` (functional ATen ops on fakes with one symbol `rows`), which values need a gradient, the compiler.
Out: a `CompiledStage`, which runs on real tensors of any number of rows.

Terms. `compiler` "eager" runs the graphs' operators one by one; "inductor" compiles them to kernels. A *position* is an
index into the stage's inputs or outputs. Equal stages (same graph text, shapes, needs) share their compiled functions
through a `CompileCache` that the caller owns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from rannc_backend.compile_joint import SplitStage, TracedStage, row_conditions, split_joint, trace_joint
from rannc_backend.compile_signature import StageSignature, signature_of, structural_hash
from rannc_backend.compile_variants import Variants, with_hint
from rannc_backend.passes.partition_backward import boxed, deliver_early
from rannc_backend.passes.recompute import saved_bytes
from rannc_backend.passes.split_stages import StageGraph, StageInput, StageOutput
from rannc_backend.passes.stage_boundaries import secure_outputs

logger = logging.getLogger(__name__)

COMPILERS = ("eager", "inductor")

Saved = Sequence[Any]
"""What forward keeps for backward: a plain tuple of tensors and ints."""

ParameterSink = Callable[[int, Tensor], None]
"""Called with the position of a parameter among the stage's inputs and its gradient."""

BoxedCallable = Callable[[list[Any]], Sequence[Any]]


@dataclass(slots=True, kw_only=True)
class StageFunctions:
    """The compiled functions of all equal stages; knows positions only, no names.

    `forward` takes [rows, *inputs, *constants] and returns the distinct outputs, then saved values. `backward` takes
    [sink, *saved in `saved_order`, *tangents] and returns the gradients of `returned`, which are positions of inputs.
    `output_index[i]` is where output i is found among the distinct outputs; `tangent_of[j]` is the distinct output that
    tangent j belongs to.
    """

    forward: BoxedCallable | None = None
    backward: BoxedCallable | None = None
    infer: BoxedCallable | None = None
    make_infer: Callable[[], BoxedCallable]
    num_outputs: int
    output_index: tuple[int, ...]
    tangent_of: tuple[int, ...] = ()
    tangent_dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    saved_order: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    delivered: tuple[int, ...] = ()
    sink_in_graph: bool = False
    # Of `returned`: gradients that are views of memory that the caller or `saved` owns, and are copied.
    borrowed: frozenset[int] = frozenset()
    saved_bytes: sympy.Expr = sympy.Integer(0)
    # What compilation assumed of the batch size, as a function so that it covers what was compiled last.
    row_conditions: Callable[[], tuple[sympy.Basic, ...]]
    rows_symbol: sympy.Symbol

    def broken_condition(self, rows: int) -> sympy.Basic | None:
        """A condition that a number of rows breaks (index arithmetic in 32 bits has a limit); None when it may run."""
        for condition in self.row_conditions():
            if condition.subs(self.rows_symbol, rows) == sympy.false:
                return condition
        return None


@dataclass(slots=True)
class CompileCache:
    """Compiled functions by structure. One object per process, owned by the caller; `num_hits` is for tests and logs."""

    functions: dict[str, Variants[StageFunctions]] = field(default_factory=dict)
    num_hits: int = 0


class CompiledStage:
    """Forward, backward and inference of one stage.

    inputs, outputs: as in the stage graph; all positions index these.
    grad_outputs: outputs whose gradients `backward` takes, in this order.
    grad_inputs: inputs, other than parameters, whose gradients `backward` returns, in this order.
    grad_parameters: parameters whose gradients go to the sink.
    saved_bytes: bytes of what one forward saves, as an expression in the batch size; see `passes.recompute`.

    Outputs are contiguous and share no memory with inputs, but may share it with saved values and with each other: they
    must not be changed in place. Gradients that `backward` returns are contiguous and share no memory with `grads` or
    `saved`; those given to the sink may, so the sink copies or adds them at once.
    """

    def __init__(
        self,
        stage: StageGraph,
        signature: StageSignature,
        variants: Variants[StageFunctions],
    ) -> None:
        self.inputs: tuple[StageInput, ...] = stage.inputs
        self.outputs: tuple[StageOutput, ...] = stage.outputs
        self.grad_outputs = signature.grad_outputs
        self.grad_inputs = signature.grad_inputs
        self.grad_parameters = variants.built[0].delivered
        self.saved_bytes = variants.built[0].saved_bytes
        self._signature = signature
        self._variants = variants

    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Compute the outputs from `args` (by `inputs`), and what `backward` needs: a tuple of tensors and ints.

        The first saved value is the number of rows.
        """
        with _RunMode():
            rows, values = self._signature.bound(args)
            functions = self._variants.of(rows)
            assert functions.forward is not None, "the stage was compiled for inference only"
            results = functions.forward(values)
        outputs = [results[index] for index in functions.output_index]
        return outputs, (rows, *results[functions.num_outputs :])

    def backward(self, saved: Saved, grads: Sequence[Tensor | None], parameter_sink: ParameterSink) -> list[Tensor]:
        """Compute gradients from those of the outputs.

        Args:
            saved: as given by `forward`. A tuple stays valid for another call; a list is emptied, so that each saved
                value is freed after its last use.
            grads: by `grad_outputs`, in the output's shape; None stands for zeros.
            parameter_sink: called once per element of `grad_parameters`, in the order in which gradients are made.

        Returns the gradients by `grad_inputs`; zeros where none flows.
        """
        rows = saved[0]
        functions, signature = self._variants.of(rows), self._signature
        values = [saved[1 + position] for position in functions.saved_order]
        if isinstance(saved, list):
            saved.clear()
        by_input: dict[int, Tensor] = {}
        with _RunMode():
            if functions.backward is not None:
                values.extend(self._tangents(functions, rows, grads))
                if functions.sink_in_graph:
                    values.insert(0, parameter_sink)
                    results = functions.backward(values)
                else:
                    results = _call_and_deliver(functions, values, parameter_sink)
                by_input = dict(zip(functions.returned, results, strict=True))
                for position in functions.borrowed:
                    by_input[position] = by_input[position].clone()
            return [
                by_input[position] if position in by_input else signature.zeros_of_input(position, rows) for position in self.grad_inputs
            ]

    def infer(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Compute the outputs from `args` (by `inputs`); nothing is saved.

        Compiled with the stage if it was compiled for inference only, else at the first call.
        """
        with _RunMode():
            rows, values = self._signature.bound(args)
            functions = self._variants.of(rows)
            while functions.infer is None:
                functions.infer = functions.make_infer()
                self._variants.forget()  # what was compiled now may have conditions of its own
                functions = self._variants.of(rows)
            results = functions.infer(values)
        return [results[index] for index in functions.output_index]

    def _tangents(self, functions: StageFunctions, rows: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradient of each distinct output that takes one: the sum over the positions where it is listed."""
        assert len(grads) == len(self.grad_outputs), f"{len(grads)} gradients for {len(self.grad_outputs)} outputs"
        sums: dict[int, Tensor] = {}
        for position, grad in zip(self.grad_outputs, grads, strict=True):
            if grad is not None:
                index = functions.output_index[position]
                sums[index] = sums[index] + grad if index in sums else grad
        tangents = []
        for index in functions.tangent_of:
            tangent = sums.get(index)
            if tangent is None:
                tangent = self._signature.zeros_of_output(functions.output_index.index(index), rows)
            tangents.append(tangent.to(functions.tangent_dtypes[index]).contiguous())
        return tangents


def _call_and_deliver(functions: StageFunctions, values: list[Any], sink: ParameterSink) -> list[Tensor]:
    assert functions.backward is not None
    results = list(functions.backward(values))
    returned = results[len(functions.delivered) :]
    del results[len(functions.delivered) :]
    results.reverse()
    for position in functions.delivered:
        sink(position, results.pop())
    return returned


class _RunMode:
    """No autograd and no autocast: the graphs contain both already."""

    __slots__ = ("_autocast", "_no_grad")

    def __enter__(self) -> None:
        self._no_grad = torch.no_grad()
        self._no_grad.__enter__()
        self._autocast = torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else None
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        self._no_grad.__exit__(*error)


def compile_stage(
    stage: StageGraph,
    *,
    needs_grad: frozenset[str],
    requires_grad_parameters: frozenset[str],
    fake_mode: FakeTensorMode,
    rows_symbol: sympy.Symbol,
    compiler: str,
    activation_budget: float = 1.0,
    training: bool,
    cache: CompileCache | None = None,
    rows_hint: int | None = None,
) -> CompiledStage:
    """Compile one stage.

    Args:
        needs_grad: names of values (batch inputs, boundary values, outputs) through which gradients flow. A name too many
            costs work but is harmless.
        requires_grad_parameters: names of the parameter placeholders that are trained.
        fake_mode: of the stage graph's ``meta["val"]``, whose batch sizes are expressions of `rows_symbol`.
        compiler: "eager" or "inductor".
        activation_budget: from 0 to 1; see `compile_joint`.
        training: False compiles no backward; then only `infer` may be called.
        cache: equal stages compiled with the same cache share their functions.
        rows_hint: the number of rows to expect. Others run too; where they need other code, it is compiled when they come.
    """
    assert compiler in COMPILERS, f"unknown compiler {compiler!r}"
    assert 0.0 <= activation_budget <= 1.0, f"activation budget {activation_budget} is not in [0, 1]"
    signature = signature_of(stage, needs_grad, requires_grad_parameters, rows_symbol)
    key = structural_hash(stage.graph_module, signature, (compiler, activation_budget, training))
    if cache is not None and key in cache.functions:
        cache.num_hits += 1
        logger.debug("stage %d has the structure of an earlier one", stage.index)
        return CompiledStage(stage, signature, cache.functions[key])

    def build(rows: int | None) -> StageFunctions:
        if rows is None:
            return StageBuilder(stage, signature, fake_mode, compiler, activation_budget).build(training)
        hinted, mode, symbol = with_hint(stage, rows_symbol, rows)
        again = signature_of(hinted, needs_grad, requires_grad_parameters, symbol)
        functions = StageBuilder(hinted, again, mode, compiler, activation_budget).build(training)
        functions.saved_bytes = functions.saved_bytes.subs(symbol, rows_symbol)
        return functions

    variants = Variants(build, [build(rows_hint)])
    if cache is not None:
        cache.functions[key] = variants
    return CompiledStage(stage, signature, variants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What the outputs of a backward graph are: gradients of the stage's inputs, by place among the outputs."""

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
    ) -> None:
        self.signature = signature
        self.fake_mode = fake_mode
        self.inductor = compiler == "inductor"
        self.activation_budget = activation_budget
        with fake_mode:
            fakes = signature.fakes(requires_grad=False)
        self.graph_module, self.output_index = secure_outputs(signature.lifted(stage.graph_module), fakes[1:], fake_mode)
        needs = {self.output_index[position] for position in signature.grad_outputs}
        self.num_outputs = len(set(self.output_index))
        self.needs_grad = [index in needs for index in range(self.num_outputs)]

    def build(self, training: bool) -> StageFunctions:
        """Compile the stage, forward and backward or inference alone."""
        functions = StageFunctions(
            make_infer=self.make_infer,
            num_outputs=self.num_outputs,
            output_index=self.output_index,
            row_conditions=functools.partial(row_conditions, self.fake_mode, self.signature.rows_symbol),
            rows_symbol=self.signature.rows_symbol,
        )
        if not training:
            functions.infer = self.make_infer()
        else:
            traced = self.trace()
            if traced.tangent_of:
                self._add_training(functions, traced)
            else:
                # Nothing here is trained: forward saves nothing and backward has nothing to do.
                functions.forward = self._forward_only(traced.joint) if self.inductor else self.make_infer()
        return functions

    def trace(self) -> TracedStage:
        """The joint graph."""
        with self.fake_mode:
            fakes = self.signature.fakes(requires_grad=True)
        # Refuses a stage that fits one batch size only, before anything else meets its numbers in place of symbols.
        row_conditions(self.fake_mode, self.signature.rows_symbol)
        traced = trace_joint(self.graph_module, fakes, self.needs_grad, self.fake_mode, self._decompositions())
        row_conditions(self.fake_mode, self.signature.rows_symbol)
        return traced

    def _split(self, traced: TracedStage) -> SplitStage:
        if self.inductor:
            from rannc_backend.compile_inductor import simplify_joint

            simplify_joint(traced.joint, self.fake_mode)
        return split_joint(
            traced,
            activation_budget=self.activation_budget,
            long_lived=self.signature.long_lived,
        )

    def kept_anyway(self, forward: fx.GraphModule) -> frozenset[str]:
        """Names of the placeholders of a joint or forward graph that live as long as the stage."""
        names = [node.name for node in forward.graph.find_nodes(op="placeholder")]
        return frozenset(names[index] for index in self.signature.long_lived)

    def make_infer(self) -> BoxedCallable:
        """Compile the graph without backward."""
        if not self.inductor:
            return _without_rows(boxed(self.graph_module))
        with self.fake_mode:
            fakes = self.signature.fakes(requires_grad=False)
        traced = trace_joint(self.graph_module, fakes, [False] * self.num_outputs, self.fake_mode, self._decompositions())
        return self._forward_only(traced.joint)

    def _forward_only(self, graph_module: fx.GraphModule) -> BoxedCallable:
        from rannc_backend.compile_inductor import compile_forward_only

        return compile_forward_only(graph_module, self.fake_mode)

    def _decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        if not self.inductor:
            return {}
        from rannc_backend.compile_inductor import inductor_decompositions

        return inductor_decompositions()

    def split_safely(self, traced: TracedStage) -> tuple[SplitStage, Gradients]:
        """The two graphs, with gradients that are safe to hand on, and what those are."""
        # Input 0 of the joint graph is the batch size.
        positions = [index - 1 for index in traced.gradient_of]
        parameters = {i: p for i, p in enumerate(positions) if p in self.signature.trained}
        returned = {i: p for i, p in enumerate(positions) if i not in parameters}
        split = self._split(traced)
        borrowed = frozenset(positions[i] for i in _make_safe(split.backward, list(returned)))
        return split, Gradients(parameters=parameters, returned=returned, borrowed=borrowed)

    def _add_training(self, functions: StageFunctions, traced: TracedStage) -> None:
        split, gradients = self.split_safely(traced)
        functions.saved_bytes = saved_bytes(split.forward, traced.num_outputs, self.kept_anyway(split.forward))
        functions.tangent_of = traced.tangent_of
        positions_of = {index: self.output_index.index(index) for index in traced.tangent_of}
        functions.tangent_dtypes = {i: self.signature.output_values[p].dtype for i, p in positions_of.items()}
        functions.saved_order = split.saved_order
        functions.delivered = tuple(gradients.parameters.values())
        functions.returned = tuple(gradients.returned.values())
        functions.borrowed = gradients.borrowed
        if not self.inductor:
            functions.forward = boxed(split.forward)
            functions.backward = boxed(deliver_early(split.backward, gradients.parameters, gradients.num_gradients))
            functions.sink_in_graph = True
            return
        from rannc_backend.compile_inductor import compile_pair

        _reorder_outputs(split.backward, [*gradients.parameters, *gradients.returned])
        functions.forward, functions.backward = compile_pair(
            split.forward,
            split.backward,
            num_outputs=self.num_outputs,
            saved_order=split.saved_order,
            fake_mode=self.fake_mode,
        )


def _without_rows(function: BoxedCallable) -> BoxedCallable:
    """The stage's own graph reads the batch size from a tensor and does not take it as an input."""

    def run(arguments: list[Any]) -> Sequence[Any]:
        del arguments[0]
        return function(arguments)

    return run


def _make_safe(backward: fx.GraphModule, indices: Sequence[int]) -> list[int]:
    """Make the given outputs contiguous; give those that still share memory with an input or another output."""
    (output,) = backward.graph.find_nodes(op="output")
    results = list(output.args[0])
    taken = {
        node.meta["val"].untyped_storage()._cdata
        for node in backward.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], Tensor)
    }
    borrowed = []
    for index in indices:
        value = results[index].meta["val"]
        if not value.is_contiguous():
            with backward.graph.inserting_before(output):
                results[index] = backward.graph.call_function(
                    torch.ops.aten.clone.default, (results[index],), {"memory_format": torch.contiguous_format}
                )
            value = torch.empty_like(value, memory_format=torch.contiguous_format)
            results[index].meta.update(val=value, autograd_backward=True)
        if value.untyped_storage()._cdata in taken:
            borrowed.append(index)
        taken.add(value.untyped_storage()._cdata)
    output.args = (tuple(results),)
    backward.recompile()
    return borrowed


def _reorder_outputs(backward: fx.GraphModule, order: Sequence[int]) -> None:
    (output,) = backward.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0][index] for index in order),)
    if "desc" in output.meta:
        output.meta["desc"] = [output.meta["desc"][index] for index in order]
    backward.recompile()
