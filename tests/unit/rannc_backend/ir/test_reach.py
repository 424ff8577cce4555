"""Where no gradient comes, beside a search through every way that it could have taken."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.reach import Reach, Sources, WrittenCall

OUTPUTS = 3


@dataclass(frozen=True)
class Example:
    reach: Reach
    outputs: frozenset[int]
    shown: dict[str, frozenset[int]]


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Calls in the order of backward: each result goes to outputs and to arguments of calls before it."""
    calls: list[WrittenCall] = []

    def sources() -> Sources:
        places = st.sampled_from([(call.name, number) for call in calls for number in range(2)])
        arguments = draw(st.frozensets(places, max_size=3)) if calls else frozenset()
        return Sources(draw(st.frozensets(st.integers(0, OUTPUTS - 1), max_size=1)), arguments)

    for number in range(draw(st.integers(0, 5))):
        results = {place: sources() for place in range(draw(st.integers(0, 2)))}
        calls.append(WrittenCall(f"call{number}", draw(st.sampled_from("abc")), results))
    reach = Reach(
        parameters={f"p{place}": sources() for place in range(3)},
        inputs={f"x{place}": sources() for place in range(2)},
        calls=tuple(calls),
    )
    shown = draw(st.dictionaries(st.sampled_from("abc"), st.frozensets(st.integers(0, 1))))
    return Example(reach, draw(st.frozensets(st.integers(0, OUTPUTS - 1))), shown)


def _ways(example: Example, sources: Sources, shown: dict[str, frozenset[int]]) -> bool:
    """Whether there is a way from an output that is differentiated."""
    if sources.outputs & example.outputs:
        return True
    by_name = {call.name: call for call in example.reach.calls}
    return any(
        number in shown.get(by_name[name].operator, (number,))
        and any(_ways(example, result, shown) for result in by_name[name].results.values())
        for name, number in sources.arguments
    )


@given(examples())
def test_values_that_no_way_leads_to(example: Example) -> None:
    reach = example.reach
    for shown, found in (
        (example.shown, reach.without(example.outputs, example.shown)),
        ({}, reach.by_graph(example.outputs)),
    ):
        for values, without in ((reach.parameters, found.parameters), (reach.inputs, found.inputs)):
            wanted = {name for name, sources in values.items() if not _ways(example, sources, shown)}
            assert without == wanted


@given(examples())
def test_a_result_is_absent_where_no_call_of_its_operator_has_a_gradient_of_it(example: Example) -> None:
    present, every = set(), set()
    for call in example.reach.calls:
        for number, sources in call.results.items():
            every.add((call.operator, number))
            if _ways(example, sources, {}):
                present.add((call.operator, number))
    assert example.reach.absent_results(example.outputs) == every - present


@pytest.mark.parametrize(
    ("shown", "without"),
    [({}, set()), ({"experts": frozenset({1})}, {"unused"}), ({"experts": frozenset()}, {"unused", "used"})],
)
def test_what_an_operator_has_shown_counts(shown: dict[str, frozenset[int]], without: set[str]) -> None:
    call = WrittenCall("call", "experts", {0: Sources(frozenset({0}))})
    parameters = {
        "unused": Sources(arguments=frozenset({("call", 0)})),
        "used": Sources(arguments=frozenset({("call", 1)})),
        "beside": Sources(frozenset({0}), frozenset({("call", 0)})),
    }
    reach = Reach(parameters=parameters, calls=(call,))
    assert reach.without(frozenset({0}), shown).parameters == without
