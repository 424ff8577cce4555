"""Tensors whose value is not on this rank: they keep shape, dtype and identity, and whatever would read,
write or copy them is an error.

In: a parameter or buffer and why its value is not here. Out: the same object, over placeholder memory (a
parameter's is a single element), with a class whose ``__torch_function__`` lets pass what asks for metadata
and raises for everything else. Terms: an *absence* is the reason: other ranks own the tensor (*released*), or
nobody has made its value yet (*deferred*).

Why a class: everything that Python code does with a tensor passes ``__torch_function__``,
``torch._foreach_*`` and registered C++ operators included, and the object stays the one that optimizers,
modules and the user know. Below it the placeholder's storage refuses access by its address where torch can do
so: for writing in all builds, for reading in builds with CUDA. What remains in builds without CUDA is C++
code that takes the tensor without asking Python and only reads it (``torch.tensor(p)``, transforms of
torch.func): it sees NaN.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch

from rannc_backend.errors import ReleasedParameterError, ValueNotMadeError, is_of_user
from rannc_backend.kernels.plain_memory import has_marks
from rannc_backend.log.logger import say_once
from rannc_backend.runtime.torch_internals import refuse_memory_access, taken_apart, without_torch_function

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_rannc_absence"
_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_GRADIENT_READ = (
    "%s:%d reads p.grad of parameters that are on other ranks, and None here: a norm or sum over all is that of this rank's "
    "part. torch.nn.utils.clip_grad_norm_ and rannc_backend.named_gradient_norms(model) give it for the whole model."
)

_PROPERTIES = (
    "device",
    "dtype",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "retains_grad",
    "shape",
    "_backward_hooks",
    "_base",
    "_post_accumulate_grad_hooks",
    "_version",
)
_SETTABLE = ("grad", "requires_grad")
_METHODS = (
    "__hash__",
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "has_names",
    "is_complex",
    "is_conj",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_same_size",
    "is_signed",
    "ndimension",
    "nelement",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",  # how much memory there is
)
_FUNCTIONS = (
    "empty_like",
    "full_like",
    "get_device",
    "is_complex",
    "is_conj",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_same_size",
    "is_signed",
    "is_storage",
    "numel",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "result_type",
    "zeros_like",
    "_has_compatible_shallow_copy_type",
)
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
# They give the tensor itself where nothing is to be converted.
_CONVERSIONS = (
    "to",
    "type",
    "type_as",
    "contiguous",
    "cpu",
    "cuda",
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "bool",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Why a tensor has no value on this rank: ``owners`` have it, or, where there are none, nobody has made
    it yet.

    Attributes:
        kind: "parameter" or "buffer".
        original: class of the tensor before.
        strides: those of its value, in elements.
        is_value: the tensor is no parameter, but detached from one, or computed: what is computed with it is computed
        by the owners, and absent here.
        is_copy: it may be changed in place too, as a copy of a model may.
    """

    name: str
    kind: Literal["parameter", "buffer"]
    owners: tuple[int, ...]
    original: type[torch.Tensor]
    strides: tuple[int, ...]
    is_value: bool = False
    is_copy: bool = False

    def error(self, what: str) -> ReleasedParameterError | ValueNotMadeError:
        """The error for a use of the tensor; ``what``: name of the function."""
        if self.owners:
            return ReleasedParameterError(self.name, kind=self.kind, owners=self.owners, use=what)
        return ValueNotMadeError(self.name, use=what)


