"""Refuses what Dynamo would run without calling the backend, where that means something else than the user asked for.

In: the backend, known to Dynamo. Out: errors, before Dynamo goes its way: for a model inside of a wrapper that replicates or shards it,
which Dynamo leaves as it is, and for one that was compiled as often as Dynamo's limits allow: the plain model would run in its place,
though its parameters are on other ranks.

What is private to torch here: where Dynamo's stack holds the frame's variables, the backend and the size of its cache, and that it asks
for the contexts of a recompilation before it looks at its limits (seen on torch 2.11.0 and 2.13.0; see
tests/unit/rannc_backend/test_capture_compilation.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context

from rannc_backend.errors import UserInputError

_FARTHEST = 20  # frames between Dynamo's `_compile` and what it calls
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What Dynamo is about to do, by the variables of its own frame."""

    backend: object
    variables: Mapping[str, Any]  # of the user's frame
    own: Mapping[str, Any]

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
            backend, variables = _innermost(found["compiler_fn"]), found.get("locals")
            if not is_ours(backend) or not isinstance(variables, Mapping):
                return None
            return Compilation(backend=backend, variables=variables, own=found)
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
    """Refuses plain models of backends that `is_ours`, as long as `is_spread`: parameters are on other ranks."""

    def __init__(self, is_ours: Callable[[object], bool], is_spread: Callable[[], bool]) -> None:
        self._is_ours, self._is_spread = is_ours, is_spread

    def watch(self) -> None:
        """From now on; costs nothing to say again."""
        if self not in (get_hook_for_recompile_user_context() or ()):
            register_hook_for_recompile_user_context(self)

    def __call__(self) -> str:
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


def _refuse(compilation: Compilation, message: str, *, cure: str) -> NoReturn:
    error = UserInputError(message, cure=cure)
    # Of other errors Dynamo would make one of its own.
    raise BackendCompilerFailed(compilation.backend, error, None) from error


def _innermost(compiler: Any) -> object:
    while True:
        inner = getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "compiler_fn", None)
        if inner is None:
            return compiler
        compiler = inner
