"""What binds a plan: what one more device, twice the memory and twice the link speed would each gain; and which plans lost
to the chosen one, and by how much.

In: a finished search's problem and plan, the request. Out: `WhatIf` and `Alternative` records and a sentence for the `Plan`.
Each case is planned again by the same rules, so that a gain is that of the change alone; in large problems by
a short search without proof, and so are alternatives: no better plan of their kind was found, but one may exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rannc_backend.errors import InfeasiblePlanError
from rannc_backend.ir.plan import Alternative, StageCost, StagePlan, WhatIf
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.plan_parts import judged, keeps_limits, priced
from rannc_backend.planner.plan_request import PlanRequest, precise_size_text
from rannc_backend.planner.search.bounds import Cell
from rannc_backend.planner.search.feasibility import least_bytes_of_one_stage
from rannc_backend.planner.search.limits import BALANCE, BUBBLE, PipelineLimits, least_bubble
from rannc_backend.planner.search.moves import few_numbers, with_one_more
from rannc_backend.planner.search.problem import SearchProblem, Solution
from rannc_backend.planner.search.search import SearchResult, StageSearch
from rannc_backend.planner.settling import attempts, settle
from rannc_backend.report.words import percent_text
from rannc_backend.schedule.orders import ScheduleName

ONE_MORE_DEVICE, MORE_MEMORY, FASTER_LINKS = (
    "one more device",
    "twice the memory per device",
    "twice the bandwidth of all links",
)
MORE_DEVICES = "twice the devices"
WITHOUT = "without "  # and an option as it was set
WITHOUT_ZERO = "without ZeRO"
NO_CHANGE = "no change"
ON_HOST = "parameters and optimizer state on the host (offload=parameters)"
# What binds where a change gains most, and the change in a few words.
_BINDING = {
    ONE_MORE_DEVICE: ("the number of devices", "one more device"),
    MORE_MEMORY: ("memory", "twice the memory"),
    FASTER_LINKS: ("links", "twice the link speed"),
}
SAME = 1e-3  # relative difference of steps that are called equal
_SMALL = 500  # blocks x devices: searched in some tenths of a second, so for each change again
_SMALL_WITH_NUMBERS = 5000  # blocks x devices x numbers of micro-batches: the same where these change
_NOTICEABLE = 0.01  # share of the step: what gains less binds nothing
_MAX_TRIED = 6  # values of a limit, in errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What would be if one thing were different. `found`: the search that `chosen` comes from. `undivided`: what else was
    asked for, where the plan divides updates.
    """

    request: PlanRequest
    problem: SearchProblem
    chosen: Solution
    found: SearchResult
    undivided: SearchProblem | None

    @property
    def shortly(self) -> bool:
        """Whether large problems are searched shortly."""
        return self.problem.num_blocks * self.problem.num_devices > _SMALL

    @property
    def changes(self) -> tuple[str, ...]:
        """All that are looked at by themselves, those that take longest first."""
        is_given = self.request.stage_replicas is not None
        again = self.shortly and (self.found.proven_gap > 0 or self.request.num_stages is not None)
        return (
            *((WITHOUT_ZERO,) if self.undivided is not None else ()),
            *((MORE_DEVICES,) if not is_given else ()),
            ONE_MORE_DEVICE,
            FASTER_LINKS,
            MORE_MEMORY,
            *((NO_CHANGE,) if again else ()),
            *(f"{WITHOUT}{text}" for text, _ in self.request.without),
        )

    def best(self, change: str) -> Solution | None:
        """The plan that would be taken; None where nothing fits, or the options leave no use for the change."""
        request, problem, chosen = self.request, self.problem, self.chosen
        if change == WITHOUT_ZERO:
            assert self.undivided is not None, "it is asked about"
            return _undivided(self.undivided, chosen)
        if change == NO_CHANGE:
            return _planned_again(request, problem, chosen, self.shortly)
        if change == ON_HOST:
            request = request.offloaded()
            problem = request.problem(request.costs(), memory_bytes=problem.memory_bytes)
            return _planned_again(request, problem, chosen, self.shortly)
        freed = next((freed for text, freed in request.without if change == f"{WITHOUT}{text}"), None)
        if freed is not None:
            # Stages as a whole may have been found to need more than their blocks do.
            memory_bytes = freed.memory_bytes - (request.memory_bytes - problem.memory_bytes)
            other = freed.problem(freed.costs(), memory_bytes=memory_bytes)
            size = other.num_blocks * other.num_devices * len(other.micro_batches)
            return _planned_again(freed, other, chosen, size > _SMALL_WITH_NUMBERS)
        changed = _changed_problem(request, problem, change)
        return None if changed is None else _planned_again(request, changed, chosen, self.shortly)


