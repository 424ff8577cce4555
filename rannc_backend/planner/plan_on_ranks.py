"""What a job does to have a plan: rank 0 finds it in the cache, or searches for it and keeps it there; where several
plans may be the fastest, all ranks measure them.

In: an analysed graph, the options, the cluster, the `World`. Out: the plan. The other ranks answer rank 0's
measurements meanwhile.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import PlanError, RanksDifferError, UnsupportedModelError, needing_batch_size
from rannc_backend.ir.plan import Alternative, Plan
from rannc_backend.ir.plan_file import plan_in, read_plan_text, write_text
from rannc_backend.log.progress import Progress
from rannc_backend.log.step_timer import log_step_timer
from rannc_backend.planner.blocks.measure import leading, make_bench
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cluster.cluster_file import cluster_toml
from rannc_backend.planner.cluster.this_machine import cache_directory, device_memory_bytes
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_cache import cached_plan, keep_measured, keep_plan, key_of
from rannc_backend.planner.plan_fits_graph import check_options, exact_schedules
from rannc_backend.planner.plan_model import plan_analysis, settled_for
from rannc_backend.planner.settling import alternative_of, rounded
from rannc_backend.report.tables import plan_report, stdout_console
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.step.graph_settings import LENGTHS_CURE
from rannc_backend.runtime.world import World
from rannc_backend.settings.options import Config
from rannc_backend.settings.same_options import check_same_options

logger = logging.getLogger(__name__)

_DEPLOYMENT = "option deployment_file"
_NUM_TRIALS = 3  # of each plan, after one that compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphToPlan:
    """A graph whose lengths are numbers.

    Attributes:
        analysis: at the lengths that memory is planned for.
        seen: at those at which blocks are timed; None: the same.
        lengths: the two.
    """

    analysis: GraphAnalysis
    seen: GraphAnalysis | None
    lengths: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(
        cls, analysis: GraphAnalysis, seen: Iterable[Sequence[int]], planned: Iterable[Sequence[int]]
    ) -> GraphToPlan:
        """``seen``: of each rank, the lengths of its call; ``planned``: the longest that were announced there."""
        now, longest = (tuple(map(max, zip(*each, strict=True))) for each in (seen, planned))
        return cls(
            analysis=analysis.at_numbers(longest),
            seen=None if now == longest else analysis.at_numbers(now),
            lengths=(longest, now),
        )

    @property
    def timed(self) -> GraphAnalysis:
        """At the lengths at which blocks are timed."""
        return self.seen or self.analysis


def plan_job(
    graph: GraphToPlan,
    config: Config,
    cluster: Cluster,
    world: World,
    *,
    batch_rows: int,
    progress: Progress,
    profiled: bool,
    check: Callable[[Plan], object] | None,
) -> Plan:
    """The plan for this job, on rank 0.

    Args:
        profiled: the other ranks are ready to measure.
        check: raises where a plan does not fit this graph and job; None: plans are neither taken from the
        cache nor kept.
    """
    analysis = graph.analysis
    question = PlanningQuestion(
        config=settled_for(analysis, config, cluster),
        cluster=cluster,
        # A first batch that is too small for the replicas asked for is an error of its step, not of the plan.
        batch_rows=max(batch_rows, *config.stage_replica_counts, config.replica_num),
        progress=progress,
        step_timer=log_step_timer(verbose=config.verbose),
    )
    bench = make_bench(graph.timed, question.config, cluster, world.device) if profiled else None
    with leading(bench, world, limit_seconds=config.compile_timeout_seconds, progress=progress) as profiler:
        # A file of measured blocks that is asked for must be written, and what is to be measured again measured.
        if check is None or not config.plan_cache or config.profile_to_write or config.profile_again:
            plan = plan_analysis(analysis, question, profiler=profiler, seen=graph.seen)
            return plan if check is None or config.num_plans == 1 else _checked(plan, check)

        def fits(plan: Plan) -> None:
            check_options(
                plan,
                config,
                exact_schedules(analysis.split, analysis.needs_grad),
                whole_batch=analysis.split.whole_batch is not None,
            )
            check(plan)

        folder = cache_directory(config) / "plans"
        key = key_of(
            config,
            fingerprint=analysis.captured.plan_fingerprint,
            cluster=cluster_toml(cluster),
            batch_rows=question.batch_rows,
            lengths=graph.lengths,
            hosts=world.hosts,
            device_memory_bytes=device_memory_bytes(world),
        )
        found = cached_plan(folder, key, fits)
        if found is not None:
            return found
        plan = plan_analysis(analysis, question, profiler=profiler, seen=graph.seen)
        plan = plan if config.num_plans == 1 else _checked(plan, check)
        keep_plan(folder, key, plan)
        return plan


def measured_best(
    plan: Plan, world: World, config: Config, deployed: Callable[[Plan], Callable[[], float]]
) -> Plan:
    """The plan that takes the fewest seconds of this one and of those of its alternatives that may be faster, with what
    was measured; the slowest rank counts. It is saved where the options say so, and where all were measured it is kept
    for later runs, which do not measure again. Collective.

    Args:
        deployed: deploys a plan, and gives what runs a step under it without consequences and says its seconds.
    """
    plans = [plan, *(Plan.from_json(other.plan) for other in plan.alternatives if other.plan)]
    begun, found = time.monotonic(), []
    for number, each in enumerate(plans):
        if number and not world.control.broadcast(
            time.monotonic() - begun < config.plan_trial_seconds, what="whether another plan is measured"
        ):
            break
        trial = deployed(each)
        seconds = [trial() for _ in range(1 + _NUM_TRIALS)][1:]
        found.append(max(agree(world, "the seconds of a plan", statistics.median(seconds))))
    best = min(range(len(found)), key=found.__getitem__)
    if world.rank == 0:
        text = ", ".join(f"{seconds * 1e3:.3g}" for seconds in found)
        logger.info(
            "measured %d of %d plans: %s ms; number %d is used", len(found), len(plans), text, best + 1
        )
    chosen = _with_measured(plan, plans, [*found, *[math.inf] * (len(plans) - len(found))], best)
    if world.rank == 0 and config.plan_cache and len(found) == len(plans):
        keep_measured(cache_directory(config) / "plans", plan, chosen)
    if world.rank == 0 and config.save_deployment and not config.load_deployment:
        save_plan(chosen.to_json(), config.deployment_file)
    return chosen


def _with_measured(plan: Plan, plans: Sequence[Plan], found: Sequence[float], best: int) -> Plan:
    """Plan number ``best``, with the others as its alternatives."""
    seconds = [each if math.isfinite(each) else None for each in found]
    of_text = {
        other.plan: number for number, other in enumerate(filter(_is_rival, plan.alternatives), start=1)
    }
    others = [
        other.model_copy(
            update={"plan": "", "measured_step_seconds": seconds[of_text[other.plan]] if other.plan else None}
        )
        for other in plan.alternatives
        if of_text.get(other.plan) != best
    ]
    chosen, binding = plans[best], plan.binding
    if best:
        first = alternative_of(
            plan.model_copy(update={"measured_step_seconds": seconds[0]}),
            "predicted to be the fastest, and slower when it was measured",
        )
        others.insert(0, first)
        binding = "its measured step: it is predicted to be slower than another plan"
    update = {
        "measured_step_seconds": seconds[best],
        "alternatives": tuple(others),
        "binding": binding,
    }
    return rounded(chosen.model_copy(update=update))


def _is_rival(other: Alternative) -> bool:
    return bool(other.plan)


def _checked(plan: Plan, check: Callable[[Plan], object]) -> Plan:
    """The plan without the texts of alternatives that do not fit the graph and the job."""

    def fits(other: Alternative) -> bool:
        try:
            check(Plan.from_json(other.plan))
        except PlanError as error:
            logger.debug("%s is not measured: %s", other.reason, error)
            return False
        return True

    found = tuple(
        other if not other.plan or fits(other) else other.model_copy(update={"plan": ""})
        for other in plan.alternatives
    )
    return plan.model_copy(update={"alternatives": found})


def loaded_text(config: Config, analysis: GraphAnalysis) -> str:
    """The plan in the file that the options name, if it is what they ask for."""
    text = read_plan_text(config.deployment_file, named_by=_DEPLOYMENT)
    check_options(
        plan_in(text, config.deployment_file, named_by=_DEPLOYMENT),
        config,
        exact_schedules(analysis.split, analysis.needs_grad),
        whole_batch=analysis.split.whole_batch is not None,
    )
    logger.info("plan loaded from %s", config.deployment_file)
    return text


def save_plan(text: str, file: str) -> None:
    """Write a plan to the file that the options name."""
    write_text(file, text, what="plan", named_by=_DEPLOYMENT)
    logger.info("plan saved in %s", os.path.abspath(file))


def print_plan(plan: Plan, file: str) -> None:
    """The report of a plan that was saved in a file, for who reads the terminal."""
    console = stdout_console(highlight=False)
    for section in plan_report(plan):
        console.print(section)
    line = f"dry run: plan for {plan.world_size} ranks saved in {file}"
    console.print(line, soft_wrap=True, markup=False)
    sys.stdout.flush()


def rows_as_number(name: str) -> UnsupportedModelError:
    """The model's code has made a number of the size of an input, whose rows are those of a batch."""
    return needing_batch_size(
        f"the model works for one batch size only: its code turned the size of input {name} into a number"
    )


def check_same(answers: list[dict[str, object]]) -> None:
    """Raise RanksDifferError where what ranks say at a graph's first call is not the same.

    Raises UnsupportedModelError for an input that was captured for its size, and is a batch of its own on each rank.
    """
    check_same_options([answer["options"] for answer in answers])  # type: ignore[misc]
    fixed: list[Any] = [answer["fixed"] for answer in answers]
    for name in fixed[0] if answers[0]["options"]["gather_inputs"] else ():  # type: ignore[index]
        if all(name in each for each in fixed) and any(each[name] != fixed[0][name] for each in fixed):
            raise rows_as_number(name)
    shapes = [str(answer["shapes"]) for answer in answers]
    for what, values, cure in (
        ("versions of torch", [str(answer["torch"]) for answer in answers], ""),
        ("shapes of inputs, behind the batch size", shapes, LENGTHS_CURE),
    ):
        if len(set(values)) > 1:
            raise RanksDifferError(what, value_by_rank=values, cure=cure)
