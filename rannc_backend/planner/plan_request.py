"""What a plan is asked for: options, cluster and batch, turned into search problems.

In: a block graph, the `Config`, the `Cluster`. Out: `PlanRequest`. Settings that a small model or batch
cannot meet are lowered with a warning; those that the number of ranks or the memory forbids are an
`InfeasiblePlanError`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError, OptionValueError
from rannc_backend.ir.block_graph import BlockGraph, StageConstraints
from rannc_backend.planner.cluster.asked_job import memory_limit, of_whole_batch
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.pricing import BlockPricer, MemoryRules
from rannc_backend.planner.cost.transfer import bucket_bytes, offload_seconds
from rannc_backend.planner.plan_parts import fullest_stages
from rannc_backend.planner.search.feasibility import (
    cut_that_fits,
    is_feasible,
    smallest_count,
    smallest_memory,
)
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.planner.search.limits import BALANCE, BUBBLE, PipelineLimits
from rannc_backend.planner.search.moves import useful_micro_batches
from rannc_backend.planner.search.problem import SearchProblem
from rannc_backend.schedule.orders import ScheduleName, schedule_named, schedule_names
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

MEGABYTE = 2**20
_MAX_DEVICES_SUGGESTED = 4096
_STAGES_PER_LANE = (2, 3, 4, 5, 6)  # that are tried
_MEMORY_HEADROOM = 2.0  # stages that need more than so many times the limit are not priced
_NEEDS_A_LOSS = "schedules with several stages on a rank run backwards within its call (a linear function of sums over samples)"
_MAX_NUMBERS_TRIED = 3  # of micro-batches, in errors about large models


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked for. `memory_bytes`: what plans may use of a device; `memory_margin`: the share kept free
    beside it.

    `update_groups`, `offload`: see `IntervalCosts`; `free_groups`: those of plans whose updates may be divided, where that
    is free. `recompute_last_stage`: see `SearchProblem`.
    `most_micro_batches`: how many there could be without the option max_pipeline; no more than there may be,
    if that does not bind.
    `without`: the same request without each option that restricts the plan, by the option as it was set.
    `without_all`: without all of them but the limit of memory.
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
    rules: MemoryRules
    update_groups: int | None
    offload: bool
    free_groups: int | None
    bucket_bytes: float
    num_stages: int | None
    replicas: int | None
    stage_replicas: tuple[int, ...] | None
    stages_per_lane: tuple[int, ...] = (2,)
    recompute: float | None = None
    recompute_last_stage: int = -1
    most_micro_batches: int = 1
    limits: PipelineLimits = PipelineLimits()
    without: tuple[tuple[str, PlanRequest], ...] = ()
    without_all: PlanRequest | None = None

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
        *,
        alone: bool = False,
    ) -> PlanRequest:
        """Check the forced numbers against ranks, blocks and rows. `alone`: as what another request is `without`."""
        log = logger.debug if alone else logger.warning  # once
        fixed = stage_replicas or config.stage_replica_counts or None
        if graph.whole_batch:
            config, fixed = of_whole_batch(config, fixed), None
        schedules = _with_per_rank(schedules, config.stages_per_rank, config.schedule)
        num_stages = len(fixed) if fixed else config.partition_num or None
        is_free = num_stages is None
        num_stages, fixed = _lanes_asked_for(schedules, num_stages, fixed, config.stages_per_rank)
        num_devices, num_blocks = cluster.num_devices, len(graph.blocks)
        needed = sum(fixed) if fixed else (num_stages or 1) * (config.replica_num or 1)
        if needed > num_devices or (fixed and needed != num_devices):
            raise InfeasiblePlanError(
                f"{_forced_text(fixed, config)} needs {needed} ranks, and there are {num_devices}",
                smallest_num_devices=needed,
            )
        legal = len(graph.constraints.legal_starts)
        if 0 < legal < (num_stages or 1):
            raise InfeasiblePlanError(
                f"{num_stages} stages are asked for, and stage_pivots lets stages start at {legal} blocks, the first among them"
            )
        if num_blocks and (num_stages or 1) > num_blocks:
            if fixed:
                raise InfeasiblePlanError(
                    f"stage_replicas asks for {num_stages} stages, and the model can be cut into "
                    f"{num_blocks} at most"
                )
            text = "partition_num %d is too much: the model can be cut into %d stages at most"
            log(text, num_stages, num_blocks)
            num_stages = num_blocks
        smallest, largest = config.min_pipeline, config.max_pipeline or batch_rows
        if config.pipeline_num:
            smallest = largest = config.pipeline_num
        if smallest > batch_rows:
            text = "%d micro-batches are too many for a batch of %d rows; %d are used"
            log(text, smallest, batch_rows, batch_rows)
        # Every replica gets a row of every micro-batch; steps with more rows may run more micro-batches than
        # this one.
        most = max(1, batch_rows // max(fixed or (config.replica_num, 1)))
        limit = memory_limit(config, cluster.device.memory_bytes)
        made = cls(
            graph=graph,
            cluster=cluster,
            pricer=pricer,
            batch_rows=batch_rows,
            schedules=schedules,
            micro_batches=useful_micro_batches(batch_rows, min(smallest, most), min(largest, most)),
            memory_bytes=limit * (1 - config.mem_margin),
            memory_margin=config.mem_margin,
            optimizer_factor=config.opt_param_factor,
            rules=MemoryRules(
                granularity=config.memory_granularity_bytes,
                update_factor=config.opt_transient_factor / config.num_apply_group,
                transient_factor=config.transient_memory_factor,
            ),
            update_groups=config.zero_ngroups if config.zero_level else None,
            free_groups=config.zero_ngroups if config.zero_level is None else None,
            offload=config.offload == "parameters",
            bucket_bytes=bucket_bytes(graph, config),
            num_stages=None if fixed else num_stages,
            replicas=None if fixed else config.replica_num or None,
            stage_replicas=fixed,
            stages_per_lane=(config.stages_per_rank,)
            if config.stages_per_rank
            else _STAGES_PER_LANE[: None if is_free else 1],
            recompute=config.fixed_recompute,
            recompute_last_stage=config.recompute_last_stage,
            most_micro_batches=most if not config.pipeline_num else 1,
            limits=PipelineLimits.of(config),
        )
        as_it_is = alone or graph.whole_batch or stage_replicas is not None
        return made if as_it_is else made._with_freed(config)

    def _with_freed(self, config: Config) -> PlanRequest:
        """This request, which the options made, beside those without each of them that restricts it."""

        def freed(*names: str) -> PlanRequest:
            other = config.model_copy(update={name: Config.model_fields[name].default for name in names})
            return PlanRequest.of(
                self.graph,
                other,
                self.cluster,
                self.pricer,
                self.batch_rows,
                self.schedules,
                None,
                alone=True,
            )

        limits = list(_limits(config, self.cluster))
        others = [(text, freed(name)) for name, text in limits]
        if config.zero_level is not None:
            others.append(
                (
                    f"zero_stage={config.zero_stage}",
                    freed("zero_stage").with_updates(divided=not config.zero_level),
                )
            )
        # An option may restrict nothing that there is.
        same = [replace(other, most_micro_batches=self.most_micro_batches) == self for _, other in others]
        return replace(
            self,
            without=tuple(item for item, is_same in zip(others, same) if not is_same),
            without_all=freed(
                *(name for name, _ in limits if name not in ("mem_limit_gb", "offload")), "zero_stage"
            ),
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
            rules=self.rules,
            update_groups=self.update_groups,
            offload=self.offload,
            most_bytes=float("inf") if all_stages else _MEMORY_HEADROOM * self.memory_bytes,
            replica_counts=self.stage_replicas or ((self.replicas,) if self.replicas else ()),
            only_budget=self.recompute,
            some_keep_all=self.recompute_last_stage >= 0,
        )

    def problem(self, costs: IntervalCosts, *, memory_bytes: float | None = None) -> SearchProblem:
        """The search on the cluster of `costs`."""
        lane_schedules = tuple(name for name in self.schedules if schedule_named(name).stages_per_lane > 1)
        pins, only_lanes = self.graph.constraints, set(self.schedules) <= set(lane_schedules)
        return SearchProblem(
            num_blocks=len(self.graph.blocks),
            cluster=costs.cluster,
            schedules=self.searched_schedules,
            own_order=next(iter(_made_for_plans(self.schedules)), ""),
            only_own_order=not set(self.schedules) - set(_made_for_plans(self.schedules)),
            lane_schedules=() if self._asks_for_stages else lane_schedules,
            stages_per_lane=self.stages_per_lane,
            only_lane_schedules=only_lanes,
            micro_batches=costs.micro_batches,
            budgets=costs.budgets,
            tables=costs.tables,
            own_gradient_bytes=costs.sums.reduced - costs.sums.shared,
            shared_gradient_bytes=costs.sums.shared,
            bucket_bytes=self.bucket_bytes,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            num_stages=self.num_stages,
            replicas=self.replicas,
            stage_replicas=self.stage_replicas,
            starts=() if only_lanes else pins.starts,
            stage_of=() if only_lanes else pins.stage_of,
            legal_starts=() if only_lanes else pins.legal_starts,
            lane_legal_starts=pins.legal_starts,
            lane_starts=pins.starts,
            lane_stage_of=pins.stage_of,
            update_groups=costs.update_groups,
            value_bytes=costs.sums.trainable,
            work_floor=costs.work_floor,
            workspace=costs.workspace_bytes,
            shared=costs.shared,
            limits=self.limits,
            only_budget=self.recompute,
            recompute_last_stage=self.recompute_last_stage,
            offload_seconds=offload_seconds(costs.cluster, costs.sums.parameters, costs.sums.sums)
            if self.offload
            else None,
        )

    @property
    def searched_schedules(self) -> tuple[ScheduleName, ...]:
        """Those that are known before the plan is, of one stage on each rank; where none of them is asked for, those with
        the same results.
        """
        known = tuple(name for name in self.schedules if _is_searched(name))
        return known or tuple(name for name in schedule_names() if _is_searched(name))

    @property
    def _asks_for_stages(self) -> bool:
        """Whether the number of stages is given, of a plan that may have one stage on each rank."""
        given = self.num_stages is not None or self.stage_replicas is not None
        return given and any(schedule_named(name).stages_per_lane == 1 for name in self.schedules)

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
        few = self._tried
        costs = self.costs(micro_batches=few, all_stages=True)
        memory = smallest_memory(self.problem(costs))
        wishes = self.graph.constraints
        asked = (
            " and the options stage_starts, stage_pivots and stage_pins"
            if wishes != StageConstraints()
            else ""
        )
        if memory is None:
            return InfeasiblePlanError(
                f"{self.cluster.num_devices} ranks cannot each get at least one row in the stages asked "
                f"for{asked}: the batch has {self.batch_rows} rows in {self.micro_batches[0]} micro-batches "
                "or more"
            )
        cut = cut_that_fits(self.problem(costs, memory_bytes=memory))
        stages = fullest_stages(costs, cut, self.memory_bytes) if cut is not None else ""
        return InfeasiblePlanError(
            f"the smallest cut needs {precise_size_text(memory)} on one device, and plans may use "
            f"{precise_size_text(self.memory_bytes)}{stages and '; '}{stages}",
            smallest_bytes=memory / (1 - self.memory_margin),
            smallest_num_devices=None if self.stage_replicas else self._smallest_num_devices(few),
            smallest_max_pipeline=self._smallest_max_pipeline(),
            options_that_would_do=self._options_that_free(),
        )

    def _options_that_free(self) -> tuple[str, ...]:
        """Options with which there is a plan, each by itself; all together where none is enough."""
        # How much memory would do is said by itself, and without offload it is more.
        others = [
            (f"without {text}", freed)
            for text, freed in self.without
            if not text.startswith(("mem_limit_gb", "offload"))
        ]
        together = (self.without_all or self).with_updates(divided=True)
        if self.graph.outputs and self.graph.has_loss:
            bare = self.graph.without_outputs()
            others.append(("outputs=auto", replace(self, graph=bare)))
            together = replace(together, graph=bare)
        if not self.offload:
            others.append(("offload=parameters", self.offloaded()))
            together = together.offloaded()
        found = tuple(text for text, other in others if other.is_feasible(other._tried))
        if found or len(others) < 2:
            return found
        return (" and ".join(text for text, _ in others),) if together.is_feasible(together._tried) else ()

    @property
    def _tried(self) -> tuple[int, ...]:
        """Numbers of micro-batches that are tried where all would take long."""
        few = self.micro_batches
        if len(self.graph.blocks) * self.cluster.num_devices > 1000:
            few = tuple(sorted({few[0], *few[-_MAX_NUMBERS_TRIED:]}))
        return few

    @property
    def may_divide_updates(self) -> bool:
        """Whether the plan may say whether updates are divided, and stages may have replicas among which to divide them."""
        fixed = self.stage_replicas or ((self.replicas,) if self.replicas else (self.cluster.num_devices,))
        return self.free_groups is not None and max(fixed) > 1

    def with_updates(self, *, divided: bool) -> PlanRequest:
        """The same, and so is what it is `without`, with the answer to that; as it is where the answer was given."""
        without = tuple((text, other.with_updates(divided=divided)) for text, other in self.without)
        freed = None if self.without_all is None else self.without_all.with_updates(divided=divided)
        groups = self.free_groups if divided and self.free_groups else self.update_groups
        return replace(self, update_groups=groups, free_groups=None, without=without, without_all=freed)

    def offloaded(self) -> PlanRequest:
        """The same with parameters on the host."""
        without = tuple((text, other.offloaded()) for text, other in self.without)
        return replace(self, offload=True, without=without)

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


def _is_searched(name: ScheduleName) -> bool:
    described = schedule_named(name)
    return not described.is_made_for_plans and described.stages_per_lane == 1


def _made_for_plans(names: Iterable[ScheduleName]) -> tuple[ScheduleName, ...]:
    return tuple(name for name in names if schedule_named(name).is_made_for_plans)


def _with_per_rank(schedules: tuple[ScheduleName, ...], number: int, asked: str) -> tuple[ScheduleName, ...]:
    """Those that have so many stages on each rank; 0: all. `asked`: the option. Raises `OptionValueError`."""
    if not number:
        return schedules
    described = [schedule_named(name) for name in schedules]
    found = tuple(
        each.name
        for each in described
        if (each.stages_per_lane > 1) == (number > 1) and each.with_stages_per_lane(number) is not None
    )
    if not found:
        is_out = asked not in schedules and not any(each.eager_backward for each in described)
        can = f"a number of stages that {' or '.join(schedules)} can have on a rank"
        expected = f"1, or compute the loss in the model's forward, as {_NEEDS_A_LOSS}" if is_out else can
        raise OptionValueError("stages_per_rank", value=number, source="options", expected=expected)
    return found


def _lanes_asked_for(
    schedules: Sequence[ScheduleName],
    num_stages: int | None,
    fixed: tuple[int, ...] | None,
    stages_per_rank: int,
) -> tuple[int | None, tuple[int, ...] | None]:
    """Where ranks are to compute several stages: how many lanes, and their replicas, for numbers that are given by
    stage. Raises `InfeasiblePlanError`.
    """
    described = schedule_named(schedules[0])
    if num_stages is None or any(schedule_named(name).stages_per_lane == 1 for name in schedules):
        return num_stages, fixed
    per_lane = stages_per_rank or described.stages_per_lane
    described = described.with_stages_per_lane(per_lane) or described
    if num_stages % per_lane:
        raise InfeasiblePlanError(
            f"schedule {described} has {per_lane} stages on each rank, and {num_stages} stages are asked for"
        )
    if fixed is None:
        return num_stages // per_lane, None
    lanes = described.lanes(num_stages)
    if any(len({fixed[stage] for stage in lane}) > 1 for lane in lanes):
        raise InfeasiblePlanError(
            f"under schedule {described} stages "
            f"{', '.join(' and '.join(map(str, lane)) for lane in lanes)} have the same ranks, and stage_replicas "
            f"gives them {','.join(map(str, fixed))} replicas"
        )
    return len(lanes), tuple(fixed[lane[0]] for lane in lanes)


def _limits(config: Config, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Options that keep the search from plans, and how they are set."""
    for name in (
        "pipeline_num",
        "min_pipeline",
        "max_pipeline",
        "partition_num",
        "replica_num",
        "stage_replicas",
        "stages_per_rank",
        "placement",
        BUBBLE,
        BALANCE,
    ):
        value = getattr(config, name)
        if name == "stages_per_rank" and (config.stage_replicas or config.partition_num):
            continue  # numbers by stage say nothing without it
        if value != Config.model_fields[name].default:
            yield name, f"{name}={value}"
    if config.offload == "parameters":
        yield "offload", f"offload={config.offload}"
    if config.fixed_recompute is not None and not config.checkpointing:
        name = "recompute_modules" if config.recompute_modules else "recompute"
        yield name, f"{name}={getattr(config, name)}"
    if config.recompute_last_stage >= 0:
        yield "recompute_last_stage", f"recompute_last_stage={config.recompute_last_stage}"
    if 0 < memory_limit(config, 0) < cluster.device.memory_bytes:
        yield "mem_limit_gb", f"mem_limit_gb={config.mem_limit_gb:g}"


def _forced_text(fixed: tuple[int, ...] | None, config: Config) -> str:
    if fixed:
        return f"stage_replicas {','.join(map(str, fixed))}"
    names = [name for name in ("partition_num", "replica_num") if getattr(config, name)]
    return " x ".join(f"{name} {getattr(config, name)}" for name in names)


def precise_size_text(num_bytes: float) -> str:
    """Bytes for people."""
    return (
        f"{num_bytes / BYTES_PER_GB:.3f} GB"
        if num_bytes >= BYTES_PER_GB / 10
        else f"{num_bytes / MEGABYTE:.3f} MB"
    )
