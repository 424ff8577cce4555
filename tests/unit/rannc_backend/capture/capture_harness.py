"""Captures models as the backend does, and runs captured graphs in place of the model.

In: a model or function. Out: `Recorder`, a Dynamo backend that captures each graph it is given, then computes
every call with the captured ATen graph under the caller's autograd, so that results and gradients can be
compared with the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from rannc_backend.capture import graph as capture
from rannc_backend.capture.analysis import in_order_of_arguments
from rannc_backend.capture.first_trace import begin_symbolically
from rannc_backend.capture.graph import CapturedGraph
from rannc_backend.ir.graph_input import StateInput

aten = torch.ops.aten


class Recorder:
    """A backend; `graphs` are the captured graphs in order, `arguments` those of the last call of a compiled
    function.
    """

    def __init__(self, **options: Any) -> None:
        # As the backend does when torch.compile looks it up.
        capture.skip_library_loggers()
        self.graphs: list[CapturedGraph] = []
        self.num_calls = 0
        self.arguments: tuple[Any, ...] = ()
        self.options = options
        self.by_arguments = False  # run nodes in the order that their arguments decide

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_calls += 1
        captured = capture.capture_or_restart(graph_module, example_inputs, **self.options)
        self.graphs.append(captured)

        def compiled(*arguments: Any) -> Any:
            self.arguments = arguments
            return run(in_order_of_arguments(captured) if self.by_arguments else captured, arguments)

        return compiled

    @property
    def graph(self) -> CapturedGraph:
        """The only captured graph."""
        (captured,) = self.graphs
        return captured


def capture_call(model: Any, *args: Any, **kwargs: Any) -> tuple[Recorder, Any]:
    """(recorder, result) of one compiled call."""
    recorder = Recorder()
    return recorder, torch.compile(model, backend=recorder)(*args, **kwargs)


def kinds(recorder: Recorder) -> dict[str, str]:
    """What each input of the only graph is, by name."""
    return {
        item.fqn if isinstance(item, StateInput) else item.name: item.kind for item in recorder.graph.inputs
    }


def run(captured: CapturedGraph, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The user's outputs; buffers are updated as the model would."""
    by_name = {item.name: arguments[item.position] for item in captured.inputs if item.kind != "length"}
    by_name |= {length.name: by_name[length.carrier].shape[length.dim] for length in captured.lengths}
    values = [by_name[item.name] for item in captured.inputs]
    outputs = _Differentiable(captured.graph_module).run(*values)
    buffers = dict(captured.root_module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for fqn, value in zip(captured.buffer_updates, outputs[captured.num_user_outputs :], strict=True):
            buffers[fqn].copy_(value)
    return tuple(outputs[: captured.num_user_outputs])


class _Differentiable(fx.Interpreter):
    """Functional batch norm is the one operator that stage compilation replaces, as it has no derivative."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten._native_batch_norm_legit_functional.default:
            x, weight, bias, mean, var, training, momentum, eps = args
            mean, var = mean.clone(), var.clone()
            return (*aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), mean, var)
        return super().call_function(target, args, kwargs)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """All tensors in a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in tensors_of(value)]
    if hasattr(output, "__dict__"):
        return [tensor for value in vars(output).values() for tensor in tensors_of(value)]
    return []


def scalar_of(output: Any) -> torch.Tensor | None:
    """The model's loss if it has one, else a sum in which every differentiable output element counts
    differently.
    """
    differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    for tensor in differentiable:
        if tensor.dim() == 0:
            return tensor
    if not differentiable:
        return None
    return sum(
        (tensor * torch.arange(1, tensor.numel() + 1).view(tensor.shape).cos()).sum()
        for tensor in differentiable
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    return difference / scale if scale else difference


@contextlib.contextmanager
def fresh_dynamo(*, begins: bool = False) -> Iterator[None]:
    """No compiled code from before, none left behind; settings must come back as they were.

    `begins`: traces begin with a symbolic batch size, as they do for the backend itself; if not, each is
    asked for twice.
    """
    torch._dynamo.reset()
    capture.skip_library_loggers()
    before = trace_settings()
    try:
        end = begin_symbolically(lambda backend: isinstance(backend, Recorder)) if begins else None
        yield
    finally:
        if end is not None:
            end()
        torch._dynamo.reset()
    assert trace_settings() == before, "capture left Dynamo's settings changed"


def trace_settings() -> dict[str, Any]:
    """What capture changes for the time of a trace."""
    from torch._dynamo import config as dynamo
    from torch.fx.experimental import _config as symbolic

    return {
        "settings": (
            dynamo.assume_static_by_default,
            dynamo.automatic_dynamic_shapes,
            dynamo.specialize_int,
            dynamo.specialize_float,
        ),
        "symbolic": (symbolic.backed_size_oblivious, symbolic.use_duck_shape),
    }
