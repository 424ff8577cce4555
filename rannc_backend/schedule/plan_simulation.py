"""A plan run in simulated time, as planned or with another schedule or number of micro-batches.

In: a `Plan`; nothing else is known here, so costs at numbers of rows that the plan does not list are
interpolated. Out: a
`PlanSimulation`: the step, what every stage does when, its share of idle time and its peak memory.

Terms. Chain: the model of communication that the planner minimises. Each stage waits for one message from the
stage before it (forward) and one from the stage after it (gradients) per micro-batch, whatever values those
carry. Span: a forward or backward of one micro-batch on one stage, or what is left of the all-reduce when its
last backward has ended. Where backwards have two parts, "backward" is the first and "weights" the second.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from rannc_backend.errors import PlanError
from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, NO_MICRO_BATCH, ActionKind, Channel
from rannc_backend.ir.plan import MAX_AMOUNT, ClusterAssumption, Plan, RowCost, StagePlan, lane_bytes
from rannc_backend.schedule.chain import chains_step_seconds
from rannc_backend.schedule.description import Lanes, Schedule
from rannc_backend.schedule.edges import chain_edges
from rannc_backend.schedule.list_run import LaneCosts, limits_in_lane
from rannc_backend.schedule.list_scheduled import ListScheduled
from rannc_backend.schedule.lowering import lower_lanes, waiting_bytes
from rannc_backend.schedule.orders import ScheduleName, held_bytes, on_lanes, order_on, schedule_named
from rannc_backend.schedule.simulator import SimulatedStep, StageSeconds, simulate

MAX_SPANS = 1_000_000  # forwards and backwards that are simulated: about a minute
_MAX_BYTES = 2.0**62
SpanKind = Literal["forward", "backward", "weights", "allreduce"]
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
_SPAN_KINDS: dict[ActionKind, SpanKind] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward",
    ActionKind.BACKWARD_WEIGHT: "weights",
    ActionKind.WAIT_REDUCTIONS: "allreduce",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Seconds since the step began; `micro_batch` is NO_MICRO_BATCH for an all-reduce."""

    kind: SpanKind
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSimulation:
    """One stage in the simulated step; each of its ranks does the same.

    Seconds of forward, backward and messages are of one micro-batch. `idle_share`: part of the step without
    computing.
    `is_listed`: the plan lists costs at this number of rows, or between two such numbers; else they are a
    guess.
    """

    index: int
    rows: int
    num_in_flight: int
    forward_seconds: float
    backward_seconds: float
    receive_seconds: float
    gradient_seconds: float
    allreduce_seconds: float
    busy_seconds: float
    idle_share: float
    workspace_bytes: int
    peak_bytes: int
    is_listed: bool
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSimulation:
    """The simulated step of a plan under one schedule. `idle_share`: mean over the ranks that have a
    stage.
    """

    schedule: ScheduleName
    num_micro_batches: int
    step_seconds: float
    idle_share: float
    stages: tuple[StageSimulation, ...]
    lanes: tuple[tuple[int, ...], ...]

    def fits(self, memory_bytes: int) -> bool:
        """Whether no rank needs more."""
        return all(self.lane_peak_bytes(lane) <= memory_bytes for lane in self.lanes)

    def lane_peak_bytes(self, lane: Sequence[int]) -> int:
        """Of a rank that has these stages: see `ir.plan.lane_bytes`."""
        return lane_bytes((self.stages[x].peak_bytes, self.stages[x].workspace_bytes) for x in lane)


