"""Finds out which user inputs have the batch size as dimension 0, from the symbols of Dynamo's trace.

In: the tensor inputs, with dimension 0 of those picked by `batch_candidates` symbolic in Dynamo's trace. Out:
a `BatchInputs`.
Terms: Dynamo gives each marked dimension a symbol of its own; symbols that the model makes equal are unified,
a symbol that the model makes equal to a number is *specialised* to it.

The rule: a user input is a batch input when its dimension 0 was not specialised. All batch inputs must have
the same size there. An input that no operator ties to the others counts by its size alone. After the trace
all batch inputs share one symbol: what the model asked about several of them (`mask.view(ids.shape[0],
-1).shape[1]`) is judged, and guarded, with equal sizes.

A batch of 1 is traced as if it were larger (operators and models treat 1 apart), and a model may test whether
its batch size is 0 or 1: the answer is that for larger ones. Other tests of the batch size are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from rannc_backend.capture.dynamo import (
    DynamoCall,
    SizeCondition,
    forget_size_conditions,
    is_storage_offset,
    make_equal,
    size_conditions,
    source_of,
)
from rannc_backend.capture.inputs import TensorInput
from rannc_backend.errors import DataDependentControlFlowError, NoBatchDimensionError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """Positions (in Dynamo's flat arguments) of batch inputs, and the value of each size that is an argument
    itself.
    """

    positions: frozenset[int]
    sizes: dict[int, int | None]  # position of a SymInt argument -> its number; None: it is the batch size


def batch_candidates(inputs: Sequence[TensorInput], *, single: bool) -> tuple[torch.Tensor, ...]:
    """The user's tensors whose dimension 0 may be the batch size; `single`: if that is 1."""
    return tuple(
        item.tensor for item in inputs if item.kind == "user" and may_be_batch(item.tensor, single=single)
    )


def may_be_batch(tensor: torch.Tensor, *, single: bool) -> bool:
    """Whether dimension 0 of this tensor may be the batch size; `single`: if that is 1."""
    return tensor.dim() > 0 and (tensor.shape[0] == 1) == single


def has_symbolic_batch(inputs: Sequence[TensorInput], call: DynamoCall) -> bool:
    """Whether dimension 0 of any user input is still symbolic after Dynamo's trace."""
    shapes = [item.example.meta["example_value"].shape for item in inputs if item.kind == "user"]
    return any(
        not call.output_graph.shape_env.replace(shape[0].node.expr).is_number
        for shape in shapes
        if shape and isinstance(shape[0], torch.SymInt)
    )


def find_batch_inputs(
    graph_module: fx.GraphModule, inputs: Sequence[TensorInput], call: DynamoCall
) -> BatchInputs:
    """Apply the rule above.

    Raises NoBatchDimensionError, DataDependentControlFlowError when the model branches on the batch size and
    UnsupportedModelError when sizes differ or other dimensions are symbolic.
    """
    shape_env = call.output_graph.shape_env
    expressions: dict[int, sympy.Expr] = {}
    for item in inputs:
        shape = item.example.meta["example_value"].shape
        for dim, size in enumerate(shape):
            expression = (
                shape_env.replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)
            )
            if expression.is_number:
                continue
            if dim > 0 or item.kind != "user":
                raise UnsupportedModelError(
                    f"dimension {dim} of {item.label} {list(item.tensor.shape)} was marked as dynamic",
                    cure="only the batch size (dimension 0 of the inputs) can be dynamic: drop mark_dynamic "
                    "for it.",
                )
            if not expression.is_Symbol:
                raise UnsupportedModelError(
                    f"dimension 0 of {item.label} {list(item.tensor.shape)} is not the batch size, but "
                    f"{expression} for the batch size of another input",
                    cure="pass it with the batch size as dimension 0 and reshape it in the model.",
                )
            expressions[item.position] = expression
    if not expressions:
        raise _no_batch(inputs, call)
    positions = frozenset(expressions)
    check_one_size(inputs, positions)
    # Only now: during the trace a mask of [T, T] with T = batch size must not share the symbol.
    symbols = {make_equal(call, expressions.values())}
    for condition in size_conditions(call):
        if condition.is_branch and not condition.is_general and condition.symbols & symbols:
            raise _branch_error(condition)
    sizes = _size_arguments(graph_module, call, symbols)
    # The graph is traced again with a batch size of its own, so that it holds for all of them.
    forget_size_conditions(call, symbols)
    return BatchInputs(positions=positions, sizes=sizes)


def check_one_size(inputs: Sequence[TensorInput], batch: frozenset[int]) -> None:
    """Raises UnsupportedModelError where the inputs at these positions have several sizes in dimension 0."""
    sizes = {item.label: item.tensor.shape[0] for item in inputs if item.position in batch}
    if len(set(sizes.values())) > 1:
        raise UnsupportedModelError(
            "dimension 0 of the inputs has several sizes, any of which could be the batch size: "
            + ", ".join(f"{label}: {size}" for label, size in sizes.items()),
            cure="pass inputs without a batch dimension as buffers of the model, or with a leading dimension "
            "of 1.",
        )


def _no_batch(inputs: Sequence[TensorInput], call: DynamoCall) -> Exception:
    shapes = {item.label: tuple(item.tensor.shape) for item in inputs if item.kind == "user"}
    conditions = [condition for condition in size_conditions(call) if condition.text.startswith("Eq(")]
    if not conditions:
        return NoBatchDimensionError(shapes)
    first = conditions[0]
    if first.is_branch:
        return _branch_error(first)
    return UnsupportedModelError(
        "the model works for one batch size only: "
        f"{', '.join(f'{label} {list(shape)}' for label, shape in shapes.items())}",
        location=first.location,
        cure="take the batch size from the inputs (x.size(0)) wherever the model uses it as a number.",
    )


def _branch_error(condition: SizeCondition) -> Exception:
    return DataDependentControlFlowError(
        f"the model tests its batch size ({condition.text}), which differs between ranks and micro-batches",
        location=condition.location,
    )


def _size_arguments(
    graph_module: fx.GraphModule, call: DynamoCall, batch: set[sympy.Expr]
) -> dict[int, int | None]:
    sizes: dict[int, int | None] = {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node.meta["example_value"]
        if isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, torch.SymInt):
            raise UnsupportedModelError(
                f"the argument {node.name} of type {type(value).__name__} changes from call to call",
                cure="pass it as a tensor, or keep it constant.",
            )
        expression = call.output_graph.shape_env.replace(value.node.expr)
        if expression.is_number:
            sizes[position] = int(expression)
        elif expression in batch or not list(node.users):
            sizes[position] = None
        elif is_storage_offset(source_of(node)):
            sizes[position] = 0  # stages are given tensors of their own
        else:
            raise UnsupportedModelError(
                f"the size {expression} is symbolic, but is not the batch size",
                cure="only the batch size (dimension 0 of the inputs) can be dynamic.",
            )
    return sizes
