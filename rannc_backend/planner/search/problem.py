"""What the stage search searches over, and what it minimises: plain numbers, no graphs.

In: tables of costs per run of blocks (from planner/search/interval_costs.py, or made up by a test). Out:
`SearchProblem`, `Solution`, and the price of any plan: the simulated seconds of its step (schedule/chain.py),
inf where it does not fit.

Terms. *Interval*: a run of blocks, by its first block and its length. *Option*: an index into the replica
counts that are tried. *Place* of a stage: the rank it begins at. Two *placements*: in "stage_major" a stage
has consecutive ranks, stages follow each other, and a stage begins at the next free rank or at the next node;
in "replica_major", for equal replica counts r in p stages, stage s has the ranks s, s + p, s + 2 p, ..., so
that neighbours are near and replicas far.

Recompute: of the activation budgets with which a stage fits into memory, the one with the shortest backward
is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.transfer import reduction_terms
from rannc_backend.planner.cost.update_shares import SharedInLane
from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.planner.search.over_intervals import Floats, Ints, WorkFloor
from rannc_backend.schedule.chain import chains_step_seconds
from rannc_backend.schedule.description import Count, Lanes, Schedule
from rannc_backend.schedule.orders import ScheduleName, on_lanes, schedule_named

Budgets = NDArray[np.int8]  # which of the budgets
Placement = Literal["stage_major", "replica_major"]
INFINITY = float("inf")
_ROUNDED_DOWN = 1 - 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchTables:
    """Costs for one number of micro-batches; [..., L, N, R] is [first block, blocks - 1, option], budgets
    come first.

    `forward`, `backward`: seconds of one micro-batch, inf where an interval ends after the last block or a
    replica would have no rows. `fixed_bytes`: memory whatever is in flight; `flight_bytes`: memory of each
    micro-batch in flight. `weight`: of a backward, the seconds of its second part, which needs `kept_bytes` of the first
    (of a first stage, all of it).
    `message_bytes`, `gradient_bytes`: what one replica receives from the stage before,
    and gets back to it.
    """

    replicas: Ints  # [R], ascending
    rows: Ints  # [R], rows of a replica
    forward: Floats  # [L, N, R]
    weight: Floats  # [L, N, R]
    kept_bytes: Floats  # [L, N, R]
    backward: Floats  # [budgets, L, N, R]
    fixed_bytes: Floats  # [budgets, L, N, R]
    flight_bytes: Floats  # [budgets, L, N, R]
    message_bytes: Floats  # [L, N, R]
    gradient_bytes: Floats  # [L, N, R]
    update_bytes: Floats | None = None  # [L, N, R], of an optimizer's step, in place of what is in flight

    def within(self, memory_bytes: float) -> MicroBatchTables:
        """The same, with inf backward seconds where an optimizer's step has no room."""
        if self.update_bytes is None:
            return self
        fits = self.fixed_bytes + self.update_bytes <= memory_bytes
        return replace(self, backward=np.where(fits, self.backward, np.inf))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchProblem:
    """`tables(m, n)` gives the costs of m micro-batches, of stages of at least n blocks. Arrays are indexed
    [first block, blocks - 1].

    `own_gradient_bytes` are reduced over the replicas; `shared_gradient_bytes` are those that other stages
    read too. `num_stages`, `replicas`: fixed numbers of stages, of replicas of each stage; None where they
    are free. `stage_replicas` fixes both. `starts`: blocks that must be the first of a stage; `stage_of`:
    (block, stage) that must meet; `legal_starts`: where stages may start, 0 among them, () for anywhere.
    `work_floor(m)`: where the seconds and bytes of an interval are at least sums over its blocks; None: nothing is known of
    them but the tables. `own_order`: name of the schedule whose order is made for what the search finds, "" where that may
    not be; `only_own_order`: nothing else may be. `lane_schedules`: for
    several stages on each rank, tried with what the search finds, with each of `stages_per_lane`; `only_lane_schedules`:
    nothing else is asked for. `lane_starts`, `lane_stage_of`, `lane_legal_starts`: those of such plans.
    `workspace(m, begin, end, replicas)`: of a stage's `fixed_bytes`, by budget, what the stages of a rank need in turn;
    None: nothing is known of it. `shared`: what they need together less than one by one. `update_groups`: of the replicas
    of a stage, one of which in each updates a parameter and sends it, of `value_bytes` [first block, blocks - 1], to the
    others; None: all update all. `limits`: of plans with one stage on each rank; others are checked when they are made.
    `recompute_last_stage`: stages after it keep all; -1: there is none such. `only_budget`: of the others, None where it is
    chosen. `offload_seconds`: of a step's copies between host and device; None: there are none.
    """

    num_blocks: int
    cluster: Cluster
    schedules: tuple[ScheduleName, ...]
    micro_batches: tuple[int, ...]
    budgets: tuple[float, ...]
    tables: Callable[[int, int], MicroBatchTables]
    own_gradient_bytes: Floats
    shared_gradient_bytes: Floats
    bucket_bytes: float
    memory_bytes: float
    num_stages: int | None = None
    replicas: int | None = None
    stage_replicas: tuple[int, ...] | None = None
    starts: tuple[int, ...] = ()
    stage_of: tuple[tuple[int, int], ...] = ()
    legal_starts: tuple[int, ...] = ()
    work_floor: Callable[[int], WorkFloor] | None = None
    offload_seconds: Floats | None = None
    workspace: Callable[[int, int, int, int], Floats] | None = None
    shared: SharedInLane | None = None
    own_order: ScheduleName = ""
    only_own_order: bool = False
    update_groups: int | None = None
    value_bytes: Floats | None = None
    lane_starts: tuple[int, ...] = ()
    lane_stage_of: tuple[tuple[int, int], ...] = ()
    lane_legal_starts: tuple[int, ...] = ()
    lane_schedules: tuple[ScheduleName, ...] = ()
    stages_per_lane: tuple[int, ...] = (2,)
    only_lane_schedules: bool = False
    limits: PipelineLimits = PipelineLimits()
    only_budget: float | None = None
    recompute_last_stage: int = -1

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1 and self.micro_batches and self.schedules, f"nothing to search: {self}"

    def allowed_budgets(self, stage: int | Ints) -> NDArray[np.bool_]:
        """[budgets, *stage.shape]: which budgets a stage may have, by its number."""
        numbers = np.asarray(stage)
        budgets = np.array(self.budgets).reshape(-1, *(1,) * numbers.ndim)
        if self.recompute_last_stage < 0:
            return np.broadcast_to(budgets >= 0, (len(budgets), *numbers.shape))
        own = budgets >= 0 if self.only_budget is None else budgets == self.only_budget
        return np.where(numbers > self.recompute_last_stage, budgets == 1.0, own)

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def num_cores(self) -> float:
        """Devices that can compute at the same time."""
        return self.cluster.num_devices * self.cluster.device.core_share

    @property
    def stage_counts(self) -> range:
        """Numbers of stages that the forced numbers, blocks and devices allow."""
        fixed = len(self.stage_replicas) if self.stage_replicas is not None else self.num_stages
        least = max([1, *(stage + 1 for _, stage in self.stage_of), len(set(self.starts) - {0}) + 1])
        most = min(len(self.legal_starts) or self.num_blocks, self.num_devices // (self.replicas or 1))
        if self.stage_replicas is not None and sum(self.stage_replicas) > self.num_devices:
            return range(0)
        return range(least, most + 1) if fixed is None else range(max(fixed, least), min(fixed, most) + 1)

    def longest_stage(self, num_micro_batches: int, limit: float = INFINITY) -> int:
        """No stage that fits, of a plan whose step takes less than `limit` seconds, has more blocks."""
        if self.work_floor is None:
            return self.num_blocks
        return self.work_floor(num_micro_batches).longest_stage(self.memory_bytes, limit / num_micro_batches)

    def copying(self, begins: Ints, lengths: Ints) -> Floats:
        """Seconds of intervals' copies between host and device; the slowest rank's are what a step takes longer."""
        if self.offload_seconds is None:
            return np.zeros(np.shape(begins))
        return self.offload_seconds[begins, np.minimum(lengths, self.offload_seconds.shape[1]) - 1]

    def num_buckets(self, begins: Ints, lengths: Ints) -> Floats:
        """Messages in which the gradients of intervals are reduced."""
        size = self.own_gradient_bytes[begins, lengths - 1] + self.shared_gradient_bytes[begins, lengths - 1]
        return np.maximum(np.ceil(size / self.bucket_bytes), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Stage s has blocks [bounds[s], bounds[s + 1]) on replicas[s] ranks, from rank places[s] on. `own_order`: name of the
    schedule whose order is made for it, in place of `schedule`, which says what fits; "" for none. `base`: where ranks
    compute several stages, the plan with one for each that it was made from.
    """

    schedule: ScheduleName
    num_micro_batches: int
    placement: Placement
    bounds: tuple[int, ...]
    replicas: tuple[int, ...]
    places: tuple[int, ...]
    budgets: tuple[float, ...]
    step_seconds: float
    own_order: ScheduleName = ""
    base: Solution | None = None

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    @property
    def has_several_stages(self) -> bool:
        """Whether ranks compute several stages."""
        return self.base is not None

    @property
    def lanes(self) -> Lanes:
        """The stages of each rank, first stages ascending."""
        at: dict[int, list[int]] = {}
        for stage, place in enumerate(self.places):
            at.setdefault(place, []).append(stage)
        return tuple(map(tuple, at.values()))

    @property
    def described(self) -> Schedule:
        """The schedule, as it runs on these lanes."""
        made = on_lanes(schedule_named(self.schedule), self.lanes)
        assert made is not None, f"{self.schedule} does not run on {self.lanes}"
        return made

    @property
    def num_ranks(self) -> int:
        """Ranks that compute a stage."""
        return sum(dict(zip(self.places, self.replicas, strict=True)).values())

    @property
    def longest_stage(self) -> int:
        """Blocks of the stage with most of them."""
        return max(end - begin for begin, end in zip(self.bounds, self.bounds[1:]))

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of a stage, ascending."""
        step = self.num_stages if self.placement == "replica_major" else 1
        return tuple(self.places[stage] + step * index for index in range(self.replicas[stage]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTerms:
    """Seconds of stages, all arrays of one shape: what `chains_step_seconds` takes, and `new_values`, which are sent after
    the step. `backward` is inf where nothing fits.
    """

    forward: Floats
    backward: Floats
    message: Floats
    gradient: Floats
    allreduce: Floats
    num_buckets: Floats
    weight: Floats
    new_values: Floats

    def columns(self) -> tuple[Floats, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


class Pricer:
    """Prices of stages for one number of micro-batches and one schedule: of those of up to `longest_stage`
    blocks, None: that fit.
    """

    def __init__(
        self,
        problem: SearchProblem,
        num_micro_batches: int,
        schedule: ScheduleName,
        longest_stage: int | None = None,
    ) -> None:
        self.problem, self.num_micro_batches, self.schedule = problem, num_micro_batches, schedule
        self.described = schedule_named(schedule)
        self.tables = problem.tables(
            num_micro_batches, longest_stage or problem.longest_stage(num_micro_batches)
        ).within(problem.memory_bytes)
        self.max_length = self.tables.forward.shape[1]

    def backward(
        self, num_stages_to_end: Count, index: tuple[Any, ...], num_stages: Count | None = None
    ) -> tuple[Floats, Budgets]:
        """Backward seconds at an index of [L, N, R] with the best budget that fits (inf: none does), and
        which budget that is. `num_stages`: None leaves out what is kept between the two parts of backwards.
        """
        number = self.described.in_flight(num_stages_to_end, self.num_micro_batches)
        tables, everywhere = self.tables, (slice(None), *index)
        backward, fixed, flight = (
            part[everywhere] for part in (tables.backward, tables.fixed_bytes, tables.flight_bytes)
        )
        if num_stages is not None and self.problem.recompute_last_stage >= 0:
            allowed = self.problem.allowed_budgets(num_stages - num_stages_to_end)
            spread = allowed.reshape(*allowed.shape, *(1,) * (backward.ndim - allowed.ndim))
            backward = np.where(spread, backward, np.inf)
        if num_stages is not None and self.described.splits_backward:
            fixed = fixed + self.described.kept_memory(
                num_stages_to_end, num_stages, self.num_micro_batches, tables.kept_bytes[index], flight
            )
        return self.backward_of(number, tables.forward[index], backward, fixed, flight)

    @cached_property
    def later_part(self) -> Floats:
        """[L, N, R]: seconds of a backward that nobody waits for."""
        return self.tables.weight if self.described.splits_backward else np.zeros_like(self.tables.weight)

    def backward_of(
        self, num_in_flight: int | Ints, forward: Floats, backward: Floats, fixed: Floats, flight: Floats
    ) -> tuple[Floats, Budgets]:
        """As `backward`, from parts of the tables and the micro-batches in flight."""
        return _fastest(forward, backward, fixed + num_in_flight * flight <= self.problem.memory_bytes)

    @cached_property
    def least_backward(self) -> Floats:
        """[L, N, R]: backward seconds of last stages: no others have fewer micro-batches in flight."""
        return self.backward(1, (slice(None), slice(None), slice(None)))[0]

    def links(self, near: NDArray[np.bool_], num_bytes: Floats) -> Floats:
        """Seconds of messages over the near or the far link."""
        fast, slow = self.problem.cluster.intra_node, self.problem.cluster.inter_node
        latency = np.where(near, fast.latency_seconds, slow.latency_seconds)
        rate = np.where(near, fast.bytes_per_second, slow.bytes_per_second)
        return np.where(num_bytes > 0, latency + num_bytes / rate, 0.0)

    def stage(
        self,
        stages_to_end: int,
        begins: Ints,
        lengths: Ints,
        options: Ints,
        places: Ints,
        *,
        before_options: Ints | None,
        before_places: Ints | None,
        placement: Placement = "stage_major",
        num_stages: int,
    ) -> StageTerms:
        """Terms of stages, arrays of one shape [n]; `before_...` are of the stages before them, None for
        first stages.
        """
        tables, problem = self.tables, self.problem
        index = (begins, lengths - 1, options)
        replicas = tables.replicas[options]
        zeros = np.zeros(len(begins))
        message, gradient = zeros, zeros
        if before_options is not None:
            assert before_places is not None, "a stage before has a place"
            per_node = problem.cluster.devices_per_node
            if placement == "replica_major":
                near = np.array(
                    [
                        _neighbours_near(num_stages, int(count), per_node, num_stages - stages_to_end)
                        for count in replicas
                    ]
                )
            else:
                near = before_places // per_node == (places + replicas - 1) // per_node
            # A sender with more rows than one receiver takes sends them to several.
            share = np.maximum(1.0, tables.rows[before_options] / tables.rows[options])
            message = self.links(near, tables.message_bytes[index] * share)
            gradient = self.links(near, tables.gradient_bytes[index] * share)
        stride = num_stages if placement == "replica_major" else 1
        return StageTerms(
            forward=tables.forward[index],
            backward=self.backward(stages_to_end, index, num_stages)[0],
            message=message,
            gradient=gradient,
            allreduce=self.allreduce(begins, lengths, replicas, places, stride),
            num_buckets=problem.num_buckets(begins, lengths),
            weight=tables.weight[index],
            new_values=self.new_values(begins, lengths, replicas, places, stride),
        )

    def new_values(self, begins: Ints, lengths: Ints, replicas: Ints, places: Ints, stride: int) -> Floats:
        """Seconds in which the replicas of stages get the parameters that others have updated: half of an all-reduce of
        them within the largest group, as each rank receives all but its own part once. What other stages read too goes to
        their ranks as well.
        """
        problem = self.problem
        if problem.update_groups is None or problem.value_bytes is None:
            return np.zeros(len(begins))
        in_group = -(-replicas // np.minimum(problem.update_groups, replicas))
        latency, rate, _, _ = self._reduction_terms(in_group, places, stride).T
        shared = problem.shared_gradient_bytes[begins, lengths - 1]
        values = np.maximum(problem.value_bytes[begins, lengths - 1] - shared, 0.0)
        seconds = np.where((in_group > 1) & (values > 0), latency + values * rate, 0.0)
        _, _, latency, rate = self._reduction_terms(replicas, places, stride).T
        return (seconds + np.where(shared > 0, latency + shared * rate, 0.0)) / 2

    def _reduction_terms(self, replicas: Ints, places: Ints, stride: int) -> Floats:
        """[stages, 4] of `reduction_terms`."""
        per_node = self.problem.cluster.devices_per_node
        keys, inverse = np.unique(replicas * per_node + places % per_node, return_inverse=True)
        terms = [
            reduction_terms(self.problem.cluster, int(key) // per_node, int(key) % per_node, stride)
            for key in keys
        ]
        return np.array(terms)[inverse]

    def allreduce(self, begins: Ints, lengths: Ints, replicas: Ints, places: Ints, stride: int) -> Floats:
        """Seconds of the all-reduce of stages with ranks places, places + stride, ...; half of it where one replica alone
        takes the sums.
        """
        problem = self.problem
        own, shared = (
            problem.own_gradient_bytes[begins, lengths - 1],
            problem.shared_gradient_bytes[begins, lengths - 1],
        )
        own_latency, own_rate, shared_latency, shared_rate = self._reduction_terms(replicas, places, stride).T
        seconds = np.where(own > 0, own_latency + own * own_rate, 0.0)
        seconds += np.where(shared > 0, shared_latency + shared * shared_rate, 0.0)
        return seconds / 2 if problem.update_groups == 1 else seconds


def _fastest(forward: Floats, backward: Floats, fits: NDArray[np.bool_]) -> tuple[Floats, Budgets]:
    """Of `backward` [budgets, ...] the least that fits, inf where none does or forward is inf; and which
    budget that is.
    """
    seconds: Floats = np.full(forward.shape, np.inf)
    chosen: Budgets = np.zeros(forward.shape, dtype=np.int8)
    fits = fits & np.isfinite(forward)
    for budget, values in enumerate(backward):
        better = fits[budget] & (values < seconds)
        np.copyto(seconds, values, where=better)
        chosen[better] = budget
    return seconds, chosen


@lru_cache(maxsize=65536)
def _neighbours_near(num_stages: int, replicas: int, per_node: int, stage: int) -> bool:
    """Whether, with replica-major ranks, each replica of `stage` shares a node with that of the stage before
    it.
    """
    firsts = range(stage - 1, num_stages * replicas, num_stages)
    return all(first // per_node == (first + 1) // per_node for first in firsts)


def plans_step_seconds(
    pricer: Pricer, bounds: Ints, options: Ints, places: Ints, placement: Placement = "stage_major"
) -> Floats:
    """Simulated seconds of a step of each of n plans of p stages, inf where one does not fit or keep the limits.

    bounds [n, p + 1], options and places [n, p] as in `Solution`; lengths are at least 1.
    """
    terms = plans_terms(pricer, bounds, options, places, placement)
    columns = [np.stack([getattr(stage, name) for stage in terms], axis=1) for name in StageTerms.__slots__]
    fits = np.isfinite(columns[0]).all(axis=1) & np.isfinite(columns[1]).all(axis=1)
    seconds = np.full(len(bounds), np.inf)
    if fits.any():
        *kept, weight, new_values = (column[fits] for column in columns)
        chains = chains_step_seconds(
            *kept, num_micro_batches=pricer.num_micro_batches, schedule=pricer.schedule, weight=weight
        )
        # Where devices share cores the cores have all of the work to do, whoever waits.
        replicas = pricer.tables.replicas[options[fits]]
        work = (replicas * (kept[0] + kept[1])).sum(axis=1)
        number, limits = pricer.num_micro_batches, pricer.problem.limits
        computed = np.maximum(chains, number * work / pricer.problem.num_cores)
        allowed = limits.allow(pricer.described, number, kept[0], kept[1], weight, replicas)
        copying = pricer.problem.copying(bounds[fits, :-1], np.diff(bounds[fits], axis=1))
        computed += new_values.max(axis=1) + copying.max(axis=1)
        seconds[fits] = np.where(allowed, computed, np.inf)
    return seconds


def plans_lower_bounds(pricer: Pricer, bounds: Ints, options: Ints, places: Ints) -> Floats:
    """[n]: what the steps of stage-major plans take at least, inf where one does not fit; see `plans_step_seconds`."""
    terms = plans_terms(pricer, bounds, options, places)
    forward, backward, weight = (
        np.stack([getattr(stage, name) for stage in terms]) for name in ("forward", "backward", "weight")
    )
    weight = weight if pricer.described.splits_backward else np.zeros_like(weight)
    weight[0] = 0.0  # of the first stage, it is on the way
    if pricer.num_micro_batches == 1:
        return np.asarray((forward + backward - weight).sum(axis=0) * _ROUNDED_DOWN)
    found = pricer.described.bound_of_stages(pricer.num_micro_batches, forward, backward, weight)
    return np.where(np.isfinite(forward + backward).all(axis=0), found * _ROUNDED_DOWN, np.inf)


def plans_terms(
    pricer: Pricer, bounds: Ints, options: Ints, places: Ints, placement: Placement = "stage_major"
) -> list[StageTerms]:
    """By stage, the terms of n plans; see `plans_step_seconds`. Intervals longer than the tables know do not
    fit.
    """
    num_stages = options.shape[1]
    result = []
    for stage in range(num_stages):
        lengths = bounds[:, stage + 1] - bounds[:, stage]
        known = np.minimum(lengths, pricer.max_length)
        terms = pricer.stage(
            num_stages - stage,
            bounds[:, stage],
            known,
            options[:, stage],
            places[:, stage],
            before_options=options[:, stage - 1] if stage else None,
            before_places=places[:, stage - 1] if stage else None,
            placement=placement,
            num_stages=num_stages,
        )
        if (lengths > known).any():
            terms.backward[lengths > known] = np.inf
        result.append(terms)
    return result
