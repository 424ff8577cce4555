"""Finds out which user inputs have the batch size as dimension 0, from the symbols of Dynamo's trace.

In: the tensor inputs, with dimension 0 of those picked by `batch_candidates` symbolic in Dynamo's trace. Out:
a `BatchInputs`.
Terms: Dynamo gives each marked dimension a symbol of its own; symbols that the model makes equal are unified,
a symbol that the model makes equal to a number is *specialised* to it.

The rule: a user input is a batch input when its dimension 0 was not specialised. All batch inputs must have
the same size there. An input that no operator ties to the others counts by its size alone. After the trace
all batch inputs share one symbol: what the model asked about several of them (`mask.view(ids.shape[0],
-1).shape[1]`) is judged, and guarded, with equal sizes.

Where inputs have several sizes there, the batch size is the one that can be any other number while the rest stay
as they are: the model's operators ask for no equality that would break (`torch.cat((text_ids, image_ids))` beside
tokens of both lengths asks for one). A micro-batch changes just that size, so no other can be the batch size;
where two can be, the inputs are refused.

Other dimensions that are symbolic are lengths (ir/length.py), and so is a dimension 0 that the model ties to
one. Lengths of the same size share a symbol, as in torch. What the model and its operators asked of them stays a
condition of the compiled frame.

A batch of 1 is traced as if it were larger (operators and models treat 1 apart), and a model may test whether
its batch size is 0 or 1: the answer is that for larger ones. Other tests of the batch size are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rannc_backend.capture.dynamo import DynamoCall, is_storage_offset, source_of
from rannc_backend.capture.dynamo_sizes import (
    SizeCondition,
    fix_symbols,
    forget_size_conditions,
    holds_from_two,
    make_equal,
    require_at_least,
    size_conditions,
)
from rannc_backend.capture.inputs import TensorInput, UserTensor
from rannc_backend.errors import DataDependentControlFlowError, NoBatchDimensionError, UnsupportedModelError
from rannc_backend.ir.length import NO_LENGTHS, SMALLEST, LengthDims, length_symbol


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """Positions (in Dynamo's flat arguments) of batch inputs, and the value of each size that is an argument
    itself.
    """

    positions: frozenset[int]
    # position of a SymInt argument -> its number, over lengths; None: it is the batch size
    sizes: dict[int, sympy.Expr | None]
    lengths: LengthDims = NO_LENGTHS  # at their sizes in this call
    length_symbols: tuple[sympy.Symbol, ...] = ()  # Dynamo's, of each length

    @property
    def sizes_in_this_call(self) -> dict[int, sympy.Expr | None]:
        """`sizes` with numbers for the lengths."""
        numbers = {length_symbol(i): sympy.Integer(size) for i, size in enumerate(self.lengths.hints)}
        return {
            position: None if size is None else size.xreplace(numbers)
            for position, size in self.sizes.items()
        }


def batch_candidates(inputs: Sequence[TensorInput], *, single: bool) -> tuple[torch.Tensor, ...]:
    """The user's tensors whose dimension 0 may be the batch size; `single`: if that is 1."""
    return tuple(
        item.tensor
        for item in inputs
        if isinstance(item, UserTensor) and may_be_batch(item.tensor, single=single)
    )


def may_be_batch(tensor: torch.Tensor, *, single: bool) -> bool:
    """Whether dimension 0 of this tensor may be the batch size; `single`: if that is 1."""
    return tensor.dim() > 0 and (tensor.shape[0] == 1) == single


def has_symbolic_batch(inputs: Sequence[TensorInput], call: DynamoCall) -> bool:
    """Whether dimension 0 of any user input is still symbolic after Dynamo's trace."""
    shapes = [item.example.meta["example_value"].shape for item in inputs if isinstance(item, UserTensor)]
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
    symbolic = _symbolic_sizes(inputs, call)
    roots = _length_symbols(inputs, symbolic, call)
    symbolic = _symbolic_sizes(inputs, call)
    expressions: dict[int, sympy.Expr] = {}
    lengths: dict[tuple[int, int], sympy.Expr] = {}
    names = {root: length_symbol(index) for index, root in enumerate(roots)}
    items = {item.position: item for item in inputs}
    for (position, dim), expression in symbolic.items():
        if expression.free_symbols <= names.keys():
            lengths[position, dim] = expression.xreplace(names)
        elif dim == 0:
            expressions[position] = expression
        else:
            raise _other_size(items[position], dim, expression)
    if not expressions:
        raise _no_batch(inputs, call)
    positions = batch_of_one_size(inputs, expressions, call.output_graph.shape_env)
    fix_symbols(call, (expressions.pop(position) for position in expressions.keys() - positions))
    # Only now: during the trace a mask of [T, T] with T = batch size must not share the symbol.
    symbols = {make_equal(call, expressions.values())}
    for condition in size_conditions(call):
        if condition.is_branch and not condition.is_general and condition.symbols & symbols:
            raise _branch_error(condition)
    sizes = _size_arguments(graph_module, call, symbols, names)
    # The graph is traced again with a batch size of its own, so that it holds for all of them.
    forget_size_conditions(call, symbols)
    hints = []
    for root in roots:
        position, dim = next(place for place, size in symbolic.items() if size == root)
        hints.append(int(items[position].tensor.shape[dim]))
    dims = LengthDims(hints=tuple(hints), sizes=lengths)
    return BatchInputs(positions=positions, sizes=sizes, lengths=dims, length_symbols=roots)


def _symbolic_sizes(inputs: Sequence[TensorInput], call: DynamoCall) -> dict[tuple[int, int], sympy.Expr]:
    """By position and dimension, what Dynamo knows of the sizes that it has not made numbers."""
    replace = call.output_graph.shape_env.replace
    found = {}
    for item in inputs:
        for dim, size in enumerate(item.example.meta["example_value"].shape):
            expression = replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if expression.is_number:
                continue
            if not isinstance(item, UserTensor):
                raise UnsupportedModelError(
                    f"dimension {dim} of {item.label} {list(item.tensor.shape)} was marked as dynamic",
                    cure="only sizes of inputs can be dynamic: drop mark_dynamic for it.",
                )
            found[item.position, dim] = expression
    return found


def _length_symbols(
    inputs: Sequence[TensorInput], symbolic: Mapping[tuple[int, int], sympy.Expr], call: DynamoCall
) -> tuple[sympy.Symbol, ...]:
    """Those of dimensions behind the first, one for each size; sizes of 0 and 1 become numbers."""
    tensors = {item.position: item.tensor for item in inputs}
    by_size: dict[int, list[sympy.Symbol]] = {}
    for (position, dim), expression in symbolic.items():
        if dim > 0 and expression.is_Symbol:
            by_size.setdefault(int(tensors[position].shape[dim]), []).append(expression)
    for size in [size for size in by_size if size < SMALLEST]:
        fix_symbols(call, by_size.pop(size))
    roots = (make_equal(call, symbols) for symbols in by_size.values())
    return tuple(root for root in roots if require_at_least(call, root, SMALLEST))


def batch_of_one_size(
    inputs: Sequence[TensorInput], symbols: Mapping[int, sympy.Expr], shape_env: ShapeEnv
) -> frozenset[int]:
    """Of the inputs at the positions of `symbols`, those whose dimension 0 is the batch size (see the module
    docstring).

    Raises UnsupportedModelError where there are several sizes, and not just one of them may change alone.
    """
    sizes = {item.position: int(item.tensor.shape[0]) for item in inputs if item.position in symbols}
    hints = {found: sizes[place] for place, found in symbols.items() if found.is_Symbol}
    conditions = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    equalities = [condition for condition in conditions if condition.has(sympy.Eq)]
    of_size, of_symbol = (
        [group for group in _grouped(key_of) if _may_change_alone(group, symbols, equalities, hints)]
        for key_of in (sizes, symbols)
    )
    if len(of_size) == 1:
        return of_size[0]
    # The batch size may be that of another input by chance.
    free = frozenset[int]().union(*of_symbol)
    if len({sizes[position] for position in free}) == 1:
        return free
    for item in inputs:
        if item.position in symbols and not symbols[item.position].is_Symbol:
            raise _other_size(item, 0, symbols[item.position])
    if len(set(sizes.values())) == 1:
        return frozenset(sizes)
    raise UnsupportedModelError(
        "dimension 0 of the inputs has several sizes, any of which could be the batch size: "
        + ", ".join(f"{item.label}: {sizes[item.position]}" for item in inputs if item.position in sizes),
        cure="pass inputs without a batch dimension as buffers of the model, or with a leading dimension of 1.",
    )


def _other_size(item: TensorInput, dim: int, size: sympy.Expr) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"dimension {dim} of {item.label} {list(item.tensor.shape)} is not the batch size, but {size} for the batch "
        "size of another input",
        cure="pass it with the batch size as dimension 0 and reshape it in the model.",
    )