def best_of_change(changed: Changed, change: str) -> Solution | None:
    """See `Changed`; a function of the module, for other processes."""
    return changed.best(change)


def what_if(changed: Changed, found: Mapping[str, Solution | None]) -> tuple[WhatIf, ...]:
    """Records of the best plans, which were `found` by change."""
    request, chosen = changed.request, changed.chosen
    # A better plan without the change may be found as shortly: a change must beat that one.
    both = [plan for plan in (chosen, found.get(NO_CHANGE)) if plan is not None]
    now = min(both, key=lambda plan: plan.step_seconds)

    def beats(best: Solution | None, by: float) -> bool:
        return best is not None and best.step_seconds < now.step_seconds * (1 - by)

    def record(change: str, best: Solution | None) -> WhatIf:
        # What is chosen fits as well with more of anything.
        return _record(change, best if best is not None and beats(best, SAME) else chosen)

    result = [
        record(change, found.get(change))
        for change in (ONE_MORE_DEVICE, MORE_MEMORY, FASTER_LINKS, MORE_DEVICES)
        if change != MORE_DEVICES or change in found
    ]
    for change in (f"{WITHOUT}{text}" for text, _ in request.without):
        best = found[change]
        if best is not None and beats(best, _NOTICEABLE):
            result.append(_record(change, best))
    more_memory = next(each for each in result if each.change == MORE_MEMORY)
    if not request.offload and _saves(more_memory, chosen) >= _NOTICEABLE:
        result.append(record(ON_HOST, changed.best(ON_HOST)))
    return tuple(result)


def _record(change: str, best: Solution) -> WhatIf:
    return WhatIf(
        change=change,
        predicted_step_seconds=best.step_seconds,
        num_stages=best.num_stages,
        stage_replicas=best.replicas,
    )


def _saves(item: WhatIf, plan: Solution) -> float:
    """Share of the step."""
    step = item.predicted_step_seconds
    return 0.0 if step is None or plan.step_seconds <= 0 else 1 - step / plan.step_seconds


def _changed_problem(request: PlanRequest, problem: SearchProblem, change: str) -> SearchProblem | None:
    """The problem that a change makes; None where the options leave no use for it."""
    cluster = problem.cluster

    def on(other: Cluster) -> SearchProblem | None:
        if request.stage_replicas is not None:
            return None
        return request.problem(request.costs(other), memory_bytes=problem.memory_bytes)

    if change == ONE_MORE_DEVICE:
        return on(_with_one_more(cluster))
    if change == MORE_DEVICES:
        return on(replace(cluster, num_devices=2 * cluster.num_devices))
    if change == MORE_MEMORY:
        return replace(problem, memory_bytes=2 * problem.memory_bytes)
    fast = replace(
        cluster,
        intra_node=replace(cluster.intra_node, bytes_per_second=2 * cluster.intra_node.bytes_per_second),
        inter_node=replace(cluster.inter_node, bytes_per_second=2 * cluster.inter_node.bytes_per_second),
    )
    return replace(problem, cluster=fast)


def _with_one_more(cluster: Cluster) -> Cluster:
    """Where all devices are in one node, the new one is there as well: on another one it would say more of
    the links between nodes.
    """
    num_devices = cluster.num_devices + 1
    is_one_node = cluster.num_devices <= cluster.devices_per_node
    return replace(
        cluster,
        num_devices=num_devices,
        devices_per_node=max(cluster.devices_per_node, num_devices)
        if is_one_node
        else cluster.devices_per_node,
    )


def _planned_again(
    request: PlanRequest, problem: SearchProblem, start: Solution, shortly: bool
) -> Solution | None:
    """The plan that the planner would take; `shortly`: a good one with the schedule of `start`."""
    if start.base is not None and shortly:
        # As many stages on each rank: other numbers are rarely better then.
        problem = replace(problem, lane_schedules=(start.schedule,), stages_per_lane=(len(start.lanes[0]),))
    elif start.base is None and not problem.only_lane_schedules:
        problem = replace(
            problem, lane_schedules=()
        )  # where two stages on each rank are no gain, they rarely become one
    start = start.base or start
    if shortly:
        problem = replace(problem, schedules=(start.schedule,))
    return _within_limits(request, problem, start if shortly else None)


