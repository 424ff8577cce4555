"""Ties a graph to the user's autograd: the one torch.autograd.Function of the package.

In: the user's tensors of a call. Out: flat outputs; those that can be differentiated lead back, on
``backward()``, to `GraphRuntime.backward`. Gradients of parameters do not pass through autograd: they are
published in ``p.grad``.

Models may follow each other: the rows of one are an input of the next (a generator and a discriminator). The gradient
of the next one's loss, which is that of the global batch, reaches the rows of the one before, whose gradients are the
mean over ranks of each rank's own. So it gets N times that gradient there, N being the number of ranks: what is summed
and divided by N then is the gradient of the global loss, and adds up with those of losses of a rank's own rows. The same
holds for a module that `synchronize` averages. Proof: gradients of a rank's rows are linear in what comes to them, and
each sample belongs to one rank.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointFunction

from rannc_backend.errors import UnsupportedModelError, UserInputError
from rannc_backend.log.logger import say_once
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.step.graph_settings import TrainingStep
from rannc_backend.runtime.step.step_state import DeliveredRows
from rannc_backend.runtime.torch_internals import (
    backward_keeps_graph,
    function_of,
    graph_task,
    is_asked_for,
    without_saved_tensor_hooks,
)
from rannc_backend.runtime.world import OwnRows, World
from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)


class _Step(torch.autograd.Function):
    """One training step; ``holder`` receives the outputs that are not tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        runtime: GraphRuntime,
        user_tensors: Sequence[torch.Tensor],
        holder: list[Any],
        sources: Sequence[_Source],
        anchor: torch.Tensor,
        *differentiable_inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with without_saved_tensor_hooks():
            outputs, step = runtime.forward(runtime.begin(user_tensors, training=True))
        ctx.runtime, ctx.step = runtime, step
        ctx.sources, ctx.global_pass = sources, None
        ctx.positions = [
            i
            for i, spec in enumerate(runtime.outputs)
            if spec.differentiable and isinstance(outputs[i], torch.Tensor)
        ]
        ctx.row_counts = [
            outputs[i].shape[:1]
            if runtime.settings.gather_inputs and isinstance(runtime.outputs[i], DeliveredRows)
            else None
            for i in ctx.positions
        ]
        ctx.num_outputs = len(outputs)
        ctx.set_materialize_grads(False)
        # Autograd's own error for a second backward without retain_graph comes from reading a saved tensor.
        ctx.save_for_backward(anchor)
        ctx.publishes = is_asked_for(anchor)
        holder.extend(outputs)
        return tuple(outputs[i] for i in ctx.positions)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            # torch's `once_differentiable` would say nothing, and the second derivative would be missing in
            # the result.
            raise _twice_differentiated()
        runtime: GraphRuntime = ctx.runtime
        step: TrainingStep | None = ctx.step
        if step is None:
            _ = ctx.saved_tensors
        assert step is not None, "autograd lets a second backward pass"
        by_output: list[torch.Tensor | None] = [None] * ctx.num_outputs
        for position, grad in zip(ctx.positions, grads, strict=True):
            by_output[position] = grad
        step.publishes = ctx.publishes()
        keep = backward_keeps_graph() or runtime.switches.keep_graph
        input_gradients = _of_sources(ctx, runtime.backward(step, by_output, keep=keep), step.only_rows)
        if not keep:
            ctx.step = None
        return (None, None, None, None, None, *input_gradients)


@dataclass(frozen=True, slots=True)
class _Source:
    """What an input that requires a gradient is computed from.

    ``steps``: calls of other compiled models, as nodes of autograd. ``factor``: by which the gradient of the global loss
    is multiplied, since what is behind it takes a mean over ranks.
    """

    steps: tuple[Any, ...] = ()
    factor: float = 1.0


