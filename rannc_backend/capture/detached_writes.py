"""What is written in place: what a graph, which has no places, would follow otherwise than autograd does.

In: calls of functions of torch, while a graph is traced. Out: for tensors without a gradient, the values that are written
without theirs; for trained inputs, their new values and the gradient of the old.

Private to torch here: what transforms of torch.func wrap (seen on torch 2.13.0 to 2.15.0).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rannc_backend.errors import UnsupportedModelError, needing_value
from rannc_backend.passes.plain_numbers import fill_diagonal

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "imatmul", "ipow", "iand", "ior",
        "ixor", "ilshift", "irshift",
    )
)  # fmt: skip
_WRITING_NOTHING = frozenset({"requires_grad_", "share_memory_"})
DETACHING = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LOOKUPS = (F.embedding, F.embedding_bag)
_NOT_ZERO = 1e-7  # torch's, beside a norm


class DetachedWrites(TorchFunctionMode):
    """Writes into `x.data`, `x.detach()` and, where gradients are switched off, into tensors that have none: while it is
    entered, what is written has none either.

    A detached tensor itself has the gradient of what is written into it (`y = x.detach(); y[mask] = token`), which x does
    not see. A functional trace makes a tensor anew from what it is a view of, where the gradient would end: such a tensor
    gets memory of its own, and x the values. What would no longer be the same in both is an error when it is read.
    """

    def __init__(self, *, is_with_gradients: bool = True) -> None:
        super().__init__()
        self._is_with_gradients = is_with_gradients  # whether the call is, whose trace is in any case
        # By id of a detached tensor with its own memory: one over that it had.
        self._apart: dict[int, Tensor] = {}
        self._stale: set[int] = set()  # memory that lacks what was written in the other place
        self._inputs: frozenset[int] = frozenset()  # their memory
        self._trained: dict[int, Tensor] = {}  # inputs with a gradient, by memory
        self._before: dict[int, Tensor] = {}  # what those had that are written to, by their id
        self._detached: dict[int, Tensor] = {}  # by id, which is theirs as long as they are here
        self._hiding: set[int] = set()  # memory of values that have a gradient
        self._left: list[torch.UntypedStorage] = []  # memory that inputs had, whose number no other is to get

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """The inputs of the graph, whose changes it gives."""
        self._inputs = frozenset(map(_memory, inputs))
        self._trained = {_memory(tensor): tensor for tensor in inputs if needs_gradient(tensor)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.fill_diagonal_:
            with self:
                return fill_diagonal(*args, **kwargs)
        if func == _SET_DATA:
            return self._set_data(*args)
        if func in _LOOKUPS and (short := _without_max_norm(func, args, kwargs)):
            with self:
                return short()
        if func is Tensor.detach_ and needs_gradient(args[0]):
            raise needing_value(
                "the forward drops the gradient of a value in place (x.detach_())",
                cure="write x = x.detach().",
            )
        if self._apart and any(map(self._is_lost, tensors_in((args, kwargs)))):
            result = func(*args, **kwargs)
            if tensors_in(result):
                raise _hidden_write()
            return result  # its sizes
        if is_in_place(func):
            written = tensors_in(args[:1])
            self._note_other_places(written)
            if any(map(self._is_written_apart, written)) or self._gives_gradient(written, (args[1:], kwargs)):
                return self._write_apart(func, args, kwargs)
            if any(map(self._is_of_trained, written)) or (
                not torch.is_grad_enabled() and any(map(needs_gradient, written))
            ):
                return self._write_without_gradient(func, args, kwargs)
            if not any(map(needs_gradient, written)):
                if not torch.is_grad_enabled():
                    args, kwargs = pytree.tree_map_only(Tensor, _detached, (args, kwargs))
                for tensor in written:
                    if _memory(tensor) in self._trained:
                        self._keep(self._trained[_memory(tensor)])
        elif self._before and func not in DETACHING and torch.is_grad_enabled():
            args, kwargs = pytree.tree_map_only(Tensor, self._with_gradient, (args, kwargs))
        result = func(*args, **kwargs)
        if func in DETACHING:
            self._note(result)
            if needs_gradient(args[0]) and _memory(result) not in self._inputs:
                self._hiding.add(_memory(result))
        elif self._detached:
            operands = {_memory(tensor) for tensor in tensors_in(args) if id(tensor) in self._detached}
            for tensor in tensors_in(result) if operands else ():
                if not needs_gradient(tensor) and _memory(tensor) in operands:
                    self._note(tensor)
        return result

    def check(self, results: object) -> None:
        """Raises UnsupportedModelError where one of the results lacks what was written."""
        if any(map(self._is_lost, tensors_in(results))):
            raise _hidden_write()

    def check_change(self, tensor: Tensor) -> None:
        """Raises UnsupportedModelError where a trained input has been changed unseen: its gradient would end there."""
        if self._is_trained(tensor) and id(tensor) not in self._before:
            raise UnsupportedModelError(
                "the forward changes a trained parameter by an operator that writes into its operands",
                cure="write the new values with p.copy_(...) under torch.no_grad().",
            )

    def _is_lost(self, tensor: Tensor) -> bool:
        """Whether a tensor has other values, or another gradient, than in one process."""
        memory = _memory(tensor)
        if memory in self._stale:
            return True
        # Another detached tensor, or a view of one, from before the write.
        return id(tensor) in self._detached and any(memory == _memory(base) for base in self._apart.values())

    def _note_other_places(self, written: Sequence[Tensor]) -> None:
        """What a write that goes to one of two memories leaves behind in the other."""
        memories = {_memory(tensor) for tensor in written if id(tensor) not in self._apart}
        for place, base in self._apart.items():
            own = _memory(self._detached[place])
            if own in memories:
                self._lose(_memory(base))
            if _memory(base) in memories:
                self._lose(own)

    def _lose(self, memory: int) -> None:
        if memory in self._inputs:
            raise _hidden_write()  # the graph gives its value
        self._stale.add(memory)

    def _is_written_apart(self, tensor: Tensor) -> bool:
        return id(tensor) in self._apart or (id(tensor) in self._detached and _memory(tensor) in self._hiding)

    def _gives_gradient(self, written: Sequence[Tensor], operands: object) -> bool:
        """Whether a detached tensor gets a gradient by a write."""
        is_detached = bool(written) and all(id(tensor) in self._detached for tensor in written)
        return is_detached and torch.is_grad_enabled() and any(map(needs_gradient, tensors_in(operands)))

    def _write_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """To a detached tensor with gradients, and to what it shares memory with without, unless that has one of its own."""
        target, *rest = args
        if not isinstance(target, FunctionalTensor):
            raise _hidden_write()
        base = self._apart.get(id(target))
        if base is None:
            base = self._apart[id(target)] = target.detach()
            if _memory(target) in self._hiding:
                self._lose(_memory(target))
            copy = target.clone()
            assert isinstance(copy, FunctionalTensor), "a copy within the trace"
            target.elem = copy.elem
        if _memory(base) not in self._stale:
            func(
                base,
                *pytree.tree_map_only(Tensor, _detached, rest),
                **pytree.tree_map_only(Tensor, _detached, kwargs),
            )
        return func(target, *rest, **kwargs)

    def _write_without_gradient(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """To a trained input where gradients are switched off, as by way of its data."""
        for tensor in tensors_in(args[:1]):
            is_trained = self._is_of_trained(tensor)
            if is_trained and self._is_with_gradients and torch.is_grad_enabled():
                raise UnsupportedModelError(
                    f"{name_of(func)} changes a trained parameter in place, of which torch would have no gradient",
                    cure="change it under torch.no_grad().",
                )
            if is_trained:
                self._keep(self._trained.get(_memory(tensor), tensor))
            elif needs_gradient(tensor):
                raise needing_value(
                    f"{name_of(func)} changes a value that has a gradient in place while gradients are switched off",
                    cure="write it without the in-place operation.",
                )
        func(
            *pytree.tree_map_only(Tensor, _detached, args), **pytree.tree_map_only(Tensor, _detached, kwargs)
        )
        return args[0]

    def _is_of_trained(self, tensor: Tensor) -> bool:
        """A trained input, or, in a call without gradients, a view of one, which has a gradient in its trace alone."""
        is_view = not self._is_with_gradients and needs_gradient(tensor) and _memory(tensor) in self._trained
        return is_view or self._is_trained(tensor)

    def _is_trained(self, tensor: Tensor) -> bool:
        return any(tensor is trained for trained in self._trained.values())

    def _note(self, tensor: Tensor) -> None:
        self._detached[id(tensor)] = tensor

    def _keep(self, tensor: Tensor) -> None:
        """What a trained input has before the first write to it."""
        if id(tensor) not in self._before:
            with torch.enable_grad():
                self._before[id(tensor)] = tensor.clone()

    def _with_gradient(self, tensor: Tensor) -> Tensor:
        """A trained input that has been written to, as autograd has it: its new values, and the gradient goes to it. The
        graph has the write in between, at which the gradient would end.
        """
        before = self._before.get(id(tensor))
        if before is not None:
            return tensor.detach() + (before - before.detach())
        source = self._trained.get(_memory(tensor)) if needs_gradient(tensor) else None
        if source is not None and id(source) in self._before:
            raise _hidden_write()  # a view from before
        return tensor

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        if _is_same_view(tensor, value):
            return
        if self._is_trained(tensor):
            self._keep(tensor)
            self._left.append(_storage(tensor))
        elif needs_gradient(tensor):
            raise _hidden_write()
        with torch.no_grad():
            tensor.set_(value.detach())  # type: ignore[call-overload]


def _hidden_write() -> UnsupportedModelError:
    return needing_value(
        "the forward changes values that have a gradient by way of x.data or x.detach()",
        cure="write x = x + (new - x).detach(), which has the new values and the gradient of the old.",
    )


def _without_max_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The lookup behind a write of its own, where it keeps the rows that it reads short."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    short = given.arguments
    if (length := short["max_norm"]) is None:
        return None

    def look_up() -> Any:
        weight, ids = short["weight"], short["input"]
        with torch.no_grad():
            weight.copy_(_shortened(weight, ids, length, short["norm_type"]))
        return func(*given.args, **given.kwargs)

    short["max_norm"] = None
    return look_up


def _shortened(weight: Tensor, ids: Tensor, length: float, norm_type: float) -> Tensor:
    """`aten.embedding_renorm`: rows of [words, width] that ids name and that are longer come to that length."""
    is_read = weight.new_zeros(weight.shape[0], dtype=torch.bool)
    is_read = is_read.index_fill(0, ids.reshape(-1), True)
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
    scales = torch.where(is_read & (norms > length), length / (norms + _NOT_ZERO), 1.0)
    return weight * scales[:, None]


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if needs_gradient(tensor) else tensor


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that transforms of torch.func wrap, which alone has memory, a place in a graph, and the gradient that
    those outside of all transforms ask for.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def needs_gradient(tensor: Tensor) -> bool:
    """Whether autograd outside of all transforms of torch.func has a gradient for it."""
    return innermost(tensor).requires_grad


def _memory(tensor: Tensor) -> int:
    """What is equal for views of the same memory, also in a functional trace."""
    return int(_storage(tensor)._cdata)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    tensor = innermost(tensor)
    return (tensor.elem if isinstance(tensor, FunctionalTensor) else tensor).untyped_storage()


def _is_same_view(tensor: Tensor, other: Tensor) -> bool:
    """Whether the other tensor is what `tensor.data` gives, as `x.data = x.data.to(device)` has it."""
    return (
        _memory(tensor) == _memory(other)
        and (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())
        and tensor.storage_offset() == other.storage_offset()
    )


def check_own_memory(tensor: Tensor, inputs: Sequence[Tensor]) -> None:
    """After a change of a tensor, such as `x.data = value`: a value that is written into x does as much, unless x shares
    it with another input, which is an UnsupportedModelError.
    """
    if sum(_memory(item) == _memory(tensor) for item in inputs) > 1:
        raise UnsupportedModelError(
            "the model lets one of its tensors share the memory of another one (x.data = y.data)",
            cure="copy the values: x.data = y.data.clone(), or x.copy_(y) under torch.no_grad().",
        )


def name_of(func: Any) -> str:
    """Of a function of torch."""
    return getattr(func, "__name__", None) or str(func)


def is_in_place(func: Any) -> bool:
    """Whether a function of torch writes into its first argument."""
    name = name_of(func)
    if name in _WRITING_NOTHING:
        return False
    return name in _IN_PLACE or func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))


def tensors_in(values: object) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
