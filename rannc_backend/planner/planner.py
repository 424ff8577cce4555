"""The planner: blocks with prices, a cluster and the user's limits in, the fastest predicted `Plan` out.

Costs of runs of blocks (planner/search/interval_costs.py), the search (planner/search/search.py), then the
plan with what binds it, the alternatives that lost and what would change it. Deterministic: the same question
gives the same bytes, unless the user ends the search. Neither torch nor sympy is imported from here on:
blocks that were saved are planned again in less time than those take.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rannc_backend.errors import InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import (
    SCHEMA_VERSION,
    Alternative,
    Plan,
    StagePlan,
    WhatIf,
    lane_bytes,
    lanes_of_stages,
)
from rannc_backend.ir.plan_formats import Formats
from rannc_backend.log.progress import Progress
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.output_bytes import (
    ASKED,
    OutputBytes,
    needed_by_stage,
    output_plans,
    why_left_out,
    with_outputs,
)
from rannc_backend.planner.cost.pricing import AnalyticPricer, BlockPricer, WholeStages
from rannc_backend.planner.cost.small_models import stage_compiler
from rannc_backend.planner.plan_parts import (
    block_plans,
    described_formats,
    keeps_limits,
    priced,
    stage_plans,
)
from rannc_backend.planner.plan_request import PlanRequest, precise_size_text
from rannc_backend.planner.search.ilp import IlpSearch
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.planner.search.moves import RunAll
from rannc_backend.planner.search.over_intervals import ParameterSums, received_bytes
from rannc_backend.planner.search.problem import SearchProblem, Solution
from rannc_backend.planner.search.search import SearchResult, StageSearch
from rannc_backend.planner.settling import attempts, is_safe, plan_in_own_order, plan_without_blocks, settle
from rannc_backend.planner.what_binds import (
    WITHOUT_ZERO,
    Changed,
    alternatives,
    best_of_change,
    binding,
    kept_others,
    refused_by_limits,
    runners_up,
    what_if,
    without_offload,
    without_zero,
)
from rannc_backend.planner.worker_processes import Workers
from rannc_backend.schedule.orders import ScheduleName
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

_MAX_SEARCHES = 4  # with less and less memory, where whole stages need more than their blocks say
_ROUNDED_UP = 1 + 1e-6
_NEAR = 0.5  # of the limit
PREDICTION_ERROR = 0.25  # of a step, as plans of one model are compared: those nearer may be the faster ones
_WORTH_DIVIDING = 5e-3  # of the step: for less, every replica updates all, as people know it


def plan_blocks(
    graph: BlockGraph,
    config: Config,
    *,
    cluster: Cluster,
    batch_rows: int,
    schedules: tuple[ScheduleName, ...],
    fingerprint: str,
    model_name: str = "",
    stage_replicas: tuple[int, ...] | None = None,
    pricer: BlockPricer | None = None,
    progress: Progress | None = None,
    whole_stages: WholeStages | None = None,
) -> Plan:
    """The fastest plan of the blocks on all devices of `cluster`, for batches of about `batch_rows` rows.

    Args:
        schedules: those that give exact results, the one preferred where both are equally fast first.
        stage_replicas: fixes stages and replicas, as the option of that name does.
        pricer: what blocks cost; None: a roofline on the cluster's device.
        progress: told of the search; asked whether to end it.
        whole_stages: knows the memory of the chosen stages better than their blocks do. Where they need more
        than there is, the search
            is repeated with that much less.

    Raises `InfeasiblePlanError` with the smallest memory or number of devices that would do.
    """
    pricer = AnalyticPricer(device=cluster.device) if pricer is None else pricer
    outputs = OutputBytes(graph=graph, batch_rows=batch_rows, num_devices=cluster.num_devices)
    graph = graph.without_outputs() if _may_lack_outputs(graph, config) else graph
    request = PlanRequest.of(graph, config, cluster, pricer, batch_rows, schedules, stage_replicas)
    if not graph.blocks:
        return plan_without_blocks(request, stage_compiler(config), fingerprint, model_name)
    others: tuple[Alternative, ...] = ()
    changes: tuple[WhatIf, ...] = ()
    limit_seconds = config.compile_timeout_seconds
    with Workers(num_processes=config.search_processes, limit_seconds=limit_seconds) as workers:
        request, choice, why = _choose_offload(request, progress, _Means(config, whole_stages, workers))
        if progress is None or not progress.cancelled():
            others, changes = _explained(request, choice, workers)
    others += why
    chosen, equal = choice.solution, choice.equal
    if choice.problem.only_lane_schedules and not chosen.has_several_stages:
        logger.warning(
            "schedule %s needs two stages on each rank, and the model's blocks (%d) or the memory do not allow them; "
            "%s is used", *choice.problem.lane_schedules, len(graph.blocks), chosen.schedule,
        )  # fmt: skip
    stages, left_out = _with_outputs(choice, outputs, config, request.memory_bytes)
    _warn_of_idle_ranks(request, chosen)
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        fingerprint=fingerprint,
        model_name=model_name,
        cluster=cluster.assumption(),
        world_size=cluster.num_devices,
        batch_rows=batch_rows,
        num_micro_batches=chosen.num_micro_batches,
        schedule=chosen.schedule,
        stage_compiler=stage_compiler(config),
        zero_stage=config.zero_level
        if config.zero_level is not None
        else int(request.update_groups is not None),
        zero_ngroups=config.zero_ngroups,
        told_recompute=config.told_recompute,
        offload="parameters" if request.offload else "none",
        formats=formats_of(request, config, choice.problem, chosen),
        outputs=output_plans(outputs, stages),
        outputs_left_out=left_out,
        memory_limit_bytes=int(request.memory_bytes),
        blocks=block_plans(graph, choice.segments, batch_rows),
        stages=stages,
        predicted_step_seconds=chosen.step_seconds,
        equal_split_seconds=None if equal is None else equal.step_seconds,
        proven_gap=choice.result.proven_gap,
        proven_for=choice.problem.schedules if choice.problem.own_order or chosen.base else (),
        costs_from=pricer.source,
        binding=binding(chosen, stages, changes, ended=choice.result.ended),
        alternatives=others,
        what_if=changes,
    )
    plan = plan_in_own_order(plan, choice.problem, chosen)
    if broken := request.limits.broken_by_plan(plan):
        raise InfeasiblePlanError(broken)
    return _with_rivals(plan, request, choice, outputs, config) if others and config.num_plans > 1 else plan


def _with_rivals(
    plan: Plan, request: PlanRequest, choice: _Choice, outputs: OutputBytes, config: Config
) -> Plan:
    """The plan with the texts of those of the others that were kept whose steps are within the prediction's error."""
    texts: dict[int, str] = {}
    longest = plan.predicted_step_seconds * (1 + PREDICTION_ERROR)
    for place, other in enumerate(kept_others(choice.search, choice.problem, choice.solution), start=2):
        if other.step_seconds > longest:
            continue
        stages = stage_plans(request.graph, choice.costs, choice.problem, other)
        its = replace(choice, solution=other, stages=stages)
        stages, left_out = _with_outputs(its, outputs, config, request.memory_bytes)
        rival = plan.model_copy(
            update={
                "num_micro_batches": other.num_micro_batches,
                "schedule": other.schedule,
                "formats": formats_of(request, config, choice.problem, other),
                "outputs": output_plans(outputs, stages),
                "outputs_left_out": left_out,
                "stages": stages,
                "predicted_step_seconds": other.step_seconds,
                "binding": "",
                "alternatives": (),
                "what_if": (),
            }
        )
        rival = plan_in_own_order(rival, choice.problem, other).model_copy(update={"alternatives": ()})
        fits = _fullest(rival.stages) <= request.memory_bytes * _ROUNDED_UP
        if fits and not request.limits.broken_by_plan(rival):
            texts[place] = rival.to_json()
    found = tuple(each.model_copy(update={"plan": texts.get(each.place, "")}) for each in plan.alternatives)
    return plan.model_copy(update={"alternatives": found})