def _of_sources(
    ctx: Any, gradients: Sequence[torch.Tensor | None], only_rows: bool
) -> list[torch.Tensor | None]:
    """Gradients of inputs as what is behind them takes them. ``only_rows``: no scalar was differentiated; then they are of
    a rank's own loss, unless another compiled model's loss came to these rows in the same backward.
    """
    this_pass = graph_task()
    if only_rows and ctx.global_pass != this_pass:
        return list(gradients)
    runtime: GraphRuntime = ctx.runtime
    share = runtime.settings.share(runtime.world.size) if only_rows else 1.0
    for source in ctx.sources:
        for node in source.steps:
            node.global_pass = this_pass
    return [
        gradient if gradient is None or share * source.factor == 1.0 else gradient * (share * source.factor)
        for gradient, source in zip(gradients, ctx.sources, strict=True)
    ]


def _source_of(
    name: str, behind: Sequence[Any], num_ranks: int, is_averaged: Callable[[torch.Tensor], bool]
) -> _Source:
    """``behind``: of `_first_nodes`. Raises UserInputError where a mean over ranks is taken of some of what is behind an
    input, and not of all.
    """
    steps, factors = [], set()
    for node in behind:
        if function_of(node) is CheckpointFunction:
            raise UserInputError(
                f"the input {name!r} of a compiled model comes from torch.utils.checkpoint with use_reentrant=True, which does "
                "not show whose gradients are averaged over ranks",
                cure="call it with use_reentrant=False.",
            )
        if _is_step(node):
            steps.append(node)
            factors.add(1.0 / node.runtime.settings.share(node.runtime.world.size))
        else:
            factors.add(float(num_ranks) if is_averaged(node) else 1.0)
    if len(factors) > 1:
        raise UserInputError(
            f"the input {name!r} of a compiled model is computed from rows of another compiled model, or by a module that "
            "rannc_backend.synchronize or DistributedDataParallel averages, and from a tensor whose gradient is not averaged over ranks",
            cure="call rannc_backend.synchronize(module) for the module that it passes before, or detach one of the two.",
        )
    return _Source(tuple(steps), *factors)


def _tell_of_detached(inputs: Sequence[tuple[str, torch.Tensor]], world: World) -> None:
    """Say once what to do with the gradient of rows that were detached between two models."""
    for name, tensor in inputs:
        if tensor.grad_fn is None and StorageWeakRef(tensor.untyped_storage()) in world.rows_given:
            say_once(
                logger,
                "the input %r of a compiled model is detached from rows of another one. Its gradient is that of the global loss, "
                "and rows.backward(gradient) takes the mean over ranks of each rank's own: pass it %d times the gradient, or "
                "leave the rows attached.",
                name,
                world.size,
            )


def _note_leaves(
    name: str,
    tensor: torch.Tensor,
    behind: Sequence[Any],
    world: World,
    is_synchronized: Callable[[torch.Tensor], bool],
) -> None:
    """Remember, and say once, what an input is computed from that has a gradient of this rank's rows alone: a prompt that is
    learned, a module in front of the model.
    """
    for leaf in behind if tensor.grad_fn is not None and tensor.dim() else ():
        if not (_is_step(leaf) or is_synchronized(leaf)):
            what = f"the input {name!r} of a compiled model is computed from a tensor {list(leaf.shape)} whose gradient"
            _note(leaf, world, "behind an input", what, {tensor.shape[:1]})


def _note(
    leaf: torch.Tensor, world: World, where: str, what: str, row_counts: Collection[torch.Size]
) -> None:
    """One with as many rows as the batch may be the rank's own (latents); that is asked when it is updated."""
    if leaf in world.of_own_rows:
        return
    is_certain = leaf.shape[:1] not in row_counts
    world.of_own_rows[leaf] = OwnRows(where, is_certain)
    if is_certain:
        say_once(
            logger,
            "%s is of this rank's rows alone: call rannc_backend.synchronize(module) once, on all ranks, for the module that "
            "holds it, or ranks go different ways.",
            what,
            level=logging.WARNING,
        )


