"""Tells the inputs of a Dynamo graph apart: parameters, buffers, batch inputs, replicated inputs.

In: the placeholders of Dynamo's graph with the real values, and the `DynamoCall`. Out: the root module and
one `InputRole` per placeholder. Terms: a *user input* is a tensor that came in as an argument of the call; it
is a *batch* input when its dimension 0 is the batch size; any other tensor that is no parameter or buffer is
*replicated*.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rannc_backend.capture.dynamo import (
    DynamoCall,
    is_argument,
    serve_only,
    source_chain,
    source_name,
    source_of,
    source_value,
)
from rannc_backend.errors import ModelDevicesError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One placeholder of a captured graph and where its value comes from."""

    name: str  # of the placeholder; the same on all ranks
    kind: str  # "parameter" | "buffer" | "batch" | "replicated" | "length" (see ir/length.py)
    fqn: str | None  # primary dotted name in the root module (parameter, buffer)
    aliases: tuple[str, ...]  # all dotted names, fqn included (tied weights); () for user inputs
    position: (
        int  # index into the flat argument tuple that Dynamo passes to the compiled callable; -1: a length
    )
    requires_grad: bool  # of the real tensor at capture


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """A tensor placeholder of the Dynamo graph before it is known which user inputs have a batch
    dimension.
    """

    node: fx.Node | None  # of Dynamo's graph, where that is what is captured
    position: int
    tensor: torch.Tensor  # the real one
    kind: (
        str  # "parameter" | "buffer" | "user" | "constant" (a tensor that is neither argument nor registered)
    )
    aliases: tuple[str, ...]
    source: str  # Dynamo's text

    @property
    def example(self) -> fx.Node:
        """The node, of which Dynamo has noted the traced value."""
        assert self.node is not None, "not from a graph of Dynamo"
        return self.node

    @property
    def label(self) -> str:
        """How the user calls it: `input_ids` for `L['kwargs']['input_ids']`."""
        return self.aliases[0] if self.aliases else _argument_label(self.source)


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
    names: dict[int, tuple[str, list[str]]] = {}
    for kind, named in (
        ("parameter", root.named_parameters(remove_duplicate=False)),
        ("buffer", root.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            names.setdefault(id(tensor), (kind, []))[1].append(name)
    found = tuple(_classify(position, node, value, names, call) for position, node, value in tensors)
    check_devices(found)
    return root, found


def placeholder_name(tensor_input: TensorInput) -> str:
    """A Python identifier made from the kind and the user's name of an input."""
    prefix = {"parameter": "p", "buffer": "b", "user": "x", "constant": "c"}[tensor_input.kind]
    return f"{prefix}_{re.sub(r'[^0-9a-zA-Z]+', '_', tensor_input.label).strip('_')}"


def _classify(
    position: int,
    node: fx.Node,
    value: torch.Tensor,
    names: dict[int, tuple[str, list[str]]],
    call: DynamoCall,
) -> TensorInput:
    source = source_of(node)
    text = source_name(source)
    if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        raise UnsupportedModelError(
            f"{text} is a {type(value).__name__} with layout {value.layout}", cure="pass plain dense tensors."
        )
    kind, aliases = names.get(id(value), ("user", []))
    if kind == "user":
        if isinstance(value, nn.Parameter):
            raise UnsupportedModelError(
                f"the parameter {text} does not belong to the model",
                cure="register it in the nn.Module that is compiled (self.name = nn.Parameter(...)).",
            )
        owned = any(
            isinstance(source_value(part, call.scope), nn.Module) for part in source_chain(source)[:-1]
        )
        if owned or not is_argument(source, call.code):
            kind = "constant"
    return TensorInput(
        position=position, node=node, tensor=value, kind=kind, aliases=tuple(aliases), source=text
    )


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
        if item.aliases and not (item.tensor.dim() == 0 and item.tensor.device.type == "cpu"):
            by_device[str(item.tensor.device)].append(item.aliases[0])
    if len(by_device) > 1:
        raise ModelDevicesError({device: tuple(names) for device, names in by_device.items()})


def _argument_label(source: str) -> str:
    """`input_ids` for `L['kwargs']['input_ids']`, `args_0` for `L['args'][0]`, `batch_x` for
    `L['batch'].x`.
    """
    text = re.sub(r"^[LG]\[['\"](.*?)['\"]\]", r"\1", source)
    text = re.sub(r"^kwargs\[['\"](.*?)['\"]\]", r"\1", text)
    return re.sub(r"[^0-9a-zA-Z_]+", "_", text).strip("_")


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, each once, under their primary names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
