"""The private torch functions that the runtime needs, one Python function or class each.

In: tensors, or nothing. Out: facts that torch has no public name for. Seen on torch 2.13.0; the test beside
says so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch._logging import trace_structured
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    GetAttrKey,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from rannc_backend.settings import hooks

# Of torch's `WorkResult`.
_NCCL_RESULTS = {1: "time-out", 2: "communication error"}
P = ParamSpec("P")
R = TypeVar("R")
ClipGradNorm = Callable[..., torch.Tensor]
"""What `torch.nn.utils.clip_grad_norm_` is, by its arguments' names."""
ClipGradValue = Callable[..., None]
"""What `torch.nn.utils.clip_grad_value_` is: (parameters, clip_value, foreach)."""
GetTotalNorm = Callable[..., torch.Tensor]
"""What `torch.nn.utils.get_total_norm` is: (tensors, norm_type, error_if_nonfinite, foreach) to the norm."""
UnscaleGrads = Callable[..., dict[torch.device, torch.Tensor]]
"""What `torch.amp.GradScaler._unscale_grads_` is: (scaler, optimizer, inverse scale, found_inf, allow_fp16)
to found_inf by device.
"""


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors, ``tensor`` included, share its storage."""
    # The storage object that is made for asking counts once itself.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


@dataclass(frozen=True, slots=True)
class BusyRun(Generic[R]):
    """What a function gave, for how long the device worked on it, and for how long the host queued it."""

    result: R
    device_seconds: float
    host_seconds: float


def on_busy_device(run: Callable[[], R], device: torch.device, sleep_seconds: float) -> BusyRun[R]:
    """Call ``run`` while the device sleeps for about ``sleep_seconds``, so that it does not wait for what the host
    has yet to queue.
    """
    clock_hertz = 2e9  # none of today's is faster: it sleeps a little longer
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(int(sleep_seconds * clock_hertz))
        begin.record()
        began = time.perf_counter()
        result = run()
        host_seconds = time.perf_counter() - began
        end.record()
    end.synchronize()
    return BusyRun(result, begin.elapsed_time(end) / 1e3, host_seconds)


def backward_keeps_graph() -> bool:
    """True inside a backward that was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def graph_task() -> int:
    """The number of the backward that is running: each call of ``backward()`` has its own. Seen on 2.11 to 2.15."""
    return torch._C._current_graph_task_id()


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """What autograd saves here stays as it is, whatever the user's hooks do with it (`torch.utils.checkpoint` calls the
    forward again where it is read). Seen on 2.11 to 2.15.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def func_transform() -> str:
    """The innermost transform of torch.func that runs (`torch.func.grad`, `vmap`); "" if none. Seen on 2.11 to 2.15."""
    level = torch._C._functorch.peek_interpreter_stack()
    return "" if level is None else level.key().name.lower()


def is_asked_for(tensor: torch.Tensor) -> Callable[[], bool]:
    """What says, while a backward runs, whether it makes the gradient of a leaf: `torch.autograd.grad` by other tensors and
    ``backward(inputs=...)`` do not. Seen on 2.11 to 2.15.
    """
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return lambda: torch._C._will_engine_execute_node(node)


def function_of(node: Any) -> type | None:
    """The `torch.autograd.Function` that a node of autograd's graph belongs to; None for torch's own nodes. A class is told
    from another one of its name. Seen on 2.11 to 2.15.
    """
    return getattr(node, "_forward_cls", None)


class NewTensors(TorchDispatchMode):
    """Context manager that calls ``made`` with each tensor that an ATen operator returns in memory of its
    own.
    """

    def __init__(self, made: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        given = {
            storage_key(leaf) for leaf in tensors if not leaf.is_sparse
        }  # which has no memory of its own
        for leaf in tree_leaves(result):
            # A view or an in-place result is no new memory.
            if isinstance(leaf, torch.Tensor) and not leaf.is_sparse and storage_key(leaf) not in given:
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


def taken_apart(values: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """All leaves of nested containers, and what puts others in their places."""
    leaves, form = tree_flatten(values)
    return leaves, lambda others: tree_unflatten(others, form)


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
    """While it lasts, ``note(function, tensor, ...)`` stands for torch's function behind
    ``nn.init.trunc_normal_``, which would ask for what it has drawn and leaves tensors on "meta" alone.
    """
    module = torch.nn.init
    name = "_no_grad_trunc_normal_"
    original = getattr(module, name)
    undo = hooks.replace("trunc_normal_", module, name, functools.partial(note, original))
    try:
        yield
    finally:
        undo()


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Put a text (``encoding`` "string" or "json") into torch's structured trace; ``payload`` is called only
    where TORCH_TRACE is set.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share while they share memory."""
    return tensor.untyped_storage()._cdata


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with autocast off: captured graphs have their casts in them, and none may be added when
    they run.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def outside_of_traces() -> contextlib.AbstractContextManager[Any]:
    """While it lasts, `torch.load` reads values although Dynamo has a trace under way: it would give tensors
    on "meta".
    """
    return torch._guards.tracing(None)