def _first_nodes(tensor: torch.Tensor) -> Iterator[Any]:
    """Behind a tensor: calls of compiled models, leaves that want a gradient, and what hides these."""
    yield from dict.fromkeys(node for node, _ in _first_edges(tensor))


def _first_edges(tensor: torch.Tensor) -> Iterator[tuple[Any, int]]:
    """The same, each with the number of its output that leads there."""
    if tensor.grad_fn is None:
        yield tensor, 0
        return
    left: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    seen = set(left)
    while left:
        node, number = left.pop()
        if function_of(node) is CheckpointFunction:
            yield node, number
        if _is_step(node):
            yield node, number
        elif type(node).__name__ == "AccumulateGrad":
            yield node.variable, number
        else:
            further = {edge for edge in node.next_functions if edge[0] is not None} - seen
            seen |= further
            left += further


def _note_heads(
    outputs: Sequence[torch.Tensor],
    is_compiled: Callable[[torch.Tensor], bool],
    is_synchronized: Callable[[torch.Tensor], bool],
) -> None:
    """Remember, and say once, what a backward reaches beside rows of a compiled model: a head with its loss, whose gradient
    is of this rank's rows alone.
    """
    edges = list(dict.fromkeys(edge for output in outputs for edge in _first_edges(output)))
    calls = [(node, node.row_counts[number]) for node, number in edges if _is_step(node)]
    rows = [(node, count) for node, count in calls if count is not None]
    if not rows:
        return
    for leaf in (node for node, _ in edges if isinstance(node, torch.Tensor)):
        if not (is_compiled(leaf) or is_synchronized(leaf)):
            what = f"a backward reaches a tensor {list(leaf.shape)} beside rows of a compiled model, and its gradient"
            _note(
                leaf, rows[0][0].runtime.world, "after rows of a compiled model", what, {n for _, n in rows}
            )


def _is_step(node: Any) -> bool:
    return function_of(node) is _Step


def _twice_differentiated() -> UnsupportedModelError:
    return UnsupportedModelError(
        "a backward with create_graph=True reached the compiled model, whose gradients have no derivatives",
        cure="compute what is differentiated twice (a gradient penalty, a Hessian) within the forward that is "
        "compiled: a module that calls the model and torch.autograd.grad(..., create_graph=True), and gives the loss.",
    )


def call_training(
    runtime: GraphRuntime,
    user_tensors: Sequence[torch.Tensor],
    is_averaged: Callable[[torch.Tensor], bool] = lambda parameter: False,
    is_synchronized: Callable[[torch.Tensor], bool] = lambda parameter: False,
) -> list[Any]:
    """A forward with autograd on: outputs of one training step, tied to their backward.

    ``is_averaged``: whether the gradient of a parameter outside of compiled models becomes its mean over ranks;
    ``is_synchronized``: its mean or its sum.
    """
    anchor = torch.zeros((), requires_grad=True)
    differentiable = [
        (spec.name, tensor)
        for spec, tensor in zip(runtime.inputs, user_tensors, strict=True)
        if spec.requires_grad
    ]
    sources = [_Source()] * len(differentiable)
    world = runtime.world
    if world.size > 1:
        if runtime.loss_index is not None:
            _tell_of_detached(differentiable, world)
        behind = [list(_first_nodes(tensor)) for _, tensor in differentiable]
        named = list(zip(differentiable, behind, strict=True))
        sources = [_source_of(name, nodes, world.size, is_averaged) for (name, _), nodes in named]
        for (name, tensor), nodes in named:
            _note_leaves(name, tensor, nodes, world, is_synchronized)
    holder: list[Any] = []
    tensors = [tensor for _, tensor in differentiable]
    results = _Step.apply(runtime, user_tensors, holder, sources, anchor, *tensors)
    if world.size > 1:
        world.rows_given.extend(StorageWeakRef(rows.untyped_storage()) for rows in results if rows.dim())
    positions = [
        i
        for i, spec in enumerate(runtime.outputs)
        if spec.differentiable and isinstance(holder[i], torch.Tensor)
    ]
    for position, result in zip(positions, results, strict=True):
        holder[position] = result
    return holder


