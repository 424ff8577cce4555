"""What the backend can learn about the Dynamo call that it was invoked from, and how it asks Dynamo to trace
again.

In: the Python stack below `torch.compile`'s backend call. Out: a `DynamoCall`; or a restart of the trace with
the settings under which sizes stay symbolic. Terms: a *frame* is the function of the user that Dynamo traces;
a *restart* is Dynamo tracing the same frame again from its beginning. Everything private that is used of
`torch._dynamo` to do so is in this file (seen on torch 2.11.0 and 2.13.0; see
tests/unit/rannc_backend/capture/test_dynamo.py).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as symbolic_config
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic
from torch._dynamo.variables import builder
from torch._guards import CompileContext

from rannc_backend.errors import LaunchError
from rannc_backend.settings import hooks

_RESUME_PREFIX = "torch_dynamo_resume_in"

#: Dynamo settings during the second trace: of sizes, nothing but the marked dimensions may become symbolic.
_DYNAMO_SETTINGS: dict[str, object] = {
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "specialize_int": True,
}
#: Sizes 0 and 1 are not special (a last batch of 1 must not give another graph), and sizes that happen to be
#: equal do not share a symbol (a mask of [T, T] is no batch when T equals the batch size).
_SYMBOLIC_SETTINGS: dict[str, object] = {"backed_size_oblivious": True, "use_duck_shape": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoCall:
    """One invocation of the backend by Dynamo."""

    output_graph: OutputGraph
    code: CodeType  # of the frame that is traced
    restart_reasons: set[str]  # shared by all attempts to trace this frame
    skipped_functions: tuple[
        str, ...
    ]  # "name (file:line)" of the user's functions between torch.compile and the frame

    @property
    def scope(self) -> dict[str, dict[str, Any]]:
        """The names that source expressions such as `L['self']` refer to."""
        return {"L": dict(self.output_graph.local_scope), "G": dict(self.output_graph.global_scope)}

    @property
    def is_resumed(self) -> bool:
        """Whether the frame is what is left of a function after a graph break."""
        return self.code.co_name.startswith(_RESUME_PREFIX)


class SeenNumbers:
    """Python's floats that the traces of a model have read, by Dynamo's names: one that has changed is symbolic from
    then on, as torch has it.
    """

    def __init__(self) -> None:
        self._values: dict[str, set[float]] = {}
        self._given_up = False

    def is_symbolic(self, name: str, number: float) -> bool:
        """Whether a trace that reads this number may be one for all its values."""
        seen = self._values.setdefault(name, set())
        if len(seen) < 2:
            seen.add(number)
        return len(seen) > 1 and not self._given_up

    def give_up(self) -> bool:
        """Nothing is symbolic from now on: the model cannot be traced so. False where nothing was in any case."""
        was_symbolic = not self._given_up and any(len(seen) > 1 for seen in self._values.values())
        self._given_up = True
        return was_symbolic


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedLengths:
    """Dimensions of tensors that a trace leaves symbolic, beside that of the batch, and what is known of numbers.

    `give_up` is to be called where the dimensions are numbers in any case. `numbers`: None, where all are constants.
    """

    dims: tuple[tuple[torch.Tensor, frozenset[int]], ...] = ()
    give_up: Callable[[], object] = lambda: None
    numbers: SeenNumbers | None = None


NO_MARKED_LENGTHS = MarkedLengths()


class RestartReason(str):
    """What a trace runs under, and the way back. A text, because Dynamo records it where it is the reason of
    a restart.
    """

    restore: Callable[[], object]
    batch_tensors: tuple[torch.Tensor, ...]
    lengths: MarkedLengths
    hint: int | None
    break_counts: dict[str, int]  # graph breaks counted by Dynamo in this process before the restart
    finished: Any = None  # what the trace before gave, where this one only renews the guards


def guard_module_hooks() -> Callable[[], object]:
    """From now on Dynamo guards on the hooks of modules, so that one that comes or goes after the first call has the
    model traced again; returns what ends this. By default Dynamo would go on with the hooks that it has seen.
    """
    undo = contextlib.ExitStack()
    undo.enter_context(dynamo_config.patch(skip_nnmodule_hook_guards=False))
    return undo.close


def find_dynamo_call() -> DynamoCall:
    """Walk up the Python stack from a backend call. Raises LaunchError on a torch whose stack looks
    different.
    """
    output_graph: OutputGraph | None = None
    reasons: set[str] | None = None
    skipped: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        variables = frame.f_locals
        if output_graph is None and isinstance(variables.get("self"), OutputGraph):
            output_graph = variables["self"]
        elif reasons is None and isinstance(variables.get("restart_reasons"), set):
            reasons = variables["restart_reasons"]
        elif reasons is not None and frame.f_code.co_name == "compile_wrapper":
            break
        elif reasons is not None and not _is_torch_file(frame.f_code.co_filename):
            skipped.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    if output_graph is None or reasons is None:
        raise LaunchError(
            f"the backend was not called by Dynamo, or torch {torch.__version__} calls backends in an "
            "unknown way",
            cure='use it through torch.compile(model, backend="rannc") with one of the torch versions in the '
            "README.",
        )
    # Without the end of torch.compile's own wrapper in sight, callers further up say nothing about the frame.
    skipped_functions = tuple(skipped) if frame is not None else ()
    return DynamoCall(
        output_graph=output_graph,
        code=output_graph.root_tx.f_code,
        restart_reasons=reasons,
        skipped_functions=skipped_functions,
    )


def previous_restart(call: DynamoCall) -> RestartReason | None:
    """The last `restart_trace` to which this call is the answer; None in the first attempt to trace a
    frame.
    """
    restarts = [reason for reason in call.restart_reasons if isinstance(reason, RestartReason)]
    return max(restarts, key=len, default=None)


def restart_trace(
    call: DynamoCall,
    batch_tensors: Sequence[torch.Tensor],
    *,
    lengths: MarkedLengths = NO_MARKED_LENGTHS,
    hint: int | None = None,
    finished: Any = None,
) -> NoReturn:
    """Make Dynamo trace the frame again with dimension 0 of `batch_tensors` symbolic; see `symbolic_trace`.

    The settings go back when the reason's `restore` is called, at the latest when Dynamo has ended the
    compilation in whichever way. Raises TensorifyScalarRestartAnalysis, which must reach Dynamo.
    """
    attempt = sum(isinstance(reason, RestartReason) for reason in call.restart_reasons)
    reason = symbolic_trace(batch_tensors, lengths=lengths, hint=hint, finished=finished, attempt=attempt)
    # Dynamo remembers where the graph broke and would break it there again.
    call.output_graph.root_tx.speculation_log.clear()
    # The context object lives as long as this compilation: a trace that fails before it comes back here
    # cleans up too.
    reason.restore = weakref.finalize(CompileContext.get(), reason.restore)
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def symbolic_trace(
    batch_tensors: Sequence[torch.Tensor],
    *,
    lengths: MarkedLengths = NO_MARKED_LENGTHS,
    hint: int | None = None,
    finished: Any = None,
    attempt: int = 0,
) -> RestartReason:
    """From now on, until `restore` of the result is called, let Dynamo trace with dimension 0 of
    `batch_tensors` symbolic, and with the dimensions `lengths`.

    `hint`: what the trace takes for that size where it has to decide something; by default the real one.
    `finished` comes back with the reason.
    """
    undo = contextlib.ExitStack()
    with contextlib.ExitStack() as guard:
        guard.callback(undo.close)
        undo.enter_context(dynamo_config.patch(_DYNAMO_SETTINGS))
        undo.enter_context(symbolic_config.patch(**_SYMBOLIC_SETTINGS))  # type: ignore[attr-defined]
        undo.enter_context(_ignored_functions(library_log_methods().values()))
        undo.enter_context(_marked_dynamic(batch_tensors, lengths, hint))
        undo.callback(_follow_numbers(lengths.numbers))
        guard.pop_all()
    reason = RestartReason("rannc: symbolic batch size" + " again" * attempt)
    reason.batch_tensors = tuple(batch_tensors)
    reason.lengths = lengths
    reason.hint = hint
    reason.finished = finished
    reason.break_counts = _break_counts()
    reason.restore = undo.close
    return reason


def skip_library_loggers() -> None:
    """Let Dynamo leave out, from now on, what libraries log once (`logger.warning_once` of Hugging Face's
    losses).

    To be called when the backend is looked up, so before the first trace: a call of a logger inside of a
    nested function makes Dynamo give up the outer one before it calls any backend. Libraries that are
    imported later count too. Other compiled functions of the process only gain by it: what would have been a
    graph break is none.
    """
    name = _ignored_name()
    ignored = getattr(dynamo_config, name)
    if not isinstance(ignored, _WithLibraryLoggers):
        hooks.replace("library loggers", dynamo_config, name, _WithLibraryLoggers(ignored))
        logger = logging.getLogger("torch._dynamo.metrics_context")
        hooks.register("library loggers", logger.addFilter, _no_settings_complaint)


def _no_settings_complaint(record: logging.LogRecord) -> bool:
    """Drop the traceback that torch 2.11 prints when it cannot write functions among its settings into its
    own metrics.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, TypeError) and "logging compilation metrics" in record.getMessage())


