"""Actions and programs as text: what prints parses back, and nothing else parses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.action import (
    INPUT,
    MESSAGE_KINDS,
    NO_MICRO_BATCH,
    NO_PEER,
    OUTPUT,
    REDUCTION_KINDS,
    Action,
    ActionKind,
    Channel,
    format_programs,
    parse_programs,
)

EXAMPLES = (
    "2F0 2B0 2I0 2W13 2SF0>3 3RF0<2 3WF0<2 3SB0>2 2RB0<3 2WB0<3 2DF0>3 3DB0>2 2A 2G ISF0>2 IDF0>2 2RF0<I "
    "2WF0<I 2SF0>O 2DF0>O ORF0<2 OWF0<2 OSB0>2 ODB0>2 2RB0<O 2WB0<O 2SB0>I 2DB0>I IRB0<2 IWB0<2 10SF11>12"
).split()


@st.composite
def actions(draw) -> Action:
    kind = draw(st.sampled_from(sorted(ActionKind)))
    stage, peer = draw(st.integers(0, 40)), NO_PEER
    if kind in MESSAGE_KINDS:
        peer = draw(st.integers(OUTPUT, 40))
        if peer >= 0:
            stage = draw(st.sampled_from([INPUT, OUTPUT, stage]))
    return Action(stage, kind, NO_MICRO_BATCH if kind in REDUCTION_KINDS else draw(st.integers(0, 300)), peer)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_parse_and_print(text):
    assert str(Action.parse(text)) == text


def test_parse_gives_the_fields():
    assert Action.parse("3RF12<I") == Action(3, ActionKind.RECEIVE_FORWARD, 12, INPUT)
    assert Action.parse("OSB0>2") == Action(OUTPUT, ActionKind.SEND_GRADIENT, 0, 2)
    assert Action.parse("2A") == Action(2, ActionKind.ALLOW_REDUCTIONS)


@given(actions())
def test_round_trip(action):
    assert Action.parse(str(action)) == action


@given(
    st.dictionaries(st.integers(0, 20), st.lists(actions(), max_size=30).map(tuple), max_size=4),
    st.integers(20, 120),
)
def test_programs_round_trip(programs, width):
    text = format_programs(programs, width=width)
    assert parse_programs(text) == programs
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2F-1",
        "2F00",
        "02F0",
        "2A0",
        "2F0>3",
        "IF0",
        "IA",
        "2SF0",
        "2SF0<3",
        "2RF0>3",
        "2SF>3",
        "ISF0>O",
        "2SX0>3",
        "2f0",
        "2F0 ",
        "2F0\n",
        "٢F0",
    ],
)
def test_bad_texts_are_refused(text):
    with pytest.raises(ValueError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0", "line 1: '0F0' starts no lane"),
        ("lane 0: 0F0\n0B0", "line 2: '0B0' starts no lane"),
        ("lane 0: 0F0\n\nlane 0: 0B0", "line 3: lane 0 is there twice"),
        ("lane 0: 0F0\n  0X0", "line 2: '0X0' is not an action"),
    ],
)
def test_bad_programs_name_the_line(text, message):
    with pytest.raises(ValueError, match=message):
        parse_programs(text)


def test_comments_and_empty_lines_are_skipped():
    assert parse_programs("# a note\n\nlane 1: 1F0\n  1B0\n") == {
        1: (Action.parse("1F0"), Action.parse("1B0"))
    }


def test_actions_sort_hash_and_stay_frozen():
    unsorted = [Action.parse(text) for text in ("1F0", "0SF1>1", "0F1", "0F0")]
    assert [str(action) for action in sorted(unsorted)] == ["0F0", "0F1", "0SF1>1", "1F0"]
    assert len({Action.parse("0F0"), Action.parse("0F0")}) == 1
    with pytest.raises(AttributeError):
        unsorted[0].stage = 3


@pytest.mark.parametrize(
    ("text", "counterpart", "channel"),
    [
        ("2SF5>3", "3RF5<2", Channel(2, 3, "F")),
        ("3RF5<2", "2SF5>3", Channel(2, 3, "F")),
        ("3WF5<2", "2SF5>3", Channel(2, 3, "F")),
        ("2DF5>3", "3RF5<2", Channel(2, 3, "F")),
        ("3SB5>2", "2RB5<3", Channel(3, 2, "B")),
        ("OSB5>2", "2RB5<O", Channel(OUTPUT, 2, "B")),
        ("IWB5<2", "2SB5>I", Channel(2, INPUT, "B")),
    ],
)
def test_counterpart_and_channel(text, counterpart, channel):
    assert str(Action.parse(text).counterpart) == counterpart
    assert Action.parse(text).channel == channel


def test_computes_have_no_channel():
    for attribute in ("channel", "counterpart"):
        with pytest.raises(ValueError, match="moves no message"):
            getattr(Action.parse("2F0"), attribute)


def test_imports_neither_torch_nor_sympy():
    code = (
        "import sys, rannc_backend.ir.action, rannc_backend.schedule.verify, "
        "rannc_backend.schedule.lowering; assert not {'torch', 'sympy'} & set(sys.modules), "
        "sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
