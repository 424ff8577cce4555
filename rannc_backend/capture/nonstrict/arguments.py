"""What a capture without Dynamo is given: the arguments of one call, apart, and what it may ask of the job.

In: a module, and the arguments of its call. Out: a `Call`, whose flat tensors are parameters, buffers, plain
tensors that modules hold as attributes, and the user's tensors, in this order. What is no tensor is part of
what a capture holds for. `Ranks` is the job; by default one rank, which has everything.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rannc_backend.capture.aten_trace import StridesOf
from rannc_backend.capture.inputs import (
    BufferTensor,
    ConstantTensor,
    ParameterTensor,
    StateTensor,
    TensorInput,
    UserTensor,
)
from rannc_backend.errors import UnsupportedModelError, UserInputError
from rannc_backend.ir.length import SMALLEST, LengthDims, length_symbol

Changing = Set[tuple[int, int]]
"""Sizes of a call that other calls have had otherwise: tensor and dimension."""

_MAX_TRIED = 4096


@dataclass(frozen=True, slots=True)
class Place(ABC):
    """Where a module keeps a tensor: an entry of one of its dictionaries, under all its dotted names."""

    dictionary: ClassVar[str]  # of the module
    holder: dict[str, Any]
    key: str
    names: tuple[str, ...]

    def tensor(self) -> torch.Tensor:
        """The one that is there now."""
        value = self.holder[self.key]
        assert isinstance(value, torch.Tensor), f"{self.names[0]} is no tensor any more"
        return value

    @abstractmethod
    def as_input(self, position: int) -> TensorInput:
        """The tensor that is there now as an input of a graph."""


@dataclass(frozen=True, slots=True)
class StatePlace(Place):
    """Of a tensor that is registered."""

    made: ClassVar[type[StateTensor]]

    def as_input(self, position: int) -> TensorInput:
        """See `Place`; raises UnsupportedModelError for a tensor that is not plain."""
        name = self.names[0]
        _refuse_special(
            self.tensor(),
            f"{self.dictionary[1:-1]} {name}",
            "register a plain dense tensor: of a sparse matrix tensor.to_dense(), or its indices and values as two "
            "buffers, and multiply with index_add in the forward.",
        )
        return self.made(node=None, position=position, tensor=self.tensor(), aliases=self.names, source=name)


@dataclass(frozen=True, slots=True)
class ParameterPlace(StatePlace):
    """Of a parameter."""

    dictionary: ClassVar[str] = "_parameters"
    made: ClassVar[type[StateTensor]] = ParameterTensor


@dataclass(frozen=True, slots=True)
class BufferPlace(StatePlace):
    """Of a buffer."""

    dictionary: ClassVar[str] = "_buffers"
    made: ClassVar[type[StateTensor]] = BufferTensor


@dataclass(frozen=True, slots=True)
class AttributePlace(Place):
    """Of a tensor that is a plain attribute."""

    dictionary: ClassVar[str] = "__dict__"

    def as_input(self, position: int) -> TensorInput:
        """See `Place`."""
        return ConstantTensor(node=None, position=position, tensor=self.tensor(), source=self.names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDims:
    """The dimension of samples of each input: that of `by_input`, else `otherwise`; of inputs that have fewer
    dimensions, their last one. An input that is a container has the name of all that is in it.
    """

    otherwise: int = 0
    by_input: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_option(cls, dims: Mapping[str, int]) -> BatchDims:
        """Of `Config.batch_dims`."""
        by_input = {name: dim for name, dim in dims.items() if name}
        return cls(otherwise=dims.get("", 0), by_input=by_input)

    def of(self, label: str, tensor: torch.Tensor) -> int:
        """Of one input. Raises UserInputError where it is named and has not so many dimensions."""
        named = [name for name in self.by_input if label == name or label.startswith(f"{name}_")]
        if not named:
            return min(self.otherwise, max(tensor.dim() - 1, 0))
        dim = self.by_input[max(named, key=len)]
        if dim >= max(tensor.dim(), 1):
            raise UserInputError(
                f"option batch_dim says {dim} of the input {label} {list(tensor.shape)}, which has {tensor.dim()} "
                "dimensions",
                cure="give the number of the dimension that counts the samples; the first one is 0.",
            )
        return dim

    def check_names(self, labels: Sequence[str], model: str) -> None:
        """Raises UserInputError where an input is named that the call of a model does not have."""
        for name in self.by_input:
            if not any(label == name or label.startswith(f"{name}_") for label in labels):
                raise UserInputError(
                    f"option batch_dim names {name}, and the inputs of {model} are {', '.join(labels)}",
                    cure="name inputs as they are passed.",
                )


FIRST = BatchDims()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """See the module docstring. `leaves` are the flat arguments, with the index of its tensor in `tensors`
    for each tensor. The dimension of samples of tensor i of the user, `given[i]`, is `dims[i]`, and the first one of
    `tensors[i]`.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    given: tuple[torch.Tensor, ...]
    tensors: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    index_of_leaf: Mapping[int, int]
    labels: tuple[str, ...]  # of the tensors: how the user calls them

    def moved(self, dims: Sequence[int]) -> Call:
        """The same call with other dimensions of samples; itself where its tensors do not have these."""
        if tuple(dims) == self.dims or len(dims) != len(self.given):
            return self
        if any(dim and dim >= tensor.dim() for dim, tensor in zip(dims, self.given, strict=True)):
            return self
        return replace(self, dims=tuple(dims), tensors=_with_samples_first(self.given, dims))

    def dim_of_tensor(self, index: int, dim: int) -> int:
        """Where a dimension of a tensor of the user is in `tensors`."""
        return 0 if dim == self.dims[index] else dim + (dim < self.dims[index])

    def dim_of_given(self, index: int, dim: int) -> int:
        """Where a dimension of a tensor of `tensors` is in that of the user."""
        if dim == 0:
            return self.dims[index]
        return dim - (dim <= self.dims[index])

    def as_given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors in the places of `tensors` as the user would give them."""
        # Contiguous, as users' tensors mostly are: code may take a view of them.
        return [
            tensor.movedim(0, dim).contiguous() if dim else tensor
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]

    def rebuilt(self, given: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in the places of those of the user."""
        leaves = [
            given[self.index_of_leaf[position]] if position in self.index_of_leaf else leaf
            for position, leaf in enumerate(self.leaves)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def constants(self) -> dict[int, Any]:
        """The leaves that are no tensors, by position."""
        return {
            position: leaf for position, leaf in enumerate(self.leaves) if position not in self.index_of_leaf
        }


def _with_samples_first(tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> tuple[torch.Tensor, ...]:
    pairs = zip(tensors, dims, strict=True)
    return tuple(tensor.movedim(dim, 0) if dim else tensor for tensor, dim in pairs)


def call_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims = FIRST
) -> Call:
    """Flatten the arguments. A tensor that is passed twice is one input.

    Raises:
        UserInputError: for inputs that do not have the dimensions of `batch_dims`.
        UnsupportedModelError: for tensors that are not plain, and objects that hold tensors and are no
            container that torch knows.
    """
    pairs, structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    names = _positional_names(module)
    tensors: dict[int, torch.Tensor] = {}
    order: dict[int, int] = {}
    labels: list[str] = []
    index_of_leaf: dict[int, int] = {}
    for position, (path, leaf) in enumerate(pairs):
        if not isinstance(leaf, torch.Tensor):
            _refuse_hidden_tensors(leaf, _label(path, names))
            continue
        if id(leaf) not in tensors:
            _refuse_special(leaf, _label(path, names))
            tensors[id(leaf)] = leaf
            order[id(leaf)] = len(labels)
            labels.append(_label(path, names))
        index_of_leaf[position] = order[id(leaf)]
    batch_dims.check_names(labels, type(module).__name__)
    given = tuple(tensors.values())
    dims = tuple(batch_dims.of(label, tensor) for label, tensor in zip(labels, given, strict=True))
    return Call(
        leaves=tuple(leaf for _, leaf in pairs),
        structure=structure,
        given=given,
        tensors=_with_samples_first(given, dims),
        dims=dims,
        index_of_leaf=index_of_leaf,
        labels=tuple(labels),
    )


def places_of(module: nn.Module, unread: Set[str] = frozenset()) -> tuple[Place, ...]:
    """Every tensor that the module and those in it hold under a name: once, however many names it has. Not plain
    attributes that are `unread` by their names.
    """
    found: dict[int, tuple[type[Place], dict[str, Any], str, list[str]]] = {}
    # A parameter that is a plain attribute too is a parameter.
    for kind in (ParameterPlace, BufferPlace, AttributePlace):
        for path, part in module.named_modules(remove_duplicate=False):
            holder = getattr(part, kind.dictionary)
            for key, value in holder.items():
                if isinstance(value, torch.Tensor) and not (kind is AttributePlace and key in unread):
                    name = f"{path}.{key}" if path else key
                    entry = found.setdefault(id(value), (kind, holder, key, []))
                    if name not in entry[3] and kind == entry[0]:
                        entry[3].append(name)
    return tuple(kind(holder, key, tuple(names)) for kind, holder, key, names in found.values())


def inputs_of(places: Sequence[Place], call: Call) -> tuple[TensorInput, ...]:
    """All tensors of a call as inputs of a graph: those that the module holds, then the user's."""
    own = [place.as_input(position) for position, place in enumerate(places)]
    known = {id(item.tensor) for item in own}
    for tensor, label in zip(call.tensors, call.labels, strict=True):
        if id(tensor) in known:
            raise UnsupportedModelError(
                f"{label} is a tensor of the model, and an argument too",
                cure="pass a copy of it, or leave the argument out.",
            )
        if isinstance(tensor, nn.Parameter):
            raise UnsupportedModelError(
                f"the parameter {label} does not belong to the model",
                cure="register it in the nn.Module that is compiled (self.name = nn.Parameter(...)).",
            )
    users = [
        UserTensor(node=None, position=len(own) + index, tensor=tensor, source=label)
        for index, (tensor, label) in enumerate(zip(call.tensors, call.labels, strict=True))
    ]
    return (*own, *users)


def length_dims(call: Call, num_places: int, changing: Changing) -> LengthDims:
    """One length for each size of the changing dimensions of a call."""
    sizes = {(index, dim): int(call.tensors[index].shape[dim]) for index, dim in sorted(changing)}
    hints = tuple(dict.fromkeys(size for size in sizes.values() if size >= SMALLEST))
    return LengthDims(
        hints=hints,
        sizes={
            (num_places + index, dim): length_symbol(hints.index(size))
            for (index, dim), size in sizes.items()
            if size in hints
        },
    )


def _positional_names(module: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _label(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """`input_ids`, `batch_x`, `args_3`: the argument's name, and the way into it."""
    first, *inner = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    if first == 0:
        index, *inner = inner
        inner = [names[index] if index < len(names) else f"args_{index}", *inner]
    return "_".join(map(str, inner))


def _refuse_special(tensor: torch.Tensor, label: str, cure: str = "pass plain dense tensors.") -> None:
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        raise UnsupportedModelError(
            f"{label} is a {type(tensor).__name__} with layout {tensor.layout}",
            cure=cure,
        )


def _refuse_hidden_tensors(value: object, label: str) -> None:
    """An object's tensors would be constants of the graph: those of the first call, in all calls."""
    if isinstance(value, nn.Module) or callable(value):
        return
    if any(isinstance(inner, torch.Tensor) for inner in _inside(value)):
        raise UnsupportedModelError(
            f"{label} is a {type(value).__name__} that holds tensors",
            cure="pass its tensors themselves, or a dict of them (model(**batch)), or register the class with "
            "torch.utils._pytree.register_pytree_node.",
        )


def _inside(value: object) -> Iterator[object]:
    members = getattr(value, "__dict__", None)
    if isinstance(members, dict):
        for member in members.values():
            yield from pytree.tree_leaves(member)


Exchange = Callable[[Any], list[Any]]
"""Every rank's payload of plain numbers and lists, in rank order; of one rank, or where each has the whole
batch, one payload.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Collective but for the first and the last two; every rank asks the same.

    Members:
        strides_of: strides by which to trace a parameter.
        global_rows: the batch size of all ranks, from this one's.
        exchange: see `Exchange`.
        is_absent: whether a tensor of the module has no values on this rank.
        device: trace as if the model and its inputs were there; None: where they are.
    """

    strides_of: StridesOf = torch.Tensor.stride
    global_rows: Callable[[int], int] = int
    exchange: Exchange = lambda payload: [payload]
    is_absent: Callable[[torch.Tensor], bool] = lambda tensor: False
    device: torch.device | None = None


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The batch size of a run: its symbol, its number on this rank, and that of all ranks, whose answer is collective."""

    symbol: sympy.Symbol
    local: int
    of_all: Callable[[], int]

    def tries(self) -> list[int]:
        """Small ones, and what the batch of all ranks might be."""
        likely = (self.local * factor for factor in (1, 2, 3, 4, 6, 8, 16, 32, 64))
        return [*range(1, 13), *(size for size in likely if 12 < size <= _MAX_TRIED)]