class _WithLibraryLoggers(set[Callable[..., Any]]):
    """Dynamo's set of logging functions to leave out, and always also what libraries have added to
    `logging.Logger` so far.
    """

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield from super().__iter__()
        for method in library_log_methods().values():
            if not super().__contains__(method):
                yield method

    def __contains__(self, function: object) -> bool:
        return super().__contains__(function) or any(
            function is method for method in library_log_methods().values()
        )


def library_log_methods() -> dict[str, Callable[..., Any]]:
    """The methods that libraries have added to `logging.Logger` to say something once, or as advice."""
    return {
        name: method for name, method in vars(logging.Logger).items() if name.endswith(("_once", "_advice"))
    }


def source_of(node: fx.Node) -> Any:
    """Dynamo's source object of a placeholder: where in the user's program its value comes from."""
    return node._dynamo_source  # type: ignore[attr-defined]


def source_name(source: Any) -> str:
    """A source as text, for example `L['self']._modules['head']._parameters['weight']`."""
    name = source.name
    return name() if callable(name) else name


def source_chain(source: Any) -> tuple[Any, ...]:
    """The sources from the root (a local or global name) to `source` itself."""
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    return tuple(reversed(chain))


def source_value(source: Any, scope: dict[str, dict[str, Any]]) -> object | None:
    """The object that a source refers to; None when its text is not a plain expression."""
    try:
        return eval(source_name(source), dict(scope))  # noqa: S307 - text made by Dynamo from attribute and item accesses
    except Exception:
        return None


