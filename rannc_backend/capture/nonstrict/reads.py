"""Values that a forward on fakes decides by: checks that only raise (`if lengths.max() > limit: raise ...`,
`assert`), and paths (`if mask.all()`).

In: a run of a forward that is told, at each test of a value that is known only when the model runs, whether it
holds. Out: the run's result, the tests that only raise, and the paths that were taken. Each test is tried both
ways. Where the forward ends by a `raise` or an `assert` of its own code one way, whatever is tested after it, it
goes the other: a batch for which it would not is one that the model refuses, and the graph is right for all
others. Where it ends well both ways, the value chooses a path: the graph holds for calls in which it is the same.
A value without inputs is what it is in every call.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from rannc_backend.capture.nonstrict.read_values import ReadValue, TracedValue
from rannc_backend.errors import RanncError, UnsupportedModelError, is_of_user, needing_value, user_location

_MAX_RUNS = 24
_OF_A_CHECK = "rannc_of_a_check"  # of an error
Result = TypeVar("Result")
Evaluate = Callable[[ReadValue], Any]
Ways = tuple[Callable[["Reads"], Any], ...]
Reader = Callable[[TracedValue, str], ReadValue]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a path was chosen by: the answer that the code got, which is `form` of these values."""

    values: tuple[ReadValue, ...]
    form: Callable[..., Any]
    answer: Any
    location: str

    def answer_from(self, evaluate: Evaluate) -> Any:
        """What the code would get now."""
        return self.form(*map(evaluate, self.values))


@dataclass(frozen=True, slots=True)
class Asked:
    """A value as the code sees it: `form` of tensors, which are `tensors` where it may be given back."""

    sources: tuple[TracedValue | None, ...]
    form: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...] = ()


class Reads:
    """Answers to what a forward asks, in its order: those that were given, then those that `evaluate` gives,
    without it False.

    Attributes:
        places: of the tests so far, in the user's code; `checks`: of those that it says to hold (`torch._check`).
        decisions: of those that were evaluated: by their numbers; None where a value has no inputs.
        refusals: why others could not be evaluated.
    """

    def __init__(
        self,
        answers: Sequence[Any] = (),
        evaluate: Evaluate | None = None,
        decisions: Mapping[int, Decision | None] | None = None,
    ) -> None:
        self.answers = list(answers)
        self.places: list[str] = []
        self.checks: list[str] = []
        self.decisions = dict(decisions or {})
        self.refusals: dict[int, UnsupportedModelError] = {}
        self._evaluate = evaluate
        self._reader: Reader | None = None
        self._noted: Callable[[str], None] = lambda place: None

    def begin(self, reader: Reader | None = None, noted: Callable[[str], None] = lambda place: None) -> None:
        """The forward runs from its beginning; `reader` gives what computes a value of its trace; `noted` is told
        of each place where a value is asked for.
        """
        self.places, self.checks = [], []
        self._reader, self._noted = reader, noted

    def decide(self, trace: str, asked: Asked | None = None) -> bool:
        """Whether the next test holds."""
        return bool(self._answer(trace, asked, default=False))

    def number(self, trace: str, asked: Asked) -> Any:
        """The next value, as a number or a list of numbers.

        Raises:
            UnsupportedModelError: nobody can evaluate it, or it is another one in each batch.
        """
        return self._answer(trace, asked, default=None)

    def _answer(self, trace: str, asked: Asked | None, default: bool | None) -> Any:
        self.places.append(user_location(trace))
        self._noted(self.places[-1])
        number = len(self.places) - 1
        if number < len(self.answers):
            return self.answers[number]
        answer = default
        try:
            decision = self._decision(asked, self.places[-1])
        except UnsupportedModelError as error:
            self.refusals[number] = error
            decision = None
        if decision is not None:
            answer = decision.answer
            if default is None and _differs_by_batch(decision):
                raise used_as_number(trace)
            self.decisions[number] = decision if any(value.inputs for value in decision.values) else None
        if answer is None:
            raise used_as_number(trace) from self.refusals.get(number)
        self.answers.append(answer)
        return answer

    def _decision(self, asked: Asked | None, location: str) -> Decision | None:
        """What is asked, evaluated; None where nothing can be."""
        if self._evaluate is None or self._reader is None or asked is None:
            return None
        sources = [source for source in asked.sources if source is not None]
        if len(sources) < len(asked.sources):
            return None
        values = tuple(self._reader(source, location) for source in sources)
        return Decision(values, asked.form, asked.form(*map(self._evaluate, values)), location)


