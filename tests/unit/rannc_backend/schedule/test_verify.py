"""The verifier refuses what it should: every mutation of a valid program that the strict executor finds
bad.
"""

from __future__ import annotations

import collections
import random
import sys

import pytest

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import INPUT, OUTPUT, Action, ActionKind, parse_programs
from rannc_backend.schedule.edges import PHASES, EdgeSpec
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import build_order, schedule_named, schedule_names
from rannc_backend.schedule.verify import verify
from tests.schedule_executor import BadProgram, run_program
from tests.schedule_lists import ONE_STAGE

EDGES = [
    EdgeSpec(src=INPUT, dst=0, num_forward_values=1, num_gradient_values=1, forward_bytes_per_row=8),
    EdgeSpec(src=INPUT, dst=2, num_forward_values=1, forward_bytes_per_row=8),
    EdgeSpec(
        src=0,
        dst=1,
        num_forward_values=1,
        num_gradient_values=1,
        forward_bytes_per_row=100,
        gradient_bytes_per_row=50,
    ),
    EdgeSpec(
        src=1,
        dst=2,
        num_forward_values=2,
        num_gradient_values=1,
        forward_bytes_per_row=10,
        gradient_bytes_per_row=5,
    ),
    EdgeSpec(src=0, dst=2, num_forward_values=1, num_gradient_values=1),
    EdgeSpec(src=1, dst=OUTPUT, num_forward_values=1),
    EdgeSpec(src=2, dst=OUTPUT, num_forward_values=1, num_gradient_values=1),
]
NUM_STAGES = 3
# On two lanes: of "interleaved" with messages both ways, of "zb_v" with a value from stage to stage on one lane.
MORE_EDGES = [*EDGES, EdgeSpec(src=2, dst=3, num_forward_values=1, num_gradient_values=1)]
CASES = [(schedule, phase) for schedule in schedule_names() for phase in PHASES]


def table(schedule: str) -> tuple[int, list[EdgeSpec]]:
    """How many stages, and their edges."""
    return (NUM_STAGES, EDGES) if schedule in ONE_STAGE else (4, MORE_EDGES)


def make(schedule: str, phase: str, num_micro_batches: int) -> dict[int, tuple[Action, ...]]:
    num_stages, edges = table(schedule)
    return lower(build_order(schedule, num_stages, num_micro_batches), edges, phase, num_micro_batches)


def check(programs, schedule: str, phase: str, num_micro_batches: int):
    (num_stages, edges), described = table(schedule), schedule_named(schedule)
    bounds = described.in_flight_bounds(num_stages, num_micro_batches) if phase == "train" else None
    lanes = described.lanes(num_stages)
    return verify(programs, edges, num_micro_batches, phase, max_in_flight=bounds, lanes=lanes)


def replaced(programs, lane: int, actions) -> dict[int, tuple[Action, ...]]:
    return {**programs, lane: tuple(actions)}


def rerouted(action: Action, generator: random.Random) -> Action:
    """Another action: one field of `action` changed."""
    while True:
        field = generator.choice(["stage", "kind", "micro_batch", "peer"])
        value = {
            "stage": generator.choice([INPUT, OUTPUT, 0, 1, 2]),
            "kind": generator.choice(list(ActionKind)),
            "micro_batch": generator.randrange(4),
            "peer": generator.choice([INPUT, OUTPUT, 0, 1, 2]),
        }[field]
        values = {name: getattr(action, name) for name in Action.__slots__}
        try:
            changed = Action(**{**values, field: value})
        except ValueError:
            continue
        if changed != action:
            return changed


def mutants(programs, generator: random.Random, num_random: int):
    """(what was done, the mutated programs): every drop and every swap of neighbours, and random others."""
    for lane, program in programs.items():
        for i, action in enumerate(program):
            yield f"drop {action}", replaced(programs, lane, program[:i] + program[i + 1 :])
        for i in range(len(program) - 1):
            swapped = (program[i + 1], program[i])
            yield (
                f"swap {program[i]} {program[i + 1]}",
                replaced(programs, lane, program[:i] + swapped + program[i + 2 :]),
            )
    for _ in range(num_random):
        lane = generator.choice(list(programs))
        actions = list(programs[lane])
        i, j = generator.randrange(len(actions)), generator.randrange(len(actions))
        what = generator.choice(["duplicate", "swap", "move", "reroute", "to lane", "swap kind"])
        text = f"{what} {actions[i]} {actions[j]}"
        if what == "duplicate":
            actions.insert(j, actions[i])
        elif what == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif what == "move":
            actions.insert(j, actions.pop(i))
        elif what == "reroute":
            actions[i] = rerouted(actions[i], generator)
            text = f"reroute {programs[lane][i]} to {actions[i]}"
        elif what == "swap kind":
            # The two most alike: the same kind and peer, other micro-batches.
            alike = [
                k
                for k, a in enumerate(actions)
                if (a.kind, a.stage, a.peer) == (actions[i].kind, actions[i].stage, actions[i].peer)
            ]
            j = generator.choice(alike)
            actions[i], actions[j] = actions[j], actions[i]
            text = f"{what} {actions[i]} {actions[j]}"
        else:
            other = generator.choice(list(programs))
            moved = actions.pop(i)
            position = generator.randrange(len(programs[other]))
            target = actions if other == lane else list(programs[other])
            target.insert(min(position, len(target)), moved)
            yield text, replaced(replaced(programs, lane, actions), other, target)
            continue
        yield text, replaced(programs, lane, actions)


