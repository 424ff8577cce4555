"""From a stage graph to its forward and backward graphs.

In: a stage graph whose outputs are safe (see `passes.stage_boundaries`), fake inputs that say what requires a gradient.
Out: `TracedStage` (one joint graph of forward and backward), then `SplitStage` (two graphs and what passes between them).
Everything that is private to torch's AOTAutograd is used in this file; seen on torch 2.13.

Terms. The joint graph's *primals* are the batch size (a number) and the stage's inputs; its *tangents* are the gradients
of those outputs that require one. The *activation budget* is the part of the default amount of saved values that may be
saved; 1.0 is the default, less makes backward recompute more.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._functorch.config as functorch_config
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.graph import CodeGen

from rannc_backend.errors import UnsupportedModelError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """Joint graph: outputs are `num_outputs` results of forward, then one gradient per element of `gradient_of`.

    `tangent_of[i]` is the output that tangent i is the gradient of, `gradient_of[i]` the input (the batch size counts as
    input 0) that gradient i belongs to. Without tangents there is no backward.
    """

    joint: fx.GraphModule
    num_outputs: int
    tangent_of: tuple[int, ...]
    gradient_of: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStage:
    """Forward graph: (batch size, *inputs) to (*outputs, *saved). Backward: (*saved by `saved_order`, *tangents)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_order: tuple[int, ...]


