"""The backend that `torch.compile(model, backend="rannc")` finds: from a Dynamo graph to the callable that plays this rank's part.

In: Dynamo's graph and example inputs. Out: a callable over Dynamo's flat arguments. The story from top to bottom: resolve the options,
capture, find the model's session (which analyses, plans, cuts and deploys), bind.

What the user did wrong is raised when the compiled model is called, as one of `rannc_backend.errors`, not wrapped by Dynamo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rannc_backend.torch_version import refuse_old_torch

# Before the imports that an old torch would fail in, with names that say nothing to the user.
refuse_old_torch(torch.__version__)

from rannc_backend import capture  # noqa: E402
from rannc_backend.capture_again import trace_again  # noqa: E402
from rannc_backend.config_sources import resolve_config  # noqa: E402
from rannc_backend.errors import RanncError, UserInputError  # noqa: E402
from rannc_backend.narrator import log_narrator  # noqa: E402
from rannc_backend.runtime import bootstrap  # noqa: E402
from rannc_backend.runtime.autograd import call_training  # noqa: E402
from rannc_backend.runtime.graph_runtime import GraphRuntime  # noqa: E402
from rannc_backend.runtime.world import StartOptions  # noqa: E402
from rannc_backend.session import SessionRegistry  # noqa: E402

REGISTRY = SessionRegistry()
"""The one piece of process-wide state: torch.compile hands a backend nothing that lives as long as the model."""

# torch.compile imports this module when it looks the backend up: before the first trace, which is when it has to be known.
capture.skip_library_loggers()


def rannc(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Sequence[Any]]:
    """Backend for torch.compile; ``options`` are the items of `Config`.

    Raises:
        Whatever Dynamo answers with another trace (the batch made symbolic, parameters moved): not an error.
    """
    try:
        if mode not in (None, "default"):
            raise UserInputError(f"mode={mode!r} means nothing to this backend", cure="use options={...}")
        config = resolve_config(options, os.environ)
        # First of all, so that the job knows of whatever fails on this rank from here on. Collective the first time.
        bootstrap.start(StartOptions(limit_seconds=config.step_timeout_seconds)).monitor.phase("capture")
        with log_narrator(verbose=config.verbose).step("capture") as details:
            captured = capture.capture_or_restart(graph_module, example_inputs, strides_of=REGISTRY.strides_of)
            details.append(f"{len(captured.graph_module.graph.nodes)} nodes")
        session = REGISTRY.session_of(captured.root_module, config)
        local_rows = _local_rows(captured, example_inputs)
        runtime, moved = session.runtime_for(captured, local_rows)
    except RanncError as error:
        return _raising(error)
    if moved:
        trace_again(captured)
    return _bind(runtime, captured)


def _local_rows(captured: capture.CapturedGraph, example_inputs: Sequence[Any]) -> int:
    spec = next(spec for spec in captured.inputs if spec.kind == "batch")
    return int(example_inputs[spec.position].shape[0])


def _bind(runtime: GraphRuntime, captured: capture.CapturedGraph) -> Callable[..., Sequence[Any]]:
    positions = {spec.name: spec.position for spec in captured.inputs}
    order = [positions[spec.name] for spec in runtime.inputs]

    def call(*flat_args: Any) -> Sequence[Any]:
        tensors = [flat_args[position] for position in order]
        if torch.is_grad_enabled() and any(output.differentiable for output in runtime.outputs):
            results = call_training(runtime, tensors)
        else:
            results = runtime.infer(tensors)
        # Only after success: a failure is told with the phase in which it happened.
        runtime.world.monitor.phase("between steps")
        return results

    return call


def _raising(error: RanncError) -> Callable[..., Sequence[Any]]:
    def call(*flat_args: Any) -> Sequence[Any]:
        raise error

    return call
