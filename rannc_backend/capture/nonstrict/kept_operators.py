"""A call of a module that runs as written, as an operator of `torch.library`.

In: a module, the arguments of a call. Out: its results, by way of an operator of its arguments, parameters and buffers,
which calls the module; its gradient calls it again and differentiates that.

The sizes of its results are those of two runs on made-up numbers, of different sizes: each must be a constant, or
in proportion to a size of an argument. Every run checks them; the second call of a step, that its results are
those of the first: what counts its calls, or draws from Python's generators, would give other ones. Random numbers of
torch come from a seed that the graph draws and gives to the operator, so that both runs draw the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rannc_backend.capture.detached_writes import check_own_memory, innermost
from rannc_backend.capture.inputs import named_tensors
from rannc_backend.capture.nonstrict.arguments import BatchSize
from rannc_backend.capture.nonstrict.swapping import (
    Attributes,
    Swap,
    Written,
    attributes_set_by,
    noting_writes,
    swapped,
    write_back,
)
from rannc_backend.errors import UnsupportedModelError, needing_value
from rannc_backend.passes.batch.row_wise import is_row_wise, row_wise
from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.kept_functions import (
    Arguments,
    Autocast,
    CannotKeep,
    InnerWork,
    is_plain,
    named_operator,
    owned_memory,
)
from rannc_backend.passes.plain_numbers import (
    NotingDraws,
    RefusingDraws,
    ShownSize,
    counting_work,
    drawing_from,
    made_up,
    needs_gradient,
    number_at,
    numbers_at,
    recording_gradients,
    shown_size,
    without_modes,
)

NAMESPACE = "rannc_module"
_DIVISIBLE = 24
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# Sums in another order differ by rounding; what is drawn anew differs by its size.
_TOLERANCE = 1e-2
_DECIDES = "decides by values or by its batch size, or has a backward of its own"
_MAX_SEED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Result:
    sizes: tuple[ShownSize, ...]
    dtype: torch.dtype

    def shape(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return [size.of(tensors) for size in self.sizes]


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """One call of a module as a function of tensors and sizes.

    Attributes:
        names: of the module's own tensors, which come first among the tensors.
        spec: of the arguments, whose leaves are `arguments`.
        requires_grad: of each tensor, as the code sees it; records: whether the call is made with gradients.
        results: of each tensor that it gives; work: of those runs; given: the structure and the other leaves, set by its first run.
        buffers: places of the buffers and frozen parameters that it changes, whose new values are its last results;
            None: not known yet.
        draws: whether it draws random numbers: then the last tensor is their seed.
        attributes: that have no value in the first runs; written: of its own, by these runs.
    """

    takes_outputs: ClassVar[bool] = True
    module: weakref.ref[nn.Module]
    path: str
    names: tuple[str, ...]
    spec: Any
    arguments: Arguments
    autocast: Autocast
    num_parameters: int
    requires_grad: tuple[bool, ...] = ()
    records: bool = True
    results: tuple[_Result, ...] = ()
    work: InnerWork = InnerWork()
    given: Any = field(default=None, compare=False)
    buffers: tuple[int, ...] | None = None
    draws: bool = False
    attributes: Attributes = field(default=(), compare=False)
    written: tuple[Written, ...] = field(default=(), compare=False)

    @property
    def has_gradient(self) -> tuple[bool, ...]:
        """Of each tensor, whether it is trained."""
        return tuple(self.records and wanted for wanted in self.requires_grad)

    @property
    def runs_whole(self) -> str:
        """See `OperatorCode`."""
        return self.path

    def constant_sizes(self) -> set[int]:
        """Of its results."""
        return {int(size.factor) for result in self.results for size in result.sizes if size.place is None}

    @property
    def own_buffers(self) -> range:
        """Their places."""
        return range(self.num_parameters, len(self.names))

    @property
    def may_be_written(self) -> frozenset[int]:
        """The places of buffers, and of parameters that are not trained, which are as much."""
        trained = self.has_gradient
        frozen = (place for place in range(self.num_parameters) if not trained[place])
        return frozenset((*frozen, *self.own_buffers))

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[list[torch.Tensor], Any]:
        """The tensors that it gives; the structure and the other leaves."""
        if self.draws:
            *tensors, seed = tensors
            with drawing_from(int(seed), seed.device):
                return self.run_alone(tensors, sizes)
        draws = UnsupportedModelError(
            f"{self.path} {_DECIDES}, so it runs as written, and draws random numbers, which it did not when it was captured",
            cure="draw them outside of this module and pass them to it.",
        )
        with RefusingDraws(draws):
            return self.run_alone(tensors, sizes)

    def run_alone(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]
    ) -> tuple[list[torch.Tensor], Any]:
        """As `run`, with random numbers of torch's own generators."""
        module = self.module()
        if module is None:
            raise UnsupportedModelError(f"{self.path} is gone, and a graph still calls it")
        leaves = self.arguments.together(tensors[len(self.names) :], sizes)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        used = self._to_use(tensors)
        before = [_identity(tensor) for tensor in used]
        with self.autocast.again(), self._swapped(module, used) as swap:
            result = module._call_impl(*args, **kwargs)  # not its call, which may be compiled
            found, spec = pytree.tree_flatten(result)
            write_back(swap.replaced(), found)
        written = {place for place, tensor in enumerate(used) if _identity(tensor) != before[place]}
        # The kernels of BatchNorm do not count as writing, nor does what is written into x.data.
        seen = self.may_be_written if self.buffers is None else self.own_buffers
        written |= {place for place in seen if not _is_same(used[place], tensors[place])}
        if written - set(self.buffers if self.buffers is not None else self.may_be_written):
            raise UnsupportedModelError(
                f"{self.path} {_DECIDES}, so it runs as written, and changes its inputs or trained parameters in place, "
                "or buffers that it did not change when it was captured",
                cure="write it without the in-place operation.",
            )
        for place in written:
            check_own_memory(used[place], used)
        changed = tuple(sorted(written)) if self.buffers is None else self.buffers
        given = [leaf for leaf in found if isinstance(leaf, torch.Tensor)] + [
            used[place] for place in changed
        ]
        rest = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in found]
        return given, (spec, rest, changed)

    def _to_use(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the module writes into its buffers is given as results, as the graph's own updates of them are."""
        copied = self.may_be_written if self.buffers is None else {*self.buffers, *self.own_buffers}
        return [
            tensor.detach().clone().requires_grad_(tensor.requires_grad) if place in copied else tensor
            for place, tensor in enumerate(tensors)
        ]

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As the code may ask them, and differentiate by them (inner loops, penalties)."""
        return [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(tensors, self.requires_grad, strict=True)
        ]

    def _swapped(
        self, module: nn.Module, tensors: Sequence[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Swap]:
        own = named_tensors(module)
        return swapped(module, {id(own[name]): tensor for name, tensor in zip(self.names, tensors)})

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        with recording_gradients(), torch.set_grad_enabled(self.records):
            results, given = self.run(self._leaves(tensors), sizes)
        found = [value.detach() for value in results]
        shapes = [(list(value.shape), value.dtype) for value in found]
        expected = [(result.shape(tensors), result.dtype) for result in self.results]
        if shapes != expected or given != self.given:
            raise UnsupportedModelError(
                f"{self.path} {_DECIDES}, and gives results of other sizes {shapes} or kinds than it did "
                f"when it was captured {expected}",
                cure="let its results have sizes that depend on the sizes of its arguments alone.",
            )
        return owned_memory([value.contiguous() for value in found], tensors)

    def backward(
        self,
        grads: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[Any],
        outputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Gradients of the tensors that are trained; None for those that this run does not use."""
        with recording_gradients():
            leaves = self._leaves(tensors)
            found, _ = self.run(leaves, sizes)
            for value, first in zip(found, outputs, strict=True):
                self._check(value, first)
            # A path may give a result that depends on nothing: zeros, where no expert has tokens.
            assert (torch.ones((), requires_grad=True) * 1).requires_grad, "operators record gradients here"
            pairs = [
                (value, grad)
                for value, grad in zip(found, grads, strict=True)
                if grad is not None and value.requires_grad
            ]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            module = self.module()
            assert module is not None, "it has run just now"
            # A function with a backward of its own may run parts of the module there (checkpoints written by hand).
            with self._swapped(module, self._to_use(leaves)):
                gradients = torch.autograd.grad(
                    [pair[0] for pair in pairs], wanted, [pair[1] for pair in pairs], allow_unused=True
                )
        own = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        return owned_memory(own, [*grads, *tensors])

    def _check(self, value: torch.Tensor, first: torch.Tensor) -> None:
        if value.shape == first.shape and torch.allclose(
            value.detach(), first, rtol=_TOLERANCE, atol=_TOLERANCE * float(_largest(first)), equal_nan=True
        ):
            return
        raise UnsupportedModelError(
            f"{self.path} {_DECIDES}, so it runs as written, forward and again for its gradient, and gave "
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


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes where code writes into a tensor or gives it other memory."""
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _largest(value: torch.Tensor) -> float:
    value = value.detach()
    finite = value[value.isfinite()] if value.is_floating_point() else value * 1  # masks have no abs
    return float(finite.abs().max()) if finite.numel() else 0.0


def called_whole(
    module: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: BatchSize,
) -> tuple[Any, Attributes]:
    """The module's results by way of its operator, which is made if there is none; and attributes that its code sets, and
    does not read before.

    `batch`: for code that works with few sizes. Raises UnsupportedModelError where it cannot be one.
    """
    own = named_tensors(module)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    try:
        arguments = Arguments.of(leaves)
    except CannotKeep as error:
        raise _cannot(path, str(error)) from error
    values = [*own.values(), *(leaves[place] for place in arguments.tensors)]
    sizes = [leaves[place] for place in arguments.sizes]
    if any(innermost(value) is not value for value in values):
        raise _cannot(path, "is called within a transform of torch.func")
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
        requires_grad=tuple(value.requires_grad for value in values),
        records=torch.is_grad_enabled(),
    )
    whole = _observed_writing(whole, values, sizes, batch)
    if wanting := [each.name for each in whole.written if needs_gradient(each.value)]:
        raise _cannot(path, f"sets {wanting[0]} to a value with a gradient, which is no result")
    if is_row_wise(type(module)) and (whole.draws or whole.buffers):
        raise _cannot(path, "draws random numbers or changes buffers, which a row-wise module may not")
    if whole.draws:
        values.append(torch.randint(_MAX_SEED, (), device=values[0].device if values else None))
        whole = replace(whole, requires_grad=(*whole.requires_grad, False))
    operator = _operator(whole, type(module))
    # Whether a result has a gradient may differ by path: the operator's backward finds out.
    found = operator(values, sizes)
    out_spec, rest, changed = whole.given
    with torch.no_grad():
        for place, new in zip(changed, found[len(found) - len(changed) :], strict=True):
            values[place].copy_(new)
    remaining = iter(found)
    result = pytree.tree_unflatten([next(remaining) if leaf is None else leaf[0] for leaf in rest], out_spec)
    return result, tuple((each.holder, each.key, each.name) for each in whole.written)


def _cannot(path: str, why: str) -> UnsupportedModelError:
    return needing_value(
        f"{path} {_DECIDES}, and cannot run as written, since it {why}",
        "",
    )


def _observed_writing(
    whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any], batch: BatchSize
) -> _Whole:
    """As `_observed`, first with no value of the attributes that the code sets: where that goes well, it reads none before."""
    module = whole.module()
    assert module is not None, "it is called"
    if attributes := attributes_set_by(module, whole.path):
        with contextlib.suppress(UnsupportedModelError):
            return _observed(replace(whole, attributes=attributes), values, sizes, batch)
    whole = _observed(whole, values, sizes, batch)
    for each in whole.written:
        # A cache is filled once; what it was before chooses what it is.
        each.holder[each.key] = each.value
    return replace(whole, written=())


def _observed(
    whole: _Whole,
    values: Sequence[torch.Tensor],
    sizes: Sequence[Any],
    batch: BatchSize,
) -> _Whole:
    """With what two runs on made-up numbers have shown: of sizes that nothing divides, or else that much does, or
    else of the batch size and its double, or of it alone.
    """
    all_sizes = [*(size for value in values for size in value.shape), *sizes]
    error: UnsupportedModelError | None = None
    for unit in (1, _DIVISIBLE):
        try:
            return _observed_at(whole, values, sizes, [numbers_at(all_sizes, more, unit) for more in (0, 1)])
        except UnsupportedModelError as failed:
            error = error or failed
    assert error is not None, "two observations have failed"
    hints = numbers_at(all_sizes, more=0)
    # A rank alone may be here, with arguments that fit no size: then the others must not be asked.
    if not any(_runs(whole, values, sizes, {**hints, batch.symbol: size}) for size in batch.tries()):
        raise error
    with without_modes(), torch._C.DisableTorchFunction():
        size = batch.of_all()
    for factor in (2, 1):
        numbers = [{**hints, batch.symbol: size}, {**hints, batch.symbol: factor * size}]
        with contextlib.suppress(UnsupportedModelError):
            observed = _observed_at(whole, values, sizes, numbers)
            # One run does not tell what has rows.
            if factor > 1 or size not in observed.constant_sizes():
                return observed
    raise error


def _runs(
    whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any], numbers: dict[Any, int]
) -> bool:
    with contextlib.suppress(UnsupportedModelError):
        _tried_at(whole, values, sizes, numbers)
        return True
    return False


def _tried_at(
    whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any], numbers: dict[Any, int]
) -> tuple[list[torch.Tensor], tuple[list[torch.Tensor], Any, InnerWork, bool, tuple[Written, ...]]]:
    """What was made up at these sizes, and the run."""
    with without_modes(), torch._C.DisableTorchFunction():
        made = [
            made_up(value, numbers, place, place < whole.num_parameters) for place, value in enumerate(values)
        ]
    return made, _tried(whole, made, [number_at(size, numbers) for size in sizes])


def _observed_at(
    whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any], tries: Sequence[dict[Any, int]]
) -> _Whole:
    seen, written = [], dict[tuple[int, str], Written]()
    for numbers in tries:
        made, (result, kinds, work, draws, writes) = _tried_at(whole, values, sizes, numbers)
        whole = replace(whole, draws=whole.draws or draws)
        written |= {(id(each.holder), each.key): each for each in writes}
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
            shown_size(pair, first_inputs, other_inputs) for pair in zip(one.shape, two.shape, strict=True)
        ]
        known = tuple(size for size in dims if size is not None)
        if len(known) < len(dims):
            raise _cannot(
                whole.path, "gives results whose sizes depend on more than the sizes of its arguments"
            )
        results.append(_Result(known, one.dtype))
    facts: dict[str, Any] = {"given": given, "work": work, "buffers": given[2]}
    return replace(whole, results=tuple(results), written=tuple(written.values()), **facts)


def _tried(
    whole: _Whole, values: Sequence[torch.Tensor], sizes: Sequence[Any], *, takes_hooks: bool = True
) -> tuple[list[torch.Tensor], Any, InnerWork, bool, tuple[Written, ...]]:
    module = whole.module()
    assert module is not None, "it is called"
    try:
        with (
            noting_writes(module, whole.path, whole.attributes) as writes,
            without_modes(),
            torch._C.DisableTorchFunction(),
            drawing_from(0, torch.device("cpu")),
            NotingDraws() as draws,
            counting_work(values, takes_hooks=takes_hooks) as count,
        ):
            found, given = whole.run_alone(values, sizes)
        num_flops, num_bytes = count()
        num_elements = max(1, sum(value.numel() for value in found))
        work = InnerWork(num_flops / num_elements, num_bytes / num_elements)
        return found, given, work, draws.has_drawn, writes()
    except UnsupportedModelError as error:
        raise _cannot(whole.path, f"cannot be tried alone: {error.args[0]}") from error
    except Exception as error:  # whatever the user's code raises for numbers that are not the user's
        if takes_hooks and "saved tensor hooks" in str(error):
            return _tried(whole, values, sizes, takes_hooks=False)
        raise _cannot(whole.path, f"fails on made-up numbers: {type(error).__name__}: {error}") from error


def _operator(whole: _Whole, cls: type) -> Any:
    """The operator of a call. Another living module may have the name."""
    facts = (
        *(cls.__module__, cls.__qualname__, whole.path, whole.names, str(whole.spec), whole.arguments),
        *(whole.autocast, whole.requires_grad, whole.records, whole.results, str(whole.given), whole.draws),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    base = f"{re.sub('[^A-Za-z0-9]', '_', cls.__name__)}_{digest}"
    operator = named_operator(
        _LIBRARY, base, whole, lambda code: isinstance(code, _Whole) and code.module() is whole.module()
    )
    return row_wise(operator) if is_row_wise(cls) else operator
