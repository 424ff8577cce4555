"""Operators and modules of users that are declared to work row by row: what nobody could know from a schema, or
from code that decides by values.

In: an operator of `torch.library`, or a class of modules, and calls of it. Out: a mark on it, the layout of its results, or a refusal.
Terms: an operator is *row-wise* if, for each number i, row i of every result is computed from row i of those
arguments that hold rows of the batch, and from the arguments that hold none.

Method of the trial: the operator runs on six rows of numbers between 0 and 1, and on the same rows in three
parts. Results of the parts, put one after the other, must be those of the whole; so must gradients of arguments
that hold rows, and gradients of the others must add up. What mixes rows differs, as does what draws random
numbers. An operator that cannot be run so (values that it does not take, sizes that depend on more than the
batch, very large arguments) is left to its declaration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from rannc_backend.passes.batch.batch_axis_rules import elementwise
from rannc_backend.passes.batch.layouts import Layout, RowCount, Rows, Several
from rannc_backend.passes.batch.operator_call import Call, rows_dims, rows_multiple
from rannc_backend.passes.graph_queries import size_expression
from rannc_backend.passes.kept_functions import operator_code
from rannc_backend.passes.plain_numbers import hints_of, without_modes

_MARK = "_rannc_row_wise"
Operator = TypeVar("Operator", bound=Callable[..., Any])

_NUM_ROWS = 6
_PARTS = ((0, 2), (2, 3), (3, 6))
_MAX_ELEMENTS = 2**27
# Sums in another order differ by rounding, mixed rows by parts of their values.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.complex128: 1e-7, torch.complex64: 1e-3}
_COARSE = 0.05
_DIFFERS = "gives other {what} for rows of the batch together than for the same rows in parts: it mixes rows, or draws random numbers"
_log = logging.getLogger("rannc_backend")


def row_wise(operator: Operator) -> Operator:
    """Declares that a custom operator, or a class of modules, works row by row over dimension 0. Also a decorator
    above ``torch.library.custom_op`` and above the class.

    When a model is compiled, the operator is tried on a few generated rows, and refused if it mixes them.
    Declare an elementwise operator to torch itself instead, with ``tags=(torch.Tag.pointwise,)``. A class
    matters where its modules run as written, since their code decides by values (experts in a loop over those that
    have tokens): with the declaration the model keeps micro-batches and replicas. Subclasses are declared by themselves.

    Args:
        operator: What ``custom_op`` or ``triton_op`` returns, ``torch.ops.library.name``, one of its
            overloads, or a subclass of ``torch.nn.Module``.

    Returns:
        The operator or class.

    Raises:
        TypeError: It is neither an operator of `torch.library` nor a class of modules.
    """
    if isinstance(operator, type) and issubclass(operator, nn.Module):
        setattr(operator, _MARK, True)
        return operator
    overloads = _overloads(operator)
    if not overloads:
        raise TypeError(
            f"{operator!r} is no operator of torch.library: give what custom_op returns, "
            "torch.ops.library.name, or a class of modules"
        )
    for overload in overloads:
        setattr(overload, _MARK, True)
    return operator


def is_row_wise(target: object) -> bool:
    """Whether an operator, or a class itself, is declared so."""
    marked = vars(target).get(_MARK) if isinstance(target, type) else getattr(target, _MARK, None)
    return marked is True


def declared_rule(call: Call) -> Layout:
    """The rule of an operator that is declared row-wise."""
    code = operator_code(call.node.target)
    return _tried(call, row_wise_rule if code is None else _sample_wise_rule)


def pointwise_rule(call: Call) -> Layout:
    """The rule of an operator of the user's that is tagged pointwise."""
    return _tried(call, elementwise)


def _tried(call: Call, rule: Callable[[Call], Layout]) -> Layout:
    if any(isinstance(call.layouts[item], RowCount) for item in call.node.all_input_nodes):
        call.refuse("gets the batch size as a number, which differs between micro-batches")
    layout = rule(call)
    probe_rows(call)
    return layout


