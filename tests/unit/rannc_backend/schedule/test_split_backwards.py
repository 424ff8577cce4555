"""Schedules whose backwards have two parts: their orders, how long they take, what they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import Action, ActionKind
from rannc_backend.schedule.chain import chains_step_seconds, order_seconds
from rannc_backend.schedule.edges import EdgeSpec
from rannc_backend.schedule.list_run import LaneCosts, lower_bound_seconds
from rannc_backend.schedule.list_scheduled import SCHEDULE, ListScheduled
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import build_order, held_bytes, schedule_named
from rannc_backend.schedule.verify import verify
from tests.schedule_executor import run_program
from tests.schedule_lists import ONE_STAGE

SPLITTING = [name for name in ONE_STAGE if schedule_named(name).splits_backward]
CHAIN = [EdgeSpec(src=i, dst=i + 1, num_forward_values=1, num_gradient_values=1) for i in range(7)]


def list_scheduled(costs: tuple[LaneCosts, ...]) -> ListScheduled:
    return ListScheduled(name="made", eager_backward=True, splits_backward=True, costs=costs)


def step_seconds(
    costs: tuple[LaneCosts, ...], num_micro_batches: int, schedule: str | ListScheduled
) -> float:
    """By the simulation that prices all plans."""

    def column(values: list[float]) -> np.ndarray:
        return np.array([values])

    weights = [cost.weights for cost in costs]
    return float(
        chains_step_seconds(
            column([cost.forward for cost in costs]),
            column([cost.inputs + cost.weights for cost in costs]),
            column([0.0, *(cost.message for cost in costs[1:])]),
            column([0.0, *(cost.gradient for cost in costs[1:])]),
            column([0.0] * len(costs)),
            column([1.0] * len(costs)),
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            weight=column(weights),
        )[0]
    )


@st.composite
def chains(draw: st.DrawFn) -> tuple[LaneCosts, ...]:
    """Uneven stages, as those of models are; messages are shorter than what is computed."""
    seconds, part = st.floats(0.5, 1.5), st.sampled_from([0.0, 0.1, 0.3])
    costs = []
    for _ in range(draw(st.integers(1, 8))):
        forward = draw(seconds)
        costs.append(
            LaneCosts(
                forward=forward,
                inputs=forward * draw(st.floats(0.8, 1.6)),
                weights=forward * draw(st.floats(0.5, 1.2)),
                message=draw(part),
                gradient=draw(part),
            )
        )
    return tuple(costs)


def test_zb_h1_runs_each_w_as_late_as_there_are_stages_before_it() -> None:
    order = build_order("zb_h1", 3, 4)
    assert " ".join(map(str, order[0])) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert " ".join(map(str, order[1])) == "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"
    assert " ".join(map(str, order[2])) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


@pytest.mark.parametrize("name", SPLITTING)
@pytest.mark.parametrize(("num_stages", "number"), [(1, 1), (2, 1), (3, 2), (4, 8), (8, 5)])
def test_orders_hold_what_they_say_and_run(name: str, num_stages: int, number: int) -> None:
    schedule = schedule_named(name)
    edges = CHAIN[: num_stages - 1]
    for phase in ("train", "forward", "backward", "infer"):
        programs = lower(schedule.order(num_stages, number), edges, phase, number)
        bounds = schedule.in_flight_bounds(num_stages, number) if phase == "train" else None
        peaks = verify(
            programs,
            edges,
            number,
            phase,
            max_in_flight=bounds,
            max_kept=schedule.kept_bounds(num_stages, number),
        )
        if name == "zb_h1" and phase == "train":
            assert [peak.num_kept for peak in peaks.values()] == [
                min(stage + 1, number) for stage in range(num_stages)
            ]
        run_program(programs, edges, number, phase, seed=number)


def test_what_belongs_to_a_second_part_is_verified() -> None:
    programs = lower(build_order("zb_h1", 2, 3), CHAIN[:1], "train", 3)
    swapped = [*programs[1]]
    first, second = (
        swapped.index(Action(1, kind, 0)) for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    )
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ScheduleError, match="1W0.*comes before 1I0"):
        verify({**programs, 1: tuple(swapped)}, CHAIN[:1], 3, "train")
    without = tuple(action for action in programs[0] if str(action) != "0W1")
    with pytest.raises(ScheduleError, match="W"):
        verify({**programs, 0: without}, CHAIN[:1], 3, "train")
    with pytest.raises(ScheduleError, match="keeps 2 micro-batches for their second part, the bound is 1"):
        verify(programs, CHAIN[:1], 3, "train", max_kept=[1, 1])


def test_gradients_are_summed_in_the_sequence_of_1f1b() -> None:
    for name in SPLITTING:
        for lane in build_order(name, 4, 9):
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT):
                assert [action.micro_batch for action in lane if action.kind is kind] == list(range(9))


@settings(max_examples=500, deadline=None)
@given(costs=chains(), rounds=st.integers(2, 6))
def test_a_list_schedule_is_near_to_what_no_order_can_beat(costs: tuple[LaneCosts, ...], rounds: int) -> None:
    number = rounds * len(costs)
    seconds = step_seconds(costs, number, list_scheduled(costs))
    bound = lower_bound_seconds(costs, number)
    assert bound * (1 - 1e-9) <= seconds <= 1.05 * bound
    for name in ONE_STAGE:
        assert bound * (1 - 1e-9) <= step_seconds(costs, number, name)


@settings(max_examples=150, deadline=None)
@given(
    costs=chains(),
    number=st.integers(1, 12),
    flight=st.floats(0.5, 3.0),
    kept=st.floats(0.5, 3.0),
    room=st.floats(1.0, 6.0),
)
def test_a_list_schedule_keeps_to_its_memory_and_comes_to_its_end(
    costs: tuple[LaneCosts, ...], number: int, flight: float, kept: float, room: float
) -> None:
    limit = room * max(flight, kept)
    costs = tuple(
        LaneCosts(
            forward=cost.forward,
            inputs=cost.inputs,
            weights=cost.weights,
            message=cost.message,
            gradient=cost.gradient,
            flight_bytes=flight,
            kept_bytes=kept,
            limit_bytes=limit,
        )
        for cost in costs
    )
    schedule = list_scheduled(costs)
    edges = CHAIN[: len(costs) - 1]
    programs = lower(schedule.order(len(costs), number), edges, "train", number)
    verify(
        programs,
        edges,
        number,
        "train",
        max_in_flight=schedule.in_flight_bounds(len(costs), number),
        max_kept=schedule.kept_bounds(len(costs), number),
    )
    held = held_bytes(schedule, len(costs), number, [flight] * len(costs), [kept] * len(costs))
    assert max(held) <= limit * (1 + 1e-9)


def test_more_memory_makes_a_list_schedule_no_slower_and_some_make_it_faster() -> None:
    seconds = []
    for room in (1, 2, 4, 8, 32):
        costs = (LaneCosts(flight_bytes=1.0, kept_bytes=1.0, limit_bytes=float(room)),) * 6
        seconds.append(step_seconds(costs, 18, list_scheduled(costs)))
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.5 * seconds[-1]
    assert seconds[-1] == pytest.approx(lower_bound_seconds(costs, 18))


def test_without_costs_all_seconds_are_one() -> None:
    assert SCHEDULE.order(3, 6) == list_scheduled((LaneCosts(),) * 3).order(3, 6)
    assert SCHEDULE.in_flight_bounds(3, 6) == SCHEDULE.kept_bounds(3, 6) == (6, 6, 6)


def test_an_order_that_gets_stuck_has_no_seconds() -> None:
    one = np.ones(2)
    good = build_order("1f1b", 2, 2)
    assert order_seconds(good, one, one, one, one, 0 * one) is not None
    # The second backward of the first stage comes before what it waits for is asked for.
    stuck = (tuple(sorted(good[0], key=lambda action: action.kind != ActionKind.BACKWARD)), good[1])
    assert order_seconds(stuck, one, one, one, one, 0 * one) is None