def _within_limits(
    request: PlanRequest, problem: SearchProblem, start: Solution | None = None
) -> Solution | None:
    """The plan that the planner would take; with `start`, a good one near it. None where nothing fits and keeps the limits."""
    for tried in attempts(problem):
        search = StageSearch(replace(tried, cluster=request.searched(tried.cluster)))
        found = search.run().solution if start is None else search.run_shortly(start)
        if found is None:
            continue
        best = settle(tried, found, None if search.equal is None else priced(tried, search.equal))
        if keeps_limits(problem, best):
            return best
    return None


def refused_by_limits(request: PlanRequest, problem: SearchProblem) -> InfeasiblePlanError | None:
    """Which limits of pipelines keep every plan out, and values with which there is one; None where nothing fits without
    them either.
    """
    limits = problem.limits
    is_set = {BUBBLE: limits.bubble > 0, BALANCE: limits.balance > 0}
    for groups in (((BUBBLE,), (BALANCE,)), ((BUBBLE, BALANCE),)):
        reasons, would_do = [], []
        for options in groups:
            if not all(is_set[option] for option in options):
                continue
            found = _nearest(request, problem, options)
            if found is not None:
                values, reason = found
                reasons.append(reason)
                would_do.append(" and ".join(f"{option}={values[option]:g}" for option in options))
        if would_do:
            would_do += _others_that_free(request, problem)
            return InfeasiblePlanError("; ".join(reasons), options_that_would_do=would_do)
    return None


def _others_that_free(request: PlanRequest, problem: SearchProblem) -> Iterator[str]:
    """Options without which a plan keeps the limits; of small problems."""
    for text, freed in request.without:
        if freed.limits == request.limits and problem.num_blocks * problem.num_devices <= _SMALL:
            memory_bytes = freed.memory_bytes - (request.memory_bytes - problem.memory_bytes)
            if _within_limits(freed, freed.problem(freed.costs(), memory_bytes=memory_bytes)) is not None:
                yield f"{WITHOUT}{text}"


def _nearest(
    request: PlanRequest, problem: SearchProblem, options: Sequence[str]
) -> tuple[dict[str, float], str] | None:
    """Values of these options with which there is a plan, as near to those that are set as a few searches find, and what is
    wrong with the plan that leaving them out gives.
    """
    limits = problem.limits
    freed = replace(
        limits,
        bubble=0.0 if BUBBLE in options else limits.bubble,
        balance=0.0 if BALANCE in options else limits.balance,
    )
    best = _within_limits(request, replace(problem, limits=freed))
    if best is None:
        return None
    reason = limits.broken_by(*judged(problem, best))
    tried_at_most = _MAX_TRIED if problem.num_blocks * problem.num_devices <= _SMALL else 0
    refused, allowed = limits, _limits_of(problem, best, freed)
    for _ in range(tried_at_most):
        middle = replace(
            freed,
            bubble=(refused.bubble + allowed.bubble) / 2 if BUBBLE in options else freed.bubble,
            balance=(refused.balance + allowed.balance) / 2 if BALANCE in options else freed.balance,
        )
        found = _within_limits(request, replace(problem, limits=middle))
        if found is None:
            refused = middle
        else:
            allowed = _limits_of(problem, found, freed)
    values = {
        BUBBLE: math.ceil(1000 * allowed.bubble) / 1000,
        BALANCE: math.floor(1000 * allowed.balance) / 1000,
    }
    return values, reason


def _limits_of(problem: SearchProblem, solution: Solution, freed: PipelineLimits) -> PipelineLimits:
    """The narrowest limits that a solution keeps, of those that are not set in `freed`."""
    shape, schedule, lanes, number = judged(problem, solution)
    bubble = freed.bubble or max(shape.bubble, least_bubble(schedule, lanes, number))
    return PipelineLimits(bubble=bubble, balance=freed.balance or shape.balance)


