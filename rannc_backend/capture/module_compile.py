"""Lets `module.compile(backend="rannc")` reach the backend where the module's `forward` is torch's own, as
that of nn.Sequential.

In: the backend, known to Dynamo. Out: from then on such a call is traced as `torch.compile(module)` would
trace it. Dynamo leaves functions of torch itself alone, and below one of nn.Sequential there may be no other:
the plain model would run, each rank would train it by itself, and nobody would be told.

What is private to torch here: the context that `torch.compile` applies to what it is given, and
`wrap_inline`, by which Dynamo itself traces torch's modules and functions, but for the one that
`nn.Module.compile` gives it; and where what it made keeps the user's function (seen on torch 2.11.0 and
2.13.0; see tests/unit/rannc_backend/capture/test_module_compile.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import _TorchDynamoContext
from torch._dynamo.external_utils import wrap_inline

from rannc_backend.capture.refusals import backend_arguments, innermost_backend, told_options
from rannc_backend.settings import hooks

_MARK = "_rannc_compiled"
_MAX_WRAPPERS = 10


def trace_modules_of_torch(
    is_ours: Callable[[object], bool],
    wrap: Callable[[Callable[..., Any], nn.Module | None, Mapping[str, Any]], Callable[..., Any]]
    | None = None,
    settle: Callable[[Any], Any] = lambda options: options,
) -> Callable[[], None]:
    """From now on, in this process, for backends that `is_ours` knows; gives what ends it.

    ``wrap``: applied to every compiled function of such a backend, that of a model included, the module whose
    call it is, and what `torch.compile` was told for the backend. `is_compiled` knows them. ``settle``: gives the options
    that such a backend gets, of those that `torch.compile` was told.
    """
    original = _TorchDynamoContext.__call__

    def call(context: Any, function: Any) -> Any:
        module = getattr(function, "__self__", None)
        in_place = getattr(function, "__name__", "") == "_call_impl"
        ours = is_ours(innermost_backend(context.callback))
        if ours:
            # Before torch compiles what comes back, a module, by way of here again.
            told_options(context.callback, settle)
        if ours and in_place and isinstance(module, nn.Module) and trace_rules.check(type(module).forward):
            function = wrap_inline(function)
        compiled = original(context, function)
        if ours and isinstance(module, nn.Module):
            compiled = _with_own_hooks(
                compiled, module, functools.cache(lambda: original(context, wrap_inline(function)))
            )
        # Of a module comes another one, which has its own call compiled by way of here.
        if ours and wrap is not None and not isinstance(compiled, nn.Module | type):
            # Private to torch, as the class: seen on 2.11.0 and 2.13.0.
            told = {**backend_arguments(context.callback), "dynamic": getattr(context, "_dynamic", None)}
            compiled = wrap(compiled, module_of(function), told)
            setattr(compiled, _MARK, True)
        return compiled

    return hooks.replace("compiled calls", _TorchDynamoContext, "__call__", call)


def _with_own_hooks(
    compiled: Callable[..., Any], module: nn.Module, inlined: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """The compiled call, or where the module has forward hooks of its own `inlined`, which traces them as those of its
    parts: else Dynamo makes graphs of their own of what they compute.
    """

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        takes_hooks = not torch.compiler.is_compiling() and not (
            module._backward_hooks or module._backward_pre_hooks
        )
        if takes_hooks and (module._forward_hooks or module._forward_pre_hooks):
            return inlined()(*args, **kwargs)
        return compiled(*args, **kwargs)

    return call


def plain_function(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What was given to Dynamo, of what came back: the user's function, or the call of a module."""
    function: Callable[..., Any] = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return function


def module_of(function: object) -> nn.Module | None:
    """The module whose call a function is, through what torch wraps around it; None if it is no module's."""
    for _ in range(_MAX_WRAPPERS):
        owner = getattr(function, "__self__", function)
        if isinstance(owner, nn.Module):
            return owner
        function = getattr(function, "__wrapped__", None)
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` has made, or `module.compile` has changed, for such a
    backend.
    """
    members = vars(module)
    return any(hasattr(members.get(name), _MARK) for name in ("forward", "_compiled_call_impl"))
