"""The chain's recurrences equal the simulated programs, and the bubble is what theory says."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.ir.action import Channel
from rannc_backend.schedule.chain import chains_step_seconds, longest_path
from rannc_backend.schedule.edges import EdgeSpec
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import build_order, schedule_named
from rannc_backend.schedule.simulator import StageSeconds, simulate
from tests.schedule_lists import ONE_STAGE

SECONDS = st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(0.001, 10.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """One stage's place in the columns of `chains_step_seconds`."""

    forward_seconds: float
    backward_seconds: float = 0.0
    message_seconds: float = 0.0
    gradient_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    num_buckets: int = 1
    weight_seconds: float = 0.0


def chain_step_seconds(stages: list[ChainStage], num_micro_batches: int, schedule: str) -> float:
    columns = [np.array([[float(value) for value in column]]) for column in zip(*map(astuple, stages))]
    *columns, weight = columns
    return float(
        chains_step_seconds(*columns, num_micro_batches=num_micro_batches, schedule=schedule, weight=weight)[
            0
        ]
    )


@st.composite
def chains(draw: st.DrawFn) -> list[ChainStage]:
    stages = []
    for index in range(draw(st.integers(1, 7))):
        backward = draw(SECONDS)
        stages.append(
            ChainStage(
                forward_seconds=draw(SECONDS),
                backward_seconds=backward,
                weight_seconds=backward * draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
                message_seconds=draw(SECONDS) if index else 0.0,
                gradient_seconds=draw(SECONDS) if index else 0.0,
                allreduce_seconds=draw(SECONDS),
                num_buckets=draw(st.integers(1, 4)),
            )
        )
    return stages


def simulated_seconds(stages: list[ChainStage], num_micro_batches: int, schedule: str) -> float:
    edges = [
        EdgeSpec(src=i, dst=i + 1, num_forward_values=1, num_gradient_values=1)
        for i in range(len(stages) - 1)
    ]
    programs = lower(build_order(schedule, len(stages), num_micro_batches), edges, "train", num_micro_batches)
    messages = {}
    for index, stage in enumerate(stages[1:]):
        messages[Channel(index, index + 1, "F")] = stage.message_seconds
        messages[Channel(index + 1, index, "B")] = stage.gradient_seconds
    costs = [
        StageSeconds(
            forward=stage.forward_seconds,
            backward=stage.backward_seconds,
            weight=stage.weight_seconds,
            allreduce=stage.allreduce_seconds,
            num_buckets=stage.num_buckets,
        )
        for stage in stages
    ]
    return simulate(programs, costs, messages).makespan_seconds


@settings(max_examples=400, deadline=None)
@given(stages=chains(), num_micro_batches=st.integers(1, 12), schedule=st.sampled_from(ONE_STAGE))
def test_a_chain_takes_as_long_as_its_simulated_programs(
    stages: list[ChainStage], num_micro_batches: int, schedule: str
) -> None:
    expected = simulated_seconds(stages, num_micro_batches, schedule)
    assert chain_step_seconds(stages, num_micro_batches, schedule) == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("schedule", ONE_STAGE)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (2, 3), (4, 8), (8, 4), (64, 128)])
def test_the_bubble_of_equal_stages_is_what_theory_says(
    schedule: str, num_stages: int, num_micro_batches: int
) -> None:
    stages = [ChainStage(forward_seconds=1.0, backward_seconds=2.0, weight_seconds=1.0)] * num_stages
    seconds = chain_step_seconds(stages, num_micro_batches, schedule)
    # Of the forwards and backwards of a micro-batch on a stage, what nobody can do meanwhile: F + B, or F + I - W.
    idle = (num_stages - 1) * (1 if schedule_named(schedule).splits_backward else 3)
    if schedule_named(schedule).splits_backward and num_micro_batches < num_stages:
        # The first stages have no W left while they wait for their last I.
        idle += min(num_stages - num_micro_batches, num_stages - 1)
    assert seconds - 3 * num_micro_batches == pytest.approx(idle, abs=1e-9)


def test_many_chains_at_once_are_each_priced_alone() -> None:
    generator = np.random.default_rng(1)
    columns = [generator.random((5, 4)) for _ in range(5)]
    weight = columns[1] / 2
    columns[2][:, 0] = columns[3][:, 0] = 0.0
    buckets = np.full((5, 4), 3.0)
    for schedule in ONE_STAGE:
        together = chains_step_seconds(
            *columns, buckets, num_micro_batches=6, schedule=schedule, weight=weight
        )
        for index, seconds in enumerate(together):
            stages = [
                ChainStage(**dict(zip(ChainStage.__slots__, (*map(float, row), 3, float(row[1]) / 2))))
                for row in np.stack([column[index] for column in columns], axis=1)
            ]
            assert chain_step_seconds(stages, 6, schedule) == seconds


@settings(max_examples=150, deadline=None)
@given(stages=chains(), number=st.integers(1, 7), schedule=st.sampled_from(ONE_STAGE))
def test_the_longest_path_takes_as_long_as_the_step(
    stages: list[ChainStage], number: int, schedule: str
) -> None:
    described = schedule_named(schedule)
    forward, backward, message, gradient, allreduce, buckets, weight = np.array(
        [astuple(each) for each in stages]
    ).T
    weight = weight if described.splits_backward else 0 * weight
    last = weight if described.splits_backward else backward
    terms = np.stack(
        [
            forward,
            backward,
            backward - weight,
            weight,
            message,
            gradient,
            allreduce - last * (1 - 1 / buckets),
            allreduce / buckets,
        ]
    )
    path = longest_path(terms, described, number)
    assert path.seconds == pytest.approx(chain_step_seconds(stages, number, schedule), rel=1e-9, abs=1e-12)
    assert (path.counts * terms).sum() == pytest.approx(path.seconds, rel=1e-9, abs=1e-12)
    # With other terms it is a path all the same.
    assert (path.counts * terms[:, ::-1]).sum() <= longest_path(terms[:, ::-1], described, number).seconds * (
        1 + 1e-9
    )