class Absent:
    """Mixed into the class of an absent tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _metadata_functions():
            if func == _GRADIENT:
                _note_gradient_read(args[0], sys._getframe(1))
            with without_torch_function():
                return func(*args, **kwargs)
        tensor = _first_absent((args, kwargs))
        if tensor is None:
            # The class alone was concerned, as in a call of its constructor.
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _detaching_functions():
            return _detached(tensor)
        if func in _converting_functions() and args and args[0] is tensor and not _wants_copy(args, kwargs):
            with without_torch_function():
                probe = torch.empty((), dtype=tensor.dtype, device=tensor.device)
                result = func(probe, *args[1:], **kwargs)
            if not isinstance(result, torch.Tensor):
                return result  # the name of its type
            if result.dtype == probe.dtype and result.device == probe.device:
                return tensor  # also for "cpu:0" in place of "cpu", where torch makes a copy
        if (
            func in _writing_functions()
            and len(args) > 1
            and args[0] is tensor
            and isinstance(args[1], Absent)
        ):
            return tensor  # what load_state_dict and Module.to do with a tensor that they are not to change
        result = _computed_by_owners(func, args, kwargs)
        if result is not NotImplemented:
            return result
        raise absence_of(tensor).error(getattr(func, "__name__", str(func)))

    def __repr__(self) -> str:
        absence = absence_of(self)
        with without_torch_function():
            text = f"{absence.kind} {absence.name!r} of shape {list(self.shape)}, {self.dtype}"  # type: ignore[attr-defined]
        return f"<{text}: {absence.error('').problem}>"

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise absence_of(self).error("pickle")

    def __copy__(self) -> Any:
        raise absence_of(self).error("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        absence = absence_of(self)
        if not absence.owners:
            raise absence.error("deepcopy")
        memo[id(self)] = twin = _absent_like(self, replace(absence, is_value=True, is_copy=True))  # type: ignore[arg-type]
        return twin


def make_absent(
    tensor: torch.Tensor,
    name: str,
    *,
    owners: tuple[int, ...],
    device: torch.device,
    strides: tuple[int, ...] | None = None,
    is_written: bool = False,
) -> None:
    """Forget the value of ``tensor``, a parameter's memory with it; from now on only metadata can be asked
    for, until `make_present`.

    Args:
        owners: the ranks that have its value; () where nobody has made it yet. An absent tensor gets another
        reason.
        strides: those of the value, in elements; None: as they are. is_written: by the model, as buffers are.
    """
    before = absence_of(tensor) if is_absent(tensor) else None
    restore_classes([tensor])
    absence = Absence(
        name=name,
        kind="parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer",
        owners=owners,
        original=type(tensor),
        strides=strides or (tensor.stride() if before is None else before.strides),
    )
    if absence.kind == "parameter" and not is_written:
        cell = placeholder(tensor, device)
    else:
        # Models change buffers in place, which a trace looks at: none of their elements may share memory.
        cell = torch.empty_strided(tensor.shape, absence.strides, dtype=tensor.dtype, device=device).fill_(
            _filler(tensor)
        )
    refuse_memory_access(cell, absence.error("").problem)
    tensor.data = cell
    setattr(tensor, _ATTRIBUTE, absence)
    refuse_again([tensor])


def bring_to(device: torch.device, tensor: torch.Tensor) -> int:
    """Bring a tensor's values to a device, in plain memory; the bytes that were moved."""
    if has_marks(tensor):
        # Once, since compiled stages go by address in every step; with the strides that Dynamo has seen.
        tensor.data = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor.data)
    # A counter on the CPU goes with any device, and was captured there.
    if tensor.device == device or (tensor.dim() == 0 and tensor.device.type == "cpu"):
        return 0
    tensor.data = tensor.data.to(device)
    return tensor.nbytes