def simulate_plan(
    plan: Plan, schedule: ScheduleName | None = None, num_micro_batches: int | None = None
) -> PlanSimulation:
    """Simulate one training step of `plan`; None takes the plan's own setting.

    Raises:
        ValueError: an unknown schedule, or a number of micro-batches below 1.
        PlanError: a step of more than `MAX_SPANS` spans.
    """
    schedule = plan.schedule if schedule is None else schedule
    count = plan.num_micro_batches if num_micro_batches is None else num_micro_batches
    _check_size(plan.num_stages, count)
    planned = schedule_of(plan)
    described = planned if schedule == plan.schedule else _described(plan, schedule)
    order = order_on(described, plan.lanes, count)
    costs = [stage_cost(plan, stage, count) for stage in plan.stages]
    messages = {}
    for index in range(1, plan.num_stages):
        if plan.stages[index - 1].ranks != plan.stages[index].ranks:
            messages[Channel(index - 1, index, FORWARD_VALUES)] = costs[index].receive_seconds
            messages[Channel(index, index - 1, GRADIENTS)] = costs[index].gradient_seconds
    programs = lower_lanes(order, chain_edges(plan.num_stages), "train", count)
    step = simulate(programs, [cost.seconds for cost in costs], messages)
    spans = _spans(step, plan.num_stages)
    in_flight = described.in_flight_bounds(plan.num_stages, count)
    own_costs = [
        cost_at(stage, replica_rows(plan, stage.num_replicas, plan.num_micro_batches))[0]
        for stage in plan.stages
    ]
    own_held = _held_bytes(plan, own_costs, planned, plan.num_micro_batches)
    held = _held_bytes(plan, [cost.at_rows for cost in costs], described, count)
    busy = {
        stage: seconds for lane, seconds in zip(plan.lanes, step.busy_seconds, strict=True) for stage in lane
    }
    new_values = max(stage.predicted.new_values_seconds for stage in plan.stages)
    whole = step.makespan_seconds + new_values
    stages = tuple(
        _stage_simulation(
            stage,
            costs[stage.index],
            spans[stage.index],
            num_in_flight=in_flight[stage.index],
            peak_bytes=_peak_bytes(
                plan, stage, costs[stage.index].at_rows, held[stage.index], own_held[stage.index]
            ),
            idle_share=max(0.0, 1.0 - busy[stage.index] / whole) if whole else 0.0,
        )
        for stage in plan.stages
    )
    # Ranks that share cores: a rank that waits gives its core to others, but the cores have all of the work
    # to do.
    work = sum(
        len(stage.ranks) * simulated.busy_seconds
        for stage, simulated in zip(plan.stages, stages, strict=True)
    )
    return PlanSimulation(
        schedule=schedule,
        num_micro_batches=count,
        step_seconds=max(step.makespan_seconds, work / (plan.cluster.num_devices * plan.cluster.core_share))
        + new_values
        + plan.offload_seconds,
        idle_share=sum(stages[lane[0]].idle_share * plan.stages[lane[0]].num_replicas for lane in plan.lanes)
        / plan.num_working_ranks,
        stages=stages,
        lanes=plan.lanes,
    )


