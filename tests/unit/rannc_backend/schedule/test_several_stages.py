"""Lanes that have several stages: their orders, how long they take, what they hold, and orders that are merged for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.ir.action import Action, ActionKind
from rannc_backend.schedule.description import Lanes, Order
from rannc_backend.schedule.edges import PHASES, EdgeSpec
from rannc_backend.schedule.list_run import (
    LaneCosts,
    Rule,
    list_order,
    lower_bound_seconds,
)
from rannc_backend.schedule.list_scheduled import SCHEDULE as LIST_SCHEDULED
from rannc_backend.schedule.lowering import lower, lower_lanes, receive_windows, waiting_bytes
from rannc_backend.schedule.orders import (
    build_order,
    held_bytes,
    on_lanes,
    order_on,
    peaks_of,
    schedule_named,
)
from rannc_backend.schedule.simulator import StageSeconds, simulate
from rannc_backend.schedule.verify import verify
from tests.schedule_executor import run_program
from tests.schedule_lists import FIXED, ONE_STAGE, SEVERAL_STAGES, num_stages_for


def chain(num_stages: int) -> list[EdgeSpec]:
    return [
        EdgeSpec(src=s, dst=s + 1, num_forward_values=1, num_gradient_values=1) for s in range(num_stages - 1)
    ]


def seconds_of(
    name: str, num_stages: int, number: int, stage: StageSeconds, first: StageSeconds | None = None
) -> float:
    programs = lower_lanes(build_order(name, num_stages, number), chain(num_stages), "train", number)
    return simulate(programs, [first or stage] + [stage] * (num_stages - 1)).makespan_seconds


def test_lanes() -> None:
    assert schedule_named("interleaved").lanes(8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert schedule_named("zb_v").lanes(8) == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert schedule_named("1f1b").lanes(3) == ((0,), (1,), (2,))
    assert schedule_named("v_half").lanes(6) == ((0, 5), (1, 4), (2, 3))
    assert SEVERAL_STAGES == ("interleaved", "zb_v", "v_half")


@pytest.mark.parametrize(
    ("num_lanes", "number"), [(2, 2), (2, 3), (2, 8), (4, 4), (4, 7), (4, 16), (8, 11), (8, 20), (8, 32)]
)
def test_interleaved_idles_half_as_long_as_1f1b(num_lanes: int, number: int) -> None:
    """(p - 1) (F + B) of stages of half the length, from p micro-batches on."""
    half = StageSeconds(forward=1.0, backward=2.0)
    idle = seconds_of("interleaved", 2 * num_lanes, number, half) - 2 * number * 3.0
    assert idle == pytest.approx((num_lanes - 1) * 3.0)
    whole = StageSeconds(forward=2.0, backward=4.0)
    assert seconds_of("1f1b", num_lanes, number, whole) - number * 6.0 == pytest.approx((num_lanes - 1) * 6.0)


@pytest.mark.parametrize(
    ("num_lanes", "number", "more"),
    [(2, 2, 0), (2, 9, 0), (4, 8, 0), (4, 17, 0), (5, 10, 0), (8, 16, 1), (8, 32, 2)],
)
def test_zb_v_idles_at_the_begin_alone(num_lanes: int, number: int, more: int) -> None:
    """(p - 1) F, and with many lanes one or two F more; no lane holds more than one stage more than 1F1B's first one, which has p
    micro-batches of two stages. The backward of the first stage is W alone.
    """
    third = StageSeconds(forward=1.0, backward=2.0, weight=1.0)
    first = replace(third, weight=2.0)
    idle = seconds_of("zb_v", 2 * num_lanes, number, third, first) - 2 * number * 3.0
    assert num_lanes - 1 - 1e-9 <= idle <= num_lanes - 1 + more + 1e-9
    described = schedule_named("zb_v")
    ones = [1.0] * 2 * num_lanes
    held = held_bytes(described, 2 * num_lanes, number, ones, ones)
    assert max(held[lane] + held[2 * num_lanes - 1 - lane] for lane in range(num_lanes)) <= 2 * num_lanes + 1


@pytest.mark.parametrize("num_lanes", [2, 3, 4, 5, 8, 16])
def test_v_half_holds_half_on_all_lanes(num_lanes: int) -> None:
    """p + 3 stages of a micro-batch at most, on every lane as many, but for two; ranks compute nothing for three quarters as long
    as under 1F1B, also where the gradient of the inputs takes longer than the others, and the number of micro-batches does not
    change that.
    """
    described, num_stages = schedule_named("v_half"), 2 * num_lanes
    ones = [1.0] * num_stages
    held = held_bytes(described, num_stages, 6 * num_lanes, ones, ones)
    of_lanes = [held[lane] + held[num_stages - 1 - lane] for lane in range(num_lanes)]
    assert max(of_lanes) <= num_lanes + 3 and min(of_lanes) >= max(of_lanes) - 2
    for inputs in (1.0, 1.3):
        stage = StageSeconds(forward=1.0, backward=inputs + 1.0, weight=1.0)
        first = replace(stage, weight=inputs + 1.0)
        work = 2 * (inputs + 2)
        idle = [
            seconds_of("v_half", num_stages, number, stage, first) - number * work
            for number in (6 * num_lanes, 9 * num_lanes)
        ]
        assert max(idle) <= 0.75 * (num_lanes - 1) * work + 4.0
        assert idle[1] == pytest.approx(idle[0]) or inputs > 1


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 7])
def test_v_half_repeats_what_a_lane_does(num_lanes: int) -> None:
    order = schedule_named("v_half").order(2 * num_lanes, 5)
    for program in order:
        for number in range(5):
            own = [(each.kind, each.stage) for each in program if each.micro_batch == number]
            assert own == [(each.kind, each.stage) for each in program if each.micro_batch == 0]
            assert len(own) == 6


@pytest.mark.parametrize(("num_lanes", "number"), [(2, 4), (3, 6), (3, 5), (4, 8), (4, 6)])
@pytest.mark.parametrize("per_lane", [3, 4, 6])
def test_more_stages_on_each_lane_idle_shorter(per_lane: int, num_lanes: int, number: int) -> None:
    """(p - 1) (F + B) of stages of that length, whatever their number, and one F more at most."""
    described = schedule_named("interleaved").with_stages_per_lane(per_lane)
    assert described is not None
    num_stages = per_lane * num_lanes
    programs = lower_lanes(described.order(num_stages, number), chain(num_stages), "train", number)
    step = simulate(programs, [StageSeconds(forward=1.0, backward=2.0)] * num_stages)
    idle = step.makespan_seconds - per_lane * number * 3.0
    assert (num_lanes - 1) * 3.0 - 1e-9 <= idle <= (num_lanes - 1) * 3.0 + 1.0 + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    num_lanes=st.integers(2, 5),
    per_lane=st.integers(2, 3),
    number=st.integers(1, 12),
    name=st.sampled_from(SEVERAL_STAGES),
)
def test_no_message_waits_for_its_receive(num_lanes: int, per_lane: int, number: int, name: str) -> None:
    """Receives are posted so early that the programs are as fast as if all were posted at the begin; and what has come
    before it is used is what is said to wait.
    """
    described = schedule_named(name).with_stages_per_lane(per_lane if name == "interleaved" else 2)
    assert described is not None
    num_stages = described.stages_per_lane * num_lanes
    order, edges = described.order(num_stages, number), chain(num_stages)
    seconds = [StageSeconds(forward=1.0, backward=2.0, weight=1.0 * described.splits_backward)] * num_stages
    programs = lower_lanes(order, edges, "train", number)
    wide = lower(order, edges, "train", number, window=number, first_at_begin=True)
    assert simulate(programs, seconds).makespan_seconds == simulate(wide, seconds).makespan_seconds
    windows = receive_windows(order)
    ones = [1.0] * num_stages
    waiting = waiting_bytes(described, number, ones, ones)
    for stage in range(num_stages):
        expected = sum(max(0, windows.get((other, stage), 0) - 1) for other in (stage - 1, stage + 1))
        assert waiting[stage] == expected
    assert waiting_bytes(schedule_named("1f1b"), number, ones, ones) == (0.0,) * num_stages


def test_with_other_numbers_of_micro_batches_interleaved_is_still_faster_than_1f1b() -> None:
    half, whole = StageSeconds(forward=1.0, backward=2.0), StageSeconds(forward=2.0, backward=4.0)
    for num_lanes, number in ((2, 3), (4, 5), (4, 7), (8, 11), (8, 20)):
        assert seconds_of("interleaved", 2 * num_lanes, number, half) < seconds_of(
            "1f1b", num_lanes, number, whole
        )


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(ONE_STAGE),
    num_lanes=st.integers(1, 4),
    per_lane=st.integers(1, 3),
    number=st.integers(1, 9),
    phase=st.sampled_from(PHASES),
    turned=st.booleans(),
)
def test_any_schedule_runs_on_any_lanes(
    name: str, num_lanes: int, per_lane: int, number: int, phase: str, turned: bool
) -> None:
    num_stages = num_lanes * per_lane
    lanes: Lanes = tuple(tuple(range(lane, num_stages, num_lanes)) for lane in range(num_lanes))
    if turned:  # neighbours on one lane
        lanes = tuple(tuple(range(lane * per_lane, (lane + 1) * per_lane)) for lane in range(num_lanes))
    edges = chain(num_stages)
    order = order_on(schedule_named(name), lanes, number)
    for stage, own in enumerate(schedule_named(name).order(num_stages, number)):
        lane = next(place for place, stages in enumerate(lanes) if stage in stages)
        assert tuple(action for action in order[lane] if action.stage == stage) == own
    programs = lower_lanes(order, edges, phase, number)
    verify(programs, edges, number, phase, window=number, lanes=lanes)
    run_program(programs, edges, number, phase, number, lanes)


def test_a_schedule_for_several_stages_runs_on_its_own_lanes_alone() -> None:
    described = schedule_named("interleaved")
    assert on_lanes(described, ((0, 2), (1, 3))) == described
    for lanes in (((0, 2, 4), (1, 3, 5)), ((0, 1, 2, 3),)):
        made = on_lanes(described, lanes)
        assert (
            made is not None
            and made.stages_per_lane == len(lanes[0])
            and made.lanes(len(lanes) * len(lanes[0])) == lanes
        )
        assert on_lanes(schedule_named("zb_v"), lanes) is None
    for lanes in (((0, 3), (1, 2)), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 2, 3), (1,))):
        assert on_lanes(described, lanes) is None
        with pytest.raises(ValueError, match="does not run on lanes"):
            order_on(described, lanes, 2)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_bounds_are_what_the_programs_hold(name: str, number: int) -> None:
    described, num_stages = schedule_named(name), num_stages_for(name, 3)
    lanes = described.lanes(num_stages)
    programs = lower_lanes(described.order(num_stages, number), chain(num_stages), "train", number)
    bounds = described.in_flight_bounds(num_stages, number)
    found = verify(
        programs, chain(num_stages), number, "train", max_in_flight=bounds, window=number, lanes=lanes
    )
    assert [found[stage].num_in_flight for stage in range(num_stages)] == list(bounds)
    assert [flying for flying, _ in peaks_of(described, num_stages, number)] == list(bounds)
    if described.splits_backward:
        kept = described.kept_bounds(num_stages, number)
        assert all(found[stage].num_kept <= kept[stage] for stage in range(num_stages))


@st.composite
def laned_costs(draw: st.DrawFn) -> tuple[tuple[LaneCosts, ...], Lanes]:
    """Uneven stages on lanes of two, the second half in either sequence; memory for a few micro-batches."""
    num_lanes = draw(st.integers(1, 4))
    limit = draw(st.sampled_from([float("inf"), 2.0, 3.0, 6.0]))
    costs = tuple(
        LaneCosts(
            forward=draw(st.floats(0.5, 1.5)),
            inputs=draw(st.floats(0.5, 2.0)),
            weights=draw(st.floats(0.3, 1.2)),
            message=draw(st.sampled_from([0.0, 0.1])),
            gradient=draw(st.sampled_from([0.0, 0.1])),
            flight_bytes=draw(st.sampled_from([0.1, 0.5])),
            kept_bytes=draw(st.sampled_from([0.1, 1.0])),
            limit_bytes=limit,
        )
        for _ in range(2 * num_lanes)
    )
    name = draw(st.sampled_from(SEVERAL_STAGES))
    return costs, schedule_named(name).lanes(2 * num_lanes)


def check_limits(order: Order, lanes: Lanes, costs: tuple[LaneCosts, ...]) -> None:
    """No lane holds more than its stages may, but for what one micro-batch alone needs."""
    changes = {
        ActionKind.FORWARD: (1, 0),
        ActionKind.BACKWARD_INPUT: (-1, 1),
        ActionKind.BACKWARD_WEIGHT: (0, -1),
    }
    for program, lane in zip(order, lanes, strict=True):
        limit = sum(costs[stage].limit_bytes for stage in lane)
        alone = sum(max(costs[stage].flight_bytes, costs[stage].kept_bytes) for stage in lane)
        held = 0.0
        for action in program:
            flying, kept = changes[action.kind]
            held += flying * costs[action.stage].flight_bytes + kept * costs[action.stage].kept_bytes
            assert held <= max(limit, alone) + 1e-9


@settings(max_examples=150, deadline=None)
@given(case=laned_costs(), number=st.integers(1, 12))
def test_orders_of_plans_run_within_their_memory_and_above_the_bound(
    case: tuple[tuple[LaneCosts, ...], Lanes], number: int
) -> None:
    costs, lanes = case
    num_stages = len(costs)
    for rule in (Rule(most_in_flight=2.0, forward_first=True), Rule(most_in_flight=0.0, forward_first=False)):
        found = list_order(costs, lanes, number, rule)
        if found is None:
            continue
        check_limits(found.order, lanes, costs)
        programs = lower_lanes(found.order, chain(num_stages), "train", number)
        verify(programs, chain(num_stages), number, "train", window=number, lanes=lanes)
        assert found.seconds >= lower_bound_seconds(costs, number, lanes) * (1 - 1e-9)
        # A run is ended when it cannot stay within a limit, and never before.
        again = list_order(costs, lanes, number, rule, limit_seconds=found.seconds * (1 + 1e-9))
        assert again is not None and again.order == found.order
        assert list_order(costs, lanes, number, rule, limit_seconds=found.seconds * (1 - 1e-9)) is None


def test_list_scheduled_takes_the_lanes_of_its_plan() -> None:
    lanes = schedule_named("zb_v").lanes(6)
    made = replace(LIST_SCHEDULED, costs=(LaneCosts(),) * 6, lanes_of_plan=lanes)
    assert made.lanes(6) == lanes and made.lanes(4) == ((0,), (1,), (2,), (3,))
    order = made.order(6, 9)
    assert [sorted({action.stage for action in program}) for program in order] == [[0, 5], [1, 4], [2, 3]]
    edges = chain(6)
    programs = lower_lanes(order, edges, "train", 9)
    stage = StageSeconds(forward=1.0, backward=2.0, weight=1.0)
    # Never slower than the order for equal stages, here at the bound: the fill, and 9 micro-batches of two stages.
    assert simulate(programs, [stage] * 6).makespan_seconds == pytest.approx(2 + 9 * 6)


def test_nothing_is_awaited_between_stages_of_one_lane() -> None:
    order = order_on(schedule_named("1f1b"), ((0, 1),), 2)
    program = lower_lanes(order, chain(2), "train", 2)[0]
    texts = list(map(str, program))
    for m in range(2):
        made, sent, done, used = (
            texts.index(text) for text in (f"0F{m}", f"0SF{m}>1", f"0DF{m}>1", f"1WF{m}<0")
        )
        assert texts.index(f"1RF{m}<0") < made < sent < done and sent < used < texts.index(f"1F{m}")
    assert isinstance(program[0], Action)


def test_memory_that_is_just_enough_is_enough() -> None:
    """Two micro-batches fill it; the second I needs no more than it frees."""
    costs = (LaneCosts(flight_bytes=1.0, kept_bytes=1.0, limit_bytes=2.0),)
    found = list_order(costs, ((0,),), 2, Rule(most_in_flight=0.0, forward_first=True))
    assert found is not None and found.seconds == 6.0
    assert " ".join(map(str, found.order[0])) == "0F0 0F1 0I0 0I1 0W0 0W1"
    tight = (replace(costs[0], limit_bytes=1.9),)
    found = list_order(tight, ((0,),), 2, Rule(most_in_flight=0.0, forward_first=True))
    assert found is not None and " ".join(map(str, found.order[0])) == "0F0 0I0 0W0 0F1 0I1 0W1"


@pytest.mark.parametrize("name", SEVERAL_STAGES)
@pytest.mark.parametrize(("num_lanes", "number"), [(17, 64), (32, 16), (11, 7)])
def test_many_lanes_come_to_their_end(name: str, num_lanes: int, number: int) -> None:
    edges = chain(2 * num_lanes)
    programs = lower_lanes(build_order(name, 2 * num_lanes, number), edges, "train", number)
    lanes = schedule_named(name).lanes(2 * num_lanes)
    verify(programs, edges, number, "train", window=number, lanes=lanes)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(SEVERAL_STAGES),
    num_lanes=st.integers(1, 6),
    number=st.integers(1, 20),
    skips=st.sets(st.tuples(st.integers(0, 10), st.integers(1, 11)), max_size=6),
)
def test_values_that_skip_stages_do_not_stop_lanes(
    name: str, num_lanes: int, number: int, skips: set[tuple[int, int]]
) -> None:
    num_stages = 2 * num_lanes
    pairs = {(edge.src, edge.dst) for edge in chain(num_stages)}
    pairs |= {(a, b) for a, b in skips if a < b < num_stages}
    edges = [EdgeSpec(src=a, dst=b, num_forward_values=1, num_gradient_values=1) for a, b in sorted(pairs)]
    lanes = schedule_named(name).lanes(num_stages)
    for phase in PHASES:
        programs = lower_lanes(build_order(name, num_stages, number), edges, phase, number)
        verify(programs, edges, number, phase, window=number, lanes=lanes)
        run_program(programs, edges, number, phase, number, lanes)
