"""Trace a module into what the batch passes take, without the backend's capture.

In: a module and keyword inputs whose listed names have the batch in dimension 0. Out: a `Traced` graph,
functional ATen ops over fake tensors with one symbolic batch size, and the real values of its placeholders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from rannc_backend.capture.written_out import trace_soft_labels


@dataclass(frozen=True, kw_only=True)
class Traced:
    graph_module: fx.GraphModule
    model: nn.Module  # called with the values of all placeholders, in order
    values: dict[str, Any]  # real value of each placeholder
    batch: tuple[str, ...]  # placeholders with rows
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    replicated: tuple[str, ...]
    num_user_outputs: int
    buffer_updates: tuple[str, ...]  # placeholder of the buffer per trailing output
    rows_symbol: sympy.Symbol
    fake_mode: FakeTensorMode

    @property
    def num_rows(self) -> int:
        return self.values[self.batch[0]].shape[0]


class _Flat(nn.Module):
    """Calls `model` with parameters, buffers and inputs given as one flat argument list."""

    def __init__(self, model: nn.Module, state_names: list[str], input_names: list[str]) -> None:
        super().__init__()
        self.model = [model]  # in a list: not a submodule, its parameters come as arguments
        self.state_names = state_names
        self.input_names = input_names

    def forward(self, *args: Any) -> tuple[Any, ...]:
        count = len(self.state_names)
        state = dict(zip(self.state_names, args[:count]))
        inputs = dict(zip(self.input_names, args[count:]))
        output = torch.func.functional_call(self.model[0], state, (), inputs, tie_weights=True)
        if dataclasses.is_dataclass(output):
            output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        return tuple(leaf for leaf in pytree.tree_leaves(output) if leaf is not None)


def trace(model: nn.Module, inputs: Mapping[str, Any], *, replicated: tuple[str, ...] = ()) -> Traced:
    """Trace `model(**inputs)`. Tensor inputs have the batch in dimension 0 unless named in `replicated`."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    state = {**parameters, **buffers}
    rows = next(v.shape[0] for k, v in inputs.items() if k not in replicated)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    source = ConstantSource("rows")
    hint = rows if rows > 1 else 6
    symbol = mode.shape_env.create_symbol(
        hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    size = mode.shape_env.create_symintnode(symbol, hint=hint, source=source)
    fakes = []
    with mode:
        for value in state.values():
            fakes.append(torch.empty(value.shape, dtype=value.dtype))
        for name, value in inputs.items():
            shape = value.shape if name in replicated else (size, *value.shape[1:])
            fakes.append(torch.empty(shape, dtype=value.dtype))
    flat = _Flat(model, list(state), list(inputs))
    trace_soft_labels()
    # as under torch.compile: Hugging Face then does not look into masks
    with mode, torch.no_grad(), mock.patch("torch.compiler._is_compiling_flag", True):
        graph_module, signature = aot_export_module(flat, fakes, trace_joint=False)
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    reals = [value.detach() for value in state.values()] + list(inputs.values())
    mutated = signature.user_inputs_to_mutate
    output = graph_module.graph.output_node()
    leaves = list(output.args[0])
    output.args = (tuple(leaves[len(mutated) :] + leaves[: len(mutated)]),)
    graph_module.recompile()
    names = [node.name for node in placeholders]
    num_parameters, num_state = len(parameters), len(state)
    by_input = dict(zip(inputs, names[num_state:]))
    return Traced(
        graph_module=graph_module,
        model=flat,
        values=dict(zip(names, reals)),
        batch=tuple(by_input[k] for k in inputs if k not in replicated),
        replicated=tuple(by_input[k] for k in inputs if k in replicated),
        parameters=tuple(names[:num_parameters]),
        buffers=tuple(names[num_parameters:num_state]),
        num_user_outputs=len(leaves) - len(mutated),
        buffer_updates=tuple(mutated.values()),
        rows_symbol=symbol,
        fake_mode=mode,
    )
