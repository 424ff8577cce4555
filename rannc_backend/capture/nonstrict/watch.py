"""What a run of the forward does beside calling operators: gradients switched off, batch sizes tested, custom
derivatives, random numbers of Python and NumPy, clocks.

In: a stretch in which the forward runs on fakes. Out: the same operators with the notes that a graph needs
(the user's lines, the module), values that stop gradients where the model stops them, and errors, with the
user's line, for what a graph does not hold.

What is private to torch here: the stack of function modes, `torch.compiler._is_compiling_flag`, and the class between
`torch.autograd.Function` and its base in C++, whose `apply` it calls (seen on torch 2.13.0 to 2.15.0; see
tests/unit/rannc_backend/capture/nonstrict/test_captures.py).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import linecache
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from rannc_backend.capture.aten_trace import RowsSymbol, fixed_rows, with_constants
from rannc_backend.capture.detached_writes import DETACHING, name_of, needs_gradient, tensors_in
from rannc_backend.capture.dynamo_sizes import holds_from_two
from rannc_backend.capture.nonstrict import kept_modules, kept_operators, read_values, reads
from rannc_backend.capture.nonstrict.guards import clock_outside, no_generators
from rannc_backend.capture.nonstrict.kept_modules import KeptModules
from rannc_backend.capture.nonstrict.packed import PackedSequences, SelectedTargets
from rannc_backend.capture.nonstrict.read_values import TracedValue
from rannc_backend.capture.nonstrict.reads import Asked, Reads, Unknown, used_as_number
from rannc_backend.errors import (
    RanncError,
    UnsupportedModelError,
    is_of_user,
    located,
    needing_batch_size,
    needing_value,
    user_location,
)
from rannc_backend.ir.size_test import SizeTest
from rannc_backend.passes import ctc, kept_functions
from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.graph_queries import size_expression
from rannc_backend.passes.kept_functions import CannotKeep, call_kept
from rannc_backend.passes.plain_numbers import fill_diagonal
from rannc_backend.passes.recurrent import call_recurrent, is_packed, recurrent_mode
from rannc_backend.settings import hooks

_TORCH = torch.__path__[0]
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_MAX_FRAMES = 40
_MODULES = (kept_functions, kept_modules, kept_operators, read_values, reads)
_OWN = (__file__, *(module.__file__ for module in _MODULES))
_CALLED = "rannc_called"
_NUMBERS: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.__int__: lambda value: int(_first(value)),
    torch.Tensor.__index__: lambda value: int(_first(value)),
    torch.Tensor.__float__: lambda value: float(_first(value)),
    torch.Tensor.tolist: lambda value: value,
}
_EQUALITIES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.equal: torch.eq,
    torch.Tensor.equal: torch.eq,
    torch.allclose: torch.isclose,
    torch.Tensor.allclose: torch.isclose,
}
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
_HOOKING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__


_WITHOUT_PLAIN_SIZES = {torch.Tensor.fill_diagonal_: fill_diagonal}
_READING = {torch.Tensor.__bool__, *_NUMBERS, *_EQUALITIES}
_CHECK = torch._check_with
_LEN = len
_TRACED = (FunctionalTensor, FakeTensor)
_APPLY = vars(torch.autograd.Function)["apply"]
#: What `apply` of every function comes to, also one that was taken from the class before (`scan = Scan.apply`).
_BASE = torch.autograd.function._SingleLevelFunction
_BASE_APPLY = vars(torch._C._FunctionBase)["apply"]


class Watch(TorchFunctionMode):
    """Sees every call of a function of torch, while the forward runs."""

    def __init__(self, rows: RowsSymbol, answers: Reads, kept: KeptModules) -> None:
        super().__init__()
        self._rows, self._reads, self._kept = rows, answers, kept
        self._modules: list[nn.Module] = []
        self._calls: list[int] = []  # of each of them, how many it has had before
        self._num_calls: Counter[int] = Counter()  # by id
        self._sized: dict[sympy.Symbol, tuple[torch.Tensor, int]] = {}
        self._selected = SelectedTargets()
        self._guard_places: dict[int, str] = {}  # the user's lines, by position as above
        self.packed = PackedSequences(self._is_longest)
        self._thread = threading.get_ident()
        self.is_in_function = False  # an `autograd.Function` runs as it is
        self.operator_guards: set[int] = set()  # of the shape environment, by position: of operators alone

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trace = user_trace(sys._getframe(1))
        self._note(trace, func)
        if func in _BACKWARD:
            raise UnsupportedModelError(
                "the forward calls backward(), which adds to the gradients of its parameters",
                location=user_location(trace),
                cure="use torch.autograd.grad(..., create_graph=True) in the forward, or call backward() "
                "outside.",
            )
        if func in _HOOKING or (func == _GRAD_FN and not args[0].is_leaf):
            raise needing_value(
                f"the forward uses {'grad_fn' if func == _GRAD_FN else name_of(func)}, and the backward of its graph "
                "would not call the hook",
                user_location(trace),
                cure="write a torch.autograd.Function whose backward changes the gradient; hooks of parameters "
                "are registered outside of the forward.",
            )
        if func is torch.Tensor.retain_grad and not args[0].is_leaf:
            raise UnsupportedModelError(
                "the forward calls retain_grad, and the backward of its graph would leave .grad as it is",
                location=user_location(trace),
                cure="give the tensor back as an output, and call retain_grad() on it behind the call.",
            )
        operands = list(filter(needs_gradient, tensors_in((args, kwargs))))
        guards, num_asked = self._rows.shape_env.guards, len(self._reads.places)
        first = len(guards)
        func = _WITHOUT_PLAIN_SIZES.get(func, func)
        if ctc.takes(func, args):
            args = (args[0], self._selected.in_rows(args[1], args[3], trace), *args[2:])
            func = functools.update_wrapper(functools.partial(ctc.call_ctc), func)
        # Under autocast torch casts the weights of its own function.
        if (mode := recurrent_mode(func)) and not (
            is_packed(args) or torch.is_autocast_enabled(args[0].device.type)
        ):
            func = functools.update_wrapper(functools.partial(call_recurrent, mode), func)
        if func is torch.Tensor.tolist:
            return self._read(func, args, kwargs, trace)
        if self.packed.takes(func, args, kwargs):
            return self.packed.call(func, args, kwargs, trace)
        try:
            result = func(*args, **kwargs)
        except RanncError as error:
            if getattr(error, "location", ""):
                raise
            raise located(error, user_location(trace)) from error.__cause__
        except Exception as error:
            self.operator_guards.update(range(first, len(guards)))
            if any(isinstance(item, Unknown) for item in pytree.tree_leaves((args, kwargs))):
                raise used_as_number(trace) from error
            if "DataDependent" in type(error).__name__ and func in _READING:
                return self._read(func, args, kwargs, trace)
            if len(self._reads.places) > num_asked and reads.marked_as_check(error):
                raise
            raise _failed(name_of(func), error, trace) from error
        if func is torch.Tensor.item and not isinstance(result, (bool, int, float, complex)):
            asked = Asked((TracedValue.of(args[0]),), _first, (args[0].detach(),))
            return Unknown(self._reads, lambda: user_trace(sys._getframe(2)), asked)
        self.operator_guards.update(range(first, len(guards)))
        self._note_sizes(result)
        self._selected.note(func, args, result)
        if self._rows.is_fixed():
            raise fixed_rows(name_of(func), user_location(trace))
        # What autograd takes for a constant must be one where the graph runs under autograd later.
        return with_constants(result, operands)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], trace: str) -> Any:
        """What the code gets of a value: from one that is known."""
        if func is torch.Tensor.__bool__:
            return self._reads.decide(
                trace, Asked((TracedValue.of(args[0]),), lambda value: bool(_first(value)))
            )
        if func in _EQUALITIES:
            equal = _EQUALITIES[func](*args, **kwargs).all()
            return self._reads.decide(trace, Asked((TracedValue.of(equal),), bool))
        return self._reads.number(trace, Asked((TracedValue.of(args[0]),), _NUMBERS[func]))

    def _is_longest(self, lengths: torch.Tensor, size: Any, trace: str) -> bool:
        return self._reads.decide(trace, Asked((TracedValue.of((lengths.max() == size).all()),), bool))

    def _expected_size(self, original: Any, name: str) -> Any:
        """`nn.RNNBase.get_expected_hidden_size` and the like, for packed sequences too."""

        def size(layer: nn.RNNBase, value: torch.Tensor, counts: Any) -> Any:
            width = layer.hidden_size if name.endswith("cell_size") else layer.proj_size or layer.hidden_size
            found = self.packed.expected_size(layer, width, counts)
            return original(layer, value, counts) if found is None else found

        return size

    def _note(self, trace: str, func: Any) -> None:
        meta = fx.traceback.get_current_meta()
        meta["stack_trace"] = trace
        meta["custom"] = {_CALLED: func}
        # As Dynamo has it: the second call of a module is another key.
        meta["nn_module_stack"] = {
            f"{id(module)}@{number}" if number else str(id(module)): ("", type(module))
            for module, number in zip(self._modules, self._calls, strict=True)
        }

    def size_tests(self) -> tuple[SizeTest, ...]:
        """Tests of the batch size by Python code, which a step's batch must meet as the capture's did.

        What operators ask of it is for them to choose, or their requirement. Sizes 0 and 1 are not told from
        larger ones.
        """
        environment = self._rows.shape_env
        found = []
        for position, guard in enumerate(environment.guards):
            condition = environment.replace(guard.expr)
            if (
                position in self.operator_guards
                or self._rows.symbol not in condition.free_symbols
                or holds_from_two(condition)
            ):
                continue
            if condition.free_symbols != {self._rows.symbol}:
                raise UnsupportedModelError(f"the model tests its batch size beside a length: {guard.expr}")
            place = guard.sloc.framework_loc
            where = self._guard_places.get(position) or (
                f"{place.filename}:{place.lineno}, in {place.name}"
                if isinstance(place, traceback.FrameSummary)
                else ""
            )
            found.append(SizeTest(str(guard.expr), where, _holds(condition, self._rows.symbol)))
        return tuple(found)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The stretch in which the forward runs."""
        with contextlib.ExitStack() as undo:
            for register, note in (
                (register_module_forward_pre_hook, self._enter),
                (register_module_forward_hook, self._leave),
            ):
                undo.callback(hooks.register("forward on fakes", register, note))
            for name in _CLOCKS:
                undo.callback(
                    hooks.replace(
                        "forward on fakes", time, name, clock_outside(getattr(time, name), name, user_trace)
                    )
                )
            for holder, name, value in (
                (_BASE, "apply", classmethod(_apply)),
                (builtins, "len", _length),
                (nn.Module, "__call__", self._kept.calling(nn.Module.__call__)),
                (torch.SymBool, "__bool__", self._deciding(torch.SymBool.__bool__)),
                (torch, "_check_with", self._check),
                *(
                    (tensors, "__bool__", lambda tensor: self._truth(tensor))
                    for tensors in (FakeTensor, FunctionalTensor)
                ),
                (torch.compiler, "_is_compiling_flag", True),  # libraries leave out checks of values then
                *(
                    (holder, name, self._expected_size(vars(holder)[name], name))
                    for holder, name in (
                        (nn.RNNBase, "get_expected_hidden_size"),
                        (nn.LSTM, "get_expected_cell_size"),
                    )
                ),
            ):
                undo.callback(hooks.replace("forward on fakes", holder, name, value))
            undo.enter_context(no_generators())
            with self:
                yield

    def _check(self, error_type: Any, condition: Any, message: Any) -> None:
        """`torch._check_with`, by way of which code says what holds."""
        if isinstance(condition, Unknown):
            self._reads.checks.append(user_location(user_trace(sys._getframe(1))))
        else:
            _CHECK(error_type, condition, message)

    def _truth(self, tensor: torch.Tensor) -> bool:
        """Of a tensor; also in functions of torch that read one to refuse it (`gaussian_nll_loss`)."""
        try:
            return torch.Tensor.__bool__(tensor)
        except RanncError:
            raise
        except Exception as error:
            if threading.get_ident() != self._thread or "DataDependent" not in type(error).__name__:
                raise
            return bool(self._read(torch.Tensor.__bool__, (tensor,), {}, user_trace(sys._getframe(1))))

    def _note_sizes(self, result: Any) -> None:
        """Which tensors have the sizes that depend on data."""
        for tensor in tensors_in(result):
            for dim, size in enumerate(tensor.shape):
                expression = size_expression(size) if isinstance(size, torch.SymInt) else None
                # The batch size, which most results have, is soon told from them.
                if expression is None or not expression.is_Symbol or expression == self._rows.symbol:
                    continue
                if expression not in self._sized and has_data_sizes(size):
                    self._sized[expression] = (tensor, dim)

    def _deciding(self, original: Any) -> Any:
        """`torch.SymBool.__bool__`, for sizes that depend on data, in the user's lines."""

        def decide(condition: torch.SymBool) -> bool:
            if threading.get_ident() != self._thread:
                return bool(original(condition))
            caller, guards = sys._getframe(1), self._rows.shape_env.guards
            first = len(guards)
            try:
                answer = bool(original(condition))
                place = f"{caller.f_code.co_filename}:{caller.f_lineno}, in {caller.f_code.co_name}"
                self._guard_places.update(dict.fromkeys(range(first, len(guards)), place))
                return answer
            except GuardOnDataDependentSymNode:
                expression = condition.node.expr
                known = expression.free_symbols <= self._sized.keys()
                if not known or not is_of_user(caller.f_code.co_filename):
                    raise
                symbols = sorted(expression.free_symbols, key=str)
                counts = [read_values.count_of(*self._sized[symbol]) for symbol in symbols]
                asked = Asked(tuple(counts), _holds(expression, *symbols))
                return self._reads.decide(user_trace(caller), asked)

        return decide

    @property
    def is_in_kept_module(self) -> bool:
        """Whether code runs as written now."""
        return self._kept.is_inside

    def note_place(self, location: str) -> None:
        """A value is asked for there, within the modules that run now."""
        self._kept.note(location, self._modules)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._modules.append(module)
            self._calls.append(self._num_calls[id(module)])
            self._num_calls[id(module)] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # A module whose forward has raised an error that the model caught never leaves.
        while threading.get_ident() == self._thread and self._modules:
            self._calls.pop()
            if self._modules.pop() is module:
                break


