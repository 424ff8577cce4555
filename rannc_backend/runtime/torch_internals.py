"""The private torch functions that the runtime needs, one Python function or class each.

In: tensors, or nothing. Out: facts that torch has no public name for. Seen on torch 2.13.0; the test beside says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch._logging import trace_structured
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

P = ParamSpec("P")
R = TypeVar("R")
ClipGradNorm = Callable[..., torch.Tensor]
"""What `torch.nn.utils.clip_grad_norm_` is, by its arguments' names."""
UnscaleGrads = Callable[..., dict[torch.device, torch.Tensor]]
"""What `torch.amp.GradScaler._unscale_grads_` is: (scaler, optimizer, inverse scale, found_inf, allow_fp16) to found_inf by device."""


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors, ``tensor`` included, share its storage."""
    # The storage object that is made for asking counts once itself.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def backward_keeps_graph() -> bool:
    """True inside a backward that was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class NewTensors(TorchDispatchMode):
    """Context manager that calls ``made`` with each tensor that an ATen operator returns in memory of its own."""

    def __init__(self, made: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            # A view or an in-place result is no new memory.
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in given:
                self._made(leaf)
        return result


class OperatorWatch(TorchDispatchMode):
    """Context manager that lets ``run(operator, args, kwargs)`` run every ATen operator."""

    def __init__(self, run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


def leaves_of(values: Any) -> list[Any]:
    """All leaves of nested lists, tuples and dicts."""
    return tree_leaves(values)


def map_leaves(function: Callable[[Any], Any], values: Any) -> Any:
    """The same nest with ``function`` of every leaf."""
    return tree_map(function, values)


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an ATen operator changes, by its schema."""
    written = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


@contextlib.contextmanager
def whole_fill_functions(note: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, ``note(function, tensor, ...)`` stands for torch's function behind ``nn.init.trunc_normal_``, which would ask for
    what it has drawn and leaves tensors on "meta" alone.
    """
    module = torch.nn.init
    name = "_no_grad_trunc_normal_"
    original = getattr(module, name)
    setattr(module, name, functools.partial(note, original))
    try:
        yield
    finally:
        setattr(module, name, original)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Put a text (``encoding`` "string" or "json") into torch's structured trace; ``payload`` is called only where TORCH_TRACE is set."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload, expect_trace_id=False)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share while they share memory."""
    return tensor.untyped_storage()._cdata


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with autocast off: captured graphs have their casts in them, and none may be added when they run."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def without_anomaly_detection(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` as if nobody had asked for anomaly detection, which looks at the values of gradients: a trace has none."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autograd.set_detect_anomaly(False):
            return function(*args, **kwargs)

    return run


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """While it lasts, functions take a tensor of a subclass for the tensor that it is, without asking its ``__torch_function__``."""
    return torch._C.DisableTorchFunctionSubclass()


def refuse_memory_access(tensor: torch.Tensor, message: str) -> None:
    """Let C++ code that asks where a tensor's memory is get an error: for writing in all builds; for reading, with ``message``, in those
    with CUDA. All tensors on the same storage are concerned.
    """
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    refuse = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if refuse is not None:
        refuse(tensor.untyped_storage()._cdata, message)


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """What ``parameter.register_hook`` was given, in that order."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``parameter.register_post_accumulate_grad_hook`` was given, in that order."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def replace_unscale_grads(make: Callable[[UnscaleGrads], UnscaleGrads]) -> Callable[[], None]:
    """Put ``make(original)`` in the place of the method of every GradScaler that unscales one optimizer's gradients and looks for
    infinities among them; returns a function that puts the original back.
    """
    original = torch.amp.GradScaler._unscale_grads_
    torch.amp.GradScaler._unscale_grads_ = functools.wraps(original)(make(original))  # type: ignore[method-assign]

    def put_back() -> None:
        torch.amp.GradScaler._unscale_grads_ = original  # type: ignore[method-assign]

    return put_back


def replace_clip_grad_norm(make: Callable[[ClipGradNorm], ClipGradNorm]) -> Callable[[], None]:
    """Put ``make(original)`` in the place of what `torch.nn.utils.clip_grad_norm_` does; returns a function that puts the original back.

    Scripts import that function by its name, perhaps before this is called. It is a wrapper that switches gradients off: what it wraps
    is exchanged. Where a torch has it without a wrapper, the name is.
    """
    public = torch.nn.utils.clip_grad_norm_
    cells = getattr(public, "__closure__", None) or ()
    original: ClipGradNorm
    put: Callable[[ClipGradNorm], None]
    if len(cells) == 1 and callable(cells[0].cell_contents):
        original, put = cells[0].cell_contents, functools.partial(setattr, cells[0], "cell_contents")
        changed = make(original)
    else:
        original, put = public, _set_clip_grad_norm
        changed = torch.no_grad()(make(original))
    put(functools.wraps(original)(changed))
    return functools.partial(put, original)


def _set_clip_grad_norm(function: ClipGradNorm) -> None:
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        module.clip_grad_norm_ = function  # type: ignore[assignment]
