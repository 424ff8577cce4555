"""Everything that this package replaces or registers outside of itself: the table of it, and the only
functions that do it.

In: what is to be called, or put in a place of torch, Python or the process. Out: a `Hook` in force, and what ends it.
Each has its entry in `HOOKS`. Nothing is put in place by an import, but for that of `rannc_backend.backend`, which
does all of it in one call of `install`. With the standard library only: helper processes of a job use it, too.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

AT_IMPORT = "import of the backend"
AT_IMPORT_OF_RANK = "import of the backend, in a job of several ranks"
AT_IMPORT_OLD_TORCH = "import of the backend, torch before 2.13"
AT_COMPILATION = "first compilation for the backend"
AT_NONSTRICT = "capture without Dynamo"
AT_JOB = "start of a job of several ranks"
AT_MODEL = "first model of a job of several ranks"
AT_ANY_MODEL = "first model"

_WITH_MODEL = "with the model"
_WITH_PROCESS = "never: a process of our own"
_ENDS_BY_CALL = "by what `SessionRegistry.ends` holds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One entry of the table."""

    name: str
    what: str  # is replaced, or given a function to call
    by: str  # modules that do it
    when: str
    why: str
    until: str = "never"
    per_object: bool = False  # on the user's parameters or modules, not on the process


