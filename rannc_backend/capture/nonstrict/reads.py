"""Checks of values that only raise (`if lengths.max() > limit: raise ...`, `assert`) in a forward on fakes.

In: a run of a forward that is told, at each test of a value that is known only when the model runs, whether it
holds. Out: the run's result, and where the tests are. Each test is tried both ways. Where the forward ends by a
`raise` or an `assert` of its own code one way, it goes the other: a batch for which it would not is one that the
model refuses, and the graph is right for all others. Where it ends well both ways, the value chooses a path, and
the model is refused.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from rannc_backend.errors import UnsupportedModelError, is_of_user, user_location

_MAX_RUNS = 24
Result = TypeVar("Result")


class Reads:
    """Answers to the tests of a forward, in their order: those that were given, then False."""

    def __init__(self, answers: Sequence[bool] = ()) -> None:
        self.answers = list(answers)
        self.places: list[str] = []  # of the tests so far, in the user's code

    def begin(self) -> None:
        """The forward runs from its beginning."""
        self.places = []

    def decide(self, trace: str) -> bool:
        """Whether the next test holds."""
        self.places.append(user_location(trace))
        if len(self.places) > len(self.answers):
            self.answers.append(False)
        return self.answers[len(self.places) - 1]


class Unknown:
    """A number that is known only when the model runs: it may be compared, and the comparison tested.

    Attributes:
        reads: told of tests; `trace_of` gives the user's lines at that moment.
    """

    def __init__(self, reads: Reads, trace_of: Callable[[], str]) -> None:
        self._reads, self._trace_of = reads, trace_of

    def _other(self, *others: object) -> Unknown:
        if any(isinstance(other, torch.Tensor) for other in others):
            self._refuse()
        return Unknown(self._reads, self._trace_of)

    __lt__ = __le__ = __gt__ = __ge__ = _other
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __abs__ = _other
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = _other
    __eq__ = __ne__ = _other  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._reads.decide(self._trace_of())

    def __repr__(self) -> str:
        return "<known when the model runs>"

    def _refuse(self, *_: object) -> NoReturn:
        raise used_as_number(self._trace_of())

    __int__ = __float__ = __index__ = __hash__ = _refuse


def used_as_number(trace: str) -> UnsupportedModelError:
    """More is asked of a value than a comparison."""
    return UnsupportedModelError(
        "a number that is known only when the model runs is used as one",
        location=user_location(trace),
        cure="write it with torch.where, or decide it outside of the compiled model.",
    )


def checked_both_ways(run: Callable[[Reads], Result]) -> tuple[Result, tuple[str, ...]]:
    """What `run` gives where all tests of values only raise, and their places.

    Raises UnsupportedModelError for a test that chooses a path; whatever `run` raises without a test.
    """
    answers: list[bool] = []
    for _ in range(_MAX_RUNS):
        reads = Reads(answers)
        try:
            result = run(reads)
        except Exception as error:
            answers = _turned(reads, 0)
            if not answers or not is_raised_by_user(error):
                raise
            continue
        for number in range(len(reads.places)):
            _check_raises(run, reads, number)
        return result, tuple(dict.fromkeys(reads.places))
    raise UnsupportedModelError(
        f"the forward has more tests of values than are tried both ways ({_MAX_RUNS})"
    )


def _turned(reads: Reads, fixed: int) -> list[bool]:
    """The answers of a run that an error has ended, with the last False after the `fixed` first ones turned to
    True; [] if there is none: all ways have led to errors.
    """
    answers = reads.answers[: len(reads.places)]
    while len(answers) > fixed and answers[-1]:
        answers.pop()
    return [*answers[:-1], True] if len(answers) > fixed else []


def _check_raises(run: Callable[[Reads], Any], reads: Reads, number: int) -> None:
    """That the forward ends by its own code with the contrary of one answer."""
    answers = [*reads.answers[:number], not reads.answers[number]]
    for _ in range(_MAX_RUNS):
        tried = Reads(answers)
        try:
            run(tried)
        except Exception as error:
            if not is_raised_by_user(error):
                raise
            answers = _turned(tried, number + 1)
            if not answers:
                return
            continue
        break
    raise UnsupportedModelError(
        "a path is chosen by a value that is known only when the model runs",
        location=reads.places[number],
        cure="write it with torch.where, or decide it outside of the compiled model.",
    )


def is_raised_by_user(error: BaseException) -> bool:
    """Whether an error comes from a `raise` or an `assert` in code that is neither torch's nor Python's."""
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    code = place.tb_frame.f_code
    return is_of_user(code.co_filename) and dis.opname[code.co_code[place.tb_lasti]] == "RAISE_VARARGS"
