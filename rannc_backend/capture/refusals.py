"""Refuses what Dynamo would run without calling the backend, where that means something else than the user
asked for.

In: the backend, known to Dynamo. Out: errors, before Dynamo goes its way: for a model inside of a wrapper
that replicates or shards it, which Dynamo leaves as it is; and for one with a graph break after which Dynamo
cannot go on, within a `with` for one, so that it gives the whole call up. In each case the plain model would
run: each rank by itself, without the others' gradients, or with parameters that are on other ranks. Dynamo's
limits of compilations, beyond which it does so too, are lifted for models of the backend.

What is private to torch here: where Dynamo's stack holds the frame's variables and the backend; that it asks
for the contexts of a recompilation before it looks at its limits; that callbacks run while the exception that
ends a compilation is under way; the stance of torch.compile; and which DDP calls its module (seen on torch
2.11.0 and 2.13.0; see tests/unit/rannc_backend/capture/test_refusals.py).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch._dynamo.config as dynamo_config
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context
from torch._guards import CompileContext
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from rannc_backend.capture.errors import graph_break_error
from rannc_backend.errors import LaunchError, RanncError, WrappedModelError, user_location
from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)

_LIMITS = ("recompile_limit", "accumulated_recompile_limit")
_FARTHEST = 20  # frames between Dynamo's `_compile` and what it calls
_LIGHTNING = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def refuse_other_count(num_ranks: int) -> None:
    """Raises LaunchError where Accelerate, on which the Trainer of Hugging Face stands, has started in this process, or
    Lightning calls the model, and sees another number of processes than the job has: each rank would read all rows, and
    counts of items and means over processes would be those of one rank.
    """
    state = sys.modules.get("accelerate.state")
    shared: Mapping[str, Any] = getattr(getattr(state, "PartialState", None), "_shared_state", {})
    seen = shared.get("num_processes", num_ranks)
    if seen != num_ranks:
        raise LaunchError(
            f"Accelerate sees {seen} process(es), the job has {num_ranks} ranks: each would read all rows",
            cure="call rannc_backend.integrations.accelerate.join_job() before Accelerator or TrainingArguments are made "
            "(docs/accelerate.md).",
        )
    seen = _count_of_lightning()
    if seen not in (None, num_ranks):
        raise LaunchError(
            f"Lightning sees {seen} process(es), the job has {num_ranks} ranks: each would read all rows and write the "
            "checkpoint",
            cure="give the Trainer strategy=rannc_backend.integrations.lightning.RanncStrategy(), or Fabric "
            "strategy=rannc_backend.integrations.fabric.RanncFabricStrategy() (docs/lightning.md).",
        )


def _count_of_lightning() -> int | None:
    """The number of processes that Lightning sees, where its Trainer or a model that Fabric has set up makes the call
    under way. None: neither does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Of no other frame: what locals are asked for stays with the frame, and a model that its user drops would stay.
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _LIGHTNING:
            caller = frame.f_locals.get("self")
            strategy = getattr(caller, "_strategy", None) or getattr(caller, "strategy", None)
            count = getattr(strategy, "world_size", None)
            if isinstance(count, int):
                return count
        frame = frame.f_back
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What Dynamo is about to do, by the variables of its own frame."""

    backend: object
    variables: Mapping[str, Any]  # of the user's frame
    code: CodeType  # that is compiled

    @property
    def owner(self) -> object:
        """The model that is called, or the code of a function that is none."""
        leaves = pytree.tree_leaves(dict(self.variables))
        owners = [getattr(value, "__self__", value) for value in leaves]
        return next((owner for owner in owners if isinstance(owner, nn.Module)), self.code)

    def is_of_a_model(self) -> bool:
        """Whether the user's frame is a call of a module that has parameters."""
        owners = [getattr(value, "__self__", value) for value in self.variables.values()]
        return any(isinstance(owner, nn.Module) and any(True for _ in owner.parameters()) for owner in owners)


def find_compilation(is_ours: Callable[[object], bool]) -> Compilation | None:
    """The compilation that has called this, directly or not, for a backend that `is_ours`; None if it is for
    another one.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FARTHEST):
        if frame is None:
            return None
        found = frame.f_locals
        if frame.f_code.co_name == "_compile" and "compiler_fn" in found:
            backend, variables = innermost_backend(found["compiler_fn"]), found.get("locals")
            if not is_ours(backend) or not isinstance(variables, Mapping):
                return None
            return Compilation(backend=backend, variables=variables, code=found["code"])
        frame = frame.f_back
    return None


def wrapper_of(value: object) -> str:
    """The class by which a module, or the bound method of one, makes replicas or shards of a model; "" if it
    does not.
    """
    owner = value if isinstance(value, nn.Module) else getattr(value, "__self__", value)
    names = [cls.__name__ for cls in type(owner).__mro__]
    return next((name for name in names if name in _WRAPPERS), "")


def is_inside_ddp() -> bool:
    """Whether a DistributedDataParallel calls its module now."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def refuse_sharded(root: nn.Module) -> None:
    """Raises WrappedModelError where torch's FSDP manages a model; `fully_shard` leaves its class alone."""
    if vars(root).get("_is_fsdp_managed_module", False):
        raise WrappedModelError("FSDP (FullyShardedDataParallel, or fully_shard)")


