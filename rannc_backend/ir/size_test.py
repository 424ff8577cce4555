"""What a model's code asks of its batch size: tests that chose a path when the model was captured.

In: nothing. Out: `SizeTest`, made by the capture and held against the rows of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SizeTest:
    """A condition that a graph's number of rows, over all ranks, must meet.

    Attributes:
        text: the condition in words of the code; `location` of the user's line.
        holds: of a number of rows.
    """

    text: str
    location: str
    holds: Callable[[int], bool] = field(compare=False, repr=False)


def first_broken(tests: Sequence[SizeTest], num_rows: int) -> SizeTest | None:
    """The first test that a batch does not meet."""
    return next((test for test in tests if not test.holds(num_rows)), None)
