"""Tells the inputs of a Dynamo graph apart: parameters, buffers, batch inputs, replicated inputs.

In: the placeholders of Dynamo's graph with the real values, and the `DynamoCall`. Out: the root module and
one `InputRole` per placeholder. Terms: a *user input* is a tensor that came in as an argument of the call; it
is a *batch* input when its dimension 0 is the batch size; any other tensor that is no parameter or buffer is
*replicated*.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rannc_backend.capture.dynamo import (
    DynamoCall,
    is_argument,
    is_number,
    serve_only,
    source_chain,
    source_name,
    source_of,
    source_value,
)
from rannc_backend.errors import ModelDevicesError, UnsupportedModelError, user_location
from rannc_backend.ir.graph_input import (
    BatchInput,
    BufferInput,
    GraphInput,
    ParameterInput,
    ReplicatedInput,
    StateInput,
)
from rannc_backend.ir.length import length_name
from rannc_backend.passes.batch.differentiability import values_reached_by_grad
from rannc_backend.passes.graph_queries import output_values

_SPARSE_CURE = "set the option sparse_gradients='dense', with which p.grad of its table is dense, or make it with sparse=False."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """A tensor placeholder of the Dynamo graph before it is known which user inputs have a batch
    dimension; a type for each kind of owner. `prefix`: of the placeholder's name.
    """

    prefix: ClassVar[str]
    node: fx.Node | None  # of Dynamo's graph, where that is what is captured
    position: int
    tensor: torch.Tensor  # the real one
    source: str  # Dynamo's text
    is_number: bool = False  # in Python, a float that changes between calls

    @property
    def example(self) -> fx.Node:
        """The node, of which Dynamo has noted the traced value."""
        assert self.node is not None, "not from a graph of Dynamo"
        return self.node

    @property
    def label(self) -> str:
        """How the user calls it: `input_ids` for `L['kwargs']['input_ids']`."""
        return _argument_label(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor(TensorInput):
    """A tensor that the model has registered, under these dotted names."""

    aliases: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its primary name."""
        return self.aliases[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor(StateTensor):
    """A parameter."""

    prefix: ClassVar[str] = "p"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTensor(StateTensor):
    """A buffer."""

    prefix: ClassVar[str] = "b"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTensor(TensorInput):
    """An argument of the call."""

    prefix: ClassVar[str] = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTensor(TensorInput):
    """A tensor that is neither an argument nor registered."""

    prefix: ClassVar[str] = "c"


def find_tensor_inputs(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], call: DynamoCall
) -> tuple[nn.Module, tuple[TensorInput, ...]]:
    """Classify all tensor placeholders; gives the root module, whose dotted names identify parameters and
    buffers.

    Raises UnsupportedModelError for parameters outside of one root module, ModelDevicesError.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(example_inputs), "Dynamo passes one example per placeholder"
    tensors = [
        (position, node, value)
        for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if isinstance(value, torch.Tensor)
    ]
    scope = call.scope
    root = _find_root(tensors, scope)
    _bind_to_root(root, tensors, scope)
    names: dict[int, tuple[type[StateTensor], list[str]]] = {}
    for state, named in (
        (ParameterTensor, root.named_parameters(remove_duplicate=False)),
        (BufferTensor, root.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            names.setdefault(id(tensor), (state, []))[1].append(name)
    found = tuple(_classify(position, node, value, names, call) for position, node, value in tensors)
    check_devices(found)
    return root, found


def number_reads(inputs: Iterable[TensorInput], values: Mapping[int, Any]) -> dict[fx.Node, Any]:
    """By the nodes of Dynamo's graph in which Python's floats leave their tensors, these values, given by position."""
    return {
        read: values[item.position]
        for item in inputs
        if item.is_number
        for read in item.example.users
        if read.target == "item"
    }


def placeholder_name(tensor_input: TensorInput) -> str:
    """A Python identifier made from the kind and the user's name of an input."""
    return f"{tensor_input.prefix}_{re.sub(r'[^0-9a-zA-Z]+', '_', tensor_input.label).strip('_')}"


def _classify(
    position: int,
    node: fx.Node,
    value: torch.Tensor,
    names: Mapping[int, tuple[type[StateTensor], list[str]]],
    call: DynamoCall,
) -> TensorInput:
    source = source_of(node)
    text = source_name(source)
    if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        raise UnsupportedModelError(
            f"{text} is a {type(value).__name__} with layout {value.layout}", cure="pass plain dense tensors."
        )
    common: dict[str, Any] = {
        "position": position,
        "node": node,
        "tensor": value,
        "source": text,
        "is_number": is_number(node),
    }
    if id(value) in names:
        state, aliases = names[id(value)]
        return state(aliases=tuple(aliases), **common)
    if isinstance(value, nn.Parameter):
        raise UnsupportedModelError(
            f"the parameter {text} does not belong to the model",
            cure="register it in the nn.Module that is compiled (self.name = nn.Parameter(...)).",
        )
    owned = any(isinstance(source_value(part, call.scope), nn.Module) for part in source_chain(source)[:-1])
    return ConstantTensor(**common) if owned or not is_argument(source, call.code) else UserTensor(**common)


