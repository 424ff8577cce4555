"""Which plan to take of what a search found.

In: a search problem, the plan that was found in it, the best equal split. Out: the plan, priced with latency; and the
plan with an order of its own, where that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import INPUT
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import (
    SCHEMA_VERSION,
    Alternative,
    Plan,
    RowCost,
    StageCompiler,
    StageCost,
    StagePlan,
)
from rannc_backend.planner.plan_parts import (
    describe_stage,
    keeps_limits,
    longest_compute,
    own_order_of,
    priced,
    priced_in,
)
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.search.equal_split import even_shares
from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.planner.search.problem import Pricer, SearchProblem, Solution
from rannc_backend.planner.search.search import TOLERANCE
from rannc_backend.planner.search.several_stages import fits, lane_plans
from rannc_backend.schedule.edges import EdgeSpec
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.orders import ScheduleName, schedule_named
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.schedule.verify import verify

_UNEVEN = 1.5  # times as much computing in the slowest stage as even shares would give it
_FASTER = 5e-3  # relative: by less, a schedule that people know is preferred to an order of the plan's own
_NEAR, _MAX_TRIED = 0.05, 6  # plans that may be the fastest in an order of their own: relative, and how many
_MAX_ORDERED = 12  # plans with several stages on each rank that get an order of their own
_AS_FAST = 1e-3  # relative difference of steps that are called equal where the number of stages is given


def settle(problem: SearchProblem, found: Solution, equal: Solution | None) -> Solution:
    """The plan to take: what was found, priced with latency; of equally fast ones that with the preferred
    schedule.

    Where the search left latency out, another schedule or number of micro-batches may be faster with it, and
    so may an equal split. Where the number of stages is given, even shares of the computing are taken in
    place of a plan that is far from them: with few micro-batches stages only cost messages, and nobody who
    asks for stages wants one of them to do all the work.
    """
    without_latency = problem.num_stages is not None or problem.stage_replicas is not None
    numbers = problem.micro_batches if without_latency else (found.num_micro_batches,)
    return _with_several_stages(problem, _settled(problem, found, equal, without_latency, numbers))


def _settled(
    problem: SearchProblem,
    found: Solution,
    equal: Solution | None,
    without_latency: bool,
    numbers: Sequence[int],
) -> Solution:
    """Of plans with one stage on each rank."""
    best: Solution | None = None
    others: list[Solution] = []
    for schedule in problem.schedules:
        for number in numbers:
            other = priced(problem, replace(found, num_micro_batches=number), schedule=schedule)
            if other is not None:
                others.append(other)
                if best is None or other.step_seconds < best.step_seconds * (1 - TOLERANCE):
                    best = other
    assert best is not None, "latency does not change what fits"
    if equal is not None and equal.step_seconds < best.step_seconds * (1 - TOLERANCE):
        best = equal
    if not without_latency or best.num_stages == 1:
        return _in_best_order(problem, best, others)
    even = even_shares(Pricer(problem, best.num_micro_batches, best.schedule), best)
    if even is None:
        return _in_best_order(problem, best, others)
    # With one micro-batch every cut takes equally long: then the even one, which also shares out the memory.
    as_fast = even.step_seconds <= best.step_seconds * (1 + _AS_FAST)
    unevenness = longest_compute(problem, best) / max(longest_compute(problem, even), 1e-30)
    if unevenness > (1 if as_fast else _UNEVEN):
        return in_own_order(
            problem, even if equal is None or even.step_seconds <= equal.step_seconds else equal
        )
    return _in_best_order(problem, best, others)


def _with_several_stages(problem: SearchProblem, best: Solution) -> Solution:
    """A plan with several stages on each rank, where that is faster or nothing else is asked for."""
    if not problem.lane_schedules or (best.num_stages == 1 and not problem.only_lane_schedules):
        return best
    tried = [in_own_order(problem, each) for each in lane_plans(problem, best)[:_MAX_ORDERED]]
    if not problem.only_lane_schedules:
        tried = [each for each in tried if keeps_limits(problem, each)]
    found = min(tried, key=lambda each: each.step_seconds, default=None)
    if found is None:
        return best
    is_taken = problem.only_lane_schedules or found.step_seconds < best.step_seconds * (1 - _FASTER)
    return found if is_taken else best


def _in_best_order(problem: SearchProblem, best: Solution, others: Sequence[Solution]) -> Solution:
    """`best` in an order of its own, or one of the others that is faster so. Those that are nearly as fast are tried, and even
    shares with their micro-batches: an order of its own gains most where no stage sets the pace.
    """
    if not problem.own_order:
        return best
    near = [each for each in others if each.step_seconds <= best.step_seconds * (1 + _NEAR)]
    near.sort(key=lambda each: each.step_seconds)
    near = [best, *near[:_MAX_TRIED]]
    even = [even_shares(Pricer(problem, each.num_micro_batches, each.schedule), each) for each in near]
    tried = dict.fromkeys([*near, *(each for each in even if each is not None)])
    return min((in_own_order(problem, each) for each in tried), key=lambda each: each.step_seconds)


def in_own_order(problem: SearchProblem, solution: Solution) -> Solution:
    """The same in an order that is made for it, if the problem has one, and it is faster or nothing else is asked for."""
    if schedule_named(solution.schedule).saves_memory and not problem.only_own_order:
        # What list scheduling makes within so little memory takes longer than a pattern.
        return solution
    own = own_order_of(problem, solution) if problem.own_order else None
    if own is None or (solution.num_stages == 1 and not problem.only_own_order):
        return solution
    if solution.has_several_stages and not fits(problem, solution, own):
        return solution
    seconds = priced_in(problem, solution, own)
    ordered = replace(solution, step_seconds=seconds, own_order=problem.own_order)
    is_taken = problem.only_own_order or seconds < solution.step_seconds * (1 - _FASTER)
    is_allowed = problem.only_own_order or keeps_limits(problem, ordered)
    return ordered if is_taken and is_allowed else solution


def attempts(problem: SearchProblem) -> Iterator[SearchProblem]:
    """The problem without its limits, whose best plan is the best under them too where it keeps them, as it often does; then
    the problem itself, whose search takes longer.
    """
    if problem.limits:
        yield replace(problem, limits=PipelineLimits())
    yield problem


def plan_in_own_order(plan: Plan, problem: SearchProblem, found: Solution) -> Plan:
    """The plan of what was found, in the order that is made for it, if there is one."""
    if not found.own_order:
        return plan
    base = priced(replace(problem, limits=PipelineLimits()), found)
    base_seconds = found.step_seconds if base is None else base.step_seconds
    return with_own_order(plan, found.own_order, base_seconds, only=problem.only_own_order)


def with_own_order(plan: Plan, name: ScheduleName, base_seconds: float, *, only: bool) -> Plan:
    """The plan in the order that is made for it, beside it with its base schedule, which takes `base_seconds`; or that,
    where the memory of the whole plan leaves no gain. `only`: nothing but the own order is asked for.
    """
    ordered = _reordered(plan, name)
    simulated = simulate_plan(ordered)
    if not only and simulated.step_seconds >= base_seconds * (1 - _FASTER):
        return rounded(plan.model_copy(update={"predicted_step_seconds": base_seconds}))
    longer = base_seconds / simulated.step_seconds if simulated.step_seconds else 1.0
    told = alternative_of(
        plan.model_copy(update={"predicted_step_seconds": base_seconds}),
        f"schedule {plan.schedule}: the step takes {longer:.4g} times as long",
    )
    update = {
        "stages": tuple(
            _with_idle_share(stage, found.idle_share)
            for stage, found in zip(ordered.stages, simulated.stages, strict=True)
        ),
        "alternatives": (told, *plan.alternatives),
        "predicted_step_seconds": simulated.step_seconds,
    }
    return rounded(ordered.model_copy(update=update))


def alternative_of(plan: Plan, reason: str) -> Alternative:
    """What another plan says of this one, and why it was not taken."""
    return Alternative(
        num_stages=plan.num_stages,
        stage_replicas=plan.stage_replicas,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        recompute=tuple(stage.recompute for stage in plan.stages),
        predicted_step_seconds=plan.predicted_step_seconds,
        measured_step_seconds=plan.measured_step_seconds,
        reason=reason,
    )


def rounded(plan: Plan) -> Plan:
    """With numbers as plans have them."""
    return Plan.from_json(plan.to_json())


def _reordered(plan: Plan, name: ScheduleName) -> Plan:
    """With the memory of the order of that name."""
    simulated = simulate_plan(plan, name)
    stages = []
    for stage, found in zip(plan.stages, simulated.stages, strict=True):
        activations = found.peak_bytes - stage.predicted.peak_bytes + stage.predicted.activation_bytes
        update = {"activation_bytes": activations, "peak_bytes": found.peak_bytes}
        stages.append(stage.model_copy(update={"predicted": stage.predicted.model_copy(update=update)}))
    return plan.model_copy(update={"schedule": name, "stages": tuple(stages)})


def _with_idle_share(stage: StagePlan, idle_share: float) -> StagePlan:
    predicted = stage.predicted.model_copy(update={"idle_share": idle_share})
    return stage.model_copy(update={"predicted": predicted})


def is_safe(problem: SearchProblem, solution: Solution, graph: BlockGraph) -> bool:
    """Whether the programs of an own order come to their end with all messages of the stages, also those that skip some."""
    stage_of = np.searchsorted(solution.bounds[1:], np.arange(len(graph.blocks)), side="right").tolist()
    pairs: dict[tuple[int, int], bool] = {}
    for flow in graph.flows:
        source = stage_of[flow.producer] if flow.producer >= 0 else INPUT
        for reader in {stage_of[block] for block in flow.consumers} - {source}:
            pairs[source, reader] = pairs.get((source, reader), False) or flow.needs_grad
    edges = [
        EdgeSpec(
            src=source, dst=reader, num_forward_values=1, num_gradient_values=int(needs and source != INPUT)
        )
        for (source, reader), needs in pairs.items()
    ]
    number = solution.num_micro_batches
    order = own_order_of(problem, solution).order(solution.num_stages, number)
    try:
        lanes = solution.lanes
        programs = lower_lanes(order, edges, "train", number)
        verify(programs, edges, number, "train", lanes=lanes)
    except ScheduleError:
        return False
    return True


def plan_without_blocks(
    request: PlanRequest, compiler: StageCompiler, fingerprint: str, model_name: str
) -> Plan:
    """A model that computes nothing from its batch: one stage without nodes on all ranks."""
    nothing = StageCost(**{name: 0 for name in StageCost.model_fields})
    stage = describe_stage(
        request.graph,
        0,
        range(0),
        ranks=range(request.cluster.num_devices),
        recompute=1.0,
        predicted=nothing,
        at_rows=(RowCost(rows=1, **{name: 0 for name in RowCost.model_fields if name != "rows"}),),
        bytes_per_row=(0.0, 0.0),
        num_buckets=1,
    )
    return Plan(
        schema_version=SCHEMA_VERSION,
        fingerprint=fingerprint,
        model_name=model_name,
        cluster=request.cluster.assumption(),
        world_size=request.cluster.num_devices,
        batch_rows=request.batch_rows,
        num_micro_batches=1,
        schedule=request.schedules[0],
        stage_compiler=compiler,
        memory_limit_bytes=int(request.memory_bytes),
        blocks=(),
        stages=(stage,),
        predicted_step_seconds=0.0,
        equal_split_seconds=None,
        proven_gap=0.0,
        costs_from=request.pricer.source,
        binding="nothing: the model computes nothing from its batch",
        alternatives=(),
        what_if=(),
    )
