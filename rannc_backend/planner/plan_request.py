"""What a plan is asked for: options, cluster and batch, turned into search problems.

In: a block graph, the `Config`, the `Cluster`. Out: `PlanRequest`. Settings that a small model or batch
cannot meet are lowered with a warning; those that the number of ranks or the memory forbids are an
`InfeasiblePlanError`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.pricing import BlockPricer
from rannc_backend.planner.search.feasibility import is_feasible, smallest_count, smallest_memory
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.planner.search.problem import SearchProblem, useful_micro_batches
from rannc_backend.schedule.orders import ScheduleName
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

MEGABYTE = 2**20
_MAX_DEVICES_SUGGESTED = 4096
_MEMORY_HEADROOM = 2.0  # stages that need more than so many times the limit are not priced
_MAX_NUMBERS_TRIED = 3  # of micro-batches, in errors about large models


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked for. `memory_bytes`: what plans may use of a device; `memory_margin`: the share kept free
    beside it.

    `update_groups`: see `IntervalCosts`.
    `most_micro_batches`: how many there could be without the option max_pipeline; no more than there may be,
    if that does not bind.
    """

    graph: BlockGraph
    cluster: Cluster
    pricer: BlockPricer
    batch_rows: int
    schedules: tuple[ScheduleName, ...]
    micro_batches: tuple[int, ...]
    memory_bytes: float
    memory_margin: float
    optimizer_factor: float
    update_groups: int | None
    bucket_bytes: float
    num_stages: int | None
    replicas: int | None
    stage_replicas: tuple[int, ...] | None
    recompute: float | None = None
    most_micro_batches: int = 1

    @classmethod
    def of(
        cls,
        graph: BlockGraph,
        config: Config,
        cluster: Cluster,
        pricer: BlockPricer,
        batch_rows: int,
        schedules: tuple[ScheduleName, ...],
        stage_replicas: tuple[int, ...] | None,
    ) -> PlanRequest:
        """Check the forced numbers against ranks, blocks and rows."""
        fixed = stage_replicas or config.stage_replica_counts or None
        if graph.whole_batch:
            config, fixed = _of_whole_batch(config, fixed), None
        num_stages = len(fixed) if fixed else config.partition_num or None
        num_devices, num_blocks = cluster.num_devices, len(graph.blocks)
        needed = sum(fixed) if fixed else (num_stages or 1) * (config.replica_num or 1)
        if needed > num_devices or (fixed and needed != num_devices):
            raise InfeasiblePlanError(
                f"{_forced_text(fixed, config)} needs {needed} ranks, and there are {num_devices}",
                smallest_num_devices=needed,
            )
        if num_blocks and (num_stages or 1) > num_blocks:
            if fixed:
                raise InfeasiblePlanError(
                    f"stage_replicas asks for {num_stages} stages, and the model can be cut into "
                    f"{num_blocks} at most"
                )
            logger.warning(
                "partition_num %d is too much: the model can be cut into %d stages at most",
                num_stages,
                num_blocks,
            )
            num_stages = num_blocks
        smallest, largest = (
            (config.pipeline_num, config.pipeline_num)
            if config.pipeline_num
            else (config.min_pipeline, config.max_pipeline)
        )
        if smallest > batch_rows:
            logger.warning(
                "%d micro-batches are too many for a batch of %d rows; %d are used",
                smallest,
                batch_rows,
                batch_rows,
            )
        # Every replica gets a row of every micro-batch; steps with more rows may run more micro-batches than
        # this one.
        most = max(1, batch_rows // max(fixed or (config.replica_num, 1)))
        limit = config.mem_limit_gb * BYTES_PER_GB or cluster.device.memory_bytes
        return cls(
            graph=graph,
            cluster=cluster,
            pricer=pricer,
            batch_rows=batch_rows,
            schedules=schedules,
            micro_batches=useful_micro_batches(batch_rows, min(smallest, most), min(largest, most)),
            memory_bytes=limit * (1 - config.mem_margin),
            memory_margin=config.mem_margin,
            optimizer_factor=config.opt_param_factor,
            update_groups=config.zero_ngroups if config.zero_stage else None,
            bucket_bytes=config.bucket_mb * MEGABYTE,
            num_stages=None if fixed else num_stages,
            replicas=None if fixed else config.replica_num or None,
            stage_replicas=fixed,
            recompute=config.fixed_recompute,
            most_micro_batches=most if not config.pipeline_num else 1,
        )

    def costs(
        self,
        cluster: Cluster | None = None,
        *,
        micro_batches: tuple[int, ...] | None = None,
        all_stages: bool = False,
    ) -> IntervalCosts:
        """Costs on the cluster, or on another one; with `all_stages` also of stages that are far too large
        for the memory.
        """
        return IntervalCosts(
            graph=self.graph,
            cluster=cluster or self.cluster,
            batch_rows=self.batch_rows,
            micro_batches=micro_batches or self.micro_batches,
            pricer=self.pricer,
            optimizer_factor=self.optimizer_factor,
            update_groups=self.update_groups,
            most_bytes=float("inf") if all_stages else _MEMORY_HEADROOM * self.memory_bytes,
            replica_counts=self.stage_replicas or ((self.replicas,) if self.replicas else ()),
            only_budget=self.recompute,
        )

    def problem(self, costs: IntervalCosts, *, memory_bytes: float | None = None) -> SearchProblem:
        """The search on the cluster of `costs`."""
        return SearchProblem(
            num_blocks=len(self.graph.blocks),
            cluster=costs.cluster,
            schedules=self.schedules,
            micro_batches=costs.micro_batches,
            budgets=costs.budgets,
            tables=costs.tables,
            own_gradient_bytes=costs.trainable_bytes - costs.shared_bytes,
            shared_gradient_bytes=costs.shared_bytes,
            bucket_bytes=self.bucket_bytes,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            num_stages=self.num_stages,
            replicas=self.replicas,
            stage_replicas=self.stage_replicas,
            starts=self.graph.constraints.starts,
            stage_of=self.graph.constraints.stage_of,
            work_floor=costs.work_floor,
        )

    def searched(self, cluster: Cluster) -> Cluster:
        """A cluster as the search sees it.

        Where the number of stages is given, messages cost no latency: there are as many of them in every
        plan, so they would only drown the balance of the stages of a small model.
        """
        if self.num_stages is None and self.stage_replicas is None:
            return cluster
        return replace(
            cluster,
            intra_node=replace(cluster.intra_node, latency_seconds=0.0),
            inter_node=replace(cluster.inter_node, latency_seconds=0.0),
        )

    def infeasible(self) -> InfeasiblePlanError:
        """Why nothing fits, and what would do."""
        few = self.micro_batches
        if len(self.graph.blocks) * self.cluster.num_devices > 1000:
            few = tuple(sorted({few[0], *few[-_MAX_NUMBERS_TRIED:]}))
        memory = smallest_memory(self.problem(self.costs(micro_batches=few, all_stages=True)))
        wishes = self.graph.constraints
        asked = " and the options stage_starts and stage_pins" if wishes.starts or wishes.stage_of else ""
        if memory is None:
            return InfeasiblePlanError(
                f"{self.cluster.num_devices} ranks cannot each get at least one row in the stages asked "
                f"for{asked}: the batch has {self.batch_rows} rows in {self.micro_batches[0]} micro-batches "
                "or more"
            )
        return InfeasiblePlanError(
            f"the smallest cut needs {size_text(memory)} on one device, and plans may use "
            f"{size_text(self.memory_bytes)}",
            smallest_bytes=memory / (1 - self.memory_margin),
            smallest_num_devices=None if self.stage_replicas else self._smallest_num_devices(few),
            smallest_max_pipeline=self._smallest_max_pipeline(),
            zero_would_do=self.may_divide_updates and self.under_zero().is_feasible(few),
        )

    @property
    def may_divide_updates(self) -> bool:
        """Whether updates could be divided over replicas, and are not."""
        fixed = self.stage_replicas or ((self.replicas,) if self.replicas else (self.cluster.num_devices,))
        return self.update_groups is None and max(fixed) > 1

    def under_zero(self) -> PlanRequest:
        """The same with one replica that updates a parameter."""
        return replace(self, update_groups=1)

    def is_feasible(self, micro_batches: tuple[int, ...] | None = None) -> bool:
        """Whether there is a plan, with some of these numbers of micro-batches."""
        return is_feasible(self.problem(self.costs(micro_batches=micro_batches)))

    def _smallest_max_pipeline(self) -> int | None:
        """With how many micro-batches, smaller ones than are allowed, a plan would fit on these devices;
        None: with no number.
        """
        most = self.most_micro_batches

        def fits(number: int) -> bool:
            return self.is_feasible((min(number, most),))

        return smallest_count(fits, self.micro_batches[-1], most) if self.micro_batches[-1] < most else None

    def _smallest_num_devices(self, micro_batches: tuple[int, ...]) -> int | None:
        most = min(_MAX_DEVICES_SUGGESTED, len(self.graph.blocks) * self.batch_rows)

        def fits(count: int) -> bool:
            costs = self.costs(replace(self.cluster, num_devices=count), micro_batches=micro_batches)
            return is_feasible(self.problem(costs))

        return smallest_count(fits, self.cluster.num_devices, most)


def _of_whole_batch(config: Config, fixed: tuple[int, ...] | None) -> Config:
    """The options for a graph whose rows meet: as many stages as asked for, each once, and one micro-batch."""
    asked = [name for name in ("pipeline_num", "replica_num") if getattr(config, name) > 1]
    asked += ["stage_replicas"] if fixed and max(fixed) > 1 else []
    asked += ["min_pipeline"] if config.min_pipeline > 1 else []
    if asked:
        logger.warning(
            "samples of a batch meet in this model, so that a step runs as one micro-batch on one replica per "
            "stage: %s cannot be had",
            ", ".join(asked),
        )
    return config.model_copy(
        update={
            "pipeline_num": 1,
            "replica_num": 1,
            "stage_replicas": "",
            "partition_num": len(fixed) if fixed else config.partition_num,
        }
    )


def _forced_text(fixed: tuple[int, ...] | None, config: Config) -> str:
    if fixed:
        return f"stage_replicas {','.join(map(str, fixed))}"
    names = [name for name in ("partition_num", "replica_num") if getattr(config, name)]
    return " x ".join(f"{name} {getattr(config, name)}" for name in names)


def size_text(num_bytes: float) -> str:
    """Bytes for people."""
    return (
        f"{num_bytes / BYTES_PER_GB:.3f} GB"
        if num_bytes >= BYTES_PER_GB / 10
        else f"{num_bytes / MEGABYTE:.3f} MB"
    )
