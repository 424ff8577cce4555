"""Plans a model from its blocks, without its graph: nothing here imports torch, so blocks from a file are
planned in a second or two.

In: a `PlannableModel` and a `PlanningQuestion`. Out: a `Plan`.

Terms. Rows to plan for: those of one training step, of all replicas together; the example batch may have any
number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import Plan
from rannc_backend.log.progress import Progress
from rannc_backend.log.step_timer import StepTimer
from rannc_backend.planner.blocks_file import PlannableModel
from rannc_backend.planner.choose_pricer import Pricing, analytic_pricer
from rannc_backend.planner.cluster.asked_job import check_ranks, on_mesh, with_micro_batches
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import BlockPricer, PricerOfTwo, WholeStages
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.settings.options import Config

if TYPE_CHECKING:
    from rannc_backend.planner.blocks.measure import LeadingProfiler


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningQuestion:
    """What is planned for: all devices of `cluster`, and steps of `batch_rows` rows. `progress`, `timer`:
    who is told how far it is.
    """

    config: Config
    cluster: Cluster
    batch_rows: int
    progress: Progress = field(default_factory=Progress)
    step_timer: StepTimer = field(default_factory=StepTimer)


def plan_prepared(
    model: PlannableModel,
    question: PlanningQuestion,
    *,
    profiler: LeadingProfiler | None = None,
    whole_stages: WholeStages | None = None,
    timed: PlannableModel | None = None,
) -> Plan:
    """The plan of blocks that were made before, perhaps for other devices.

    With a `profiler`, blocks may be measured; the other ranks must be ready for it. `whole_stages`: see
    `plan_blocks`. `timed`: the same blocks at the lengths at which they are timed, where `model` has those that
    memory is planned for.

    Raises:
        BlocksFileError: the blocks were made under other options.
        JobSizeError: the options are of another number of ranks, or another batch.
        InfeasiblePlanError: nothing fits; says the smallest memory or number of devices that would do.
    """
    check_ranks(question.config, question.cluster.num_devices)
    config = model.settled(
        with_micro_batches(question.config, question.batch_rows), question.cluster.device.kind
    )
    model.check_options(config)
    question = replace(question, cluster=on_mesh(config, question.cluster))
    pricing = Pricing(
        graph=(timed or model).graph,
        partitions=timed or model,
        config=config,
        cluster=question.cluster,
        batch_rows=question.batch_rows,
        profiler=profiler,
    )

    def search(pricer: BlockPricer) -> Plan:
        if timed is not None:
            kept = analytic_pricer(model, config, question.cluster)
            pricer = PricerOfTwo(seconds=pricer, timed=timed.graph.blocks, kept=kept)
        with question.step_timer.step("search") as details:
            plan = plan_blocks(
                for_batch(model.graph, question.batch_rows, question.cluster.num_devices),
                config,
                cluster=question.cluster,
                batch_rows=question.batch_rows,
                schedules=model.searched_schedules(config),
                fingerprint=model.fingerprint,
                model_name=model.model_name,
                pricer=pricer,
                progress=question.progress,
                whole_stages=whole_stages,
            ).model_copy(update={"plan_name": config.plan_name})
            details.append(f"{plan.num_stages} stages")
        return plan

    return pricing.plan(search, cancelled=question.progress.cancelled)


def for_batch(graph: BlockGraph, batch_rows: int, num_ranks: int) -> BlockGraph:
    """The graph for a batch of so many rows: how many rows of tables it looks up, and how many of them ranks exchange at
    most, each number once per rank.
    """
    tables = [use for use in graph.parameters if use.table_rows]
    if not tables:
        return graph
    counts = evaluate([use.looked_up for use in tables], [batch_rows])[:, 0]
    found = {
        use.name: replace(use, looked_up=int(count), reduced_rows=min(int(count), num_ranks * use.table_rows))
        for use, count in zip(tables, counts, strict=True)
    }
    return replace(graph, parameters=tuple(found.get(use.name, use) for use in graph.parameters))