def _grouped(key_of: Mapping[int, object]) -> list[frozenset[int]]:
    groups: dict[object, set[int]] = {}
    for position, key in key_of.items():
        groups.setdefault(key, set()).add(position)
    return [frozenset(group) for group in groups.values()]


def _may_change_alone(
    group: Set[int],
    sizes: Mapping[int, sympy.Expr],
    equalities: Sequence[sympy.Basic],
    hints: Mapping[sympy.Basic, int],
) -> bool:
    """Whether inputs may have any size from 2, the same for all of the group, while no other size changes."""
    symbols = {sizes[position] for position in group}
    others = [size for position, size in sizes.items() if position not in group]
    if not all(size.is_Symbol for size in symbols) or any(size.free_symbols & symbols for size in others):
        return False
    rows = sympy.Symbol("rows", integer=True, positive=True)
    values = {symbol: rows if symbol in symbols else hint for symbol, hint in hints.items()}
    return all(holds_from_two(equality.xreplace(values)) for equality in equalities)


def _no_batch(inputs: Sequence[TensorInput], call: DynamoCall) -> Exception:
    shapes = {item.label: tuple(item.tensor.shape) for item in inputs if isinstance(item, UserTensor)}
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
    graph_module: fx.GraphModule,
    call: DynamoCall,
    batch: set[sympy.Expr],
    lengths: Mapping[sympy.Expr, sympy.Symbol],
) -> dict[int, sympy.Expr | None]:
    sizes: dict[int, sympy.Expr | None] = {}
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
        if expression.free_symbols <= lengths.keys():
            sizes[position] = expression.xreplace(lengths)
        elif expression in batch or not list(node.users):
            sizes[position] = None
        elif is_storage_offset(source_of(node)):
            sizes[position] = sympy.Integer(0)  # stages are given tensors of their own
        else:
            raise UnsupportedModelError(
                f"the size {expression} is symbolic, but is no size of an input",
                cure="only sizes of inputs can be dynamic.",
            )
    return sizes