def told_as_they_are(compilation: Compilation, check: Callable[[object], None]) -> None:
    """Calls ``check`` with the model that is to be compiled; its errors are not taken for Dynamo's own."""
    try:
        check(compilation.owner)
    except RanncError as error:
        raise BackendCompilerFailed(compilation.backend, error, None) from error


def refuse_wrapped(compilation: Compilation) -> None:
    """Raises BackendCompilerFailed with a WrappedModelError where the frame is that of a wrapped model."""
    for value in compilation.variables.values():
        # The frame of a whole model has the bound method that calls it.
        if wrapper := wrapper_of(value):
            error = WrappedModelError(wrapper)
            # Of other errors Dynamo would make one of its own.
            raise BackendCompilerFailed(compilation.backend, error, None) from error


class GivenUpModels:
    """Refuses that Dynamo gives up a model of a backend that `is_ours`; and lets it compile those as often as
    there is need.

    Dynamo counts what it has compiled of a function, whatever the model: cross-validation, or a sweep, would
    reach its limits though each model is compiled once. Its entries of models that are gone count, too. The
    backend counts by model (`session.py`).
    """

    def __init__(self, is_ours: Callable[[object], bool]) -> None:
        self._is_ours = is_ours
        self._restore_limits: Callable[[], object] = lambda: None

    def watch(self) -> None:
        """From now on, but for what `torch._dynamo.reset` ends: to be said at the start of each compilation,
        which costs nothing.
        """
        self._restore_limits()
        if self._recompiles not in (get_hook_for_recompile_user_context() or ()):
            hooks.register("given-up models", register_hook_for_recompile_user_context, self._recompiles)
        if self._ends not in callback_handler.end_callbacks:
            hooks.register("given-up models", callback_handler.register_end_callback, self._ends)

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
        raise BackendCompilerFailed(
            compilation.backend, graph_break_error(str(error), location), None
        ) from error

    def _recompiles(self) -> str:
        """Dynamo asks what there is to know of a compilation, before it looks at its limits: they are lifted
        for this one.
        """
        try:
            compilation = find_compilation(self._is_ours)
        except Exception:
            # Whatever this torch looks like, it may be another backend's compilation, which is not for us to
            # end.
            logger.debug("it is not known whose compilation this is", exc_info=True)
            compilation = None
        if compilation is not None:
            undo = contextlib.ExitStack()
            undo.enter_context(dynamo_config.patch(dict.fromkeys(_LIMITS, sys.maxsize)))
            # At the latest with the compilation: its context lives no longer.
            self._restore_limits = weakref.finalize(CompileContext.get(), undo.close)
        return ""


def recompile_limit() -> int:
    """How often Dynamo is to compile one function, by its settings."""
    return min(getattr(dynamo_config, name) for name in _LIMITS)


def plain_reason() -> str:
    """Which of torch's settings lets Dynamo run functions without compiling them, as ": because ..."; ""
    where none is known.
    """
    stance = eval_frame._stance.stance
    if stance != "default":
        return f', because of torch.compiler.set_stance("{stance}")'
    settings = [name for name in ("disable", "suppress_errors") if getattr(dynamo_config, name)]
    return f", because of torch._dynamo.config.{settings[0]}" if settings else ""


def _count_as_ended() -> None:
    """What Dynamo does after its callbacks, if none of them raises: otherwise none would be called again."""
    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    if hasattr(callback_handler, name):
        setattr(callback_handler, name, getattr(callback_handler, name) - 1)


def innermost_backend(compiler: Any) -> object:
    """The backend that Dynamo has wrapped into `compiler`."""
    return list(_unwrapped(compiler))[-1]


def backend_arguments(compiler: Any) -> Mapping[str, Any]:
    """What `torch.compile` was told for the backend: its options and mode."""
    found = (getattr(each, "kwargs", None) for each in _unwrapped(compiler))
    return next((arguments for arguments in found if isinstance(arguments, Mapping)), {})


def told_options(compiler: Any, settle: Callable[[Any], Any]) -> None:
    """Put what `settle` gives of the options that `torch.compile` was told in their place."""
    found = (getattr(each, "kwargs", None) for each in _unwrapped(compiler))
    arguments = next((arguments for arguments in found if isinstance(arguments, dict)), None)
    if arguments is None:
        return
    options = settle(arguments.get("options"))
    if options is not None:
        arguments["options"] = options


def _unwrapped(compiler: Any) -> Iterator[Any]:
    """`compiler`, and what Dynamo has wrapped into it, from the outside in."""
    while compiler is not None:
        yield compiler
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(
            compiler, "compiler_fn", None
        )
