"""A `torch.autograd.Function` with a backward of its own, as one operator: it stays whole in a stage.

In: the class and the arguments of a call, on fakes. Out: an operator of `torch.library` that calls the class,
and whose gradient calls it again: `backward` runs the function's forward on the same inputs and then its own
backward. So whatever a context keeps need not be known, for the price of one more forward of the function; a
function that draws random numbers would draw others, and is refused. The operator is named by all that the call
is made of, so that all ranks have one name for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import sympy
import torch
from torch import fx

from rannc_backend.passes.graph_queries import num_elements
from rannc_backend.passes.plain_numbers import RefusingDraws, at_hint, hint_of, plain_mode, without_modes

NAMESPACE = "rannc_kept"
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


class CannotKeep(Exception):
    """Why a function cannot be kept as an operator, in words that follow its name."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call, told apart.

    Attributes:
        constants: those that are neither tensors nor batch sizes, by place.
        tensors, sizes: places of tensors, and of sizes that depend on the batch.
    """

    constants: tuple[tuple[int, Any], ...]
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, items: Sequence[Any]) -> Arguments:
        """Raises CannotKeep where one has no name that all ranks know."""
        tensors = tuple(place for place, item in enumerate(items) if isinstance(item, torch.Tensor))
        sizes = tuple(place for place, item in enumerate(items) if isinstance(item, torch.SymInt))
        constants = []
        for place, item in enumerate(items):
            if place in tensors or place in sizes:
                continue
            if not is_plain(item):
                raise CannotKeep(
                    f"gets an argument of {type(item).__name__}, which no other rank knows by a name"
                )
            constants.append((place, item))
        return cls(tuple(constants), tensors, sizes)

    def together(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
        """All of them in their order, with these tensors and sizes."""
        by_place = dict(self.constants) | dict(zip(self.tensors, tensors)) | dict(zip(self.sizes, sizes))
        return [by_place[place] for place in range(len(by_place))]


@dataclass(frozen=True, slots=True)
class Autocast:
    """The device type and dtype that a call ran under; None: none."""

    setting: tuple[str, torch.dtype] | None = None

    @classmethod
    def now(cls, device: str) -> Autocast:
        return cls((device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None)

    def again(self) -> AbstractContextManager[Any]:
        """The same, for the stretch of a `with`."""
        return torch.autocast(self.setting[0], dtype=self.setting[1]) if self.setting else nullcontext()


@dataclass(frozen=True, slots=True)
class InnerWork:
    """What one run of an operator's code computes, and keeps for its gradient, for each element of its results."""

    flops: float = 0.0
    num_bytes: float = 0.0


class OperatorCode(Protocol):
    """What an operator calls, on real tensors and on fakes. The results of `backward` are for the tensors that
    `has_gradient` says, None where no gradient came; it is given the outputs of `forward` where it `takes_outputs`.
    Where it `runs_whole`, `grads` has None for what nobody differentiates.
    """

    takes_outputs: ClassVar[bool]

    @property
    def has_gradient(self) -> tuple[bool, ...]: ...  # of each tensor

    @property
    def runs_whole(self) -> str: ...  # what code it runs as written, of whose rows nothing is known; or ""

    @property
    def work(self) -> InnerWork: ...

    def forward(self, tensors: Any, sizes: Any) -> list[torch.Tensor]: ...

    def backward(
        self, grads: Any, tensors: Any, sizes: Any, outputs: Any
    ) -> list[torch.Tensor | None] | list[torch.Tensor]: ...

    def fake_forward(self, tensors: Any, sizes: Any) -> list[torch.Tensor]: ...

    def fake_backward(self, grads: Any, tensors: Any, sizes: Any, outputs: Any) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFunction:
    """One function with the arguments that are no tensors.

    Attributes:
        apply: the class's own `apply`.
        has_gradient: of each tensor, whether the function gives it a gradient.
    """

    takes_outputs: ClassVar[bool] = False
    runs_whole: ClassVar[str] = ""
    work: ClassVar[InnerWork] = InnerWork()
    apply: Callable[..., Any]
    arguments: Arguments
    has_gradient: tuple[bool, ...] = ()
    autocast: Autocast = Autocast()

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs, in memory of their own."""
        with torch.no_grad():
            outputs = self._call(tensors, sizes)
        return owned_memory(outputs, tensors)

    def backward(
        self,
        grads: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[Any],
        outputs: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """Gradients of the tensors that have one."""
        with torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(tensors, self.has_gradient, strict=True)
            ]
            results = self._call(leaves, sizes)
            pairs = [
                (result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad
            ]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad([pair[0] for pair in pairs], wanted, [pair[1] for pair in pairs])
        return owned_memory(found, [*grads, *tensors])

    fake_forward, fake_backward = forward, backward

    def _call(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        outputs = self.call(tensors, sizes)
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

    def call(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
        """What the class's own `apply` gives."""
        with self.autocast.again():
            return self.apply(*self.arguments.together(tensors, sizes))