def binding(plan: Solution, stages: Sequence[StagePlan], changes: Sequence[WhatIf], *, ended: bool) -> str:
    """What binds the plan, by what would gain most; then the slowest part of the slowest stage."""
    slowest = _slowest(plan, stages)
    if not ended:
        return f"the user's interruption of the search: this is the best plan until then; slowest: {slowest}"
    gains = _gains(plan, changes)
    return f"{gains_text(gains)}; slowest: {slowest}" if gains else slowest


def gains_text(gains: Mapping[str, float]) -> str:
    """What binds, and why: `gains` has the share of the step that each change saves."""
    options = sorted(
        (change for change in gains if change.startswith(WITHOUT)), key=lambda change: -gains[change]
    )
    ordered = sorted((change for change in _BINDING if change in gains), key=lambda change: -gains[change])
    parts = [
        f"{_BINDING[change][1]} by {percent_text(gains[change]) if gains[change] else 'nothing'}"
        for change in ordered
    ]
    by_options = [f"{change} by {percent_text(gains[change])}" for change in options]
    if options and gains[options[0]] > gains[ordered[0]]:
        saved = percent_text(gains[options[0]])
        told = f"option {options[0].removeprefix(WITHOUT)}: leaving it out would shorten the step by {saved}"
        return ", ".join([told, *by_options[1:], *parts])
    name = _BINDING[ordered[0]][0]
    twice = gains.get(MORE_DEVICES, 0.0)
    if gains[ordered[0]] < _NOTICEABLE:
        # Rows and layers come in whole numbers, so one more device among many may have nothing to do.
        is_devices = twice >= _NOTICEABLE
        name = _BINDING[ONE_MORE_DEVICE][0] if is_devices else "none of devices, memory and links"
        parts = [f"twice the devices by {percent_text(twice)}"] * is_devices + parts
    first, *others = [*parts, *by_options]
    return f"{name}: {first.replace(' by ', ' would shorten the step by ')}, {', '.join(others)}"


def _gains(plan: Solution, changes: Sequence[WhatIf]) -> dict[str, float]:
    """By change the share of the step that it saves."""
    gains = {}
    for item in changes:
        if item.predicted_step_seconds is not None and plan.step_seconds > 0:
            gain = _saves(item, plan)
            gains[item.change] = gain if gain >= SAME else 0.0
    return gains


def _slowest(plan: Solution, stages: Sequence[StagePlan]) -> str:
    worst = max(stages, key=lambda stage: _micro_batch_seconds(stage.predicted))
    cost = worst.predicted
    parts = {"compute": cost.forward_seconds + cost.backward_seconds, "transfers": cost.transfer_seconds}
    part = max(parts, key=lambda name: parts[name])
    ranks = sum(len(stage.ranks) for stage in stages)
    idle = sum(stage.predicted.idle_share * len(stage.ranks) for stage in stages) / ranks
    reduction = max(stage.predicted.allreduce_seconds for stage in stages) / max(plan.step_seconds, 1e-30)
    share = parts[part] / max(_micro_batch_seconds(cost), 1e-30)
    return (
        f"{part} of stage {worst.index} ({percent_text(share)} of its time); ranks compute nothing for "
        f"{percent_text(idle)} of the step (filling, draining, waiting); the longest all-reduce is "
        f"{percent_text(reduction)} of it, most of it beside computing"
    )


def _micro_batch_seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds + cost.transfer_seconds


def alternatives(
    request: PlanRequest, found: StageSearch, problem: SearchProblem, chosen: Solution, equal: Solution | None
) -> tuple[Alternative, ...]:
    """Good plans with other numbers of stages, of pure data parallelism, with the other schedule, and of
    equal splits.

    `problem`: in which steps are priced; that of `found` may leave latency out.
    """
    counts, searched = problem.stage_counts, chosen.base or chosen
    wanted = [1, searched.num_stages - 1, searched.num_stages + 1, min(2 * searched.num_stages, counts[-1])]
    numbers = few_numbers(problem.micro_batches, chosen.num_micro_batches)
    result = []

    def best(schedules: Sequence[ScheduleName], count: int) -> Solution | None:
        return found.best_of(
            Cell(schedule=name, num_micro_batches=m, num_stages=count) for name in schedules for m in numbers
        )

    for count in dict.fromkeys(
        number for number in wanted if number in counts and number != searched.num_stages
    ):
        if count == 1 and least_bytes_of_one_stage(problem) > problem.memory_bytes:
            result.append(_one_stage_does_not_fit(request, problem, chosen))
            continue
        label = "pure data parallelism" if count == 1 else f"{count} stages"
        other = best((searched.schedule,), count)
        if other is not None:
            result.append(_lost(label, _in(problem, other), chosen))
    for schedule in problem.schedules:
        if schedule != chosen.schedule and (chosen.num_micro_batches > 1 or chosen.num_stages > 1):
            other = best((schedule,), searched.num_stages)
            if other is not None:
                result.append(_lost(f"schedule {schedule}", _in(problem, other), chosen))
    if equal is not None and (equal.bounds, equal.replicas) != (chosen.bounds, chosen.replicas):
        result.append(_lost("equally many blocks and replicas in every stage", equal, chosen))
    return tuple(result)