def make_present(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let ``tensor`` be ``value`` (its memory is shared), whether it was absent or not."""
    restore_classes([tensor])
    if hasattr(tensor, _ATTRIBUTE):
        delattr(tensor, _ATTRIBUTE)
    tensor.data = value


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no value on this rank; also while its class is the plain one."""
    return _ATTRIBUTE in vars(tensor)


def absence_of(tensor: Any) -> Absence:
    """Why an absent tensor has no value."""
    absence = vars(tensor)[_ATTRIBUTE]
    assert isinstance(absence, Absence)
    return absence


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor where its value is, in elements."""
    return absence_of(tensor).strides if is_absent(tensor) else tensor.stride()


def restore_classes(tensors: Iterable[torch.Tensor]) -> None:
    """Let absent tensors have the class that they had before: for the time of a trace, which reads no values
    but asks for classes.

    Buffers without dimensions can be read until `refuse_again`: torch looks at their values when it makes a
    trace's fake tensors, and a trace that would use one of them ends in an error of its own (``.item()``,
    control flow).
    """
    for tensor in tensors:
        if isinstance(tensor, Absent):
            absence = absence_of(tensor)
            tensor.__class__ = absence.original  # type: ignore[assignment]
            if _is_looked_at(tensor, absence):
                tensor.data = torch.full((), _filler(tensor), dtype=tensor.dtype, device=tensor.device)


def refuse_again(tensors: Iterable[torch.Tensor]) -> None:
    """Undo `restore_classes` for those of ``tensors`` that are absent."""
    for tensor in tensors:
        if is_absent(tensor) and not isinstance(tensor, Absent):
            absence = absence_of(tensor)
            if _is_looked_at(tensor, absence):
                refuse_memory_access(tensor, absence.error("").problem)
            tensor.__class__ = _absent_class(type(tensor))


def _is_looked_at(tensor: torch.Tensor, absence: Absence) -> bool:
    return absence.kind == "buffer" and tensor.dim() == 0


def placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of another one's shape and dtype over a single NaN (0 for integers), with strides of zero."""
    return torch.full((), _filler(tensor), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _filler(tensor: torch.Tensor) -> float:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """What ``detach()`` and ``data`` give: shape and dtype can be asked for, no value."""
    with without_torch_function():
        twin = tensor.detach().as_subclass(torch.Tensor)
    setattr(twin, _ATTRIBUTE, replace(absence_of(tensor), original=torch.Tensor, is_value=True))
    refuse_again([twin])
    return twin


def _absent_like(tensor: torch.Tensor, absence: Absence) -> torch.Tensor:
    """Another absent tensor of this shape and dtype, on the device of ``tensor``, or on the CPU for one on meta."""
    with without_torch_function():
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        cell = placeholder(tensor, device)
        refuse_memory_access(cell, absence.error("").problem)
        if absence.kind == "parameter" and issubclass(absence.original, torch.nn.Parameter):
            twin: torch.Tensor = torch.nn.Parameter(cell, requires_grad=tensor.requires_grad)
            twin.__class__ = absence.original
        else:
            twin = cell.as_subclass(absence.original)
    setattr(twin, _ATTRIBUTE, absence)
    refuse_again([twin])
    return twin


def _computed_by_owners(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a computation gives on this rank whose operands are absent copies, and numbers: a result that is absent too.
    NotImplemented for anything else. All ranks compute it; those that have the operands have the result.
    """
    if "out" in kwargs:
        return NotImplemented
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_"):
        return _foreach_by_owners(func, args, kwargs) if name.endswith("_") and not kwargs else NotImplemented
    leaves, put_together = taken_apart((args, kwargs))
    absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
    values: list[Any] = [leaf for leaf in absent if absence_of(leaf).is_value]
    if not values or any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, Absent) and leaf.dim() for leaf in leaves
    ):
        return NotImplemented
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        is_copy = isinstance(args[0], Absent) and absence_of(args[0]).is_copy
        return args[0] if is_copy else NotImplemented
    with without_torch_function():
        metas = [
            torch.empty_strided(leaf.shape, strides_of(leaf), dtype=leaf.dtype, device="meta")  # type: ignore[attr-defined,arg-type]
            if isinstance(leaf, Absent)
            else leaf
            for leaf in leaves
        ]
        meta_args, meta_kwargs = put_together(metas)
        try:
            result = func(*meta_args, **meta_kwargs)
        except Exception:  # whatever reads a value
            return NotImplemented
    if not isinstance(result, torch.Tensor) or not result.is_meta:
        return NotImplemented
    # Of a model's own values, arithmetic with numbers: what averages are made of. All else is told where it is asked for.
    if result.shape != values[0].shape and not any(absence_of(value).is_copy for value in values):
        return NotImplemented
    return _absent_like(
        result,
        replace(
            absence_of(values[0]), original=torch.Tensor, strides=result.stride(), is_value=True, is_copy=True
        ),
    )


def _foreach_by_owners(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A change in place of a list of tensors, some of which are absent copies: of those that this rank has."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and isinstance(arg[0], torch.Tensor)]
    kept = []
    for position, targets in enumerate(zip(*lists, strict=True)):
        is_here = [not isinstance(tensor, Absent) for tensor in targets]
        if not any(is_here) and absence_of(targets[0]).is_copy:
            continue
        if not all(is_here):
            return NotImplemented
        kept.append(position)
    if kept:
        func(*([arg[place] for place in kept] if any(arg is one for one in lists) else arg for arg in args))
    return args[0]


def _note_gradient_read(tensor: torch.Tensor, reader: FrameType) -> None:
    """Say once that a sum over the gradients of all parameters is none on this rank, where the user's code reads them."""
    if absence_of(tensor).owners and tensor.requires_grad and is_of_user(reader.f_code.co_filename):
        say_once(logger, _GRADIENT_READ, reader.f_code.co_filename, reader.f_lineno)


def _wants_copy(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``Tensor.to`` has ``copy=True``, its last argument and the second flag."""
    flags = [value for value in args if isinstance(value, bool)]
    return bool(kwargs.get("copy")) or flags[1:] == [True]


def _first_absent(values: Any) -> torch.Tensor | None:
    if isinstance(values, Absent):
        return values  # type: ignore[return-value]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list, set)):
        return None
    return next((found for value in values if (found := _first_absent(value)) is not None), None)


@functools.cache
def _absent_class(original: type[torch.Tensor]) -> type[torch.Tensor]:
    meta: Any = type(original)
    return meta(f"Absent{original.__name__}", (Absent, original), {"__module__": __name__})


@functools.cache
def _metadata_functions() -> frozenset[Any]:
    getters = [
        getattr(torch.Tensor, name).__get__
        for name in (*_PROPERTIES, *_SETTABLE)
        if hasattr(torch.Tensor, name)
    ]
    setters = [getattr(torch.Tensor, name).__set__ for name in _SETTABLE]
    methods = [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    functions = [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    deleter = torch.Tensor.grad.__delete__  # type: ignore[union-attr]
    return frozenset([*getters, *setters, deleter, *methods, *functions])


@functools.cache
def _detaching_functions() -> frozenset[Any]:
    return frozenset([torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__])  # type: ignore[attr-defined]


@functools.cache
def _writing_functions() -> frozenset[Any]:
    return frozenset([torch.Tensor.copy_, torch.Tensor.data.__set__])  # type: ignore[attr-defined]


@functools.cache
def _converting_functions() -> frozenset[Any]:
    return frozenset(getattr(torch.Tensor, name) for name in _CONVERSIONS)
