"""The one gate: every call of a function or model that was compiled for this backend passes here.

In: the callable that Dynamo made. Out: one that does the same, or raises one of `rannc_backend.errors`, the
same on all ranks: where Dynamo ran the plain model in its place, where another wrapper calls it, where Dynamo
or the model raise. Terms: a call *arrives* when the backend's own callable runs within it; one that never
arrives was run without the backend, whatever the cause.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from rannc_backend.capture.errors import own_error
from rannc_backend.capture.graph import CapturedGraph
from rannc_backend.capture.module_compile import is_compiled, plain_function
from rannc_backend.capture.nonstrict.arguments import Ranks
from rannc_backend.capture.nonstrict.captures import refuse_other_dim
from rannc_backend.capture.refusals import is_inside_ddp, plain_reason, wrapper_of
from rannc_backend.errors import (
    GatheringError,
    ModelError,
    PlainCallError,
    RanncError,
    ReleasedParameterError,
    UserInputError,
    WrappedModelError,
)
from rannc_backend.passes.pipeline import PassError
from rannc_backend.runtime.absent_tensors import is_absent, strides_of
from rannc_backend.runtime.agreement import share_failure
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import func_transform
from rannc_backend.settings import hooks
from rannc_backend.settings.options import Config


@dataclass(slots=True)
class _Call:
    arrived: bool = False
    compiled: bool = False  # Dynamo has compiled something, with an operator in it or without
    captured: bool = False  # the model has become a graph: what fails now is not its capture
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None  # that is compiled, where it is no module


_CURRENT: ContextVar[_Call | None] = ContextVar("rannc_call", default=None)


def arrive() -> None:
    """The backend's callable runs: whatever call is under way is served by it."""
    call = _CURRENT.get()
    if call is not None:
        call.arrived = True


def note_capture() -> None:
    """The model of the call under way has become a graph."""
    call = _CURRENT.get()
    if call is not None:
        call.captured = True


def arguments_of_call() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Of the call under way; none where a compiled function calls a model."""
    call = _CURRENT.get()
    return ((), {}) if call is None else (call.args, call.kwargs)


class _Calling(nn.Module):
    """A function that calls a model."""

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def batch_dim_check(config: Config, num_ranks: int, captured: CapturedGraph) -> Callable[[PassError], None]:
    """What to ask of the call under way where its samples meet, as `refuse_other_dim` does: with option batch_dim, or
    with one rank, nothing.
    """
    call = _CURRENT.get()
    is_asked = num_ranks > 1 and config.gather_inputs and not config.batch_dim
    # With sizes that are numbers it is captured once more.
    if not is_asked or captured.fixed_inputs or call is None:
        return lambda error: None
    ranks = Ranks(strides_of=strides_of, is_absent=is_absent)
    root = captured.root_module
    module = root if call.function is None else _Calling(call.function, root)
    return functools.partial(refuse_other_dim, captured, module, call.args, call.kwargs, ranks)


# Gives other arguments, and what is to be asked of the result.
Prepare = Callable[
    [tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], None]]
]


class SecondWay(Protocol):
    """Calls of one compiled module, captured in another way than by Dynamo."""

    def is_chosen(self) -> bool:
        """Whether calls go this way from now on."""
        ...

    def choose(self, error: ModelError) -> bool:
        """Dynamo has refused with this error; whether calls go this way from now on."""
        ...

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call."""
        ...


def note_compilation() -> None:
    """Dynamo has compiled a function for this backend: within a call, where that is under way."""
    call = _CURRENT.get()
    if call is not None and sys.exc_info()[1] is None:
        call.compiled = True


def refuse_gathered(is_gathered: bool) -> None:
    """Raises GatheringError where a call comes to the backend though its model is gathered: another compiled function
    calls it.
    """
    if is_gathered:
        raise GatheringError(
            "a compiled function calls the model inside rannc_backend.gathered",
            cure="call the model itself, which runs there as in one process, or the function outside of it.",
        )


def refuse_wrappers(
    is_planned: Callable[[nn.Module], bool], note_averaged: Callable[[nn.Module], None]
) -> Callable[[], None]:
    """From now on, modules that make replicas or shards cannot be made of a compiled model; gives what ends
    this.

    ``is_planned``: whether a module has parameters of a model that is spread over ranks. ``note_averaged``: is told of
    other modules whose gradients become means over ranks.
    """

    def registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        wrapper = wrapper_of(module)
        if wrapper and submodule is not None and not bootstrap.is_alone():
            if any(is_compiled(part) for part in submodule.modules()) or is_planned(submodule):
                raise WrappedModelError(wrapper)
        if wrapper == "DistributedDataParallel" and submodule is not None:
            note_averaged(submodule)

    return hooks.register("wrappers", register_module_module_registration_hook, registered)


def casting(config_of: Callable[[], Config]) -> Callable[[], AbstractContextManager[object]]:
    """What the option autocast puts around a call."""

    def around() -> AbstractContextManager[object]:
        try:
            config = config_of()
        except RanncError:
            return nullcontext()  # an option is wrong: the call says so where all options are read
        if config.autocast == "none":
            return nullcontext()
        device_type = bootstrap.start(bootstrap.options_of(config)).device.type
        if torch.is_autocast_enabled(device_type):
            return nullcontext()  # the script's own
        return torch.autocast(device_type, dtype=getattr(torch, config.autocast))

    return around