def keep_second_derivatives(graph: fx.Graph) -> None:
    """Let what `torch.autograd.grad` has added to a graph depend on the values that it is made of.

    Autograd keeps the result of an operator without its history, which is a `detach` of it in the graph, and
    finds the history again when it uses it. A `detach` that the model asks for is one of its own calls, or
    is used elsewhere.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        users = list(node.users)
        if (
            users
            and _called(node) not in DETACHING
            and all(_called(user) is torch.autograd.grad for user in users)
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _called(node: fx.Node) -> Any:
    return node.meta.get("custom", {}).get(_CALLED)


def user_trace(frame: FrameType | None) -> str:
    """The lines from the call of the model to a frame, without those of torch, as a traceback prints them."""
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        code = frame.f_code
        if code.co_name == "_rannc_forward":
            break
        if not code.co_filename.startswith((_TORCH, "<")) and code.co_filename not in _OWN:
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            lines.append(
                f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {text}\n'
            )
        frame = frame.f_back
    return "".join(reversed(lines))


def _failed(what: str, error: Exception, trace: str) -> UnsupportedModelError:
    name, text = type(error).__name__, str(error).partition("\nException raised from ")[0]
    if "DataDependent" in name:
        return needing_value(
            f"{what} needs a value that is known only when the model runs", user_location(trace)
        )
    return needing_batch_size(
        f"{what} cannot be captured with a symbolic batch size: {name}: {text}",
        location=user_location(trace),
    )


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of what `torch.autograd.Function.apply` calls."""
    watches = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Watch)]
    if not watches or watches[-1].is_in_kept_module or watches[-1].is_in_function:
        # Another thread, or autograd of code that runs as written.
        return _BASE_APPLY.__get__(None, cls)(*args, **kwargs)
    trace = user_trace(sys._getframe(1))
    if cls.__module__ == "torch.utils.checkpoint":
        function, _, *inputs = args  # reentrant: the function, whether to keep the state of generators
        return function(*inputs)
    if torch.is_grad_enabled() and any(map(needs_gradient, tensors_in((args, kwargs)))):
        if kwargs:
            raise _not_kept(cls, "gets arguments by name", trace)
        watches[-1].is_in_function = True
        try:
            return call_kept(cls, _APPLY.__get__(None, cls), args)
        except CannotKeep as error:
            raise _not_kept(cls, str(error), trace) from error
        finally:
            watches[-1].is_in_function = False
    return _BASE_APPLY.__get__(None, cls)(*args, **kwargs)


def _length(value: Any) -> Any:
    """In place of `len`, which can only give a number: the size of a tensor may be a symbol."""
    return value.shape[0] if isinstance(value, _TRACED) and value.dim() else _LEN(value)


def _holds(condition: sympy.Basic, *symbols: sympy.Symbol) -> Callable[..., bool]:
    """Whether a condition is true, as a function of the numbers of its symbols."""

    def holds(*numbers: int) -> bool:
        known = dict(zip(symbols, map(sympy.Integer, numbers), strict=True))
        return bool(condition.xreplace(known) == sympy.true)

    return holds


def _not_kept(cls: type, why: str, trace: str) -> UnsupportedModelError:
    return needing_value(
        f"the model uses {cls.__name__}, a torch.autograd.Function with a backward of its own, which {why}",
        location=user_location(trace),
        cure="write this part with ordinary operators, for which autograd knows the gradient.",
    )


def _first(value: Any) -> Any:
    """The number of a tensor of one element, from its nested lists."""
    while isinstance(value, list):
        (value,) = value
    return value
