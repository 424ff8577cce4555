"""The most memory that a graph's values take at one time, as expressions in the batch size.

In: a graph with fake tensors in ``meta["val"]``, run node by node, each value dropped after its last use.
Out: candidates for the largest amount of live bytes; which of them is largest depends on the batch size.

Terms. A *storage* is memory that a value and its views share; it lives from the first node that has it to the
last that uses it. A *virtual* value is never written: a compiler computes it inside of the kernels that read
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import sympy
import torch
from torch import fx

from rannc_backend.passes.kept_functions import any_gradient, inner_work

_Amount = tuple[float, ...]  # coefficients of a polynomial in the batch size, constant first


def live_bytes(
    graph: fx.Graph,
    *,
    ignored: Collection[str],
    held: Collection[str] = (),
    virtual: Collection[str] = (),
    rows_symbol: sympy.Symbol,
) -> tuple[sympy.Expr, ...]:
    """Candidates for the largest number of bytes alive at one time.

    Args:
        ignored: names of placeholders whose memory does not count.
        held: names of placeholders that live to the end, as the graph's outputs do.
        virtual: names of values that take no memory, see `virtual_values`.
    """
    nodes = list(graph.nodes)
    without_memory = {storage for node in nodes if node.name in ignored for storage in storages(node)}
    last_use: dict[int, int] = {}
    written: dict[int, torch.UntypedStorage] = {}
    for place, node in enumerate(nodes):
        for item in [node, *node.all_input_nodes]:
            stays = node.op == "output" or item.name in held
            for key, storage in storages(item).items():
                last_use[key] = len(nodes) if stays else max(place, last_use.get(key, 0))
                if item.name not in virtual and key not in without_memory:
                    written[key] = storage
    sizes = _Sizes(rows_symbol)
    live = sizes.zero
    alive: set[int] = set()
    peaks: set[_Amount] = set()
    for place, node in enumerate(nodes):
        for key in storages(node):
            if key in written and key not in alive:
                alive.add(key)
                live = _add(live, sizes.of(written[key]), 1)
        if node.op != "placeholder":
            peaks.add(_add(live, sizes.inside(node), 1))
        for item in [node, *node.all_input_nodes]:
            for key in storages(item):
                if key in alive and last_use[key] <= place:
                    alive.remove(key)
                    live = _add(live, sizes.of(written[key]), -1)
    return tuple(sizes.expression(amount) for amount in sorted(_largest(peaks)))


def virtual_values(
    graph: fx.Graph, *, computes_inline: Collection[fx.Node], reads_inline: Collection[fx.Node]
) -> frozenset[str]:
    """Names of values that a fusing compiler does not write.

    Args:
        computes_inline: nodes whose value can be computed where it is read (elementwise operators and views).
        reads_inline: nodes that can compute their inputs so: those and reductions.
    """
    written = {key for node in graph.nodes if node.op == "placeholder" for key in storages(node)}
    for node in graph.nodes:
        if node.op == "call_function" and node not in computes_inline:
            written.update(storages(node))
        if node not in reads_inline:
            written.update(key for argument in node.all_input_nodes for key in storages(argument))
    return frozenset(
        node.name for node in graph.nodes if storages(node) and not written & storages(node).keys()
    )


def storages(node: fx.Node) -> dict[int, torch.UntypedStorage]:
    """The storages of a node's tensors, by identity."""
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else (value,)
    found = [item.untyped_storage() for item in items if isinstance(item, torch.Tensor)]
    return {storage._cdata: storage for storage in found}


def storage_bytes(storage: torch.UntypedStorage) -> sympy.Expr:
    """Bytes of a fake tensor's storage."""
    size = storage.nbytes()
    return sympy.Integer(size) if isinstance(size, int) else sympy.sympify(size.node.expr)


class _Sizes:
    """Sizes of storages as polynomials, which are added much faster than expressions."""

    def __init__(self, rows_symbol: sympy.Symbol) -> None:
        self.zero: _Amount = (0.0, 0.0, 0.0)
        self._symbol = rows_symbol
        self._known: dict[sympy.Expr, _Amount] = {}

    def of(self, storage: torch.UntypedStorage) -> _Amount:
        expression = storage_bytes(storage)
        if expression not in self._known:
            self._known[expression] = self._polynomial(expression)
        return self._known[expression]

    def inside(self, node: fx.Node) -> _Amount:
        """What code that runs as written keeps while it runs, for a gradient within or for its own."""
        found = inner_work(node)
        if found is None or not (found[2] or any_gradient(node)):
            return self.zero
        work, num_elements, _ = found
        return self._polynomial(sympy.Integer(math.ceil(work.num_bytes)) * num_elements)

    def expression(self, amount: _Amount) -> sympy.Expr:
        terms = (sympy.Integer(round(factor)) * self._symbol**power for power, factor in enumerate(amount))
        return sympy.Add(*terms)

    def _polynomial(self, expression: sympy.Expr) -> _Amount:
        if expression.is_polynomial(self._symbol):
            factors = [
                float(factor) for factor in reversed(sympy.Poly(expression, self._symbol).all_coeffs())
            ]
            if len(factors) <= len(self.zero):
                return (*factors, *self.zero[len(factors) :])
        # Rounded up sizes and the like: the straight line through two points is near enough.
        low, high = (float(expression.subs(self._symbol, rows)) for rows in (1, 64))
        slope = (high - low) / 63
        return (low - slope, slope, 0.0)


def _add(left: _Amount, right: _Amount, sign: int) -> _Amount:
    return tuple(a + sign * b for a, b in zip(left, right, strict=True))


def _largest(amounts: Iterable[_Amount]) -> list[_Amount]:
    """Those that no other one exceeds in all coefficients."""
    kept: list[_Amount] = []
    for amount in sorted(amounts, reverse=True):
        if not any(all(a >= b for a, b in zip(other, amount, strict=True)) for other in kept):
            kept.append(amount)
    return kept
