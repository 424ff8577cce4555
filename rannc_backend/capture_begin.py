"""Lets Dynamo's first trace of a frame be the one that counts: with the batch size symbolic from its start.

In: the backend, known to Dynamo. Out: at the start of each compilation of a frame for that backend, the trace's settings are those of
`capture_dynamo.symbolic_trace`; `begun_trace` gives them to the backend call. Without this, or where it finds less than the graph shows,
the backend asks for a second trace, which takes as long as the first: nothing but time depends on it. A model inside of a wrapper that
replicates or shards it is refused here: Dynamo would leave it as it is, and the backend would never be called.

What is private to torch here: where Dynamo's stack holds the frame's variables and the backend when it tells that a compilation starts
(seen on torch 2.11.0 and 2.13.0; see tests/unit/rannc_backend/test_capture_begin.py).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
import torch._dynamo.callback as dynamo_callback
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import CompileContext
from torch.utils import _pytree as pytree

from rannc_backend.capture_batch import may_be_batch
from rannc_backend.capture_dynamo import RestartReason, symbolic_trace
from rannc_backend.errors import UserInputError

logger = logging.getLogger(__name__)

_ATTRIBUTE = "rannc_begun_trace"  # of the context of one compilation
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
_FARTHEST = 20  # frames between Dynamo's `_compile` and what it calls


def begin_symbolically(is_ours: Callable[[object], bool]) -> Callable[[], None]:
    """From now on, in this process, begin traces for backends that `is_ours` knows with a symbolic batch size; gives what ends it."""

    def begin(event: dynamo_callback.CallbackArgs) -> None:
        if event.callback_trigger is not dynamo_callback.CallbackTrigger.DYNAMO:
            return
        try:
            backend, variables = _frame_variables(is_ours) or (None, {})
            _refuse_wrapped(variables, backend)
            batches = _batches(variables)
            if batches:
                context = CompileContext.get()
                reason = symbolic_trace(batches)
                # The context lives as long as the compilation, also where its exception is kept: settings go back however it ends.
                reason.restore = weakref.finalize(context, reason.restore)
                setattr(context, _ATTRIBUTE, reason)
        except BackendCompilerFailed:
            raise
        except Exception:
            # The backend asks for a second trace.
            logger.debug("the first trace begins without a symbolic batch size", exc_info=True)

    handler = dynamo_callback.callback_handler
    if not isinstance(handler.start_callbacks, _LastingCallbacks):
        handler.start_callbacks = _LastingCallbacks(handler.start_callbacks)
    callbacks = handler.start_callbacks
    callbacks.append(begin)
    callbacks.lasting.append(begin)

    def end() -> None:
        callbacks.remove(begin)
        callbacks.lasting.remove(begin)

    return end


class _LastingCallbacks(list[Callable[[dynamo_callback.CallbackArgs], None]]):
    """Callbacks of which ours stay when `torch._dynamo.reset` clears them: the backend stays too."""

    def __init__(self, callbacks: Iterable[Callable[[dynamo_callback.CallbackArgs], None]]) -> None:
        super().__init__(callbacks)
        self.lasting: list[Callable[[dynamo_callback.CallbackArgs], None]] = []

    def clear(self) -> None:
        self[:] = self.lasting


def begun_trace() -> RestartReason | None:
    """To be asked in a backend call: what its frame's first trace ran under; None where nothing was begun."""
    return getattr(CompileContext.try_get(), _ATTRIBUTE, None)


def _frame_variables(is_ours: Callable[[object], bool]) -> tuple[object, Mapping[str, Any]] | None:
    """The backend that `is_ours`, and the variables of the user's frame that Dynamo is about to trace for it; None if it is another's."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FARTHEST):
        if frame is None:
            return None
        found = frame.f_locals
        if frame.f_code.co_name == "_compile" and "compiler_fn" in found:
            backend, variables = _innermost(found["compiler_fn"]), found.get("locals")
            return (backend, variables) if is_ours(backend) and isinstance(variables, Mapping) else None
        frame = frame.f_back
    return None


def _refuse_wrapped(variables: Mapping[str, Any], backend: object) -> None:
    for value in variables.values():
        # The frame of a whole model has the bound method that calls it.
        names = [cls.__name__ for cls in type(getattr(value, "__self__", value)).__mro__]
        wrapper = next((name for name in names if name in _WRAPPERS), None)
        if wrapper is not None:
            error = UserInputError(
                f"the model is wrapped in {wrapper}, so this backend would not see it and every rank would train it as without the backend",
                cure="compile the plain model: the backend makes replicas of stages and reduces their gradients itself. Accelerate and "
                "the Trainer of Hugging Face wrap a model when they prepare it; write the loop by hand.",
            )
            # Of other errors Dynamo would make one of its own.
            raise BackendCompilerFailed(backend, error, None) from error


def _innermost(compiler: Any) -> object:
    while True:
        inner = getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "compiler_fn", None)
        if inner is None:
            return compiler
        compiler = inner


def _batches(variables: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors among the arguments that may be batches of more than one sample."""
    leaves = pytree.tree_leaves(dict(variables))
    own = {id(tensor) for module in leaves if isinstance(module, nn.Module) for tensor in (*module.parameters(), *module.buffers())}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
    return [tensor for tensor in tensors if may_be_batch(tensor, single=False)]