def _differs_by_batch(decision: Decision) -> bool:
    return isinstance(decision.answer, float | complex | list) and any(
        value.has_rows for value in decision.values
    )


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._combined(function, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._combined(lambda own, first: function(first, own), other)


class Unknown:
    """A number that is known only when the model runs: it may be compared, and the comparison tested.

    Attributes:
        reads: told of tests; `trace_of` gives the user's lines at that moment; `asked`: what it is.
    """

    def __init__(self, reads: Reads, trace_of: Callable[[], str], asked: Asked | None = None) -> None:
        self._reads, self._trace_of = reads, trace_of
        self._asked = asked or Asked((None,), lambda value: value)

    def given(self) -> Asked | None:
        """What it is made of; None where these tensors are not known."""
        return self._asked if len(self._asked.tensors) == len(self._asked.sources) else None

    def _combined(self, function: Callable[..., Any], *others: object) -> Unknown:
        if any(isinstance(other, torch.Tensor) for other in others):
            self._refuse()
        parts = [self._asked, *(other._asked if isinstance(other, Unknown) else other for other in others)]
        sources = tuple(source for part in parts if isinstance(part, Asked) for source in part.sources)

        def form(*values: Any) -> Any:
            rest, operands = list(values), []
            for part in parts:
                if isinstance(part, Asked):
                    own, rest = rest[: len(part.sources)], rest[len(part.sources) :]
                    operands.append(part.form(*own))
                else:
                    operands.append(part)
            return function(*operands)

        tensors = tuple(tensor for part in parts if isinstance(part, Asked) for tensor in part.tensors)
        if any(isinstance(other, torch.SymInt | torch.SymFloat) for other in others):
            tensors = ()  # of sizes too: a number of this trace alone
        return Unknown(self._reads, self._trace_of, Asked(sources, form, tensors))

    def __bool__(self) -> bool:
        return self._reads.decide(self._trace_of(), self._asked)

    def __repr__(self) -> str:
        return "<known when the model runs>"

    def _refuse(self, *_: object) -> NoReturn:
        raise used_as_number(self._trace_of())

    def _number(self) -> Any:
        return self._reads.number(self._trace_of(), self._asked)

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return operator.index(self._number())

    def __float__(self) -> float:
        return float(self._number())

    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __neg__ = _forward(operator.neg)
    __abs__ = _forward(operator.abs)
    __add__, __radd__ = _forward(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _forward(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _forward(operator.pow), _reflected(operator.pow)
    __eq__, __ne__ = _forward(operator.eq), _forward(operator.ne)
    __hash__ = _refuse


def used_as_number(trace: str) -> UnsupportedModelError:
    """More is asked of a value than a comparison."""
    return needing_value(
        "a number that is known only when the model runs is used as one", user_location(trace)
    )


def checked_both_ways(
    run: Callable[[Reads], Result],
    evaluate: Evaluate | None = None,
    quick_run: Callable[[Reads], object] | None = None,
) -> tuple[Result, tuple[str, ...], tuple[Decision, ...]]:
    """What `run` gives, the places of tests that only raise, and the paths that were chosen.

    `quick_run`: the same forward without its result, for tests that go the other way.

    Raises UnsupportedModelError for a test that chooses a path and that nobody can evaluate; whatever `run` raises
    without a test.
    """
    answers: list[Any] = []
    known: dict[int, Decision | None] = {}
    for _ in range(_MAX_RUNS):
        reads = Reads(answers, evaluate, known)
        try:
            result = run(reads)
        except Exception as error:
            answers = _turned(reads, 0)
            known = {number: found for number, found in reads.decisions.items() if number < len(answers)}
            if not answers or not is_raised_by_user(error):
                raise
            continue
        unchecked, decisions = _told_apart((quick_run or run, run), reads)
        return result, tuple(dict.fromkeys((*unchecked, *reads.checks))), decisions
    raise _too_many()


def _too_many() -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the forward has more tests of values than are tried both ways ({_MAX_RUNS})"
    )


def _told_apart(ways: Ways, reads: Reads) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """The places of tests that only raise, and the other ones."""
    unchecked: list[str] = []
    decisions: list[Decision] = []
    if len(reads.places) > _MAX_RUNS:
        raise _too_many()
    for number, place in enumerate(reads.places):
        is_evaluated, decision = number in reads.decisions, reads.decisions.get(number)
        if is_evaluated and decision is None:
            continue  # the same in every call
        answer = reads.answers[number]
        if isinstance(answer, bool) and _only_raises(ways, reads, number):
            unchecked.append(place)
        elif decision is not None:
            decisions.append(decision)
        elif number in reads.refusals:
            raise reads.refusals[number]
        else:
            raise needing_value("a path is chosen by a value that is known only when the model runs", place)
    return tuple(dict.fromkeys(unchecked)), tuple(decisions)


def _turned(reads: Reads, fixed: int) -> list[Any]:
    """The answers of a run that an error has ended, with the last False after the `fixed` first ones that was
    not evaluated turned to True; [] if there is none: all ways have led to errors.
    """
    answers = reads.answers[: len(reads.places)]
    while len(answers) > fixed and (answers[-1] or len(answers) - 1 in reads.decisions):
        answers.pop()
    return [*answers[:-1], True] if len(answers) > fixed else []


def _only_raises(ways: Ways, reads: Reads, number: int) -> bool:
    """Whether the forward ends by its own code with the contrary of one answer, however later tests end."""
    answers = [*reads.answers[:number], not reads.answers[number]]
    for _ in range(_MAX_RUNS):
        # What ends in another way holds as it is for a value that every call reads again.
        is_read = number in reads.decisions
        tried, error = _tried(ways[:1] if is_read else ways, answers)
        if error is None:
            return False
        if not is_raised_by_user(error):
            if is_read:
                return False
            raise error
        answers = _turned(tried, number + 1)
        if not answers:
            return True
    return False


def _tried(ways: Ways, answers: Sequence[Any]) -> tuple[Reads, Exception | None]:
    """How the forward ends with these answers: one way, or the other where something else than its own code ends
    that.
    """
    tried: Reads
    error: Exception | None
    for run in ways:
        tried, error = Reads(answers), None
        try:
            run(tried)
        except Exception as raised:
            error = raised
        if error is None or is_raised_by_user(error):
            break
    return tried, error


def is_raised_by_user(error: BaseException) -> bool:
    """Whether an error comes from a `raise` or an `assert` in code that is neither torch's nor Python's nor this
    package's, or by which a function of torch refuses a value that it has read.
    """
    if isinstance(error, RanncError):
        return False
    if getattr(error, _OF_A_CHECK, False):
        return True
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    return is_of_user(place.tb_frame.f_code.co_filename) and _is_raise(place)


def marked_as_check(error: Exception) -> bool:
    """Whether a function of torch has raised this error itself, after it has read a value; it is known as such from
    then on.
    """
    places = [place for place in _places(error) if place.tb_frame.f_code.co_filename != __file__]
    if isinstance(error, RanncError) or not places or not _is_raise(places[-1]):
        return False
    setattr(error, _OF_A_CHECK, True)
    return True


def _places(error: BaseException) -> Iterator[TracebackType]:
    place = error.__traceback__
    while place is not None:
        yield place
        place = place.tb_next


def _is_raise(place: TracebackType) -> bool:
    code = place.tb_frame.f_code
    return dis.opname[code.co_code[place.tb_lasti]] == "RAISE_VARARGS"