def _check_size(num_stages: int, num_micro_batches: int) -> None:
    if num_micro_batches < 1:
        raise ValueError(f"need at least one micro-batch, got {num_micro_batches}")
    if 2 * num_micro_batches * num_stages > MAX_SPANS:
        raise PlanError(
            f"{num_micro_batches} micro-batches on {num_stages} stages are too many to simulate one by one",
            cure=f"simulate at most {MAX_SPANS // (2 * num_stages)} micro-batches.",
        )


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule; an order that is made for plans, for this one."""
    return _described(plan, plan.schedule)


def _described(plan: Plan, name: ScheduleName) -> Schedule:
    described = on_lanes(schedule_named(name), plan.lanes)
    if described is None:
        raise PlanError(
            f"schedule {name} is for several stages on each rank, others than this plan has there",
            cure=f"plan with schedule={name}.",
        )
    if not isinstance(described, ListScheduled):
        return described
    _check_size(plan.num_stages, plan.num_micro_batches)
    limits = _limits(plan)
    costs = tuple(replace(lane_costs(plan, stage), limit_bytes=limits[stage.index]) for stage in plan.stages)
    return replace(described, costs=costs, lanes_of_plan=plan.lanes)


def _limits(plan: Plan) -> dict[int, float]:
    """By stage, what its micro-batches may hold: see `list_run.limits_in_lane`."""
    limits: dict[int, float] = {}
    for lane in plan.lanes:
        costs = [plan.stages[index].predicted for index in lane]
        workspaces = [cost.workspace_bytes for cost in costs]
        others = [cost.peak_bytes - cost.workspace_bytes - cost.activation_bytes for cost in costs]
        limits |= zip(lane, limits_in_lane(plan.memory_limit_bytes, others, workspaces), strict=True)
    return limits


def lane_costs(plan: Plan, stage: StagePlan) -> LaneCosts:
    """What a run of an order needs of a stage, on one of its ranks; without a limit of memory."""
    cost = stage_cost(plan, stage, plan.num_micro_batches)
    return LaneCosts(
        forward=cost.seconds.forward,
        inputs=cost.seconds.backward - cost.seconds.weight,
        weights=cost.seconds.weight,
        message=cost.receive_seconds,
        gradient=cost.gradient_seconds,
        flight_bytes=cost.seconds.activation_bytes,
        kept_bytes=cost.seconds.kept_bytes,
        message_bytes=cost.at_rows.rows * stage.received_bytes_per_row,
        gradient_bytes=cost.at_rows.rows * stage.gradient_bytes_per_row,
    )


class PipelineShape(NamedTuple):
    """What the order of the actions and uneven stages make of a pipeline.

    `bubble`: share of the step in which the ranks that have a stage compute nothing, in a run without messages and
    reductions. `balance`: seconds of the fastest stage over those of the slowest, of one micro-batch on a replica.
    """

    bubble: float
    balance: float

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        lanes: Lanes,
        num_micro_batches: int,
        stages: Sequence[StageSeconds],
        replicas: Sequence[int],
    ) -> PipelineShape:
        """Of these stages, each on so many ranks."""
        work = [stage.forward + stage.backward for stage in stages]
        busy = num_micro_batches * sum(map(operator.mul, replicas, work))
        step = _compute_seconds(schedule, lanes, num_micro_batches, stages)
        there = step * sum(replicas[lane[0]] for lane in lanes)
        return cls(
            bubble=max(0.0, 1 - busy / there) if there else 0.0,
            balance=min(work) / max(work) if max(work) else 1.0,
        )


def _compute_seconds(
    schedule: Schedule, lanes: Lanes, num_micro_batches: int, stages: Sequence[StageSeconds]
) -> float:
    """Of a step without messages and reductions."""
    if len(lanes) == len(stages):
        columns = np.array([[stage.forward, stage.backward, stage.weight] for stage in stages])
        forward, backward, weight = columns.T[:, None]
        nothing = np.zeros_like(forward)
        step = chains_step_seconds(
            forward, backward, nothing, nothing, nothing, nothing + 1,
            num_micro_batches=num_micro_batches, schedule=schedule, weight=weight,
        )  # fmt: skip
        return float(step[0])
    order = order_on(schedule, lanes, num_micro_batches)
    programs = lower_lanes(order, chain_edges(len(stages)), "train", num_micro_batches)
    return simulate(programs, [replace(stage, allreduce=0.0) for stage in stages], {}).makespan_seconds


def shape_of(plan: Plan) -> PipelineShape:
    """Of a plan with its own order and number of micro-batches; `PlanError` where lanes have too many spans."""
    number = plan.num_micro_batches
    if len(plan.lanes) < plan.num_stages:
        _check_size(plan.num_stages, number)
    stages = [stage_cost(plan, stage, number).seconds for stage in plan.stages]
    return PipelineShape.of(schedule_of(plan), plan.lanes, number, stages, plan.stage_replicas)


def most_micro_batches(plan: Plan) -> int:
    """The largest number of micro-batches in which every replica of every stage gets a row."""
    return max(1, plan.batch_rows // max(plan.stage_replicas))


def replica_rows(plan: Plan, num_replicas: int, num_micro_batches: int) -> int:
    """Rows of the largest part that a replica gets of the largest micro-batch."""
    largest_micro_batch = -(-plan.batch_rows // num_micro_batches)
    return -(-largest_micro_batch // num_replicas)


def cost_at(stage: StagePlan, rows: int) -> tuple[RowCost, bool]:
    """Costs of one micro-batch of `rows` rows on a replica, and whether the plan lists numbers of rows on
    both sides.

    On the line through the two nearest listed numbers of rows; in proportion to the rows where only one is
    listed.
    """
    listed = stage.at_rows
    place = bisect.bisect_left([entry.rows for entry in listed], rows)
    if place < len(listed) and listed[place].rows == rows:
        return listed[place], True
    if len(listed) == 1:
        share = rows / listed[0].rows
        low, high, position = listed[0], listed[0], 0.0
    else:
        share = 1.0
        first = min(max(place - 1, 0), len(listed) - 2)
        low, high = listed[first], listed[first + 1]
        position = (rows - low.rows) / (high.rows - low.rows)

    def value(name: str, most: float) -> float:
        begin, end = getattr(low, name), getattr(high, name)
        return min(max(share * (begin + (end - begin) * position), 0.0), most)

    def num_bytes(name: str) -> int:
        return math.ceil(value(name, _MAX_BYTES))

    cost = RowCost(
        rows=rows,
        forward_seconds=value("forward_seconds", MAX_AMOUNT),
        backward_seconds=value("backward_seconds", MAX_AMOUNT),
        weight_seconds=value("weight_seconds", MAX_AMOUNT),
        kept_bytes=num_bytes("kept_bytes"),
        activation_bytes=num_bytes("activation_bytes"),
        workspace_bytes=num_bytes("workspace_bytes"),
    )
    return cost, 0 < place < len(listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage and of its messages, at the number of rows that `at_rows` is for; see `cost_at`."""

    seconds: StageSeconds
    at_rows: RowCost
    is_listed: bool
    receive_seconds: float
    gradient_seconds: float


