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
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rannc_backend.passes.plain_numbers import RefusingDraws, at_hint, plain_mode, without_modes

NAMESPACE = "rannc_kept"
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


class CannotKeep(Exception):
    """Why a function cannot be kept as an operator, in words that follow its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFunction:
    """One function with the arguments that are no tensors.

    Attributes:
        apply: the class's own `apply`.
        constants: arguments that are neither tensors nor batch sizes, by place.
        tensors, sizes: places of tensors, and of sizes that depend on the batch, among the arguments.
        has_gradient: of each tensor, whether the function gives it a gradient.
        autocast: the device type and dtype that the call ran under; None: none.
    """

    apply: Callable[..., Any]
    constants: tuple[tuple[int, Any], ...]
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]
    has_gradient: tuple[bool, ...] = ()
    autocast: tuple[str, torch.dtype] | None = None

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs, in memory of their own."""
        with torch.no_grad():
            outputs = self._call(tensors, sizes)
        return owned_memory(outputs, tensors)

    def backward(
        self, grads: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], sizes: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Gradients of the tensors that have one."""
        with torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(tensors, self.has_gradient, strict=True)
            ]
            outputs = self._call(leaves, sizes)
            pairs = [
                (output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad
            ]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad([pair[0] for pair in pairs], wanted, [pair[1] for pair in pairs])
        return owned_memory(found, [*grads, *tensors])

    def _call(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        outputs = self.call(tensors, sizes)
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

    def call(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
        """What the class's own `apply` gives."""
        by_place = dict(self.constants) | dict(zip(self.tensors, tensors)) | dict(zip(self.sizes, sizes))
        with self._autocast():
            return self.apply(*(by_place[place] for place in range(len(by_place))))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1])


_MARK = "_rannc_kept_function"
_WHOLE = "_rannc_runs_as_written"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def owned_memory(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values, copied where they lie in the memory of `others` or of one another."""
    owned = {tensor.untyped_storage()._cdata for tensor in others}
    found = []
    for value in values:
        found.append(value.clone() if value.untyped_storage()._cdata in owned else value)
        owned.add(found[-1].untyped_storage()._cdata)
    return found


def kept_function(target: object) -> KeptFunction | None:
    """What an operator calls; None where it is another one."""
    found = getattr(target, _MARK, None)
    return found if isinstance(found, KeptFunction) else None


def mark_whole(target: object, what: str) -> None:
    """Say of an operator that it runs code of the user's as written, of whose rows nothing is known."""
    setattr(target, _WHOLE, what)


def runs_whole(target: object) -> str:
    """What code an operator runs as written; "" for any other."""
    return str(getattr(target, _WHOLE, ""))


def call_kept(cls: type, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The function's outputs by way of its operator, which is made if there is none.

    Raises CannotKeep.
    """
    tensors = tuple(place for place, item in enumerate(args) if isinstance(item, torch.Tensor))
    sizes = tuple(place for place, item in enumerate(args) if isinstance(item, torch.SymInt))
    constants = []
    for place, item in enumerate(args):
        if place in tensors or place in sizes:
            continue
        if not is_plain(item):
            raise CannotKeep(
                f"gets an argument of {type(item).__name__}, which no other rank knows by a name"
            )
        constants.append((place, item))
    device = next((args[place].device.type for place in tensors), "cpu")
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    kept = KeptFunction(
        apply=apply,
        constants=tuple(constants),
        tensors=tensors,
        sizes=sizes,
        autocast=autocast,
    )
    facts = _tried(kept, [args[place] for place in tensors], [args[place] for place in sizes])
    text = repr((cls.__module__, cls.__qualname__, constants, tensors, sizes, autocast, facts))
    name = f"{re.sub('[^A-Za-z0-9]', '_', cls.__name__)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        _define(name, dataclasses.replace(kept, has_gradient=facts.has_gradient))
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    outputs = operator([args[place] for place in tensors], [args[place] for place in sizes])
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
            result = kept.call(inputs, [int(size.node.hint) for size in sizes])
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


def _define(name: str, kept: KeptFunction) -> None:
    arguments = "Tensor[] tensors, SymInt[] sizes"
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]")
    _LIBRARY.define(f"{name}_backward(Tensor[] grads, {arguments}) -> Tensor[]")
    for one, run in ((name, kept.forward), (f"{name}_backward", kept.backward)):
        _LIBRARY.impl(one, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{one}", run, lib=_LIBRARY)
    backward_operator = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward").default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        tensors, ctx.sizes = inputs
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, Any]:
        saved = ctx.saved_tensors
        tensors, outputs = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        full = [torch.zeros_like(output) if grad is None else grad for grad, output in zip(grads, outputs)]
        found = iter(backward_operator(full, list(tensors), ctx.sizes))
        return [next(found) if has else None for has in kept.has_gradient], [None] * len(ctx.sizes)

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    setattr(operator, _MARK, kept)
