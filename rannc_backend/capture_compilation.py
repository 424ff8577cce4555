"""Refuses what Dynamo would run without calling the backend, where that means something else than the user asked for.

In: the backend, known to Dynamo. Out: errors, before Dynamo goes its way: for a model inside of a wrapper that replicates or shards
it, which Dynamo leaves as it is; for one with a graph break after which Dynamo cannot go on, within a `with` for one, so that it gives the
whole call up; and for one that was compiled as often as Dynamo's limits allow. In each case the plain model would run: each rank by
itself, without the others' gradients, or with parameters that are on other ranks.

What is private to torch here: where Dynamo's stack holds the frame's variables, the backend and the size of its cache; that it asks
for the contexts of a recompilation before it looks at its limits; and that callbacks run while the exception that ends a compilation is
under way (seen on torch 2.11.0 and 2.13.0; see tests/unit/rannc_backend/test_capture_compilation.py).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context

from rannc_backend.capture_breaks import graph_break_error
from rannc_backend.errors import UserInputError, user_location

_FARTHEST = 20  # frames between Dynamo's `_compile` and what it calls
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What Dynamo is about to do, by the variables of its own frame."""

    backend: object
    variables: Mapping[str, Any]  # of the user's frame
    own: Mapping[str, Any]

    def is_of_a_model(self) -> bool:
        """Whether the user's frame is a call of a module that has parameters."""
        owners = [getattr(value, "__self__", value) for value in self.variables.values()]
        return any(isinstance(owner, nn.Module) and any(True for _ in owner.parameters()) for owner in owners)

    def exceeded_limit(self) -> str:
        """The name of the setting that this compilation is one too many for, "" if it is not."""
        if not {"cache_size", "compile_id"} <= self.own.keys():
            return ""
        return exceeds_recompile_limit(self.own["cache_size"], self.own["compile_id"])[1]


def find_compilation(is_ours: Callable[[object], bool]) -> Compilation | None:
    """The compilation that has called this, directly or not, for a backend that `is_ours`; None if it is for another one."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FARTHEST):
        if frame is None:
            return None
        found = frame.f_locals
        if frame.f_code.co_name == "_compile" and "compiler_fn" in found:
            backend, variables = innermost_backend(found["compiler_fn"]), found.get("locals")
            if not is_ours(backend) or not isinstance(variables, Mapping):
                return None
            # From Python 3.13 on a frame gives a view, whose keys are a list.
            return Compilation(backend=backend, variables=variables, own=dict(found))
        frame = frame.f_back
    return None


def refuse_wrapped(compilation: Compilation) -> None:
    """Raises BackendCompilerFailed with a UserInputError where the frame is that of a wrapped model."""
    for value in compilation.variables.values():
        # The frame of a whole model has the bound method that calls it.
        names = [cls.__name__ for cls in type(getattr(value, "__self__", value)).__mro__]
        wrapper = next((name for name in names if name in _WRAPPERS), None)
        if wrapper is not None:
            _refuse(
                compilation,
                f"the model is wrapped in {wrapper}, so this backend would not see it and every rank would train it as without the backend",
                cure="compile the plain model: the backend makes replicas of stages and reduces their gradients itself. Accelerate and "
                "the Trainer of Hugging Face wrap a model when they prepare it; write the loop by hand.",
            )


class PlainModels:
    """Refuses that Dynamo gives up a model of a backend that `is_ours`, or compiles it no more while parameters are on other ranks."""

    def __init__(self, is_ours: Callable[[object], bool], is_spread: Callable[[], bool]) -> None:
        self._is_ours, self._is_spread = is_ours, is_spread

    def watch(self) -> None:
        """From now on, but for what `torch._dynamo.reset` ends: to be said at the start of each compilation, which costs nothing."""
        if self._recompiles not in (get_hook_for_recompile_user_context() or ()):
            register_hook_for_recompile_user_context(self._recompiles)
        if self._ends not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(self._ends)

    def _ends(self, event: CallbackArgs) -> None:
        """A compilation ends.

        Raises:
            BackendCompilerFailed: with a GraphBreakError where Dynamo gives the call of a model up.
        """
        error = sys.exc_info()[1]
        if event.callback_trigger is not CallbackTrigger.DYNAMO or not isinstance(error, Unsupported):
            return
        compilation = find_compilation(self._is_ours)
        if compilation is None or not compilation.is_of_a_model():
            return
        _count_as_ended()
        location = user_location("".join(traceback.format_list(list(getattr(error, "real_stack", ())))))
        raise BackendCompilerFailed(compilation.backend, graph_break_error(str(error), location), None) from error

    def _recompiles(self) -> str:
        """Dynamo asks what there is to know of a recompilation.

        Raises:
            BackendCompilerFailed: with a UserInputError where Dynamo would not compile it.
        """
        compilation = find_compilation(self._is_ours) if self._is_spread() else None
        limit = "" if compilation is None else compilation.exceeded_limit()
        if compilation is not None and limit:
            setting = f"torch._dynamo.config.{limit}"
            _refuse(
                compilation,
                f"Dynamo has compiled this model as often as {setting} ({getattr(torch._dynamo.config, limit)}) allows and would now run "
                "the plain model, whose parameters are on other ranks",
                cure=f"give inputs of fewer different shapes (pad them; the batch size may differ), or set {setting} higher at the start.",
            )
        return ""


def _count_as_ended() -> None:
    """What Dynamo does after its callbacks, if none of them raises: otherwise none would be called again."""
    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback_handler, name):
        setattr(callback_handler, name, getattr(callback_handler, name) - 1)


def _refuse(compilation: Compilation, message: str, *, cure: str) -> NoReturn:
    error = UserInputError(message, cure=cure)
    # Of other errors Dynamo would make one of its own.
    raise BackendCompilerFailed(compilation.backend, error, None) from error


def innermost_backend(compiler: Any) -> object:
    """The backend that Dynamo has wrapped into `compiler`."""
    while True:
        inner = getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "compiler_fn", None)
        if inner is None:
            return compiler
        compiler = inner