HOOKS = (
    Hook(
        name="SystemExit", what="`SystemExit.code`, `sys.exit`",
        by="runtime.job.interpreter_exit", when=AT_IMPORT_OF_RANK,
        why="no other hook shows which SystemExit ends the interpreter",
    ),
    Hook(
        name="early words",
        what="`sys.excepthook`",
        by="runtime.job.last_words",
        when=AT_IMPORT_OF_RANK,
        until="never; silent once the job stands",
        why="a rank that fails before the job stands says so once, with the cure",
    ),
    Hook(
        name="start watch", what="`atexit`", by="runtime.job.start_watch", when=AT_IMPORT_OF_RANK,
        why="the watch of this rank learns that it ends in order",
    ),
    Hook(
        name="unused", what="`atexit`", by="runtime.job.disabled_compile", when=AT_IMPORT_OF_RANK,
        why="rank 0 says so where no call came to the backend",
    ),
    Hook(
        name="other libraries", by="integrations.accelerate, integrations.lightning_ranks, integrations.trainer",
        what="variables that Accelerate reads (`RANK`, ...), its `SkipBatchSampler`, `rank_zero_only.rank` of Lightning",
        when="an adapter that the user calls", why="the library takes its place in the job from there",
    ),
    Hook(
        name="forward on fakes",
        what="calls and hooks of modules, `time`, `torch.autograd.Function.apply`, `is_compiling`, `len`, truth of tensors and sizes",
        by="capture.nonstrict.watch", when=AT_NONSTRICT,
        why="what a graph does not hold is seen while the forward runs on fakes",
        until="that run ends",
    ),
    Hook(
        name="library loggers", by="capture.dynamo", when=AT_IMPORT,
        what="`torch._dynamo.config.ignore_logging_functions`, a filter of Dynamo's metrics logger",
        why="a call of a logger in a model would be a graph break",
    ),
    Hook(
        name="numbers", what="`process_automatic_dynamic`, which says what Dynamo makes symbolic", by="capture.dynamo",
        when="trace of a model", until="it ends", why="Python's floats that change are inputs of the graph",
    ),
    Hook(
        name="soft labels", what="the kernel of `aten.cross_entropy_loss` in traces",
        by="capture.written_out", when=AT_IMPORT_OLD_TORCH,
        why="torch's own takes the batch size as a number there",
    ),
    Hook(
        name="margin loss", what="the kernel of `aten.multilabel_margin_loss_forward` in traces",
        by="capture.written_out", when=AT_IMPORT, why="torch's own has other values than its eager one",
    ),
    Hook(
        name="compiled calls",
        what="the context that `torch.compile` applies (`_TorchDynamoContext.__call__`)",
        by="capture.module_compile",
        when=AT_IMPORT,
        until="never; that of `rannc verify` neither",
        why="every compiled call passes the gate; models whose forward is torch's own are traced",
    ),
    Hook(
        name="wrappers",
        what="torch's hook of registered submodules",
        by="compiled_call",
        when=AT_IMPORT,
        why="DDP and FSDP around a compiled model are refused",
    ),
    Hook(
        name="callback lists",
        what="Dynamo's lists of callbacks at the start and end of compilations",
        by="capture.first_trace",
        when=AT_IMPORT,
        why="`torch._dynamo.reset` would drop our callbacks",
    ),
    Hook(
        name="first trace",
        what="Dynamo's callbacks at the start and end of compilations",
        by="capture.first_trace",
        when=AT_IMPORT,
        until="never; when a model has been planned without ranks, those for that",
        why="the first trace has a symbolic batch size; absent tensors have their classes while it lasts",
    ),
    Hook(
        name="given-up models",
        what="Dynamo's hook of recompilations and its callback at the end of compilations",
        by="capture.refusals",
        when=AT_COMPILATION,
        until="by `torch._dynamo.reset`, until the next compilation",
        why="a graph break that would run the plain model is refused; limits of compilations are per model",
    ),
    Hook(
        name="exits",
        what="`sys.excepthook`, `threading.excepthook`, `os._exit`, `atexit`, `os.register_at_fork`",
        by="runtime.job.exit_hooks",
        when=AT_JOB,
        until="in a forked child (but for that of forks)",
        why="the other ranks learn why this one ends; ranks say goodbye before they close connections",
    ),
    Hook(
        name="signals",
        what="SIGINT, SIGTERM (where the user has no handler), `signal.set_wakeup_fd`",
        by="runtime.job.exit_hooks",
        when=AT_JOB,
        until="as the row above",
        why="a rank that waits in C++ ends on a signal, and says so",
    ),
    Hook(
        name="threads",
        what="variables `OMP_NUM_THREADS`, `TORCHINDUCTOR_COMPILE_THREADS`, where unset",
        by="runtime.host_resources",
        when=AT_JOB,
        why="ranks of a host share its cores; child processes read the variables",
    ),
    Hook(
        name="connections",
        what="variable `CUDA_DEVICE_MAX_CONNECTIONS`, where unset; `CUDA_VISIBLE_DEVICES`, with `visible_devices`",
        by="runtime.comm.device_connections",
        when="start of a job on GPUs",
        why="a stream that waits for a rank holds up no other; ranks use the devices that the option names",
    ),
    Hook(
        name="NCCL",
        what="variables `NCCL_*`, where unset",
        by="runtime.job.make_transport",
        when="start of a job whose ranks share a GPU",
        why="NCCL refuses two ranks on one device otherwise",
    ),
    Hook(
        name="interfaces",
        what="variables of gloo, NCCL and MPI that name a network interface, where unset",
        by="runtime.job.meeting",
        when=AT_JOB,
        why="they listen where the ranks meet, and nowhere else",
    ),
    Hook(
        name="GradScaler", what="`torch.amp.GradScaler._unscale_grads_`", by="runtime.torch_internals",
        when=AT_MODEL, until=_ENDS_BY_CALL, why="an infinity on one rank makes all skip the step",
    ),
    Hook(
        name="norms", what="`torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, `get_total_norm`",
        by="runtime.torch_internals", when=AT_MODEL, until=_ENDS_BY_CALL,
        why="the norm is that of all ranks' gradients",
    ),
    Hook(
        name="gradients by name", what="`torch.autograd.grad`, `backward`", by="runtime.step.autograd", when=AT_ANY_MODEL,
        until=_ENDS_BY_CALL, why="gradients of parameters of a compiled model do not pass through autograd; heads' are of own rows",
    ),
    Hook(
        name="optimizer states",
        what="`torch.optim.Optimizer.state_dict`, `load_state_dict`",
        by="runtime.torch_internals",
        when=AT_MODEL,
        until=_ENDS_BY_CALL,
        why="states are whole where they are saved, and divided where they are loaded",
    ),
    Hook(
        name="zero_grad",
        what="`torch.optim.Optimizer.zero_grad`",
        by="runtime.torch_internals",
        when=AT_MODEL,
        until=_ENDS_BY_CALL,
        why="clearings are counted, and compared over ranks",
    ),
    Hook(
        name="optimizer steps",
        what="torch's hook before steps of optimizers",
        by="runtime.gradients.optimizer_watch",
        when=AT_MODEL,
        until=_ENDS_BY_CALL,
        why="gradients and optimizers that are not what one process would have are refused",
    ),
    Hook(
        name="apply groups",
        what="torch's hook before steps of optimizers, the function behind `step` of their classes",
        by="runtime.gradients.apply_groups",
        when="first model with `num_apply_group`",
        until=_ENDS_BY_CALL,
        why="a step runs in parts of the parameters, between the hooks of one step",
    ),
    Hook(
        name="new values",
        what="`register_step_post_hook` of optimizers",
        by="runtime.gradients.optimizer_watch",
        when="first step of an optimizer under ZeRO",
        until=_WITH_MODEL,
        why="replicas that do not update get new values, before other hooks read them",
        per_object=True,
    ),
    Hook(
        name="plain gradients",
        what="`register_hook` of parameters",
        by="runtime.parameters",
        when="deployment of a model",
        until=_WITH_MODEL,
        why="gradients that do not come from compiled calls are noticed",
        per_object=True,
    ),
    Hook(
        name="module states",
        what="hooks of `state_dict` and `load_state_dict` of modules, and their `save_pretrained`",
        by="runtime.state_hooks",
        when="deployment of a model",
        until=_WITH_MODEL,
        why="states are whole where they are saved, and divided where they are loaded",
        per_object=True,
    ),
    Hook(
        name="synchronized parameters",
        what="`register_hook` of parameters",
        by="api.synchronized_modules",
        when="`synchronize(module)`",
        until=_WITH_MODEL,
        why="their gradients are averaged over ranks",
        per_object=True,
    ),
    Hook(
        name="handed-over optimizer",
        what="`state_dict` and `load_state_dict` of one optimizer",
        by="api.whole_optimizer_state",
        when="`patch_optimizer`",
        until=_WITH_MODEL,
        why="they have an argument more: `from_global`",
        per_object=True,
    ),
    Hook(
        name="step meter",
        what="torch's hook after steps of optimizers",
        by="runtime.trace.meter",
        when="a model whose steps are measured, on CPUs",
        until="when it has been measured",
        why="memory of optimizers is part of the report",
    ),
    Hook(
        name="event trace",
        what="torch's hooks before and after steps of optimizers",
        by="runtime.trace.event_trace",
        when="first step with `trace_events`",
        until="when the trace is closed",
        why="updates are in the trace",
    ),
    Hook(
        name="trace file",
        what="`atexit`",
        by="runtime.trace.trace_file",
        when="first model with `trace_events`",
        why="the trace is written when the process ends",
    ),
    Hook(
        name="checkpoint end",
        what="`atexit`",
        by="checkpoint.background",
        when="first checkpoint that is written in the background",
        why="a save that fails after the last call is reported",
    ),
    Hook(
        name="Ctrl-C of the search",
        what="SIGINT",
        by="log.progress",
        when="search for a plan in the foreground",
        until="when it ends",
        why="the first Ctrl-C takes the best plan so far",
    ),
    Hook(
        name="log handler",
        what="a handler of the logger `rannc_backend`",
        by="log.logger",
        when="first call of a compiled model",
        why="lines of the log name their rank",
    ),
    Hook(
        name="quicker compilation",
        what="functions of Inductor and sympy (`stages/quicker_compiler.py` lists them)",
        by="stages.quicker_compiler",
        when="compilation of a stage",
        until="when it ends",
        why="they take most of the time, and do the same work again",
    ),
    Hook(
        name="compile ahead",
        what="Inductor's `PythonWrapperCodegen.define_kernel` and `AsyncCompile.cpp_pybinding`",
        by="stages.compile_ahead",
        when="compilation of a stage",
        until="when it ends",
        why="kernels are compiled while others are written",
    ),
    Hook(
        name="trunc_normal_",
        what="the function behind `torch.nn.init.trunc_normal_`",
        by="runtime.torch_internals",
        when="models built within `DistributeModelParams`",
        until="at its end",
        why="it leaves tensors on meta alone",
    ),
    Hook(
        name="recorded parameters",
        what="torch's hooks of registered parameters and buffers",
        by="api.record_model",
        when="models built within `DistributeModelParams`",
        until="at its end",
        why="parameters are known by what made them",
    ),
    Hook(
        name="verify steps",
        what="torch's hook after steps of optimizers",
        by="verify.recording, verify.replay",
        when="a rank of `rannc verify`",
        until=_WITH_PROCESS,
        why="steps are recorded, and compared",
    ),
    Hook(
        name="verify gradients",
        what="`register_hook` of outputs",
        by="verify.recording",
        when="a rank of `rannc verify`",
        until=_WITH_PROCESS,
        why="incoming gradients are recorded",
        per_object=True,
    ),
    Hook(
        name="model file",
        what="an entry of `sys.modules`",
        by="cli.model_factory",
        when="`rannc plan FILE:FUNCTION`",
        until="where the file cannot be imported",
        why="classes of the file look their module up by name",
    ),
    Hook(
        name="doctor's job",
        what="variable `RANNC_CONF_DIR`",
        by="doctor.job",
        when="a rank of `rannc doctor`",
        until=_WITH_PROCESS,
        why="the user's options are for another model",
    ),
    Hook(
        name="helper's signals",
        what="SIGINT, SIGTERM, SIGHUP",
        by="runtime.job.supervisor, runtime.job.start_watch, planner.worker_processes",
        when="a helper process of a job or of a search",
        until=_WITH_PROCESS,
        why="the launcher's signals are for the ranks",
    ),
)  # fmt: skip