def stage_cost(plan: Plan, stage: StagePlan, num_micro_batches: int) -> StageTimes:
    """Of one micro-batch, of so many."""
    own_rows = replica_rows(plan, stage.num_replicas, plan.num_micro_batches)
    rows = replica_rows(plan, stage.num_replicas, num_micro_batches)
    cost, is_listed = cost_at(stage, rows)
    if rows == own_rows:
        update = {
            "forward_seconds": stage.predicted.forward_seconds,
            "backward_seconds": stage.predicted.backward_seconds,
            "weight_seconds": stage.predicted.weight_seconds,
        }
        cost = cost.model_copy(update=update)
    receive, gradient = _message_seconds(plan, stage, rows)
    planned = sum(_message_seconds(plan, stage, own_rows))
    # What the planner charged for its own number of rows is known; the links of the cluster say how it grows.
    correction = stage.predicted.transfer_seconds / planned if planned else 0.0
    return StageTimes(
        seconds=StageSeconds(
            forward=cost.forward_seconds,
            backward=cost.backward_seconds,
            weight=min(cost.weight_seconds, cost.backward_seconds),
            allreduce=stage.predicted.allreduce_seconds,
            num_buckets=stage.num_buckets,
            activation_bytes=cost.activation_bytes,
            kept_bytes=cost.kept_bytes,
        ),
        at_rows=cost,
        is_listed=is_listed,
        receive_seconds=receive * correction,
        gradient_seconds=gradient * correction,
    )


def _message_seconds(plan: Plan, stage: StagePlan, rows: int) -> tuple[float, float]:
    """Forward message from the stage before, and the gradients that go back, by the slowest link between the
    two.
    """
    if stage.index == 0:
        return 0.0, 0.0
    cluster = plan.cluster
    latency, rate = _link(cluster, (*plan.stages[stage.index - 1].ranks, *stage.ranks))
    if not rate:
        return 0.0, 0.0
    forward, backward = (
        latency + rows * amount / rate if amount else 0.0
        for amount in (stage.received_bytes_per_row, stage.gradient_bytes_per_row)
    )
    return forward, backward