def _find_root(
    tensors: Iterable[tuple[int, fx.Node, torch.Tensor]], scope: dict[str, dict[str, Any]]
) -> nn.Module:
    """The outermost module on the way to the parameters; without parameters, to any tensor, or the caller's
    `self`.
    """
    with_parameters: dict[int, nn.Module] = {}
    others: dict[int, nn.Module] = {}
    for _, node, value in tensors:
        for part in source_chain(source_of(node))[:-1]:
            owner = source_value(part, scope)
            if isinstance(owner, nn.Module):
                owner = _unwrapped(owner)
                (with_parameters if isinstance(value, nn.Parameter) else others)[id(owner)] = owner
                break
    local = [_unwrapped(value) for value in scope["L"].values() if isinstance(value, nn.Module)]
    bound = [getattr(value, "__self__", None) for value in scope["L"].values() if callable(value)]
    local += [_unwrapped(value) for value in bound if isinstance(value, nn.Module)]
    roots = list(with_parameters.values()) or list(others.values()) or local[:1] or [nn.Module()]
    for root in [*roots, *local]:
        inside = {id(module) for module in root.modules()}
        if all(id(other) in inside for other in roots):
            return root
    raise UnsupportedModelError(
        f"the compiled function uses the parameters of {len(roots)} separate modules "
        f"({', '.join(sorted(type(root).__name__ for root in roots))})",
        cure="put them into one nn.Module and compile that, or a function of that one.",
    )


def _bind_to_root(
    root: nn.Module, tensors: Iterable[tuple[int, fx.Node, torch.Tensor]], scope: dict[str, dict[str, Any]]
) -> None:
    """Another model of the same class gets a graph of its own, with its own parameters and plan."""
    for _, node, _ in tensors:
        for part in source_chain(source_of(node))[:-1]:
            owner = source_value(part, scope)
            if isinstance(owner, nn.Module) and _unwrapped(owner) is root:
                serve_only(part)
                return


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def check_devices(inputs: Iterable[TensorInput]) -> None:
    """Raises ModelDevicesError where the model's tensors lie on several devices."""
    by_device: dict[str, list[str]] = defaultdict(list)
    for item in inputs:
        # A counter that was left on the CPU is no second device: 0-dimensional CPU tensors go with any
        # device.
        if isinstance(item, StateTensor) and not (
            item.tensor.dim() == 0 and item.tensor.device.type == "cpu"
        ):
            by_device[str(item.tensor.device)].append(item.label)
    if len(by_device) > 1:
        raise ModelDevicesError({device: tuple(names) for device, names in by_device.items()})