_BY_NAME = {hook.name: hook for hook in HOOKS}
_IN_FORCE = dict.fromkeys(_BY_NAME, 0)


class Undo:
    """Ends a hook, once: when called, or by the name that torch's handles have for it."""

    __slots__ = ("_name", "_undo")

    def __init__(self, name: str, undo: Callable[[], object]) -> None:
        self._name = name
        self._undo: Callable[[], object] | None = undo
        if not _BY_NAME[name].per_object:
            _IN_FORCE[name] += 1

    def __call__(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
            if not _BY_NAME[self._name].per_object:
                _IN_FORCE[self._name] -= 1

    remove = __call__


def install(begin: Iterable[Callable[[], object]]) -> None:
    """All that the import of the backend puts in place, in this order. Called by it alone."""
    for each in begin:
        each()


def in_force() -> set[str]:
    """Names of the hooks that are in place in this process now, but for those on the user's objects."""
    return {name for name, number in _IN_FORCE.items() if number}


def together(*ends: Callable[[], object]) -> Callable[[], None]:
    """What calls all of these."""

    def end() -> None:
        for each in ends:
            each()

    return end


def replace(name: str, holder: Any, attribute: str, value: object) -> Undo:
    """Put ``value`` in a place; undone by putting back what was there, or inherited, where ``value`` still is."""
    inherits = isinstance(holder, type) and attribute not in vars(holder)
    before = None if inherits else _held(holder, attribute)
    setattr(holder, attribute, value)

    def put_back() -> None:
        if _held(holder, attribute) == value and inherits:
            delattr(holder, attribute)
        elif _held(holder, attribute) == value:
            setattr(holder, attribute, before)

    return Undo(name, put_back)


def replace_item(name: str, mapping: MutableMapping[Any, Any], key: object, value: object) -> Undo:
    """Set an item, as of ``os.environ``; undone by setting or removing it as it was."""
    was_there, before = key in mapping, mapping.get(key)
    mapping[key] = value

    def put_back() -> None:
        if was_there:
            mapping[key] = before
        else:
            mapping.pop(key, None)

    return Undo(name, put_back)


def register(name: str, registering: Callable[[Any], Any], function: object) -> Undo:
    """Call one of torch's ``register_..._hook``, or alike, which may give a handle to remove it by."""
    handle = registering(function)
    return Undo(name, getattr(handle, "remove", handle if callable(handle) else lambda: None))


def at_exit(name: str, function: Callable[..., object], *args: object) -> Undo:
    """Call a function when the interpreter ends."""
    atexit.register(function, *args)
    return Undo(name, lambda: atexit.unregister(function))


def after_fork(name: str, function: Callable[[], object]) -> Undo:
    """Call a function in forked children, for good."""
    os.register_at_fork(after_in_child=function)
    return Undo(name, lambda: None)


def handle_signal(name: str, number: int, handler: Any) -> Undo:
    """Handle a signal. From the main thread, as undoing it."""
    before = signal.signal(number, handler)
    return Undo(name, lambda: signal.signal(number, before))


def wake_on_signals(name: str, descriptor: int) -> Undo | None:
    """Let signals write to a descriptor; None where they write to another. From the main thread, as undoing it."""
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return None
    return Undo(name, lambda: signal.set_wakeup_fd(-1))


def _held(holder: Any, attribute: str) -> Any:
    # As it lies there: of a class, a static method and not its function.
    own = getattr(holder, "__dict__", {})
    return own[attribute] if attribute in own else getattr(holder, attribute)