def gated(
    compiled: Callable[..., Any],
    on_failure: Callable[[], None] = lambda: None,
    second: SecondWay | None = None,
    prepared: Prepare | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    is_gathered: Callable[[], bool] = lambda: False,
) -> Callable[..., Any]:
    """``compiled`` behind the gate; Dynamo sees through it as through what it made itself. ``on_failure``:
    told of calls that raise. ``second``: serves the calls of a model that Dynamo refuses. ``prepared``: what is done
    to the arguments first. ``around``: gives the context in which a call runs. ``is_gathered``:
    whether calls run plainly now.
    """

    has_no_operator = False

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        if is_gathered():
            return plain_function(compiled)(*args, **kwargs)
        nonlocal has_no_operator
        counts = bootstrap.counts()
        counts.num_calls += 1
        try:
            check_result: Callable[[Any], None] | None = None
            _refuse_transforms()
            if prepared is not None:
                args, kwargs, check_result = prepared(args, kwargs)
            with around(), _whole_memory(args, kwargs) as (args, kwargs):
                result, served = _served_either_way(compiled, second, args, kwargs)
            # A function without any operator never comes to a backend, and is itself what it does to rows.
            has_no_operator = (
                not served.arrived and (served.compiled or has_no_operator) and not plain_reason()
            )
            if not served.arrived and not has_no_operator:
                _refuse_plain_call()
            if check_result is not None:
                check_result(result)
            return result
        except Exception as error:
            on_failure()
            counts.note_failure(f"call {counts.num_calls}", error)
            world = bootstrap.started()
            if world is not None:
                share_failure(world, error)
            raise

    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


@contextmanager
def _whole_memory(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments, with a contiguous copy of each tensor that is not, or that does not begin where its memory does.

    Dynamo guards strides and, once a size has changed, where a tensor begins: with slices of one batch
    (``x[rank * n:][:n]``) ranks would choose different graphs. Of what this gives, both are the same on all ranks. What the
    call writes into a copy is written to the user's tensor in the end.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def whole(value: Any) -> Any:
        kind = type(value)
        is_plain = kind is torch.Tensor and value.layout == torch.strided
        if is_plain and (value.storage_offset() or not value.is_contiguous()):
            if id(value) not in copies:
                copy = value.clone(memory_format=torch.contiguous_format)
                copies[id(value)] = value, copy, copy._version
            return copies[id(value)][1]
        if kind in (tuple, list, dict):
            parts = list(value.values()) if kind is dict else value
            new = [whole(part) for part in parts]
            if any(one is not two for one, two in zip(new, parts, strict=True)):
                return dict(zip(value, new, strict=True)) if kind is dict else kind(new)
        return value

    yield (args, kwargs) if bootstrap.is_alone() else (whole(args), whole(kwargs))
    for value, copy, version in copies.values():
        if copy._version != version:
            with torch.no_grad():
                value.copy_(copy)


def _refuse_transforms() -> None:
    """Raises UserInputError within `torch.func.grad` and alike: a step is no function that they can follow."""
    if transform := func_transform():
        raise UserInputError(
            f"a compiled model is called within a transform of torch.func ({transform})",
            cure="call the transform within the forward that is compiled; for the gradient of an input, "
            "torch.autograd.grad(loss, x).",
        )


def _served_either_way(
    compiled: Callable[..., Any], second: SecondWay | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, _Call]:
    if is_inside_ddp() and not bootstrap.is_alone():
        raise WrappedModelError("DistributedDataParallel")
    if second is None or not second.is_chosen():
        function = plain_function(compiled) if second is None else None
        call = _Call(args=args, kwargs=kwargs, function=function)
        try:
            return _served(call, compiled, args, kwargs), call
        except ModelError as error:
            # What fails in a step, here or on another rank, is not the capture.
            deployed = call.arrived or (call.captured and not error.needs_batch_size)
            if deployed or second is None or not second.choose(error):
                raise
    call = _Call(args=args, kwargs=kwargs)
    return _served(call, lambda *args, **kwargs: second(args, kwargs), args, kwargs), call


def _served(call: _Call, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = _CURRENT.set(call)
    try:
        return compiled(*args, **kwargs)
    except ReleasedParameterError as error:
        if call.arrived:
            raise
        raise PlainCallError(plain_reason()) from error
    except RuntimeError as error:
        own = own_error(error)
        if own is None:
            raise
        # What Dynamo has only wrapped is told without the wrapping.
        raise own from (own.__cause__ if own.__traceback__ is not None else error)
    finally:
        _CURRENT.reset(token)


def _refuse_plain_call() -> None:
    if not bootstrap.is_alone():
        raise PlainCallError(plain_reason())
    warnings.warn(
        f"Dynamo ran the plain model in place of the compiled one{plain_reason()}",
        RuntimeWarning,
        stacklevel=4,
    )