def serve_only(source: Any) -> None:
    """Let the compiled frame serve the object that `source` leads to now, and no other that looks like it.

    Dynamo takes two models of one class for the same: their parameters are arguments of the graph.
    """
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_as_they_are(
    call: DynamoCall, graph_module: fx.GraphModule, example_inputs: Sequence[Any], positions: Iterable[int]
) -> bool:
    """Let the compiled frame expect the strides that the tensors at these positions have now, not those that
    they were traced with.

    False, and nothing done, where more than strides has changed: that takes another trace.
    """
    known = call.output_graph.input_source_to_sizes_strides
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    renewed = []
    for position in positions:
        value, traced = example_inputs[position], placeholders[position].meta["example_value"]
        source = source_of(placeholders[position])
        if (value.shape, value.dtype, value.device) != (
            traced.shape,
            traced.dtype,
            traced.device,
        ) or source not in known:
            return False
        renewed.append((known[source], value.stride()))
    for entry, strides in renewed:
        entry["stride"] = strides
    return True


def run_without_check_of_guards() -> None:
    """Let Dynamo run what the backend gives for this call, though its guards no longer hold of the model: for what
    tells an error. To be called from the backend.
    """
    with contextlib.suppress(LaunchError):
        find_dynamo_call().output_graph.skip_guards_check = True


def is_storage_offset(source: Any) -> bool:
    """Whether a source is where in its memory a tensor begins, as a slice of another does."""
    return getattr(getattr(source, "prop", None), "name", "") == "STORAGE_OFFSET"


def is_argument(source: Any, code: CodeType) -> bool:
    """Whether a source starts at an argument of the function `code` (not at a closure or a global).

    An argument that an inner function or a generator of the model uses is in a cell, as a closure is.
    """
    root = source_chain(source)[0]
    if not getattr(root, "is_input", False):
        return False
    return (
        not getattr(root, "is_derefed_cell_contents", False)
        or getattr(root, "local_name", "") in code.co_cellvars
    )