def formats_of(request: PlanRequest, config: Config, problem: SearchProblem, chosen: Solution) -> Formats:
    """What the plan sends in fewer bits, and what that saves beside the same plan that sends all as it is."""
    graph = request.graph
    stages = [(range(*pair), chosen.ranks(index)) for index, pair in enumerate(pairwise(chosen.bounds))]
    known = described_formats(graph, stages, config)
    if graph.is_exact:
        return known
    messages = gradients = 0.0
    sums = ParameterSums.of(graph)
    for index, (begin, end) in enumerate(pairwise(chosen.bounds)):
        if index and chosen.ranks(index) != chosen.ranks(index - 1):
            whole, sent = (
                received_bytes(graph, begin, end, [request.batch_rows], on_wire=on_wire)
                for on_wire in (False, True)
            )
            messages += sum(float(before[0] - after[0]) for before, after in zip(whole, sent, strict=True))
        if chosen.replicas[index] > 1:
            place = (begin, end - begin - 1)
            gradients += float(sums.sums[place] - sums.reduced[place]) * chosen.replicas[index]
    exact = replace(request, graph=graph.as_it_is(), without=(), without_all=None)
    costs = exact.costs(all_stages=True)
    whole_plan = priced(exact.problem(costs, memory_bytes=float("inf")), chosen)
    own = priced(replace(problem, memory_bytes=float("inf"), limits=PipelineLimits()), chosen)
    longer = 0.0 if whole_plan is None or own is None else whole_plan.step_seconds - own.step_seconds
    saved = {"saved_message_bytes": int(messages), "saved_gradient_bytes": int(gradients)}
    return known.model_copy(update={**saved, "saved_seconds": float(f"{max(0.0, longer):.6g}")})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What to do, and the search that found it. `equal`: the best equal split, if one fits. `undivided`: what else was
    asked for, where the plan divides updates since that is faster.
    """

    problem: SearchProblem
    search: StageSearch
    result: SearchResult
    equal: Solution | None
    solution: Solution
    stages: tuple[StagePlan, ...]
    segments: tuple[int, ...]
    costs: IntervalCosts
    undivided: SearchProblem | None = None


def _explained(
    request: PlanRequest, choice: _Choice, workers: Workers
) -> tuple[tuple[Alternative, ...], tuple[WhatIf, ...]]:
    """What lost to the plan, and what would change it; each change is searched for by itself, so in several processes."""
    changed = Changed(
        request=request,
        problem=choice.problem,
        chosen=choice.solution,
        found=choice.result,
        undivided=choice.undivided,
    )
    changes = changed.changes
    batch = workers.start(best_of_change, changed, changes)
    try:
        others = (
            *runners_up(choice.search, choice.problem, choice.solution),
            *alternatives(request, choice.search, choice.problem, choice.solution, choice.equal),
        )
    except BaseException:
        batch.stop()
        raise
    found = dict(zip(changes, batch.wait(), strict=True))
    if choice.undivided is not None:
        others = (*others, without_zero(choice.undivided, choice.solution, found[WITHOUT_ZERO]))
    return others, what_if(changed, found)


@dataclass(frozen=True, slots=True)
class _Means:
    """What a plan is searched with. `whole_stages` knows the memory of whole stages."""

    config: Config
    whole_stages: WholeStages | None
    workers: Workers

    @property
    def always(self) -> bool:
        """Whether the memory of whole stages is always asked for, or where they come near to the limit."""
        return self.config.stage_memory == "traced"

    @property
    def run_all(self) -> RunAll | None:
        """None: one process does everything when it is needed."""
        return self.workers.run if self.workers.num_processes > 1 else None

    def search(self, problem: SearchProblem, progress: Progress | None, seconds: float) -> StageSearch:
        """See `StageSearch`; by the solver that is asked for."""
        if self.config.solver == "dp":
            return StageSearch(
                problem,
                progress=progress,
                seconds=seconds,
                run_all=self.run_all,
                num_plans=self.config.num_plans,
            )
        return IlpSearch(
            problem,
            progress=progress,
            seconds=seconds,
            time_seconds=self.config.solver_seconds,
            run_all=self.run_all,
            num_plans=self.config.num_plans,
        )


def _choose_offload(
    request: PlanRequest, progress: Progress | None, means: _Means
) -> tuple[PlanRequest, _Choice, tuple[Alternative, ...]]:
    """The fastest plan; where nothing fits and option offload leaves it to the planner, that with parameters on the host, and
    why it is so.
    """
    try:
        return *_choose_updates(request, progress, means), ()
    except InfeasiblePlanError:
        if means.config.offload != "auto" or request.offload:
            raise
    offloaded, choice = _choose_updates(request.offloaded(), progress, means)
    return offloaded, choice, (without_offload(choice.solution, request.memory_bytes),)


def _choose_updates(
    request: PlanRequest, progress: Progress | None, means: _Means
) -> tuple[PlanRequest, _Choice]:
    """The fastest plan, and the request with the answer whether updates are divided over replicas (ZeRO 1).

    Dividing them frees memory, so a plan with it is looked for first: no plan is faster than its lower bound, with or
    without. Then one without it is, which is taken unless it is noticeably slower; where memory binds there is none below
    that, which bounds soon prove. Where all of a model fits on each device, dividing gains nothing.
    """
    plain = request.with_updates(divided=False)
    costs = plain.costs()
    if not request.may_divide_updates or _fits_anyhow(plain, costs):
        return plain, _found(_choose(plain, costs, progress, means), plain, costs)
    divided = request.with_updates(divided=True)
    divided_costs = divided.costs()
    choice = _found(_choose(divided, divided_costs, progress, means), divided, divided_costs)
    assert choice.result.solution is not None, "it was chosen from"
    if progress is not None and progress.cancelled():
        return divided, choice
    limit = choice.result.solution.step_seconds * (1 + _WORTH_DIVIDING)
    other = _choose(plain, costs, progress, means, limit)
    if other is not None and other.solution.step_seconds <= choice.solution.step_seconds * (
        1 + _WORTH_DIVIDING
    ):
        lower = min(other.result.lower_bound, choice.result.lower_bound)
        return plain, replace(other, result=replace(other.result, lower_bound=lower))
    return divided, replace(choice, undivided=plain.problem(costs))


def _found(choice: _Choice | None, request: PlanRequest, costs: IntervalCosts) -> _Choice:
    if choice is None:
        raise refused_by_limits(request, request.problem(costs)) or request.infeasible()
    return choice


def _fits_anyhow(request: PlanRequest, costs: IntervalCosts) -> bool:
    """Whether all blocks fit on one device, with all micro-batches in flight and nothing computed again, whatever their
    number: then no plan lacks memory.
    """
    if costs.max_length < len(request.graph.blocks):
        return False
    for number in {request.micro_batches[0], request.micro_batches[-1]}:
        tables = costs.tables(number)
        fixed, flight = (part[:, 0, -1, 0] for part in (tables.fixed_bytes, tables.flight_bytes))
        best = int(tables.backward[:, 0, -1, 0].argmin())
        update = 0.0 if tables.update_bytes is None else tables.update_bytes[0, -1, 0]
        held = max(number * flight[best] + number * tables.kept_bytes[0, -1, 0], update)
        if fixed[best] + held > request.memory_bytes:
            return False
    return True


def _choose(
    request: PlanRequest,
    costs: IntervalCosts,
    progress: Progress | None,
    means: _Means,
    limit_seconds: float = math.inf,
) -> _Choice | None:
    """The fastest plan whose stages fit, also as whole stages; None where nothing fits whose step is found to take less
    than the limit.

    Raises `InfeasiblePlanError` where what fits does not as whole stages.
    """
    problem = request.problem(costs)
    least = math.inf
    whole_stages = means.whole_stages
    for _ in range(_MAX_SEARCHES):
        found = _searched(request, problem, progress, means, limit_seconds)
        if found is None:
            break
        search, result, equal, solution = found
        stages = stage_plans(request.graph, costs, problem, solution)
        ended = progress is not None and progress.cancelled()
        if (
            whole_stages is not None
            and not ended
            and (means.always or _fullest(stages) > _NEAR * request.memory_bytes)
        ):
            stages = stage_plans(request.graph, costs, problem, solution, whole_stages)
        needed = _fullest(stages)
        if whole_stages is None or needed <= request.memory_bytes * _ROUNDED_UP or ended:
            return _Choice(
                problem=problem,
                search=search,
                result=result,
                equal=equal,
                solution=solution,
                stages=stages,
                segments=costs.segments.of_block,
                costs=costs,
            )
        logger.info(
            "a stage needs %s as a whole, and plans may use %s",
            precise_size_text(needed),
            precise_size_text(request.memory_bytes),
        )
        least = min(least, needed)
        problem = replace(problem, memory_bytes=problem.memory_bytes * request.memory_bytes / needed)
    if math.isinf(least) or not math.isinf(limit_seconds):
        return None
    raise InfeasiblePlanError(
        f"the fullest stage of the plans that were found needs {precise_size_text(least)}, and plans may use "
        f"{precise_size_text(request.memory_bytes)}",
        smallest_bytes=least / (1 - request.memory_margin),
    )


def _searched(
    request: PlanRequest,
    problem: SearchProblem,
    progress: Progress | None,
    means: _Means,
    limit_seconds: float,
) -> tuple[StageSearch, SearchResult, Solution | None, Solution] | None:
    """A search, what it found, the best equal split, and the plan to take; None where nothing fits and keeps the limits
    whose step is found to take less than `limit_seconds`.
    """
    for tried in attempts(problem):
        searched = replace(tried, cluster=request.searched(tried.cluster))
        search = means.search(searched, progress, limit_seconds)
        result = search.run()
        if result.solution is None:
            continue
        equal = None if search.equal is None else priced(tried, search.equal)
        solution = settle(tried, result.solution, equal)
        if solution.own_order and not is_safe(tried, solution, request.graph):
            told = logger.warning if tried.only_own_order else logger.info
            told(
                "an order made for the plan would get stuck over values that skip stages; it keeps its schedule"
            )
            solution = settle(replace(tried, own_order="", only_own_order=False), result.solution, equal)
        if keeps_limits(problem, solution):
            equal = equal if equal is not None and keeps_limits(problem, equal) else None
            return search.under(problem.limits), result, equal, solution
    return None


def _may_lack_outputs(graph: BlockGraph, config: Config) -> bool:
    return config.outputs == "loss" or (config.outputs == "auto" and graph.has_loss)


def _with_outputs(
    choice: _Choice, outputs: OutputBytes, config: Config, limit_bytes: float
) -> tuple[tuple[StagePlan, ...], str]:
    """The stages, with the outputs that were not planned for where there is room, and why there is none."""
    stages = choice.stages
    if not outputs.graph.outputs or not _may_lack_outputs(outputs.graph, config):
        return stages, ""
    if config.outputs == "loss":
        return stages, ASKED
    needed = needed_by_stage(outputs, stages, choice.solution.num_micro_batches)
    left_out = why_left_out(stages, needed, limit_bytes)
    return (stages, left_out) if left_out else (with_outputs(stages, needed), "")


def _fullest(stages: Sequence[StagePlan]) -> int:
    """Of a rank, with all of its stages."""
    return max(
        lane_bytes((stages[x].predicted.peak_bytes, stages[x].predicted.workspace_bytes) for x in lane)
        for lane in lanes_of_stages(stages)
    )


def _warn_of_idle_ranks(request: PlanRequest, chosen: Solution) -> None:
    used, there = chosen.num_ranks, request.cluster.num_devices
    if used < there:
        logger.warning(
            "only %d of %d ranks are given work: more would not be faster with the settings, the model's "
            "blocks (%d) and the batch (%d rows)", used, there, len(request.graph.blocks), request.batch_rows,
        )  # fmt: skip