def is_bad(programs, schedule: str, phase: str, num_micro_batches: int) -> bool:
    """The executor's judgement, under several delays."""
    num_stages, edges = table(schedule)
    lanes = schedule_named(schedule).lanes(num_stages)
    try:
        for seed in range(3):
            run_program(programs, edges, num_micro_batches, phase, seed, lanes)
    except BadProgram:
        return True
    return False


@pytest.mark.parametrize(("schedule", "phase"), CASES)
def test_mutation_score(schedule, phase):
    num_micro_batches = 4
    programs = make(schedule, phase, num_micro_batches)
    check(programs, schedule, phase, num_micro_batches)
    num_bad, survivors = 0, []
    for text, mutant in mutants(programs, random.Random(7), 300):
        if mutant == programs:
            continue
        try:
            check(mutant, schedule, phase, num_micro_batches)
            refused = False
        except ScheduleError:
            refused = True
        if is_bad(mutant, schedule, phase, num_micro_batches):
            num_bad += 1
            if not refused:
                survivors.append(text)
    assert num_bad > 200
    assert not survivors


def test_two_swapped_sends_against_two_receives_are_seen():
    """The case that a simulator without queues misses: nothing hangs, the values are exchanged."""
    text = """
lane 0: 0F0 0F1 0SF0>1 0SF1>1 0DF0>1 0DF1>1
lane 1: 1RF0<0 1RF1<0 1WF0<0 1F0 1WF1<0 1F1
"""
    edges = [EdgeSpec(src=0, dst=1, num_forward_values=1)]
    verify(parse_programs(text), edges, 2, "infer")
    swapped = parse_programs(text.replace("0SF0>1 0SF1>1", "0SF1>1 0SF0>1"))
    with pytest.raises(ScheduleError, match="1RF0<0: .*would get the message of 0SF1>1, which lane 0 sends"):
        verify(swapped, edges, 2, "infer")
    with pytest.raises(BadProgram, match="computed other values"):
        run_program(swapped, edges, 2, "infer", 0)


def hand_edges() -> list[EdgeSpec]:
    return [EdgeSpec(src=0, dst=1, num_forward_values=1, num_gradient_values=1)]


GOOD = """
lane 0: 0F0 0SF0>1 0RB0<1 0DF0>1 0WB0<1 0A 0B0 0G
lane 1: 1RF0<0 1WF0<0 1F0 1A 1B0 1SB0>0 1DB0>0 1G
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F0 0SF0>1", "0SF0>1 0F0", r"action 0SF0>1: \(stage 0, action number 0\) comes before 0F0"),
        ("1WF0<0 1F0", "1F0 1WF0<0", r"action 1F0: .*number 1\) comes before 1WF0<0"),
        (" 0DF0>1", "", r"action 0DF0>1: \(stage 0, action number 7\) is missing"),
        ("1G", "1G 1G", r"action 1G: .*is there twice"),
        ("1A 1B0", "1B0 1A", r"action 1A: .*must stand before the last backward"),
        ("0A 0B0 0G", "0A 0G 0B0", r"action 0G: .*must come after all backwards"),
        ("0SF0>1", "0SF0>O", r"action 0SF0>O: .*does not belong into lane 0"),
        ("1B0", "1B1", r"action 1B1: .*does not belong"),
        ("0RB0<1 0DF0>1 0WB0<1", "0DF0>1 0WB0<1 0RB0<1", r"0WB0<1: .*comes before 0RB0<1"),
    ],
)
def test_errors_name_stage_number_and_action(old, new, message):
    verify(parse_programs(GOOD), hand_edges(), 1, "train")
    assert old in GOOD
    with pytest.raises(ScheduleError, match=message) as caught:
        verify(parse_programs(GOOD.replace(old, new)), hand_edges(), 1, "train")
    assert caught.value.action in message


def test_a_deadlock_names_the_circle():
    edges = [EdgeSpec(src=0, dst=1, num_forward_values=1), EdgeSpec(src=INPUT, dst=0, num_forward_values=1)]
    # Lane 0 waits for the rows of lane 1, which sends them only after the message of lane 0 is in.
    text = """
