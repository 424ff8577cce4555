"""What binds a plan: what one more device, twice the memory and twice the link speed would each gain.

In: a finished search's problem and plan, the request. Out: `WhatIf` records and a sentence for the `Plan`.
Each case is planned again by the same rules, so that a gain is that of the change alone; in large problems by
a short search without proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rannc_backend.errors import InfeasiblePlanError
from rannc_backend.ir.plan import StageCost, StagePlan, WhatIf
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.explanations import SAME
from rannc_backend.planner.plan_parts import judged, keeps_limits, priced
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.search.limits import BALANCE, BUBBLE, PipelineLimits, least_bubble
from rannc_backend.planner.search.problem import SearchProblem, Solution
from rannc_backend.planner.search.search import SearchResult, StageSearch
from rannc_backend.planner.settling import attempts, settle
from rannc_backend.report.words import percent_text

ONE_MORE_DEVICE, MORE_MEMORY, FASTER_LINKS = (
    "one more device",
    "twice the memory per device",
    "twice the bandwidth of all links",
)
MORE_DEVICES = "twice the devices"
WITHOUT = "without "  # and an option as it was set
ON_HOST = "parameters and optimizer state on the host (offload=parameters)"
# What binds where a change gains most, and the change in a few words.
_BINDING = {
    ONE_MORE_DEVICE: ("the number of devices", "one more device"),
    MORE_MEMORY: ("memory", "twice the memory"),
    FASTER_LINKS: ("links", "twice the link speed"),
}
_SMALL = 500  # blocks x devices: searched in some tenths of a second, so for each change again
_SMALL_WITH_NUMBERS = 5000  # blocks x devices x numbers of micro-batches: the same where these change
_NOTICEABLE = 0.01  # share of the step: what gains less binds nothing
_MOST_TRIED = 6  # values of a limit, in errors


def what_if(
    request: PlanRequest, problem: SearchProblem, chosen: Solution, found: SearchResult
) -> tuple[WhatIf, ...]:
    """The best plans found if one thing were different. `found`: the search that `chosen` comes from."""
    shortly = problem.num_blocks * problem.num_devices > _SMALL
    now: Solution = chosen
    if shortly and (found.proven_gap > 0 or request.num_stages is not None):
        # A better plan without the change may be found as shortly: a change must beat that one.
        again = _planned_again(request, problem, chosen, shortly)
        now = min((plan for plan in (chosen, again) if plan is not None), key=lambda plan: plan.step_seconds)
    result = []
    for change, other in _cases(request, problem):
        best = None if other is None else _planned_again(request, other, chosen, shortly)
        if best is None or best.step_seconds >= now.step_seconds * (1 - SAME):
            best = chosen  # it fits as well with more of anything
        result.append(_record(change, best))
    result += _without_options(request, problem, chosen, now)
    more_memory = next(record for record in result if record.change == MORE_MEMORY)
    if not request.offload and _saves(more_memory, chosen) >= _NOTICEABLE:
        offloaded = request.offloaded()
        other = offloaded.problem(offloaded.costs(), memory_bytes=problem.memory_bytes)
        best = _planned_again(offloaded, other, chosen, shortly)
        if best is None or best.step_seconds >= now.step_seconds * (1 - SAME):
            best = chosen
        result.append(_record(ON_HOST, best))
    return tuple(result)


def _without_options(
    request: PlanRequest, problem: SearchProblem, chosen: Solution, now: Solution
) -> Iterator[WhatIf]:
    """What leaving an option out would gain, for each that keeps the search from a noticeably faster plan."""
    for text, freed in request.without:
        # Stages as a whole may have been found to need more than their blocks do.
        memory_bytes = freed.memory_bytes - (request.memory_bytes - problem.memory_bytes)
        other = freed.problem(freed.costs(), memory_bytes=memory_bytes)
        size = other.num_blocks * other.num_devices * len(other.micro_batches)
        best = _planned_again(freed, other, chosen, size > _SMALL_WITH_NUMBERS)
        if best is not None and best.step_seconds < now.step_seconds * (1 - _NOTICEABLE):
            yield _record(f"{WITHOUT}{text}", best)


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


def _cases(request: PlanRequest, problem: SearchProblem) -> Iterator[tuple[str, SearchProblem | None]]:
    """Each change with the problem that it makes; None where the options leave no use for it."""
    cluster = problem.cluster

    def on(other: Cluster) -> SearchProblem | None:
        if request.stage_replicas is not None:
            return None
        return request.problem(request.costs(other), memory_bytes=problem.memory_bytes)

    yield ONE_MORE_DEVICE, on(_with_one_more(cluster))
    yield MORE_MEMORY, replace(problem, memory_bytes=2 * problem.memory_bytes)
    fast = replace(
        cluster,
        intra_node=replace(cluster.intra_node, bytes_per_second=2 * cluster.intra_node.bytes_per_second),
        inter_node=replace(cluster.inter_node, bytes_per_second=2 * cluster.inter_node.bytes_per_second),
    )
    yield FASTER_LINKS, replace(problem, cluster=fast)
    if request.stage_replicas is None:
        yield MORE_DEVICES, on(replace(cluster, num_devices=2 * cluster.num_devices))


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
    if start.base is None and not problem.only_lane_schedules:
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
    tried_at_most = _MOST_TRIED if problem.num_blocks * problem.num_devices <= _SMALL else 0
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