def _link(cluster: ClusterAssumption, ranks: Sequence[int]) -> tuple[float, float]:
    """Latency and bytes per second of the slowest link among `ranks`."""
    if len({rank // cluster.devices_per_node for rank in ranks}) <= 1:
        return cluster.intra_node_latency_seconds, cluster.intra_node_bytes_per_second
    return cluster.inter_node_latency_seconds, cluster.inter_node_bytes_per_second


def _spans(step: SimulatedStep, num_stages: int) -> list[list[Span]]:
    """Per stage its spans in the order of time."""
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    for timed in step.timeline:
        kind = _SPAN_KINDS.get(timed.action.kind)
        if kind is not None and (kind != "allreduce" or timed.end > timed.start):
            micro_batch = NO_MICRO_BATCH if kind == "allreduce" else timed.action.micro_batch
            span = Span(kind=kind, micro_batch=micro_batch, start=timed.start, end=timed.end)
            spans[timed.action.stage].append(span)
    return [sorted(of_stage, key=lambda span: (span.start, span.end)) for of_stage in spans]


def _stage_simulation(
    stage: StagePlan,
    cost: StageTimes,
    spans: list[Span],
    *,
    num_in_flight: int,
    peak_bytes: int,
    idle_share: float,
) -> StageSimulation:
    return StageSimulation(
        index=stage.index,
        rows=cost.at_rows.rows,
        num_in_flight=num_in_flight,
        forward_seconds=cost.seconds.forward,
        backward_seconds=cost.seconds.backward,
        receive_seconds=cost.receive_seconds,
        gradient_seconds=cost.gradient_seconds,
        allreduce_seconds=cost.seconds.allreduce,
        busy_seconds=sum(span.end - span.start for span in spans if span.kind != "allreduce"),
        idle_share=idle_share,
        workspace_bytes=stage.predicted.workspace_bytes
        if peak_bytes == stage.predicted.peak_bytes
        else cost.at_rows.workspace_bytes,
        peak_bytes=peak_bytes,
        is_listed=cost.is_listed,
        spans=tuple(spans),
    )


def _peak_bytes(plan: Plan, stage: StagePlan, cost: RowCost, held: float, own_held: float) -> int:
    """As predicted where rows and what is held are the plan's own; what moves with them moves in proportion."""
    planned = stage.predicted
    own_rows = replica_rows(plan, stage.num_replicas, plan.num_micro_batches)
    if (cost.rows, held) == (own_rows, own_held):
        return planned.peak_bytes
    is_known = own_held and planned.activation_bytes > planned.update_bytes
    correction = planned.activation_bytes / own_held if is_known else 1.0
    # Messages grow with the rows; outputs that are kept to the end of the step are those of the whole batch
    # in any case.
    following = plan.stages[stage.index + 1 : stage.index + 2]
    sent = sum(later.received_bytes_per_row for later in following)
    messages = min(own_rows * (stage.gradient_bytes_per_row + 2 * sent), planned.buffer_bytes)
    buffers = planned.buffer_bytes + messages * (cost.rows / own_rows - 1)
    state = planned.parameter_bytes + planned.gradient_bytes + planned.optimizer_bytes
    return math.ceil(state + buffers + cost.workspace_bytes + max(correction * held, planned.update_bytes))


def _held_bytes(
    plan: Plan, costs: Sequence[RowCost], schedule: Schedule, num_micro_batches: int
) -> tuple[float, ...]:
    """By stage, what micro-batches in flight save and what is kept between the two parts of backwards; of lanes with
    several stages, when the lane holds most, and messages that have come before they are used.
    """
    flight = [cost.activation_bytes for cost in costs]
    kept = [cost.kept_bytes for cost in costs]
    if isinstance(schedule, ListScheduled) or schedule.stages_per_lane > 1:
        held = held_bytes(schedule, plan.num_stages, num_micro_batches, flight, kept)
        values = [
            cost.rows * stage.received_bytes_per_row for cost, stage in zip(costs, plan.stages, strict=True)
        ]
        gradients = [
            cost.rows * stage.gradient_bytes_per_row for cost, stage in zip(costs, plan.stages, strict=True)
        ]
        return tuple(
            map(sum, zip(held, waiting_bytes(schedule, num_micro_batches, values, gradients), strict=True))
        )
    bounds = schedule.in_flight_bounds(plan.num_stages, num_micro_batches)
    beside = (
        schedule.kept_memory(
            plan.num_stages - index, plan.num_stages, num_micro_batches, kept[index], flight[index]
        )
        for index in range(plan.num_stages)
    )
    return tuple(bound * size + float(more) for bound, size, more in zip(bounds, flight, beside, strict=True))