def watch_backwards(
    tables: Callable[[], Sequence[ParameterTable]], is_synchronized: Callable[[torch.Tensor], bool]
) -> Callable[[], None]:
    """From now on `torch.autograd.grad` of a compiled model by a parameter of the ``tables`` is an error, as is one that is to
    be differentiated again, and ``backward(inputs=...)`` by one; returns a function that ends this. torch would not find
    the parameter behind the loss: None, or a backward that does nothing. And the backward that refuses a second derivative
    may run in a thread without the user's lines. What either differentiates beside rows of a compiled model is remembered.
    """
    original = torch.autograd.grad
    original_backward = torch.autograd.backward

    def name_of(tensors: Any) -> str | None:
        tensors = list(tensors.values()) if isinstance(tensors, Mapping) else tensors
        names = (table.name_of(tensor) for table in tables() for tensor in _tensors_in(tensors))
        return next((found for found in names if found is not None), None)

    def note(tensors: Any) -> None:
        if any(table.world.size > 1 for table in tables()):
            _note_heads(_tensors_in(tensors), lambda each: name_of(each) is not None, is_synchronized)

    @functools.wraps(original_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original_backward(tensors, *args, **kwargs)
        tensors = list(tensors) if isinstance(tensors, Iterator) else tensors
        note(tensors)
        inputs = kwargs.get("inputs")
        if inputs is None:
            return original_backward(tensors, *args, **kwargs)
        inputs = list(inputs) if isinstance(inputs, Iterator) else inputs
        if (name := name_of(inputs)) is not None and _leads_to_step(_tensors_in(tensors)):
            raise UserInputError(
                f"backward was asked for the gradient of {name!r} alone, a parameter of a compiled model, which is computed on "
                "the ranks of its stages and does not pass through autograd",
                cure="call backward() without inputs; gradients of parameters that are not wanted are dropped by "
                "p.requires_grad_(False) before the call of the model, or p.grad = None after it.",
            )
        return original_backward(tensors, *args, **{**kwargs, "inputs": inputs})

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(outputs, inputs, *args, **kwargs)
        outputs, inputs = (
            list(values) if isinstance(values, Iterator) else values for values in (outputs, inputs)
        )
        note(outputs)
        name = name_of(inputs)
        is_twice, is_batched = bool(kwargs.get("create_graph")), bool(kwargs.get("is_grads_batched"))
        if (is_twice or is_batched or name is not None) and _leads_to_step(_tensors_in(outputs)):
            if is_twice:
                raise _twice_differentiated()
            if is_batched and name is None:
                raise UserInputError(
                    "torch.autograd.grad with is_grads_batched=True reaches a compiled model, whose backward takes one gradient",
                    cure="call it once for each gradient, with retain_graph=True for all but the last.",
                )
            raise UserInputError(
                f"torch.autograd.grad was asked for the gradient of {name!r}, a parameter of a compiled model, which is "
                "computed on the ranks of its stages and does not pass through autograd",
                cure="call backward(); then p.grad is there for each parameter that this rank has "
                "(rannc_backend.is_held(p)). Gradients of inputs are there for torch.autograd.grad, too.",
            )
        return original(outputs, inputs, *args, **kwargs)

    return hooks.together(
        hooks.replace("gradients by name", torch.autograd, "grad", grad),
        hooks.replace("gradients by name", torch.autograd, "backward", backward),
    )


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Those of what torch.autograd.grad takes: a tensor, some of them, or torch's GradientEdge, which has none."""
    every = [values] if torch.is_tensor(values) or not isinstance(values, Iterable) else values
    return [each for each in every if torch.is_tensor(each)]


def _leads_to_step(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call of a compiled model is among what the outputs were computed from."""
    return any(_is_step(node) for output in outputs for node in _first_nodes(output))
