"""The type of an amount over the number of rows.

Terms. A *size* is a number of FLOPs or bytes as an expression in the rows that one replica computes in one
micro-batch: a sympy expression where it comes from a graph, a `cost.formula.Formula` where it was read from a
file, or an int. `cost.expressions.evaluate` gives the values of all.
"""

from __future__ import annotations

from typing import Protocol


class Size(Protocol):
    """See the module docstring; equal ones have equal hashes."""

    def __hash__(self) -> int: ...