def without_anomaly_detection(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` as if nobody had asked for anomaly detection, which looks at the values of gradients: a
    trace has none.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autograd.set_detect_anomaly(False):
            return function(*args, **kwargs)

    return run


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Within a backward: call ``function`` when it has made and added up all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """While it lasts, functions take a tensor of a subclass for the tensor that it is, without asking its
    ``__torch_function__``.
    """
    return torch._C.DisableTorchFunctionSubclass()


def refuse_memory_access(tensor: torch.Tensor, message: str) -> None:
    """Let C++ code that asks where a tensor's memory is get an error: for writing in all builds; for reading,
    with ``message``, in those with CUDA. All tensors on the same storage are concerned.
    """
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    refuse = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if refuse is not None:
        refuse(tensor.untyped_storage()._cdata, message)


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """What the user gave to ``parameter.register_hook``, in that order."""
    return [hook for hook in (parameter._backward_hooks or {}).values() if not isinstance(hook, GradientNote)]


class GradientNote:
    """A hook of this package for ``parameter.register_hook``: ``note`` sees what autograd itself adds to
    ``p.grad``.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        self._note = note

    def __call__(self, gradient: torch.Tensor) -> None:
        self._note(gradient)


def be_first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> None:
    """Let a hook of ``register_step_post_hook`` be the first that an optimizer calls after its step, before those of all
    optimizers too.
    """
    registered = optimizer._optimizer_step_post_hooks
    ordered = sorted(registered.items(), key=lambda item: item[1] is not hook)
    registered.clear()
    registered.update(ordered)


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The ``step`` of an optimizer's class without the wrapper that calls hooks of optimizer steps."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def cell_of_step(cls: type[torch.optim.Optimizer]) -> Any:
    """The closure's cell with the function that an optimizer's ``step`` calls between hooks; None where there is
    none. The function is read from it after the hooks before a step: seen on torch 2.13.
    """
    step = cls.step
    if not getattr(step, "hooked", False):
        return None
    own = step.__wrapped__  # type: ignore[attr-defined]
    cells = dict(zip(step.__code__.co_freevars, step.__closure__ or ()))
    found = cells.get("func")
    inner = getattr(found, "cell_contents", None)
    return found if inner is own or getattr(inner, "__wrapped__", None) is own else None


def optimizers_in_step() -> list[torch.optim.Optimizer]:
    """Those whose ``step`` this call comes from, by way of a closure; the innermost first. The function that torch puts
    around a ``step`` has the optimizer as its local ``self``: seen on torch 2.13.
    """
    around = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
    frame, found = sys._getframe(), []
    while frame is not None:
        if frame.f_code is around:
            found.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return found


def replace_optimizer_states(
    give: Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]],
    take: Callable[[torch.optim.Optimizer, dict[str, Any], Callable[[dict[str, Any]], None]], None],
) -> Callable[[], None]:
    """Let every ``optimizer.state_dict()`` be what ``give`` makes of this process's own state, and let
    ``take`` load one: it is given torch's own way of loading. Returns a function that ends this.
    """
    cls = torch.optim.Optimizer
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict

    @torch._disable_dynamo
    @functools.wraps(state_dict)
    def whole(self: torch.optim.Optimizer) -> dict[str, Any]:
        return give(self, state_dict(self))

    @torch._disable_dynamo
    @functools.wraps(load_state_dict)
    def load(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        take(self, state_dict, functools.partial(load_state_dict, self))

    return hooks.together(
        hooks.replace("optimizer states", cls, "state_dict", whole),
        hooks.replace("optimizer states", cls, "load_state_dict", load),
    )


def replace_zero_grad(before: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Let ``before`` see every call of `torch.optim.Optimizer.zero_grad`; returns a function that ends
    this.
    """
    original = torch.optim.Optimizer.zero_grad

    @torch._disable_dynamo
    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        before(self)
        original(self, *args, **kwargs)

    return hooks.replace("zero_grad", torch.optim.Optimizer, "zero_grad", zero_grad)


def accumulation_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``parameter.register_post_accumulate_grad_hook`` was given, in that order."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def any_hooks(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any of them may have some of `gradient_hooks` or `accumulation_hooks`; asked in every step, of
    all parameters.
    """
    return any(
        [parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters]
    )


def replace_unscale_grads(make: Callable[[UnscaleGrads], UnscaleGrads]) -> Callable[[], None]:
    """Put ``make(original)`` in the place of the method of every GradScaler that unscales one optimizer's
    gradients and looks for infinities among them; returns a function that puts the original back.
    """
    original = torch.amp.GradScaler._unscale_grads_
    changed = functools.wraps(original)(make(original))
    return hooks.replace("GradScaler", torch.amp.GradScaler, "_unscale_grads_", changed)


def state_dict_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What ``module.register_state_dict_post_hook`` was given, in that order."""
    return list(module._state_dict_hooks.values())


def replace_clip_grad_norm(make: Callable[[ClipGradNorm], ClipGradNorm]) -> Callable[[], None]:
    """Put ``make(original)`` in the place of what `torch.nn.utils.clip_grad_norm_` does; returns a function
    that puts the original back.
    """
    return _replace_behind_wrapper(torch.nn.utils.clip_grad_norm_, ("clip_grad_norm_",), make)


def replace_clip_grad_value(make: Callable[[ClipGradValue], ClipGradValue]) -> Callable[[], None]:
    """As `replace_clip_grad_norm`, for `torch.nn.utils.clip_grad_value_`."""
    return _replace_behind_wrapper(torch.nn.utils.clip_grad_value_, ("clip_grad_value_",), make)


def replace_get_total_norm(make: Callable[[GetTotalNorm], GetTotalNorm]) -> Callable[[], None]:
    """As `replace_clip_grad_norm`, for `torch.nn.utils.get_total_norm`."""
    return _replace_behind_wrapper(torch.nn.utils.get_total_norm, ("get_total_norm", "_get_total_norm"), make)


def _replace_behind_wrapper(
    public: Callable[..., Any], names: Sequence[str], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Scripts import a function by its name, perhaps before this is called. It is a wrapper that switches
    gradients off: what it wraps is exchanged. Where a torch has it without a wrapper, its names are.
    """
    cells: Sequence[Any] = getattr(public, "__closure__", None) or ()
    if len(cells) == 1 and callable(cells[0].cell_contents):
        original: Callable[..., Any] = cells[0].cell_contents
        changed = functools.wraps(original)(make(original))
        return hooks.replace("norms", cells[0], "cell_contents", changed)
    changed = functools.wraps(public)(torch.no_grad()(make(public)))
    return hooks.together(
        *(
            hooks.replace("norms", module, name, changed)
            for module in (torch.nn.utils, torch.nn.utils.clip_grad)
            for name in names
            if hasattr(module, name)
        )
    )


def is_finished(work: Any) -> bool:
    """Whether an operation of torch.distributed has ended well; does not wait.

    Raises:
        RuntimeError: it has failed. Such work counts as completed too.
    """
    completed = bool(work.is_completed())  # asks the connection, which sets the exception and NCCL's result
    failure = _failure_of(work)
    if failure is not None:
        raise RuntimeError(failure)
    return completed


def _failure_of(work: Any) -> str | None:
    """Why it has failed, as far as torch tells; None where it has not.

    Seen with gloo on 2.11 and 2.13, and of NCCL on 2.11 with CUDA 13. NCCL's work tells a code, which its watchdog and
    `is_completed` set. The exception has words, but up to 2.12 no Python type, whatever the work.
    """
    code = None
    with contextlib.suppress(RuntimeError):  # gloo's work has none
        result = work.get_future_result()
        code = int(result.value()) if result.done() else 0
    if code == 0:
        return None
    try:
        failure = work.exception()
    except TypeError:
        failure = None if code or not work.is_completed() or work.is_success() else "the connection is broken"
    if code and failure is None:
        failure = f"NCCL's result is {code}, {_NCCL_RESULTS.get(code, 'unknown')}"
    return None if failure is None else (str(failure).splitlines() or [type(failure).__name__])[0]


def root_of(model: nn.Module) -> nn.Module:
    """The user's module behind a compiled one."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def register_members(kind: type[Any], *names: str, settings: tuple[str, ...] = ()) -> None:
    """Let both ways of capture see the tensors in these members; ``settings``: members without tensors."""

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in names], tuple(getattr(value, name) for name in settings)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        members, rest = flatten(value)
        return [(GetAttrKey(name), each) for name, each in zip(names, members, strict=True)], rest

    def unflatten(members: Iterable[Any], rest: Iterable[Any]) -> Any:
        return kind(*members, *rest)

    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