def runners_up(found: StageSearch, problem: SearchProblem, chosen: Solution) -> tuple[Alternative, ...]:
    """The other plans that the search has kept, as they would be taken, fastest first."""
    others = kept_others(found, problem, chosen)
    return tuple(
        _lost(f"number {place} of the best plans", each, chosen).model_copy(update={"place": place})
        for place, each in enumerate(others, start=2)
    )


def kept_others(found: StageSearch, problem: SearchProblem, chosen: Solution) -> list[Solution]:
    """What the search has kept beside the chosen plan, as it would be taken, fastest first."""
    others: list[Solution] = []
    for kept in found.kept[1:]:
        others = with_one_more(others, settle(problem, kept, None), len(found.kept))
    return [each for each in others if len(with_one_more([chosen], each, 2)) == 2]


def _undivided(undivided: SearchProblem, chosen: Solution) -> Solution | None:
    """What is found if every replica updates all; None where nothing fits."""
    start = chosen.base or chosen
    search = StageSearch(replace(undivided, schedules=(start.schedule,), lane_schedules=()))
    found = search.run_shortly(start)
    return None if found is None else settle(undivided, found, None)


def without_zero(undivided: SearchProblem, chosen: Solution, found: Solution | None) -> Alternative:
    """What was `found` if every replica updates all, beside a plan in which one does (ZeRO)."""
    if found is None:
        return _fits_nowhere(WITHOUT_ZERO, chosen, undivided.memory_bytes)
    return _lost(WITHOUT_ZERO, found, chosen)


def without_offload(chosen: Solution, memory_bytes: float) -> Alternative:
    """Why a plan keeps parameters on the host."""
    return _fits_nowhere("without offload", chosen, memory_bytes)


def _fits_nowhere(label: str, chosen: Solution, memory_bytes: float) -> Alternative:
    return _told(chosen, None, f"{label}: nothing fits into {precise_size_text(memory_bytes)}")


def _in(problem: SearchProblem, solution: Solution) -> Solution:
    return priced(problem, solution) or solution


def _lost(label: str, other: Solution, chosen: Solution) -> Alternative:
    longer = other.step_seconds / max(chosen.step_seconds, 1e-30)
    if longer > 1 + SAME:
        reason = f"{label}: the step takes {longer:.4g} times as long"
    else:
        reason = f"{label}: equally fast"
    return _told(other, other.step_seconds, reason)


def _told(other: Solution, step_seconds: float | None, reason: str) -> Alternative:
    return Alternative(
        num_stages=other.num_stages,
        stage_replicas=other.replicas,
        num_micro_batches=other.num_micro_batches,
        schedule=other.schedule,
        recompute=other.budgets,
        predicted_step_seconds=step_seconds,
        reason=reason,
    )


def _one_stage_does_not_fit(request: PlanRequest, problem: SearchProblem, chosen: Solution) -> Alternative:
    least = least_bytes_of_one_stage(problem)
    if least == float("inf"):
        held = sum(
            use.held_bytes(request.optimizer_factor, offload=request.offload)
            for use in request.graph.parameters
        )
        least = held
    reason = (
        f"pure data parallelism: it does not fit: it needs {precise_size_text(least)} or more on one device, and "
        f"plans may use {precise_size_text(problem.memory_bytes)}"
    )
    replicas = min(problem.num_devices, max(1, request.batch_rows))
    return Alternative(
        num_stages=1,
        stage_replicas=(replicas,),
        num_micro_batches=chosen.num_micro_batches,
        schedule=chosen.schedule,
        recompute=(1.0,),
        predicted_step_seconds=None,
        reason=reason,
    )