def trace_joint(
    graph_module: fx.GraphModule,
    fakes: Sequence[Any],
    needs_grad: Sequence[bool],
    fake_mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> TracedStage:
    """Trace forward and backward of a stage.

    Args:
        graph_module: placeholders are the inputs without the batch size; outputs are distinct tensors.
        fakes: the batch size (SymInt), then one fake tensor per placeholder, with `requires_grad` set.
        needs_grad: per output, whether it takes a gradient.
    """
    function = _StageFunction(graph_module, needs_grad)
    with contextlib.ExitStack() as stack:
        stack.enter_context(clean_tracing(fake_mode))
        stack.enter_context(torch.enable_grad())
        joint = aot_export_joint_with_descriptors(stack, function, tuple(fakes), decompositions=dict(decompositions)).graph_module
    num_outputs = len(needs_grad)
    tangent_of = []
    for node in joint.graph.find_nodes(op="placeholder"):
        description = node.meta["desc"]
        if isinstance(description, TangentAOTInput):
            assert isinstance(description.output, PlainAOTOutput), f"unexpected tangent {description}"
            tangent_of.append(description.output.idx)
        else:
            assert isinstance(description, PlainAOTInput), f"unexpected input {description}"
    return TracedStage(
        joint=joint,
        num_outputs=num_outputs,
        tangent_of=tuple(tangent_of),
        gradient_of=_keep_made_gradients(joint, num_outputs),
    )


def _keep_made_gradients(joint: fx.GraphModule, num_outputs: int) -> tuple[int, ...]:
    """Drop the outputs that are None (inputs without a gradient); give the input of each gradient that is left."""
    (output,) = joint.graph.find_nodes(op="output")
    descriptions = output.meta["desc"]
    results = list(output.args[0])
    for description in descriptions[:num_outputs]:
        assert isinstance(description, PlainAOTOutput), f"unexpected output {description}"
    kept = list(range(num_outputs))
    gradient_of = []
    for index in range(num_outputs, len(results)):
        if results[index] is None:
            continue
        description = descriptions[index]
        assert isinstance(description, GradAOTOutput), f"unexpected output {description}"
        assert isinstance(description.grad_of, PlainAOTInput), f"unexpected gradient {description}"
        kept.append(index)
        gradient_of.append(description.grad_of.idx)
    output.args = (tuple(results[index] for index in kept),)
    output.meta["desc"] = [descriptions[index] for index in kept]
    # The traced graph's calling convention, nested (primals, tangents), names the outputs that are gone.
    joint.graph.set_codegen(CodeGen())
    joint.recompile()
    return tuple(gradient_of)


class _StageFunction(nn.Module):
    """The stage as a function of (batch size, *inputs); outputs that take no gradient are detached."""

    def __init__(self, graph_module: fx.GraphModule, needs_grad: Sequence[bool]) -> None:
        super().__init__()
        # In a tuple, so that it is not a submodule whose tensors would become inputs.
        self._hidden = (graph_module,)
        self._needs_grad = tuple(needs_grad)

    def forward(self, rows: Any, *args: Any) -> tuple[Any, ...]:
        del rows
        with fx.traceback.preserve_node_meta():
            results = _DifferentiableInterpreter(self._hidden[0]).run(*args)
        return tuple(r if needs else r.detach() for r, needs in zip(results, self._needs_grad, strict=True))


class _DifferentiableInterpreter(fx.Interpreter):
    """Runs a graph; operators that functionalization has left without a derivative are computed in another way."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten._native_batch_norm_legit_functional.default:
            return _batch_norm(*args, **kwargs)
        if target is aten._batch_norm_with_update_functional.default:
            return _batch_norm_with_update(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _batch_norm(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    new_mean, new_var = running_mean.clone(), running_var.clone()
    results = aten._native_batch_norm_legit.default(value, weight, bias, new_mean, new_var, training, momentum, eps)
    return (*results, new_mean, new_var)


def _batch_norm_with_update(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    new_mean, new_var = running_mean.clone(), running_var.clone()
    results = aten._batch_norm_with_update.default(value, weight, bias, new_mean, new_var, momentum, eps)
    return (*results, new_mean, new_var)


@contextlib.contextmanager
def clean_tracing(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Trace or compile under `fake_mode` only: without an outer capture's context and without the user's autocast."""
    with tracing(TracingContext(fake_mode)), torch._C._DisableAutocast():
        yield


def split_joint(traced: TracedStage, *, activation_budget: float, long_lived: Sequence[int]) -> SplitStage:
    """Split the joint graph into forward and backward by the minimum cut, so that little is saved.

    Args:
        activation_budget: see the module docstring, from 0 to 1.
        long_lived: inputs (the batch size is input 0) that exist until backward anyway, so that saving them is free.
    """
    fake_mode = _fake_mode(traced.joint)
    with (
        clean_tracing(fake_mode),
        torch.no_grad(),
        functorch_config.patch(activation_memory_budget=activation_budget),
    ):
        forward, backward = min_cut_rematerialization_partition(
            traced.joint,
            None,
            num_fwd_outputs=traced.num_outputs,
            static_lifetime_input_indices=list(long_lived),
        )
    saved = [node.name for node in _results(forward)[traced.num_outputs :]]
    wanted = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    wanted = wanted[: len(wanted) - len(traced.tangent_of)]
    assert sorted(saved) == sorted(wanted), f"forward saves {saved}, backward takes {wanted}"
    return SplitStage(forward=forward, backward=backward, saved_order=tuple(saved.index(name) for name in wanted))


def _results(graph_module: fx.GraphModule) -> Sequence[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    return output.args[0]


def _fake_mode(joint: fx.GraphModule) -> FakeTensorMode:
    for node in joint.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.Tensor):
            return node.meta["val"].fake_mode
    raise AssertionError("a joint graph has a tensor among its inputs")


def row_conditions(fake_mode: FakeTensorMode, rows_symbol: sympy.Symbol) -> tuple[sympy.Basic, ...]:
    """What torch has assumed about the batch size in all traces under `fake_mode`; code compiled so far relies on it.

    Raises UnsupportedModelError if a single batch size was assumed.
    """
    shape_env = fake_mode.shape_env
    if rows_symbol in shape_env.replacements:
        raise UnsupportedModelError(
            f"a part of the model compiles for one batch size only ({shape_env.replacements[rows_symbol]})",
            cure="look for an operation that needs the batch size to be a certain number.",
        )
    return tuple(
        guard.expr
        for guard in shape_env.guards
        if rows_symbol in guard.expr.free_symbols and not _only_chooses_convolution(guard)
    )


def _only_chooses_convolution(guard: Any) -> bool:
    """Whether a guard comes from which kernel a convolution would pick for this batch size (oneDNN from 16 samples on).

    The kernel is picked again at run time; the trace needs it for the memory format alone, which is the operands' own.
    """
    frame = guard.sloc.framework_loc
    return isinstance(frame, traceback.FrameSummary) and frame.name == "conv" and frame.filename.endswith("fake_impls.py")