_Some = TypeVar("_Some", torch.Tensor, torch.Tensor | None)
_MARK, _BACKWARD_MARK = "_rannc_operator_code", "_rannc_operator_backward_of"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def owned_memory(values: Sequence[_Some], others: Sequence[torch.Tensor | None]) -> list[_Some]:
    """The values, copied where they lie in the memory of `others` or of one another."""
    owned = {tensor.untyped_storage()._cdata for tensor in others if tensor is not None}
    found = []
    for value in values:
        if value is not None:
            value = value.clone() if value.untyped_storage()._cdata in owned else value
            owned.add(value.untyped_storage()._cdata)
        found.append(value)
    return found


def operator_code(target: object) -> OperatorCode | None:
    """What an operator of `define_operator` calls; None for another one."""
    return getattr(target, _MARK, None)


def backward_code(target: object) -> OperatorCode | None:
    """The code of an operator whose gradient this one is."""
    return getattr(target, _BACKWARD_MARK, None)


def runs_whole(node: fx.Node) -> bool:
    """Whether its operator runs code as written, which may decide by values what it uses."""
    code = operator_code(node.target)
    return code is not None and bool(code.runs_whole)


def any_gradient(node: fx.Node) -> bool:
    """Whether the code of its operator is run with gradients, which it may ask for within."""
    code = operator_code(node.target)
    return code is not None and any(code.has_gradient)


def inner_work(node: fx.Node) -> tuple[InnerWork, sympy.Expr, bool] | None:
    """What the code of a node's operator does for each element, how many there are, and whether it is called for its
    gradient; None for another operator.
    """
    code, of_backward = operator_code(node.target), backward_code(node.target)
    if code is not None:
        return code.work, sympy.Add(*map(num_elements, node.meta["val"])), False
    if of_backward is not None:
        grads: Any = node.args[0]
        return of_backward.work, sympy.Add(*(num_elements(grad.meta["val"]) for grad in grads)), True
    return None


def kept_function(target: object) -> KeptFunction | None:
    """The function that an operator is; None where it is another one."""
    found = operator_code(target)
    return found if isinstance(found, KeptFunction) else None


