"""Parts of a model whose code decides by values that are known only when it runs (a loop over the experts that have
tokens, `tolist()` as sizes, a search that ends when it has converged): they stay whole, and run as written.

In: a run of the forward that has failed so, and in which modules. Out: which modules to keep in the next run; a call
of one of those as an operator of `torch.library`, of its arguments, parameters and buffers. The operator calls the
module; its gradient calls it again and differentiates that. What rows are inside of it is not known, so samples
meet there (passes/batch), unless the class is declared row-wise: a step runs as one micro-batch on one replica,
exactly.

The sizes of its results are those of two runs on made-up numbers, of different sizes: each must be a constant, or
in proportion to a size of an argument. Every run checks them; the second call of a step, that its results are
those of the first: what draws numbers or counts its calls would give other ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from rannc_backend.capture.inputs import named_tensors
from rannc_backend.capture.nonstrict.read_values import needing_value
from rannc_backend.capture.nonstrict.swapping import swapped
from rannc_backend.errors import DataDependentControlFlowError, ModelError, UnsupportedModelError
from rannc_backend.passes.batch.row_wise import is_row_wise, row_wise
from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.graph_queries import size_expression, symbols_in
from rannc_backend.passes.kept_functions import (
    Arguments,
    Autocast,
    CannotKeep,
    InnerWork,
    define_operator,
    is_plain,
    operator_code,
    owned_memory,
)
from rannc_backend.passes.plain_numbers import RefusingDraws, hints_in, recording_gradients, without_modes

NAMESPACE = "rannc_module"
WHOLE_MODEL = "the model"  # in place of a path
_MAX_KEPT = 8
_DIVISIBLE = 24
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# Sums in another order differ by rounding; what is drawn anew differs by its size.
_TOLERANCE = 1e-2


class KeptModules:
    """Which modules of a model stay whole, and which code of it has failed.

    Attributes:
        names: of those that were called as operators, with their classes.
        all_rows: whether all arguments as long as the batch have its rows, also where the code makes a number of that.
    """

    def __init__(self, root: nn.Module, *, all_rows: bool = False) -> None:
        self._root, self.all_rows = root, all_rows
        self._paths = {id(part): name for name, part in root.named_modules()}
        self._kept: set[object] = set()
        self._refused: set[object] = set()
        self._raised: dict[int, tuple[BaseException, list[nn.Module]]] = {}  # by id of the error
        self._asked: dict[str, tuple[nn.Module, ...]] = {}
        self._first: ModelError | None = None
        self._is_inside = False
        self.names: dict[str, str] = {}

    def note(self, location: str, modules: Sequence[nn.Module]) -> None:
        """A value was asked for at this line, within these modules, the outermost first."""
        self._asked[location] = tuple(reversed(modules))

    def calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`nn.Module.__call__` of this thread; below it lies the user's code."""
        thread = threading.get_ident()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(module, *args, **kwargs)
            return self._called(original, module, args, kwargs)

        return call

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the model itself. Not its call, which may be compiled."""
        if _key(self._root) in self._kept:
            return self._called(nn.Module._call_impl, self._root, args, kwargs)
        return self._root._call_impl(*args, **kwargs)

    def _called(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_inside:
            return original(module, *args, **kwargs)
        if _key(module) in self._kept:
            path = self._paths.get(id(module)) or WHOLE_MODEL
            self._is_inside = True
            try:
                result = _called_whole(module, path, args, kwargs)
            except UnsupportedModelError:
                self._kept.discard(_key(module))
                self._refused.add(_key(module))
                raise
            finally:
                self._is_inside = False
            self.names[path] = type(module).__name__
            return result
        try:
            return original(module, *args, **kwargs)
        except Exception as error:
            self._raised.setdefault(id(error), (error, []))[1].append(module)
            raise

    def extended(self, error: ModelError) -> bool:
        """Whether the forward may run with one more class of modules kept, after this error."""
        self._first = self._first or error
        self.names.clear()
        if len(self._kept) + len(self._refused) >= _MAX_KEPT or not (
            error.needs_value or error.needs_batch_size or isinstance(error, DataDependentControlFlowError)
        ):
            return False
        modules = self._modules_of(error)
        self._raised.clear()
        for module in modules:
            key = _key(module)
            if (
                module is not self._root
                and id(module) in self._paths
                and key not in self._refused | self._kept
            ):
                self._kept.add(key)
                return True
        # Last of all the model itself: its code, and all that it calls, is one operator then.
        root = _key(self._root)
        if self._first.needs_batch_size and root not in self._refused | self._kept:
            self._kept = {root}
            return True
        return False

    def refusal(self, error: ModelError) -> ModelError:
        """What to tell the user: what failed before anything was kept."""
        return self._first or error

    def why(self) -> str:
        """What failed before anything was kept, and where."""
        if self._first is None:
            return ""
        return self._first.problem + (f" at {self._first.location}" if self._first.location else "")

    def _modules_of(self, error: BaseException) -> Sequence[nn.Module]:
        cause: BaseException | None = error
        while cause is not None:
            if id(cause) in self._raised:
                return self._raised[id(cause)][1]
            cause = cause.__cause__
        return self._asked.get(getattr(error, "location", ""), ())


def _key(module: nn.Module) -> object:
    """All modules of a user's class are alike; those of torch's containers are not."""
    return id(module) if type(module).__module__.startswith("torch.nn") else type(module)


@dataclass(frozen=True, slots=True)
class _Size:
    """A size of a result: a constant, or so many times the size of a dimension of an argument."""

    factor: Fraction
    place: tuple[int, int] | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self.place is None:
            return int(self.factor)
        size = tensors[self.place[0]].shape[self.place[1]]
        return size * self.factor.numerator // self.factor.denominator


@dataclass(frozen=True, slots=True)
class _Result:
    sizes: tuple[_Size, ...]
    dtype: torch.dtype

    def shape(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return [size.of(tensors) for size in self.sizes]


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """One call of a module as a function of tensors and sizes.

    Attributes:
        names: of the module's own tensors, which come first among the tensors.
        spec: of the arguments, whose leaves are `arguments`.
        has_gradient: of each tensor, whether it is trained.
        results: of each tensor that it gives; work: of those runs; given: the structure and the other leaves, set by its first run.
    """

    takes_outputs: ClassVar[bool] = True
    module: weakref.ref[nn.Module]
    path: str
    names: tuple[str, ...]
    spec: Any
    arguments: Arguments
    autocast: Autocast
    num_parameters: int
    has_gradient: tuple[bool, ...] = ()
    results: tuple[_Result, ...] = ()
    work: InnerWork = InnerWork()
    given: Any = field(default=None, compare=False)

    @property
    def runs_whole(self) -> str:
        """See `OperatorCode`."""
        return self.path

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[list[torch.Tensor], Any]:
        """The tensors that it gives; the structure and the other leaves."""
        module = self.module()
        if module is None:
            raise UnsupportedModelError(f"{self.path} is gone, and a graph still calls it")
        leaves = self.arguments.together(tensors[len(self.names) :], sizes)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        before = [tensor._version for tensor in tensors]
        draws = UnsupportedModelError(
            f"{self.path} decides by values or by its batch size, so it runs as written, and draws random numbers",
            cure="draw them outside of this module and pass them to it, or switch its dropout off.",
        )
        own = named_tensors(module)
        others = {id(own[name]): tensor for name, tensor in zip(self.names, tensors)}
        with RefusingDraws(draws), self.autocast.again(), swapped(module, others):
            result = module._call_impl(*args, **kwargs)  # not its call, which may be compiled
        if [tensor._version for tensor in tensors] != before:
            raise UnsupportedModelError(
                f"{self.path} decides by values or by its batch size, so it runs as written, and changes its inputs or buffers in place",
                cure="write it without the in-place operation.",
            )
        found, spec = pytree.tree_flatten(result)
        given = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        rest = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in found]
        return given, (spec, rest)

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            found, given = self.run(tensors, sizes)
        shapes = [(list(value.shape), value.dtype) for value in found]
        expected = [(result.shape(tensors), result.dtype) for result in self.results]
        if shapes != expected or given != self.given:
            raise UnsupportedModelError(
                f"{self.path} decides by values or by its batch size, and gives results of other sizes {shapes} or kinds than it did "
                f"when it was captured {expected}",
                cure="let its results have sizes that depend on the sizes of its arguments alone.",
            )
        return owned_memory([value.contiguous() for value in found], tensors)

    def backward(
        self,
        grads: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[Any],
        outputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Gradients of the tensors that are trained."""
        with recording_gradients():
            leaves = [
                tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(tensors, self.has_gradient, strict=True)
            ]
            found, _ = self.run(leaves, sizes)
            for value, first in zip(found, outputs, strict=True):
                self._check(value, first)
            # A path may give a result that depends on nothing: zeros, where no expert has tokens.
            assert (torch.ones((), requires_grad=True) * 1).requires_grad, "operators record gradients here"
            pairs = [(value, grad) for value, grad in zip(found, grads, strict=True) if value.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            gradients = torch.autograd.grad(
                [pair[0] for pair in pairs], wanted, [pair[1] for pair in pairs], allow_unused=True
            )
        full = [
            torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
            for leaf, gradient in zip(wanted, gradients, strict=True)
        ]
        return owned_memory(full, [*grads, *tensors])

    def _check(self, value: torch.Tensor, first: torch.Tensor) -> None:
        if value.shape == first.shape and torch.allclose(
            value.detach(), first, rtol=_TOLERANCE, atol=_TOLERANCE * float(_largest(first)), equal_nan=True
        ):
            return
        raise UnsupportedModelError(
            f"{self.path} decides by values or by its batch size, so it runs as written, forward and again for its gradient, and gave "
            "other results the second time",
            cure="let it depend on its arguments, parameters and buffers alone.",
        )

    def fake_forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        return [tensors[0].new_empty(result.shape(tensors), dtype=result.dtype) for result in self.results]

    def fake_backward(
        self, grads: Any, tensors: Sequence[torch.Tensor], sizes: Any, outputs: Any
    ) -> list[torch.Tensor]:
        return [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor, trained in zip(tensors, self.has_gradient, strict=True)
            if trained
        ]


def _largest(value: torch.Tensor) -> float:
    value = value.detach()
    finite = value[value.isfinite()] if value.is_floating_point() else value
    return float(finite.abs().max()) if finite.numel() else 0.0


def _called_whole(module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's results by way of its operator, which is made if there is none.

    Raises UnsupportedModelError where it cannot be one.
    """
    own = named_tensors(module)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    try:
        arguments = Arguments.of(leaves)
    except CannotKeep as error:
        raise _cannot(path, str(error)) from error
    values = [*own.values(), *(leaves[place] for place in arguments.tensors)]
    sizes = [leaves[place] for place in arguments.sizes]
    if has_data_sizes([*(size for value in values for size in value.shape), *sizes]):
        raise _cannot(path, "gets arguments whose sizes depend on data")
    whole = _Whole(
        module=weakref.ref(module),
        path=path,
        names=tuple(own),
        spec=spec,
        arguments=arguments,
        autocast=Autocast.now(values[0].device.type if values else "cpu"),
        num_parameters=len(list(module.parameters())),
        has_gradient=tuple(value.requires_grad and torch.is_grad_enabled() for value in values),
    )
    whole = _observed(whole, values, sizes)
    operator = _operator(whole, type(module))
    # Whether a result has a gradient may differ by path: the operator's backward finds out.
    remaining = iter(operator(values, sizes))
    out_spec, rest = whole.given
    return pytree.tree_unflatten([next(remaining) if leaf is None else leaf[0] for leaf in rest], out_spec)


def _cannot(path: str, why: str) -> UnsupportedModelError:
    return needing_value(
        f"{path} decides by values or by its batch size, and cannot run as written, since it {why}",
        "",
    )


def _observed(whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any]) -> _Whole:
    """With what two runs on made-up numbers have shown: of sizes that nothing divides, or else that much does."""
    try:
        return _observed_at(whole, values, sizes, unit=1)
    except UnsupportedModelError:
        return _observed_at(whole, values, sizes, unit=_DIVISIBLE)


def _observed_at(whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any], unit: int) -> _Whole:
    seen = []
    for more in (0, 1):
        numbers = _numbers([*(size for value in values for size in value.shape), *sizes], more, unit)
        with without_modes(), torch._C.DisableTorchFunction():
            made = [
                _made_up(value, numbers, place < whole.num_parameters) for place, value in enumerate(values)
            ]
        result, kinds, work = _tried(whole, made, [_number(size, numbers) for size in sizes])
        seen.append((result, kinds, made))
    (first, given, first_inputs), (other, other_given, other_inputs) = seen
    if given != other_given or len(first) != len(other):
        raise _cannot(whole.path, "gives other kinds of results for other batch sizes")
    if not all(leaf is None or is_plain(leaf[0]) for leaf in given[1]):
        raise _cannot(whole.path, "gives what is no tensor")
    results = []
    for one, two in zip(first, other, strict=True):
        if one.dim() != two.dim():
            raise _cannot(whole.path, "gives other kinds of results for other batch sizes")
        dims = [
            _size_of(pair, first_inputs, other_inputs, whole.path)
            for pair in zip(one.shape, two.shape, strict=True)
        ]
        results.append(_Result(tuple(dims), one.dtype))
    return replace(whole, results=tuple(results), given=given, work=work)


@contextlib.contextmanager
def _counting_saved(inputs: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Bytes that are kept for a gradient, but for those of the inputs, by where they lie."""
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _numbers(sizes: Sequence[Any], more: int, unit: int = 1) -> dict[Any, int]:
    """A number for each symbol: its example, rounded up to a multiple of `unit`, and with `more` another one."""
    environments = {size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)}
    hints = {symbol: hint for environment in environments for symbol, hint in hints_in(environment).items()}
    ordered = sorted(symbols_in(sizes) & hints.keys(), key=str)
    return {
        symbol: (-(-int(hints[symbol]) // unit) * (1 + more) + more * (1 + 2 * place)) * unit
        for place, symbol in enumerate(ordered)
    }


def _number(size: Any, numbers: dict[Any, int]) -> int:
    return int(size_expression(size).xreplace(numbers))


def _made_up(value: torch.Tensor, numbers: dict[Any, int], is_parameter: bool) -> torch.Tensor:
    """A tensor of such sizes on the CPU; of a parameter one number alone, since it may be large."""
    shape = [_number(size, numbers) for size in value.shape]
    if is_parameter and value.is_floating_point():
        made = torch.full((), 0.01, dtype=value.dtype).expand(shape)
    elif value.is_floating_point() or value.is_complex():
        made = torch.linspace(0.1, 1.0, math.prod(shape), dtype=torch.float64).to(value.dtype).view(shape)
    else:
        made = torch.full(shape, value.dtype is torch.bool, dtype=value.dtype)
    return made.requires_grad_(value.requires_grad)


def _tried(
    whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any]
) -> tuple[list[torch.Tensor], Any, InnerWork]:
    try:
        with (
            without_modes(),
            torch._C.DisableTorchFunction(),
            FlopCounterMode(display=False) as counter,
            _counting_saved(values) as saved,
        ):
            found, given = whole.run(values, sizes)
            num_elements = max(1, sum(value.numel() for value in found))
        work = InnerWork(counter.get_total_flops() / num_elements, sum(saved.values()) / num_elements)
        return found, given, work
    except UnsupportedModelError as error:
        raise _cannot(whole.path, f"cannot be tried alone: {error.args[0]}") from error
    except Exception as error:  # whatever the user's code raises for numbers that are not the user's
        raise _cannot(whole.path, f"fails on made-up numbers: {type(error).__name__}: {error}") from error


def _size_of(
    pair: tuple[int, int], first: Sequence[torch.Tensor], other: Sequence[torch.Tensor], path: str
) -> _Size:
    if pair[0] == pair[1]:
        return _Size(Fraction(pair[0]))
    for index, (one, two) in enumerate(zip(first, other, strict=True)):
        for dim, sizes in enumerate(zip(one.shape, two.shape, strict=True)):
            if sizes[0] != sizes[1] and pair[0] * sizes[1] == pair[1] * sizes[0]:
                return _Size(Fraction(pair[0], sizes[0]), (index, dim))
    raise _cannot(path, "gives results whose sizes depend on more than the sizes of its arguments")


def _operator(whole: _Whole, cls: type) -> Any:
    """The operator of a call: of this name, unless another living module has it."""
    facts = (
        *(cls.__module__, cls.__qualname__, whole.path, whole.names, str(whole.spec), whole.arguments),
        *(whole.autocast, whole.has_gradient, whole.results, str(whole.given)),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    base = f"{re.sub('[^A-Za-z0-9]', '_', cls.__name__)}_{digest}"
    operators = getattr(torch.ops, NAMESPACE)
    for number in itertools.count():
        name = f"{base}_{number}" if number else base
        if not hasattr(operators, name):
            define_operator(_LIBRARY, name, whole)
        operator = getattr(operators, name).default
        code = operator_code(operator)
        if isinstance(code, _Whole) and code.module() is whole.module():
            return row_wise(operator) if is_row_wise(cls) else operator
