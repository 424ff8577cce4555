"""Which parameters and inputs a backward brings a gradient to: those of the others stay as they are, None for one.

In: the sources of each value's gradient, by the graph; which outputs a step has differentiated; and what the
operators that run code as written have shown. Out: the values that no gradient comes to.
Method: a gradient comes to a value from an output that is differentiated, or from an argument of such an operator
that a gradient came to in one of its calls, on any rank, for any micro-batch. Operators are asked in the order of
backward, so each is asked after all that its results go into.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Shown = Mapping[str, frozenset[int]]
"""By operator that has run: the numbers of the tensors that a gradient came to."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What brings a gradient to a value.

    Attributes:
        outputs: places of the user's outputs, but for those that are reached only by way of `arguments`.
        arguments: of calls: the call's name, and the number of the tensor.
    """

    outputs: frozenset[int] = frozenset()
    arguments: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of an operator that runs code as written: its name in the graph, and its results' sources by number."""

    name: str
    operator: str
    results: Mapping[int, Sources]


@dataclass(slots=True)
class OperatorCalls:
    """The calls of such operators in one backward on one rank.

    Attributes:
        absent: results, by operator and number, that no gradient comes to.
        reached: by operator, the numbers of the tensors that a gradient has come to, in any call.
    """

    absent: frozenset[tuple[str, int]] = frozenset()
    reached: dict[str, set[int]] = field(default_factory=dict)


class Without(NamedTuple):
    """Names of parameters and inputs that no gradient comes to."""

    parameters: frozenset[str]
    inputs: frozenset[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reach:
    """See the module docstring. ``calls``: in the order of backward."""

    parameters: Mapping[str, Sources] = field(default_factory=dict)
    inputs: Mapping[str, Sources] = field(default_factory=dict)
    calls: tuple[WrittenCall, ...] = ()

    def without(self, outputs: frozenset[int], shown: Shown) -> Without:
        """The values that no gradient of ``outputs`` comes to."""
        reached = self._arguments(outputs, shown)
        parameters, inputs = (
            frozenset(name for name, sources in values.items() if not _is_reached(sources, outputs, reached))
            for values in (self.parameters, self.inputs)
        )
        return Without(parameters, inputs)

    @functools.lru_cache(maxsize=32)  # noqa: B019 (few graphs, and what they hold is names)
    def by_graph(self, outputs: frozenset[int]) -> Without:
        """`without`, as far as the graph alone tells."""
        return self.without(outputs, {})

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def absent_results(self, outputs: frozenset[int]) -> frozenset[tuple[str, int]]:
        """Results of operators, by operator and number, that no gradient of ``outputs`` comes to in any call."""
        present = self._arguments(outputs, {})
        found = [
            ((call.operator, number), _is_reached(sources, outputs, present))
            for call in self.calls
            for number, sources in call.results.items()
        ]
        return frozenset(place for place, _ in found) - {place for place, is_reached in found if is_reached}

    def _arguments(self, outputs: frozenset[int], shown: Shown) -> dict[str, frozenset[int] | None]:
        """Of the calls that a gradient comes to: the numbers of the tensors that it goes on to, or None for all."""
        found: dict[str, frozenset[int] | None] = {}
        for call in self.calls:
            if any(_is_reached(sources, outputs, found) for sources in call.results.values()):
                found[call.name] = shown.get(call.operator)
        return found


def _is_reached(
    sources: Sources, outputs: frozenset[int], calls: Mapping[str, frozenset[int] | None]
) -> bool:
    if not sources.outputs.isdisjoint(outputs):
        return True
    for name, number in sources.arguments:
        if name in calls:
            numbers = calls[name]
            if numbers is None or number in numbers:
                return True
    return False