def call_kept(cls: type, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The function's outputs by way of its operator, which is made if there is none.

    Raises CannotKeep.
    """
    arguments = Arguments.of(args)
    tensors, sizes = ([args[place] for place in places] for places in (arguments.tensors, arguments.sizes))
    autocast = Autocast.now(next((tensor.device.type for tensor in tensors), "cpu"))
    kept = KeptFunction(apply=apply, arguments=arguments, autocast=autocast)
    facts = _tried(kept, tensors, sizes)
    text = repr((cls.__module__, cls.__qualname__, arguments, autocast, facts))
    base = f"{re.sub('[^A-Za-z0-9]', '_', cls.__name__)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    # Another class may have the name: one that a function of the user's makes anew.
    operator = named_operator(
        _LIBRARY,
        base,
        dataclasses.replace(kept, has_gradient=facts.has_gradient),
        lambda code: isinstance(code, KeptFunction) and code.apply == kept.apply,
    )
    outputs = operator(tensors, sizes)
    return tuple(outputs) if facts.is_tuple else outputs[0]


@dataclass(frozen=True, slots=True)
class _Facts:
    has_gradient: tuple[bool, ...]
    is_tuple: bool


def _tried(kept: KeptFunction, tensors: Sequence[Any], sizes: Sequence[Any]) -> _Facts:
    """Run forward and backward once on fakes of plain sizes. Raises CannotKeep for what an operator cannot
    be.
    """
    mode = plain_mode()
    draws = CannotKeep("draws random numbers, and its backward would draw others")
    with without_modes(), mode, RefusingDraws(draws), torch.enable_grad():
        leaves = [at_hint(tensor, mode) for tensor in tensors]
        for leaf, tensor in zip(leaves, tensors):
            leaf.requires_grad_(tensor.requires_grad)
        # A leaf may not be changed in place; what comes out of an operator may.
        inputs = [leaf.clone() for leaf in leaves]
        before = [item._version for item in inputs]
        try:
            result = kept.call(inputs, [int(hint_of(size)) for size in sizes])
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            if any(not isinstance(output, torch.Tensor) for output in outputs):
                raise CannotKeep("gives what is no tensor")
            if [item._version for item in inputs] != before:
                raise CannotKeep("changes its inputs in place")
            found = iter(_gradients(outputs, leaves))
        except CannotKeep:
            raise
        except Exception as error:
            if isinstance(error.__cause__, CannotKeep):
                raise error.__cause__ from error
            raise CannotKeep(f"does not run without values: {type(error).__name__}: {error}") from error
    has_gradient = tuple(leaf.requires_grad and next(found) is not None for leaf in leaves)
    return _Facts(has_gradient, isinstance(result, (tuple, list)))


def _gradients(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    differentiable = [output for output in outputs if output.requires_grad]
    if not wanted or not differentiable:
        return (None,) * len(wanted)
    ones = [torch.ones_like(output) for output in differentiable]
    return torch.autograd.grad(differentiable, wanted, ones, allow_unused=True)


def is_plain(item: Any) -> bool:
    """Whether all ranks write it in one way: numbers, texts, types, and containers of them."""
    if isinstance(item, (tuple, list, torch.Size)):
        return all(map(is_plain, item))
    if isinstance(item, dict):
        return all(map(is_plain, (*item, *item.values())))
    return isinstance(item, _PLAIN)


def named_operator(
    library: torch.library.Library, base: str, code: OperatorCode, is_same: Callable[[OperatorCode], bool]
) -> Any:
    """The operator of this name, made if there is none; with a number behind it where what has the name is not the same."""
    operators = getattr(torch.ops, library.ns)
    for number in itertools.count():
        name = f"{base}_{number}" if number else base
        if not hasattr(operators, name):
            define_operator(library, name, code)
        found = getattr(operators, name).default
        known = operator_code(found)
        if known is not None and is_same(known):
            return found


class Calls(Protocol):
    """What `ir/reach.py` asks of one backward: only the calls of operators that run code as written show what that uses."""

    absent: frozenset[tuple[str, int]]
    reached: dict[str, set[int]]


_CALLS: ContextVar[Calls | None] = ContextVar("rannc_operator_calls", default=None)


@contextmanager
def noting_calls(calls: Calls) -> Iterator[None]:
    """Around a backward."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


def _gradients_of(
    code: OperatorCode,
    name: str,
    grads: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[Any],
    outputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Of the tensors that `has_gradient` says: zeros where code that runs whole gives none, which is noted."""
    calls = _CALLS.get() if code.runs_whole else None
    if calls is None:
        found = code.backward(grads, tensors, sizes, outputs)
    else:
        given = [None if (name, place) in calls.absent else grad for place, grad in enumerate(grads)]
        found = code.backward(given, tensors, sizes, outputs)
    trained = [place for place, has in enumerate(code.has_gradient) if has]
    if calls is not None:
        reached = (place for place, grad in zip(trained, found, strict=True) if grad is not None)
        calls.reached.setdefault(name, set()).update(reached)
    return [
        torch.zeros_like(tensors[place], memory_format=torch.contiguous_format) if grad is None else grad
        for place, grad in zip(trained, found, strict=True)
    ]


def define_operator(library: torch.library.Library, name: str, code: OperatorCode) -> None:
    """The operator `name` of tensors and sizes that calls `code`, and one for its gradient."""
    operators, arguments = getattr(torch.ops, library.ns), "Tensor[] tensors, SymInt[] sizes"
    library.define(f"{name}({arguments}) -> Tensor[]")
    library.define(f"{name}_backward(Tensor[] grads, {arguments}, Tensor[] outputs) -> Tensor[]")
    for one, run, fake in (
        (name, code.forward, code.fake_forward),
        (
            f"{name}_backward",
            partial(_gradients_of, code, f"{library.ns}.{name}.default"),
            code.fake_backward,
        ),
    ):
        library.impl(one, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{one}", fake, lib=library)
    backward_operator = getattr(operators, f"{name}_backward").default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        tensors, ctx.sizes = inputs
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, Any]:
        saved = ctx.saved_tensors
        tensors, outputs = list(saved[: ctx.num_tensors]), list(saved[ctx.num_tensors :])
        full = [torch.zeros_like(output) if grad is None else grad for grad, output in zip(grads, outputs)]
        found = iter(backward_operator(full, tensors, ctx.sizes, outputs if code.takes_outputs else []))
        return [next(found) if has else None for has in code.has_gradient], [None] * len(ctx.sizes)

    torch.library.register_autograd(
        f"{library.ns}::{name}", backward, setup_context=setup_context, lib=library
    )
    operator = getattr(operators, name).default
    setattr(operator, _MARK, code)
    setattr(backward_operator, _BACKWARD_MARK, code)