def row_wise_rule(call: Call) -> Layout:
    """Rows stay where they are, in dimension 0, and are the same rows in all arguments."""
    found: Rows | None = None
    for argument in call.tensors():
        layout = call.rows(argument)
        if layout is not None and layout.dim != 0:
            call.refuse(
                f"is declared to work row by row, but gets rows of the batch in dimension {layout.dim}, not 0"
            )
        found = call.merge(found, layout)
    if found is None:
        call.refuse_mixing("it is declared to work row by row, and gets no rows")
    return found


def _sample_wise_rule(call: Call) -> Layout:
    """Of a module: its arguments and results have rows in dimension 0, each as many as it likes for each."""
    for argument in call.tensors():
        layout = call.rows(argument)
        if layout is not None and (layout.dim != 0 or layout.outer != 1):
            call.refuse(
                "is declared to work row by row, but gets rows of the batch in another dimension than 0"
            )
    results = []
    for value in call.value:
        multiple = rows_multiple(value.shape[0], call.symbol) if value.dim() else 0
        if not multiple:
            call.refuse("is declared to work row by row, but gives a result without rows in dimension 0")
        results.append(Rows(0, 1, multiple))
    return Several(tuple(results))


def _overloads(operator: object) -> list[torch._ops.OpOverload]:
    packet = operator
    if not isinstance(operator, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        own = getattr(operator, "_opoverload", None)  # what torch.library.custom_op and triton_op return
        packet = own if own is not None else operator
    if isinstance(packet, torch._ops.OpOverload):
        return [packet]
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return [getattr(packet, name) for name in packet.overloads()]
    return []


def probe_rows(call: Call) -> None:
    """Run the operator on a few rows, whole and in parts. Refuses the call if results or gradients differ."""
    arguments = {node: value for node in call.tensors() if (value := _example(call, node)) is not None}
    if (
        len(arguments) != len(list(call.tensors()))
        or sum(value.numel() for value in arguments.values()) > _MAX_ELEMENTS
    ):
        return
    with without_modes(), torch.random.fork_rng(devices=_devices(arguments.values())):
        torch.manual_seed(0)
        for value in arguments.values():
            if value.is_floating_point() or value.is_complex():
                value.copy_(torch.rand(value.shape, dtype=torch.float64) * 0.9 + 0.05)
        for differentiate in (False, True):
            try:
                whole = _run(call, arguments, (0, _NUM_ROWS), differentiate=differentiate)
                parts = [_run(call, arguments, part, differentiate=differentiate) for part in _PARTS]
            except Exception as error:  # whatever the user's code raises for numbers that are not the user's
                _log.debug("%s was not tried on rows: %s", call.name, error)
                return
            if not _agree(call, whole, parts, arguments, differentiate=differentiate):
                call.refuse(_DIFFERS.format(what="gradients" if differentiate else "results"))


def _devices(values: Any) -> list[torch.device]:
    return sorted({value.device for value in values if value.device.type == "cuda"}, key=str)


def _example(call: Call, node: fx.Node) -> torch.Tensor | None:
    """Zeros of an argument's shape at six rows; None where its sizes depend on more than the batch."""
    value = node.meta["val"]
    shape = []
    for size in value.shape:
        at_rows = size_expression(size).subs(call.symbol, _NUM_ROWS)
        if at_rows.free_symbols:
            at_rows = at_rows.xreplace(hints_of(value))
        if not at_rows.is_Integer:
            return None
        shape.append(int(at_rows))
    with without_modes():
        return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _run(
    call: Call, arguments: dict[fx.Node, torch.Tensor], part: tuple[int, int], *, differentiate: bool
) -> list[torch.Tensor]:
    """Results for these rows, or with ``differentiate`` the gradients of all arguments that have one."""
    given = {}
    for node, value in arguments.items():
        layout = call.rows(node)
        taken = value if layout is None else _rows(value, layout, part)
        given[node] = (
            taken.detach()
            .clone()
            .requires_grad_(differentiate and (taken.is_floating_point() or taken.is_complex()))
        )
    operator: Any = call.node.target
    args: Any
    kwargs: Any
    args, kwargs = (
        fx.map_arg(each, lambda node: given.get(node, node.meta["val"]))
        for each in (call.node.args, call.node.kwargs)
    )
    with torch.set_grad_enabled(differentiate):
        results = _tensors(operator(*args, **kwargs))
        if not differentiate:
            return results
        leaves = [value for value in given.values() if value.requires_grad]
        ends = [result for result in results if result.requires_grad]
        if not ends:
            return []
        # A weight for each element, the same for the whole and for parts: rows differ, so that sums over them
        # do.
        gradients = torch.autograd.grad(
            ends, leaves, [_weights(end, part) for end in ends], allow_unused=True
        )
    return [
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, gradients, strict=True)
    ]


