"""Captures a model by one run of its forward on fakes, or under Dynamo, without computing anything: also a model
that has no memory (device "meta").

In: the model, the arguments of one call, and the device that the trace is to take the model for. Out: the
`CapturedGraph` that a real call with such arguments gives there. Terms: to *call off* the call is to end it
from within the backend, once the graph is known.
"""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._dynamo.exc import Unsupported
from torch.utils import _pytree as pytree

from rannc_backend.capture.errors import graph_break_error
from rannc_backend.capture.first_trace import begin_symbolically
from rannc_backend.capture.graph import CapturedGraph, capture_or_restart, skip_library_loggers
from rannc_backend.capture.nonstrict.arguments import FIRST, BatchDims, Ranks, call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.errors import RanncError, UnsupportedModelError, user_location

logger = logging.getLogger(__name__)


class _CalledOff(BaseException):
    """Not an Exception, so that neither Dynamo nor the model takes it for a failure that could be dealt
    with.
    """

    def __init__(self, result: CapturedGraph | RanncError) -> None:
        super().__init__()
        self.result = result


def capture_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device | None = None,
    batch_dims: BatchDims = FIRST,
) -> CapturedGraph:
    """The graph of ``model(*args, **kwargs)`` with gradients enabled, as if all of it were on ``device``
    (None: where it is). Inputs are in the order of their use, so that it is the graph of the model's calls, whichever
    way these are captured.

    Raises:
        RanncError: whatever capture refuses; UnsupportedModelError when the model does nothing that Dynamo
        can capture.
        Exception: what the model itself raises.
    """
    ranks = Ranks(device=device, is_absent=lambda tensor: tensor.is_meta)
    try:
        # A forward that prints would print fakes.
        with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
            call = call_of(model, args, kwargs, batch_dims)
            captured = capture_call(model, call, ranks).recorded.captured
        if captured.num_user_outputs:
            return captured
    except Exception as error:
        # Whatever it is, Dynamo's capture says it with the user's line.
        logger.debug("the forward is not captured by a run of it: %s", error)
        if batch_dims != FIRST:
            raise
    return _by_dynamo(model, args, kwargs, device)


def _by_dynamo(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None
) -> CapturedGraph:
    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> NoReturn:
        try:
            captured = capture_or_restart(graph_module, example_inputs, device=device)
        except RanncError as error:
            raise _CalledOff(error) from error
        raise _CalledOff(captured)

    skip_library_loggers()
    # Dynamo's trace takes most of the time: with symbolic batch sizes from the start there is one, not two.
    end = begin_symbolically(lambda other: other is backend)
    try:
        with torch.enable_grad():
            torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    except _CalledOff as called_off:
        if isinstance(called_off.result, RanncError):
            raise called_off.result from None
        return called_off.result
    except Unsupported as error:
        raise graph_break_error(
            str(error), user_location("".join(traceback.format_list(list(error.real_stack))))
        ) from None
    finally:
        end()
    raise UnsupportedModelError(
        f"{type(model).__name__} was called without computing anything that Dynamo captures",
        cure="pass at least one tensor with a batch dimension, and a model that is not compiled already.",
    )


def convert_model(
    model: nn.Module, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:
    """Give the model's tensors, in place, another device, and its floating-point ones another dtype; tied
    ones stay tied.
    """
    made: dict[int, torch.Tensor] = {}

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            other = convert_values(tensor.detach(), device, dtype)
            if isinstance(tensor, nn.Parameter):
                other = nn.Parameter(other, requires_grad=tensor.requires_grad)
            made[id(tensor)] = (
                tensor if other.device == tensor.device and other.dtype == tensor.dtype else other
            )
        return made[id(tensor)]

    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            tensors: dict[str, Any] = holder
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = converted(tensor)


def convert_values(values: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Nested arguments with their tensors on another device, floating-point ones with another dtype."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, convert, values)