lane 0: ISF0>0 0RF0<I 0WF0<I 0F0 0SF0>1 0DF0>1 IDF0>0
lane 1: 1RF0<0 1WF0<0 ISF0>0 1F0 IDF0>0
"""
    with pytest.raises(ScheduleError) as caught:
        verify(parse_programs(text), edges, 1, "infer")
    assert str(caught.value).splitlines()[0] == (
        "action 0WF0<I: (stage 0, action number 2) never ends: lane 0 at action number 2 (0WF0<I) waits for "
        "ISF0>0 of lane 1; lane 1 at action number 1 (1WF0<0) waits for 0SF0>1 of lane 0"
    )


def test_a_done_that_blocks_its_own_receiver_is_a_deadlock():
    """With buffered sends this would run; with rendezvous both lanes wait for the other's receive."""
    edges = hand_edges()
    text = """
lane 0: 0F0 0SF0>1 0DF0>1 0F1 0SF1>1 0DF1>1 0RB0<1 0WB0<1 0B0 0RB1<1 0WB1<1 0A 0B1 0G
lane 1: 1RF0<0 1WF0<0 1F0 1B0 1SB0>0 1DB0>0 1RF1<0 1WF1<0 1F1 1A 1B1 1SB1>0 1DB1>0 1G
"""
    with pytest.raises(
        ScheduleError,
        match=r"0DF1>1.*waits for 1RF1<0 of lane 1; lane 1 .*1DB0>0.* waits for 0RB0<1 of lane 0",
    ):
        verify(parse_programs(text), edges, 2, "train")


def test_bounds():
    m = 6
    programs = make("fill_drain", "train", m)
    with pytest.raises(ScheduleError, match="0F3.*brings 4 micro-batches in flight, the bound is 3"):
        check(programs, "1f1b", "train", m)
    programs = make("1f1b", "train", m)
    lane = programs[1]
    dones = tuple(a for a in lane if a.kind is ActionKind.DONE_GRADIENT)
    late = tuple(a for a in lane if a not in dones) + dones
    with pytest.raises(
        ScheduleError, match="1SB3>0.*takes send buffer number 4 of channel 1>0 B, the bound is 3"
    ):
        check(replaced(programs, 1, late), "1f1b", "train", m)
    receives = tuple(a for a in lane if str(a).startswith("1RF"))
    early = receives + tuple(a for a in lane if a not in receives)
    with pytest.raises(
        ScheduleError, match="1RF4<0.*takes receive buffer number 5 of channel 0>1 F, the bound is 4"
    ):
        check(replaced(programs, 1, early), "1f1b", "train", m)


def test_peaks_count_buffers_and_bytes():
    peaks = check(make("1f1b", "train", 8), "1f1b", "train", 8)
    assert [peaks[stage].num_in_flight for stage in range(NUM_STAGES)] == [3, 2, 1]
    # Stage 1: before a forward its own message and the next one from stage 0 (100 bytes), and a gradient from
    # stage 2 (5).
    assert (peaks[1].num_receive_buffers, peaks[1].receive_bytes_per_row) == (3, 205.0)
    assert (peaks[1].num_send_buffers, peaks[1].send_bytes_per_row) == (6, 120.0)


def test_lanes_and_stages_must_fit():
    with pytest.raises(ScheduleError, match="lanes must be numbered"):
        verify({1: ()}, [], 1, "infer")
    with pytest.raises(ScheduleError, match="names stage 1"):
        verify({0: build_order("fill_drain", 1, 1)[0]}, hand_edges(), 1, "infer")


def test_verification_takes_twice_as_long_for_twice_as_many_micro_batches():
    """Counted in calls, of Python functions and of others, which no busy machine changes."""

    def num_calls(num_micro_batches):
        edges = [EdgeSpec(src=INPUT, dst=s, num_forward_values=1) for s in (0, 7)] + [
            EdgeSpec(src=7, dst=OUTPUT, num_forward_values=1)
        ]
        edges += [EdgeSpec(src=s, dst=s + 1, num_forward_values=1, num_gradient_values=1) for s in range(7)]
        programs = lower(build_order("1f1b", 8, num_micro_batches), edges, "train", num_micro_batches)
        counts = collections.Counter()
        sys.setprofile(lambda _frame, event, _argument: counts.update((event,)))
        try:
            verify(programs, edges, num_micro_batches, "train")
        finally:
            sys.setprofile(None)
        return counts["call"] + counts["c_call"]

    assert num_calls(128) < 2.02 * num_calls(64)