def _tensors(result: Any) -> list[torch.Tensor]:
    """Tensors of an operator's result: one, several, lists of them, or none."""
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    return [result] if isinstance(result, torch.Tensor) else []


def _weights(end: torch.Tensor, part: tuple[int, int]) -> torch.Tensor:
    """Weights of a result's elements that depend on the row alone, where rows are the first dimension."""
    rows = end.shape[0] if end.dim() else 1
    multiple = rows / (part[1] - part[0])
    numbers = torch.arange(rows, device=end.device) / multiple + part[0]
    return (
        (0.5 + numbers / _NUM_ROWS)
        .to(end.dtype)
        .view(-1, *[1] * max(end.dim() - 1, 0))
        .expand(end.shape)
        .contiguous()
    )


def _rows(value: torch.Tensor, layout: Rows, part: tuple[int, int]) -> torch.Tensor:
    # One of the two may depend on lengths.
    outer, inner = (number if isinstance(number, int) else -1 for number in (layout.outer, layout.inner))
    positions = torch.arange(value.shape[layout.dim], device=value.device).view(outer, _NUM_ROWS, inner)
    return value.index_select(layout.dim, positions[:, part[0] : part[1]].reshape(-1))


def _agree(
    call: Call,
    whole: Sequence[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    arguments: Any,
    *,
    differentiate: bool,
) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return False
    if differentiate:
        nodes = [node for node, value in arguments.items() if value.is_floating_point() or value.is_complex()]
        layouts = [call.rows(node) for node in nodes]
    else:
        layouts = [_result_layout(call, value) for value in _tensors(call.value)]
    for index, result in enumerate(whole):
        layout, pieces = layouts[index], [part[index] for part in parts]
        if layout is None:
            together = sum(pieces) if differentiate else pieces[0]
        else:
            blocks = [piece.unflatten(layout.dim, (layout.outer, -1)) for piece in pieces]
            together = torch.cat(blocks, layout.dim + 1).flatten(layout.dim, layout.dim + 1)
        if not _close(result, together):
            return False
    return True


def _result_layout(call: Call, value: torch.Tensor) -> Rows | None:
    """As the first argument with rows has them: an operator leaves rows where they are."""
    dims = rows_dims(value, call.symbol)
    if not dims:
        return None
    given = next(layout for node in call.tensors() if (layout := call.rows(node)) is not None)
    outer = (
        given.outer if rows_multiple(value.shape[dims[0]], call.symbol) == given.outer * given.inner else 1
    )
    return Rows(dims[0], outer)


def _close(result: torch.Tensor, together: Any) -> bool:
    if result.shape != together.shape:
        return False
    if not (result.is_floating_point() or result.is_complex()):
        return torch.equal(result, together)
    tolerance = _TOLERANCE.get(result.dtype, _COARSE)
    size = float(result.abs().nan_to_num(0, 0, 0).max()) if result.numel() else 0.0
    return torch.allclose(result, together, rtol=tolerance, atol=tolerance * size, equal_nan=True)