def module_stack(meta: dict[str, Any], path_of_module: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """The calls of modules that a node was made in, the outermost first: dotted path, and which call of the module it
    was.

    `path_of_module`: id of each module -> its dotted path.
    """
    # Dynamo's key is the module's id, followed by "@1" at a second call of the same module.
    keys = [key.partition("@") for key in meta.get("nn_module_stack") or {}]
    return tuple(
        (path_of_module[int(number)], call)
        for number, _, call in keys
        if number.isdigit() and int(number) in path_of_module
    )


def break_reasons_since(restart: RestartReason | None) -> tuple[str, ...]:
    """Texts of the graph breaks that Dynamo met since a restart (without one: in this process), oldest kind
    first.
    """
    before = {} if restart is None else restart.break_counts
    return tuple(text for text, count in _break_counts().items() if count > before.get(text, 0))


def _break_counts() -> dict[str, int]:
    return {str(reason): count for reason, count in torch._dynamo.utils.counters["graph_break"].items()}


def latest_break() -> tuple[str, str]:
    """Text of the last statement that Dynamo could not trace, and the user's lines down to it as a traceback;
    "" and "" if none.

    After a break from which it cannot resume, Dynamo goes back to a statement before it and only says
    "step_unsupported".
    """
    for reason in reversed(torch._dynamo.utils.graph_break_reasons):
        if reason.graph_break and "step_unsupported" not in reason.reason:
            return reason.reason, "".join(traceback.format_list(list(reason.user_stack)))
    return "", ""


@contextlib.contextmanager
def _ignored_functions(functions: Iterable[Callable[..., Any]]) -> Iterator[None]:
    ignored = _ignored_set()
    added = [function for function in functions if function not in ignored]
    ignored.update(added)
    try:
        yield
    finally:
        ignored.difference_update(added)


def _ignored_set() -> set[Callable[..., Any]]:
    return getattr(dynamo_config, _ignored_name())


def _ignored_name() -> str:
    # Older versions know the set by its former name only.
    return (
        "ignore_logging_functions"
        if hasattr(dynamo_config, "ignore_logging_functions")
        else "ignore_logger_methods"
    )


def marked_sizes(tensor: torch.Tensor) -> dict[int, int]:
    """Of the dimensions that the user has marked with `torch._dynamo.mark_dynamic`, the largest size that was given
    there, 0 where none was. (Torch's own attributes, seen on 2.13.0 and 2.14.1.)
    """
    marked = {dim: 0 for dim in getattr(tensor, "_dynamo_dynamic_indices", ())}
    for given in getattr(tensor, "_dynamo_dynamic_range", ()):
        if given.dim in marked and given.max is not None:
            marked[given.dim] = int(given.max)
    return marked


@contextlib.contextmanager
def _marked_dynamic(
    batches: Sequence[torch.Tensor], lengths: MarkedLengths, hint: int | None
) -> Iterator[None]:
    names = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking", "_dynamo_hint_overrides")
    wanted: dict[int, tuple[torch.Tensor, set[int]]] = {id(tensor): (tensor, {0}) for tensor in batches}
    for tensor, more in lengths.dims:
        wanted.setdefault(id(tensor), (tensor, set()))[1].update(more)
    marked = [
        (tensor, dims)
        for tensor, dims in wanted.values()
        if (hint is not None and 0 in dims) or not dims <= set(getattr(tensor, names[0], ()))
    ]
    before = [{name: vars(tensor)[name] for name in names if name in vars(tensor)} for tensor, _ in marked]
    for tensor, dims in marked:
        # A set of our own: the user's must come back unchanged.
        tensor._dynamo_weak_dynamic_indices = set(getattr(tensor, names[0], ()))  # type: ignore[attr-defined]
        for dim in sorted(dims):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        if hint is not None and 0 in dims:
            tensor._dynamo_hint_overrides = {0: hint}  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for (tensor, _), attributes in zip(marked, before, strict=True):
            for name in names:
                if name in attributes:
                    setattr(tensor, name, attributes[name])
                elif name in vars(tensor):
                    delattr(tensor, name)


def _follow_numbers(numbers: SeenNumbers | None) -> Callable[[], object]:
    """From now on, until what this gives is called, Python's floats are symbolic as ``numbers`` has it: Dynamo hands
    each over as a tensor of one element. Its own count of changes is switched on and off together with that of sizes.
    """
    ask = builder.process_automatic_dynamic

    def asked(tx: Any, name: str, entry: FrameStateSizeEntry, **arguments: Any) -> FrameStateSizeEntry:
        found = ask(tx, name, entry, **arguments)
        if not isinstance(entry.scalar, float):
            return found
        is_symbolic = numbers is not None and numbers.is_symbolic(name, entry.scalar)
        return FrameStateSizeEntry(scalar=auto_dynamic) if is_symbolic else entry

    return hooks.replace("numbers", builder, "process_automatic_dynamic", asked)


def is_number(node: fx.Node) -> bool:
    """Whether a placeholder is for a Python float, which Dynamo hands over as a tensor of one element."""
    given = node.meta.get("grapharg")
    return bool(getattr(given, "pass_arg_as_tensor", False)) and not getattr(given, "is_tensor", True)


def _is_torch_file(path: str) -> bool:
    return path.startswith(torch.__path__[0]) or path.startswith("<")
