"""Compile one stage graph into callables for forward, backward and inference.

In: a `StageGraph` (functional ATen ops on fakes with one symbol `rows`), which values need a gradient, the
compiler.
Out: a `CompiledStage`, which runs on real tensors of any number of rows.

Terms. `compiler` "eager" runs the graphs' operators one by one; "inductor" compiles them to kernels. A
*position* is an index into the stage's inputs or outputs. Equal stages (same graph text, shapes, needs) share
their compiled functions through a `CompileCache` that the caller owns.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rannc_backend.kernels.gradient_views import GradientTables
from rannc_backend.kernels.gradient_writes import listening
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.passes.pipeline import with_dump_of_now
from rannc_backend.passes.stage.recompute import segments_of
from rannc_backend.passes.stage.split_stages import StageGraph, StageInput, StageOutput
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.settings.rare_collections import rare_collections
from rannc_backend.stages.build import StageBuilder, StageFunctions, Stored
from rannc_backend.stages.gradient_sink import GradientSink, ScratchGradients, open_targets
from rannc_backend.stages.signature import Sizes, StageSignature, signature_of, structural_hash
from rannc_backend.stages.variants import Variants, with_hints

logger = logging.getLogger(__name__)

COMPILERS = ("eager", "inductor")

Saved = Sequence[Any]
"""What forward keeps for backward: a plain tuple of tensors and ints."""

NOTHING: Mapping[int, Tensor] = MappingProxyType({})


def minds_rows(compiler: str, activation_budget: float) -> bool:
    """Whether what is compiled depends on how many rows are expected.

    Inductor tunes its kernels to them. With a part of the activations' budget it depends on them what is best
    saved; all, nothing or segments need no choice, and operators that run one by one do not care.
    """
    return compiler == "inductor" or activation_budget not in (0.0, SEGMENTS_BUDGET, 1.0)


@dataclass(slots=True)
class CompileCache:
    """Compiled functions by structure. One object per process, owned by the caller; `num_hits` is for tests
    and logs.
    """

    functions: dict[str, Variants[StageFunctions]] = field(default_factory=dict)
    num_hits: int = 0


class CompiledStage:
    """Forward, backward and inference of one stage.

    inputs, outputs: as in the stage graph; all positions index these.
    grad_outputs: outputs whose gradients `backward` takes, in this order.
    grad_inputs: inputs, other than parameters, whose gradients `backward` returns, in this order.
    grad_parameters: parameters whose gradients go to the sink.
    stored_outputs, stored_gradients: positions of outputs, and of inputs of which the gradient is returned,
    that are best given a
        destination: they are written there by what computes them. The others are made in memory of their own.
    how_gradients_are_written: by parameter, of each term; see `passes.gradient_buckets`.
    gradient_copies: what one backward copies to the sink, and what is made there.
    gradient_tables: what the kernel needs that copies gradients on a GPU, made in the first backwards and
    then found again.
    saved_bytes: bytes of what one forward saves, as an expression in the batch size; see `passes.recompute`.
    splits_backward: whether `backward_inputs` and `backward_weights` may be called.
    kept_bytes: the same of what the first part of a backward keeps for the second.

    Outputs are contiguous and share no memory with inputs, but may share it with saved values and with each
    other: they must not be changed in place. Gradients that `backward` returns are contiguous and share no
    memory with `grads` or `saved`. What has a destination is there, and shares memory with nothing else.
    """

    def __init__(
        self,
        stage: StageGraph,
        signature: StageSignature,
        variants: Variants[StageFunctions],
        *,
        splits_backward: bool = False,
    ) -> None:
        self.splits_backward = splits_backward
        self.inputs: tuple[StageInput, ...] = stage.inputs
        self.outputs: tuple[StageOutput, ...] = stage.outputs
        self.grad_outputs = signature.grad_outputs
        self.grad_inputs = signature.grad_inputs
        functions = variants.built[0]
        self.grad_parameters = functions.delivered
        self.saved_bytes, self.kept_bytes = functions.saved_bytes, functions.kept_bytes
        stored = (
            functions.stored_outputs
            if functions.forward is not None or functions.infer is None
            else functions.infer.stored
        )
        self.stored_outputs = tuple(
            position for position, index in enumerate(functions.output_index) if index in stored
        )
        self.stored_gradients = functions.stored_gradients
        self.how_gradients_are_written = functions.how
        self.gradient_copies = _gradient_copies(functions, signature)
        self._signature = signature
        self._variants = variants
        self.gradient_tables = GradientTables()

    def scratch_gradients(self, *, keep_adding: bool = True) -> ScratchGradients:
        """A sink with memory of its own for the gradients of the parameters."""
        # Of a sparse gradient the sink has rows, and graphs take one number.
        values, sparse = self._signature.values, self._signature.sparse
        shapes = {p: values[p].new_empty(1) if p in sparse else values[p] for p in self.grad_parameters}
        dtypes = {position: self._signature.sum_dtype(position) for position in self.grad_parameters}
        return ScratchGradients(shapes, dtypes, keep_adding=keep_adding)

    def parameter_dtype(self, position: int) -> torch.dtype:
        """Of a parameter; its gradients may be summed in a wider one."""
        return self._signature.values[position].dtype

    def forward(
        self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Compute the outputs from `args` (by `inputs`), and what `backward` needs: a tuple of tensors and
        ints.

        `destinations`: contiguous memory for outputs, by position. The first saved value is the number of
        rows.
        """
        with _RunMode():
            sizes, values = self._signature.bound(args)
            functions = self._variants.of(sizes)
            assert functions.forward is not None, "the stage was compiled for inference only"
            given = self._destinations(functions, functions.stored_outputs, destinations, sizes)
            values.extend(given.values())
            results = functions.forward(values)
            outputs = self._outputs(functions, results, given, destinations)
        return outputs, (sizes, *results[functions.num_outputs - len(given) :])

    def backward(
        self,
        saved: Saved,
        grads: Sequence[Tensor | None],
        sink: GradientSink,
        destinations: Mapping[int, Tensor] = NOTHING,
    ) -> list[Tensor]:
        """Compute gradients from those of the outputs.

        Args:
            saved: as given by `forward`. A tuple stays valid for another call; a list is emptied, so that
            each saved
                value is freed after its last use.
            grads: by `grad_outputs`, in the output's shape; None stands for zeros.
            sink: where gradients of parameters go, those of `grad_parameters`.
            destinations: contiguous memory for returned gradients, by the positions of their inputs.

        Returns the gradients by `grad_inputs`; zeros where none flows.
        """
        gradients, kept = self._backward(saved, grads, sink, destinations)
        self.backward_weights(kept, sink)
        return gradients

    def backward_inputs(
        self,
        saved: Saved,
        grads: Sequence[Tensor | None],
        destinations: Mapping[int, Tensor] = NOTHING,
    ) -> tuple[list[Tensor], list[Any]]:
        """The first part of `backward`, of a stage that was compiled for two: the gradients by `grad_inputs`, and what
        `backward_weights` needs.
        """
        return self._backward(saved, grads, None, destinations)

    def backward_weights(self, kept: list[Any], sink: GradientSink) -> None:
        """The second part: the gradients of parameters go to the sink. `kept` is emptied."""
        if not kept:
            return
        functions = self._variants.of(kept[0])
        values = kept[1:]
        kept.clear()
        assert functions.backward_weights is not None, "something is kept for what was not compiled"
        with _RunMode():
            accumulate, views = open_targets(sink, functions.delivered)
            values += [accumulate, *views]
            del views
            with listening(sink, self.gradient_tables):
                functions.backward_weights(values)

    def _backward(
        self,
        saved: Saved,
        grads: Sequence[Tensor | None],
        sink: GradientSink | None,
        destinations: Mapping[int, Tensor],
    ) -> tuple[list[Tensor], list[Any]]:
        """Without a sink, nothing may go to one: the stage has two parts, or nothing in it is trained."""
        sizes = saved[0]
        kept: list[Any] = []
        functions, signature = self._variants.of(sizes), self._signature
        values = [saved[1 + position] for position in functions.saved_order]
        if isinstance(saved, list):
            saved.clear()
        by_input: dict[int, Tensor] = {}
        with _RunMode():
            if functions.backward is not None:
                values.extend(self._grad_outputs(functions, sizes, grads))
                if functions.delivered and functions.backward_weights is None:
                    assert sink is not None, "the stage was compiled for a backward in one part"
                    accumulate, views = open_targets(sink, functions.delivered)
                    values += [accumulate, *views]
                    del views
                for position in functions.stored_gradients:
                    memory = destinations.get(position)
                    by_input[position] = signature.empty_input(position, sizes) if memory is None else memory
                    values.append(by_input[position])
                with listening(sink, self.gradient_tables) if sink is not None else contextlib.nullcontext():
                    results = functions.backward(values)
                if functions.backward_weights is not None:
                    kept += [sizes, *results[len(functions.returned) :]]
                    results = results[: len(functions.returned)]
                by_input.update(zip(functions.returned, map(plain_memory, results), strict=True))
                for position in functions.borrowed:
                    by_input[position] = by_input[position].clone()
            for position in self.grad_inputs:
                if position not in by_input:
                    by_input[position] = signature.zeros_of_input(position, sizes)
                _move(by_input, position, destinations)
        return [by_input[position] for position in self.grad_inputs], kept

    def infer(self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING) -> list[Tensor]:
        """Compute the outputs from `args` (by `inputs`), to `destinations` where those are given; nothing is
        saved.

        Compiled with the stage if it was compiled for inference only, else at the first call.
        """
        with _RunMode():
            sizes, values = self._signature.bound(args)
            functions = self._variants.of(sizes)
            while functions.infer is None:
                functions.infer = functions.make_infer()
                self._variants.forget()  # what was compiled now may have conditions of its own
                functions = self._variants.of(sizes)
            given = self._destinations(functions, functions.infer.stored, destinations, sizes)
            values.extend(given.values())
            results = functions.infer.function(values)
            return self._outputs(functions, results, given, destinations)

    def _destinations(
        self,
        functions: StageFunctions,
        stored: Sequence[int],
        destinations: Mapping[int, Tensor],
        sizes: Sizes,
    ) -> dict[int, Tensor]:
        """Memory for the distinct outputs that a function does not return: the caller's, or new."""
        given = {}
        for index in stored:
            position = functions.output_index.index(index)
            memory = destinations.get(position)
            given[index] = self._signature.empty_output(position, sizes) if memory is None else memory
        return given

    def _outputs(
        self,
        functions: StageFunctions,
        results: Sequence[Any],
        given: Mapping[int, Tensor],
        destinations: Mapping[int, Tensor],
    ) -> list[Tensor]:
        """The outputs by position, from what was returned and what was written."""
        returned = iter(results)
        distinct = [
            given[index] if index in given else next(returned) for index in range(functions.num_outputs)
        ]
        outputs = {
            position: plain_memory(distinct[index]) for position, index in enumerate(functions.output_index)
        }
        for position in destinations:
            _move(outputs, position, destinations)
        return list(outputs.values())

    def _grad_outputs(
        self, functions: StageFunctions, sizes: Sizes, grads: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The gradient of each distinct output that takes one: the sum over the positions where it is
        listed.
        """
        assert len(grads) == len(self.grad_outputs), (
            f"{len(grads)} gradients for {len(self.grad_outputs)} outputs"
        )
        sums: dict[int, Tensor] = {}
        for position, grad in zip(self.grad_outputs, grads, strict=True):
            if grad is not None:
                index = functions.output_index[position]
                sums[index] = sums[index] + grad if index in sums else grad
        grad_outputs = []
        for index in functions.tangent_of:
            grad_output = sums.get(index)
            if grad_output is None:
                grad_output = self._signature.zeros_of_output(functions.output_index.index(index), sizes)
            grad_outputs.append(plain_memory(grad_output.to(functions.tangent_dtypes[index])))
        return grad_outputs


def _gradient_copies(functions: StageFunctions, signature: StageSignature) -> CopyReport:
    bytes_of = {
        position: signature.values[position].numel() * signature.sum_dtype(position).itemsize
        for position in functions.how
    }
    copied = {position: terms.count("added") for position, terms in functions.how.items() if "added" in terms}
    bytes_copied = sum(bytes_of[position] for position in copied)
    on_host = all(signature.values[position].device.type == "cpu" for position in copied)
    launches = sum(copied.values()) if on_host else functions.num_gradient_calls
    return CopyReport(bytes_copied, sum(bytes_of.values()) - bytes_copied, launches)


def _move(values: dict[int, Tensor], position: int, destinations: Mapping[int, Tensor]) -> None:
    """Let a value be in its destination, if it has one and is not there yet: another variant may have stored
    it itself.
    """
    memory = destinations.get(position)
    if memory is not None and values[position] is not memory:
        values[position] = memory.copy_(values[position])


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
    length_hints: Mapping[str, int] = {},
    stored: frozenset[str] = frozenset(),
    stored_gradients: frozenset[str] = frozenset(),
    splits_backward: bool = False,
    wide_sums: bool = False,
    sparse: frozenset[str] = frozenset(),
) -> CompiledStage:
    """Compile one stage.

    Args:
        needs_grad: names of values (batch inputs, boundary values, outputs) through which gradients flow. A
        name too many
            costs work but is harmless.
        requires_grad_parameters: names of the parameter placeholders that are trained.
        fake_mode: of the stage graph's ``meta["val"]``, whose batch sizes are expressions of `rows_symbol`.
        compiler: "eager" or "inductor".
        activation_budget: from 0 to 1; see `stages.joint_graph`.
        training: False compiles no backward; then only `infer` may be called.
        cache: equal stages compiled with the same cache share their functions.
        rows_hint: the number of rows to expect, used where that matters (`minds_rows`). `length_hints`: the lengths
            to expect, by the names of their inputs; without them, those of the capture. Others run too; where
        they need other code, it
            is compiled when they come.
        stored, stored_gradients: names of outputs, each an output once, and of inputs, whose values and
        gradients travel in messages
            with others; see `CompiledStage`.
        splits_backward: compile the backward in two parts, for `backward_inputs` and `backward_weights`.
        wide_sums: gradients of parameters of 16 bits go to sums in float32.
        sparse: names of parameter placeholders whose gradients the sink keeps as rows.
    """
    assert compiler in COMPILERS, f"unknown compiler {compiler!r}"
    assert 0.0 <= activation_budget <= 1.0, f"activation budget {activation_budget} is not in [0, 1]"
    sign = functools.partial(signature_of, wide_sums=wide_sums, sparse=sparse)
    signature = sign(stage, needs_grad, requires_grad_parameters, rows_symbol)
    places = Stored(
        outputs=frozenset(i for i, target in enumerate(stage.outputs) if target.name in stored),
        gradients=frozenset(i for i in signature.grad_inputs if stage.inputs[i].name in stored_gradients),
    )
    segments = segments_of(stage.graph_module) if activation_budget == SEGMENTS_BUDGET else ()
    options = (
        compiler, activation_budget, segments, training, sorted(places.outputs), sorted(places.gradients),
        splits_backward and training,
    )  # fmt: skip
    key = structural_hash(stage.graph_module, signature, options)
    if cache is not None and key in cache.functions:
        cache.num_hits += 1
        logger.debug("stage %d has the structure of an earlier one", stage.index)
        return CompiledStage(stage, signature, cache.functions[key], splits_backward=splits_backward)

    @with_dump_of_now
    @rare_collections()
    def build(sizes: Sizes | None) -> StageFunctions:
        builder = functools.partial(StageBuilder, splits_backward=splits_backward)
        if sizes is None:
            return builder(stage, signature, fake_mode, compiler, activation_budget, places).build(training)
        hinted, mode, symbols = with_hints(stage, signature.symbols, sizes)
        again = sign(hinted, needs_grad, requires_grad_parameters, symbols[0])
        functions = builder(hinted, again, mode, compiler, activation_budget, places).build(training)
        names = dict(zip(symbols, signature.symbols, strict=True))
        functions.saved_bytes = functions.saved_bytes.xreplace(names)
        functions.kept_bytes = functions.kept_bytes.xreplace(names)
        return functions

    # Without a backward nothing is saved, whatever the budget.
    expected = None
    if signature.length_inputs or minds_rows(compiler, activation_budget if training else 1.0):
        lengths = (
            length_hints.get(stage.inputs[position].name, signature.values[position].node.hint)
            for position in signature.length_inputs
        )
        expected = None if rows_hint is None else (rows_hint, *lengths)
    variants = Variants(build, [build(expected)])
    if cache is not None:
        cache.functions[key] = variants
    return CompiledStage(stage, signature, variants, splits_backward=splits_backward)
