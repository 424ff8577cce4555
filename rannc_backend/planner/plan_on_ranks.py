"""What rank 0 of a job does to have a plan: it is found in the cache, or searched for and kept there.

In: an analysed graph, the options, the cluster, the `World`. Out: the plan. The other ranks answer its
measurements meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.ir.plan import Plan
from rannc_backend.log.progress import Progress
from rannc_backend.log.step_timer import log_step_timer
from rannc_backend.planner.blocks.measure import leading, make_bench
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cluster.cluster_file import cluster_toml
from rannc_backend.planner.cluster.this_machine import cache_directory, device_memory_bytes
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_cache import cached_plan, keep_plan, key_of
from rannc_backend.planner.plan_fits_graph import check_options, exact_schedules
from rannc_backend.planner.plan_model import plan_analysis, settled_for
from rannc_backend.runtime.world import World
from rannc_backend.settings.options import Config


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
            return plan_analysis(analysis, question, profiler=profiler, seen=graph.seen)

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
        keep_plan(folder, key, plan)
        return plan