def _argument_label(source: str) -> str:
    """`input_ids` for `L['kwargs']['input_ids']`, `args_0` for `L['args'][0]`, `batch_x` for
    `L['batch'].x`.
    """
    text = re.sub(r"^[LG]\[['\"](.*?)['\"]\]", r"\1", source)
    text = re.sub(r"^kwargs\[['\"](.*?)['\"]\]", r"\1", text)
    return re.sub(r"[^0-9a-zA-Z_]+", "_", text).strip("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTable:
    """A table that is read with sparse gradients: placeholder ``place`` of a trace, None where it is none, which is
    input ``name`` of the graph and parameter ``fqn`` of the model. ``location``: the user's line. ``is_rows``: all that
    reads it looks rows up.
    """

    place: int | None
    location: str
    is_rows: bool
    name: str = ""
    fqn: str = ""

    def check(self) -> None:
        """Raise UnsupportedModelError where the gradient is not that of rows of a parameter."""
        if not self.is_rows or not self.fqn:
            raise UnsupportedModelError(
                "a table with sparse gradients is no parameter, or is read by bags with offsets or of the largest of "
                "their rows (nn.EmbeddingBag of ids in one dimension, mode='max')",
                location=self.location,
                cure=_SPARSE_CURE,
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise UnsupportedModelError: sparse gradients and ``reason`` do not go together."""
        raise UnsupportedModelError(
            f"an embedding makes sparse gradients, and {reason}", location=self.location, cure=_SPARSE_CURE
        )


def made_dense(graph: fx.Graph) -> tuple[SparseTable, ...]:
    """The tables whose gradients are sparse: those that nothing but operators reads that were asked for sparse gradients.
    Where something else reads a table too (a tied output layer, an embedding without sparse=True), its gradient is dense
    in one process. The argument is False then: graphs are the same whatever becomes of the gradients.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        place = names.index("sparse") if "sparse" in names else len(node.args)
        if place < len(node.args) and node.args[place] is True:
            node.update_arg(place, False)
            found.setdefault(node.args[0], []).append(node)
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    return tuple(
        SparseTable(
            place=places.get(table),
            location=user_location(readers[0].meta.get("stack_trace")),
            is_rows=all(reader.target is torch.ops.aten.embedding.default for reader in readers),
        )
        for table, readers in found.items()
        if set(table.users) == set(readers)
    )


def trained_tables(tables: Iterable[SparseTable], inputs: Sequence[GraphInput]) -> tuple[SparseTable, ...]:
    """Those that have gradients, with their names; ``inputs``: by placeholder of the trace."""
    found = []
    for table in tables:
        item = None if table.place is None else inputs[table.place]
        if isinstance(item, StateInput) and item.requires_grad:
            found.append(replace(table, name=item.name, fqn=item.fqn))
        elif item is None or item.requires_grad:
            found.append(table if item is None else replace(table, name=item.name))
    return tuple(found)


def plain_numbers(root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """The Python numbers that a forward may read, each of which a graph is compiled for: arguments, by their names where
    the call is one of the root's forward, and attributes of modules.
    """
    try:
        given: Mapping[str, Any] = inspect.signature(root.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        given = {**{f"argument {place}": value for place, value in enumerate(args)}, **kwargs}
    attributes = {
        f"{path}.{name}" if path else name: value
        for path, module in root.named_modules()
        for name, value in vars(module).items()
    }
    numbers = {**attributes, **given}
    return {name: value for name, value in numbers.items() if type(value) in (int, float)}


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, each once, under their primary names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def named_inputs(
    graph: fx.Graph, tensors: Sequence[TensorInput], batch: frozenset[int], num_lengths: int
) -> tuple[GraphInput, ...]:
    """Rename the placeholders after what they hold, and describe those of tensors."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders[:num_lengths]):
        node._rename(length_name(index))
        node.target = node.name
    placeholders = placeholders[num_lengths:]
    inputs: list[GraphInput] = []
    for node, item in zip(placeholders, tensors, strict=True):
        node._rename(placeholder_name(item))
        node.target = node.name
        common: dict[str, Any] = {"position": item.position, "requires_grad": item.tensor.requires_grad}
        if isinstance(item, StateTensor):
            state = ParameterInput if isinstance(item, ParameterTensor) else BufferInput
            inputs.append(state(name=node.name, fqn=item.aliases[0], aliases=item.aliases, **common))
        else:
            of_user = BatchInput if item.position in batch else ReplicatedInput
            inputs.append(of_user(name=node.name, **common))
    return tuple(inputs)


def with_buffers(
    graph: fx.Graph, inputs: Sequence[GraphInput], mutated: Collection[int], num_user_outputs: int
) -> tuple[GraphInput, ...]:
    """Parameters that the forward changes and that get no gradient (momentum encoders, codebooks) are buffers: no
    optimizer changes them.
    """
    outputs = {node.name for node in output_values(graph)[:num_user_outputs] if isinstance(node, fx.Node)}
    found = list(inputs)
    for index in mutated:
        item = inputs[index]
        if isinstance(item, ParameterInput) and not (
            item.requires_grad and outputs & values_reached_by_grad(graph, {item.name})
        ):
            found[index] = BufferInput(
                name=item.name, position=item.position, fqn=item.fqn, aliases=item.aliases
            )
    return tuple(found)


def buffer_updates(
    graph: fx.Graph, inputs: Sequence[GraphInput], mutated: Collection[int], num_user_outputs: int
) -> tuple[str, ...]:
    """The names of the buffers and trained parameters that the forward changes. Raises UnsupportedModelError if it changes
    anything else.
    """
    names = []
    for index, value in zip(mutated, output_values(graph)[num_user_outputs:], strict=True):
        item = inputs[index]
        if not isinstance(item, BufferInput | ParameterInput):
            name = item.fqn if isinstance(item, StateInput) else item.name
            raise UnsupportedModelError(
                f"the model changes {name} in place, which is no buffer",
                location=user_location(value.meta.get("stack_trace")),
                cure="work on a copy (x = x.clone()), or register a tensor that must change as a buffer.",
            )
        names.append(item.fqn)
    return tuple(names)
