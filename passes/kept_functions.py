"""A `torch.autograd.Function` with a backward of its own, as one operator: it stays whole in a stage.

In: the class and the arguments of a call, on fakes. Out: an operator of `torch.library` that calls the class,
and whose gradient calls it again: `backward` runs the function's forward on the same inputs and then its own
backward. So whatever a context keeps need not be known, for the price of one more forward of the function; a
function that draws random numbers would draw others, and is refused. The operator is named by all that the call
is made of, so that all ranks have one name for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rannc_backend.passes.plain_numbers import at_hint, plain_mode, without_modes

NAMESPACE = "rannc_kept"
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


class CannotKeep(Exception):
    """Why a function cannot be kept as an operator, in words that follow its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFunction:
    """One function with the arguments that are no tensors.

    Attributes:
        apply: the class's own `apply`.
        structure: of its arguments; `constants`: those that are neither tensors nor batch sizes, by place.
        tensors, sizes: places of tensors, and of sizes that depend on the batch, among the flat arguments.
        has_gradient: of each tensor, whether the function gives it a gradient.
        autocast: the device type and dtype that the call ran under; None: none.
    """

    apply: Callable[..., Any]
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]
    has_gradient: tuple[bool, ...] = ()
    autocast: tuple[str, torch.dtype] | None = None

    def forward(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs, in memory of their own."""
        with torch.no_grad():
            outputs = self._call(tensors, sizes)
        owned = {tensor.untyped_storage()._cdata for tensor in tensors}
        found = []
        for output in outputs:
            found.append(output.clone() if output.untyped_storage()._cdata in owned else output)
            owned.add(found[-1].untyped_storage()._cdata)
        return found

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
        return [grad.clone() for grad in found]

    def _call(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        flat: list[Any] = [None] * self.structure.num_leaves
        for place, value in self.constants:
            flat[place] = value
        for place, value in [*zip(self.tensors, tensors), *zip(self.sizes, sizes)]:
            flat[place] = value
        with self._autocast():
            outputs = self.apply(*pytree.tree_unflatten(flat, self.structure))
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1])


_OPERATORS: dict[str, tuple[Any, KeptFunction]] = {}
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def kept_function(target: object) -> KeptFunction | None:
    """What an operator calls; None where it is another one."""
    name = getattr(target, "__name__", "").partition(".")[0]
    if getattr(target, "namespace", "") != NAMESPACE or name not in _OPERATORS:
        return None
    return _OPERATORS[name][1]


def call_kept(cls: type, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The function's outputs by way of its operator, which is made if there is none.

    Raises CannotKeep.
    """
    flat, structure = pytree.tree_flatten(args)
    tensors = tuple(place for place, item in enumerate(flat) if isinstance(item, torch.Tensor))
    sizes = tuple(place for place, item in enumerate(flat) if isinstance(item, torch.SymInt))
    constants = []
    for place, item in enumerate(flat):
        if place in tensors or place in sizes:
            continue
        if not isinstance(item, _PLAIN):
            raise CannotKeep(f"gets an argument of {type(item).__name__}, which no other rank knows by a name")
        constants.append((place, item))
    device = next((flat[place].device.type for place in tensors), "cpu")
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    kept = KeptFunction(
        apply=apply,
        structure=structure,
        constants=tuple(constants),
        tensors=tensors,
        sizes=sizes,
        autocast=autocast,
    )
    facts = _tried(kept, [flat[place] for place in tensors], [flat[place] for place in sizes])
    text = repr(
        (cls.__module__, cls.__qualname__, str(structure), constants, tensors, sizes, autocast, facts)
    )
    name = f"{re.sub('[^A-Za-z0-9]', '_', cls.__name__)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if name not in _OPERATORS:
        made = KeptFunction(
            apply=apply,
            structure=structure,
            constants=tuple(constants),
            tensors=tensors,
            sizes=sizes,
            has_gradient=facts.has_gradient,
            autocast=autocast,
        )
        _OPERATORS[name] = (_defined(name, made), made)
    operator = _OPERATORS[name][0]
    outputs = operator([flat[place] for place in tensors], [flat[place] for place in sizes])
    return tuple(outputs) if facts.is_tuple else outputs[0]


@dataclass(frozen=True, slots=True)
class _Facts:
    has_gradient: tuple[bool, ...]
    is_tuple: bool


class _NoDraws(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotKeep("draws random numbers, and its backward would draw others")
        return func(*args, **(kwargs or {}))


def _tried(kept: KeptFunction, tensors: Sequence[Any], sizes: Sequence[Any]) -> _Facts:
    """Run forward and backward once on fakes of plain sizes. Raises CannotKeep for what an operator cannot
    be.
    """
    mode = plain_mode()
    with without_modes(), mode, _NoDraws(), torch.enable_grad():
        leaves = [at_hint(tensor, mode) for tensor in tensors]
        for leaf, tensor in zip(leaves, tensors):
            leaf.requires_grad_(tensor.requires_grad)
        before = [leaf._version for leaf in leaves]
        # A leaf may not be changed in place; what comes out of an operator may.
        inputs = [leaf.view_as(leaf) if leaf.requires_grad else leaf for leaf in leaves]
        flat: list[Any] = [None] * kept.structure.num_leaves
        for place, value in kept.constants:
            flat[place] = value
        for place, value in [*zip(kept.tensors, inputs), *zip(kept.sizes, map(_hint, sizes))]:
            flat[place] = value
        try:
            with kept._autocast():
                result = kept.apply(*pytree.tree_unflatten(flat, kept.structure))
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            if any(not isinstance(output, torch.Tensor) for output in outputs):
                raise CannotKeep("gives what is no tensor")
            if [leaf._version for leaf in leaves] != before:
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


def _hint(size: torch.SymInt) -> int:
    return int(size.node.hint)


def _defined(name: str, kept: KeptFunction) -> Any:
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
        full = [
            torch.zeros_like(output) if grad is None else grad for grad, output in zip(grads, outputs)
        ]
        found = iter(backward_operator(full, list(tensors), ctx.sizes))
        return [next(found) if has else None for has in kept.has_gradient], [None] * len(ctx.sizes)

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )
    return getattr(getattr(torch.ops, NAMESPACE), name).default
