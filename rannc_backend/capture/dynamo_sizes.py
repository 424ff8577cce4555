"""What Dynamo's trace knows of symbolic sizes, and what is made a condition of the compiled frame.

In: a `DynamoCall`. Out: the conditions on sizes so far; symbols made equal, made numbers, bounded. Terms: a
*condition* is what the frame holds for; Dynamo traces again where a call breaks one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from rannc_backend.capture.aten_trace import AtenTrace
from rannc_backend.capture.dynamo import DynamoCall
from rannc_backend.capture.inputs import TensorInput, number_reads
from rannc_backend.errors import UnsupportedModelError, is_of_user, user_location
from rannc_backend.passes.plain_numbers import hints_in


class FrameNumbers:
    """Python's floats that a frame has as tensors of one element: which of them are inputs of the graph. The frame
    serves the others at their values in this call alone.
    """

    def __init__(self, call: DynamoCall, inputs: Sequence[TensorInput]) -> None:
        self._call = call
        read = number_reads(inputs, {item.position: item.position for item in inputs if item.is_number})
        self._symbols = {
            position: node.meta["example_value"].node.expr
            for node, position in read.items()
            if isinstance(node.meta["example_value"], torch.SymFloat)
        }

    @property
    def positions(self) -> frozenset[int]:
        """Of those that may be inputs."""
        replace = self._call.output_graph.shape_env.replace
        return frozenset(place for place, symbol in self._symbols.items() if not replace(symbol).is_number)

    def fix(self, positions: Iterable[int]) -> None:
        """Let these be constants of the graph."""
        fix_symbols(self._call, [self._symbols[position] for position in positions])

    def require(
        self, conditions: Iterable[sympy.Basic], symbols: Mapping[int, sympy.Symbol]
    ) -> frozenset[int]:
        """Make what a trace has assumed of its numbers, which are ``symbols`` there, conditions of the frame. Gives
        the positions of those that have to be constants for it.
        """
        own = {symbol: self._symbols[position] for position, symbol in symbols.items()}
        found = [(item, item.free_symbols & own.keys()) for item in conditions]
        needed = set[sympy.Basic]().union(*(known for item, known in found if known != item.free_symbols))
        if not needed and not require(self._call, [item.xreplace(own) for item, known in found if known]):
            needed = set(own)
        return frozenset(position for position, symbol in symbols.items() if symbol in needed)

    def trace(self, trace: Callable[..., AtenTrace], **arguments: Any) -> AtenTrace:
        """What ``trace(numbers=positions)`` gives with as many numbers for inputs as can be; fixes the others. Raises
        what it raises without any.
        """
        while positions := self.positions:
            try:
                found = trace(numbers=positions, **arguments)
            except UnsupportedModelError:
                found = trace(numbers=frozenset(), **arguments)
                self.fix(positions)
                return found
            conditions = found.conditions_on(set(found.number_symbols.values())) or ()
            needed = found.needed_numbers or self.require(conditions, found.number_symbols)
            if not needed:
                return found
            self.fix(needed)
        return trace(numbers=frozenset(), **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCondition:
    """Something about symbolic sizes that the trace took for granted."""

    text: str
    symbols: frozenset[Any]  # those that stand for themselves and for all that are equal to them
    location: str  # the user's line, "" if unknown
    # tested by the user's own Python code; else by an operator, for its own choice or as its requirement
    is_branch: bool
    is_general: bool  # holds for all sizes from 2


def size_conditions(call: DynamoCall) -> tuple[SizeCondition, ...]:
    """All conditions on symbolic sizes that Dynamo guards on, in the order in which they came up."""
    replace = call.output_graph.shape_env.replace
    found = []
    for guard in call.output_graph.shape_env.guards:
        framework = getattr(guard.sloc, "framework_loc", None)
        parts = getattr(framework, "filename", str(framework)).replace("\\", "/").split("/")
        # A condition may be older than what the trace found out about its symbols.
        expression = replace(guard.expr)
        found.append(
            SizeCondition(
                text=str(guard.expr),
                symbols=frozenset(expression.free_symbols),
                location=_full_place(guard.sloc.maybe_user_loc or "", call.output_graph.graph),
                # Operators run in _dynamo/utils.py; elsewhere in Dynamo it is a branch that asks.
                is_branch="_dynamo" in parts and parts[-1] != "utils.py",
                is_general=holds_from_two(expression),
            )
        )
    return tuple(found)


def _full_place(short: str, graph: fx.Graph) -> str:
    """`/me/model.py:12, in forward: if x.size(0) > 2:` for torch's `if x.size(0) > 2:  # e/model.py:12 in
    forward`: paths are cut there.

    Of a line of torch's own, the user's line of an operator in it; "" if none is known.
    """
    text, _, place = short.rpartition("  # ")
    path, _, rest = place.partition(".py:")
    if not rest:
        return short
    files = (str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values()))
    file = next((file for file in files if file.endswith(f"{path}.py")), f"{path}.py")
    line, _, function = rest.partition(" in ")
    if is_of_user(file):
        return f"{file}:{line}, in {function}" + (f": {text.strip()}" if text else "")
    traces = (str(node.meta.get("stack_trace") or "") for node in graph.nodes)
    return user_location(
        next((trace for trace in traces if f'{path}.py", line {line}, in {function}' in trace), "")
    )


def make_equal(call: DynamoCall, symbols: Iterable[Any]) -> Any:
    """Make equality of these symbols a condition of the compiled frame; gives the one that stands for all of
    them.
    """
    shape_env = call.output_graph.shape_env
    first, *others = sorted(symbols, key=str)
    for symbol in others:
        holds = shape_env.evaluate_expr(sympy.Eq(shape_env.replace(first), shape_env.replace(symbol)))
        assert holds, f"{symbol} is not {first} in the trace"
    return shape_env.replace(first)


def fix_symbols(call: DynamoCall, symbols: Iterable[Any]) -> None:
    """Let the compiled frame serve the sizes of this call alone, where it has these symbols."""
    shape_env = call.output_graph.shape_env
    for symbol in symbols:
        root = shape_env.replace(symbol)
        if not root.is_number:
            shape_env.evaluate_expr(sympy.Eq(root, root.xreplace(hints_in(shape_env))))


def require_at_least(call: DynamoCall, symbol: Any, smallest: int) -> bool:
    """Make it a condition of the compiled frame that a symbol is at least so much; False where it is a number
    already.
    """
    shape_env = call.output_graph.shape_env
    root = shape_env.replace(symbol)
    return not root.is_number and bool(shape_env.evaluate_expr(root >= smallest))


def require(call: DynamoCall, conditions: Iterable[Any]) -> bool:
    """Make conditions on symbols of this trace such of the compiled frame; False, and nothing done, where the
    sizes of this call do not meet all of them.
    """
    shape_env = call.output_graph.shape_env
    wanted = list(conditions)
    if any(condition.xreplace(hints_in(shape_env)) == sympy.false for condition in wanted):
        return False
    return all(shape_env.evaluate_expr(condition) for condition in wanted)


def forget_size_conditions(call: DynamoCall, symbols: set[Any]) -> None:
    """Let the compiled frame serve all sizes of `symbols`, whatever the trace took for granted about them.

    That symbols are equal to each other remains a condition.
    """
    shape_env = call.output_graph.shape_env
    same = {symbol: shape_env.replace(symbol) for symbol in shape_env.var_to_range}
    members = {symbol for symbol, root in same.items() if root in symbols}
    kept = [
        guard
        for guard in shape_env.guards
        if not guard.expr.free_symbols <= members or guard.expr.xreplace(same) == sympy.true
    ]
    shape_env.guards[:] = kept
    for symbol in members:
        shape_env.var_to_range[symbol] = ValueRanges(0, int_oo)


def holds_from_two(condition: sympy.Basic) -> bool:
    """Whether a condition is true for all sizes from 2."""
    shifted = {
        symbol: sympy.Symbol(f"above_{symbol}", integer=True, nonnegative=True) + 2
        for symbol in condition.free_symbols
    }
    return condition.xreplace(shifted) == sympy.true
